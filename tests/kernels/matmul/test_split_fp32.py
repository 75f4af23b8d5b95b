"""float32 rows through 16-bit values: nothing is rounded that float32 would keep, and nothing overflows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.truth import Truth, rounded_activations, to_half
from torch import Tensor

from rekindle.batch import Batch, Segment, Wanted
from rekindle.kernels import matmul
from rekindle.kernels.matmul import split_fp32
from rekindle.kernels.matmul.dense import product
from rekindle.kernels.moe import ExpertStack, naive
from rekindle.kernels.moe.by_expert import moe
from rekindle.layers import load_span
from rekindle.stages import LocalStage
from rekindle.weights import open_weights

GPU, CPU = torch.device("cuda"), torch.device("cpu")
LOST = {torch.float16: 1e-6, torch.bfloat16: 3e-5}  # of the largest


@pytest.fixture(autouse=True)
def _library_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """This torch multiplies 16-bit values into float32 sums on a GPU alone."""
    monkeypatch.setattr(split_fp32, "_products", lambda rows, weight: rows.float() @ weight.float().t())


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(out: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest of a row, in the norm of what is expected."""
    expected = x.double() @ weight.double().t()
    assert out.dtype == torch.float32
    return float(((out - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("dtype", LOST)
def test_two_rows_hold_what_one_has_lost(dtype: torch.dtype) -> None:
    x = drawn(5, 1500)
    both, scales = split_fp32.split(x, dtype)
    again = (both[:5].double() + both[5:].double()) * scales.double()[:, None]
    assert both.dtype == dtype
    assert ((again - x).abs().amax(1) / x.abs().amax(1)).max() < LOST[dtype]


@pytest.mark.parametrize("size", [1e30, 1e6, 1.0, 1e-6, 1e-30])
def test_rows_of_any_size_keep_their_bits(size: float) -> None:
    x, weight = drawn(3, 256) * torch.tensor([[1.0], [size], [size / 64]]), drawn(9, 256).half()
    both, _ = split_fp32.split(x, torch.float16)
    assert both.isfinite().all()
    assert error(split_fp32.multiply(x, weight), x, weight) < 1e-6


def test_a_row_of_zeros_stays_one_and_one_that_is_not_finite_is_seen() -> None:
    x = torch.zeros(2, 64)
    x[1, 3] = torch.inf
    out = split_fp32.multiply(x, drawn(4, 64).half())
    assert (out[0] == 0).all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("dtype", LOST)
def test_a_product_with_narrower_values_agrees(dtype: torch.dtype, rows: int) -> None:
    x, weight = drawn(rows, 320), drawn(21, 320).to(dtype)
    assert error(product(x, weight), x, weight) < LOST[dtype]


def test_slabs_of_outputs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(3, 64), drawn(50, 64).half()
    whole = split_fp32.multiply(x, weight)
    monkeypatch.setattr(split_fp32, "PRODUCTS", 6 * 16)
    torch.testing.assert_close(split_fp32.multiply(x, weight), whole, rtol=1e-6, atol=1e-6)


def test_rows_may_lie_apart() -> None:
    wide, weight = drawn(4, 256), drawn(7, 128).half()
    x = wide[:, :128]
    assert error(split_fp32.multiply(x, weight), x, weight) < 1e-6


def test_experts_of_narrower_values_agree() -> None:
    gate, up, down = drawn(3, 24, 64).half(), drawn(3, 24, 64).half(), drawn(3, 64, 24).half()
    stacks = [ExpertStack((3, *part.shape[1:]), dense=part) for part in (gate, up, down)]
    h, ids, weights = drawn(5, 64), torch.tensor([[0, 1], [0, 2], [0, 1], [1, 2], [1, 0]]).int(), drawn(5, 2).abs()
    expected = naive.moe(h, ids, weights, gate, up, down)
    assert (moe(h, ids, weights, *stacks) - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("type", "device", "dtype", "kept"),
    [
        ("F16", GPU, torch.float32, torch.float16),
        ("BF16", GPU, torch.float32, torch.bfloat16),
        ("F32", GPU, torch.float32, torch.float32),
        ("F16", GPU, torch.bfloat16, torch.bfloat16),
        ("Q2_K", GPU, torch.float32, torch.float32),
        ("F16", CPU, torch.float32, torch.float32),
    ],
)
def test_only_sixteen_bits_beside_float32_on_a_gpu_stay_as_stored(
    type: str, device: torch.device, dtype: torch.dtype, kept: torch.dtype
) -> None:
    assert matmul.kept_dtype(type, device, dtype) is kept


def test_a_float16_model_through_halves_is_nearer_to_the_truth_than_rounded_activations(
    golden: Path, monkeypatch: pytest.MonkeyPatch, only_torch: None
) -> None:
    """With KV in float16, as on a GPU."""
    path = golden / "tiny-qwen35-f16.gguf"
    monkeypatch.setattr(matmul, "kept_dtype", lambda type, *_: matmul.PLAIN[type])
    file, truth = open_weights(path), Truth(path)
    model = load_span(file, file.spec.whole, CPU, torch.float32)
    model = replace(model, spec=replace(model.spec, tokens=0))  # the truth is over every row of the head
    assert model.head is not None and model.head.matrix.values.dtype == torch.float16
    tokens = torch.arange(3, 3 + 13 * 150, 150).tolist()
    output = LocalStage(model, 1, 2, "f16").forward(Batch((Segment(0, 0, tuple(tokens), Wanted.ALL),)), None)
    assert output.logits is not None
    exact = truth.logits(tokens).log_softmax(-1)
    with rounded_activations(truth, to_half):
        rounded = truth.logits(tokens).log_softmax(-1)
    ours, theirs = ((said - exact).abs().mean() for said in (output.logits.log_softmax(-1), rounded))
    assert ours < theirs / 10
