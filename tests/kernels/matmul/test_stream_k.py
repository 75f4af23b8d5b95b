"""A few rows through NVIDIA's tensor cores in equal shares (Stream-K), the instructions laid out on paper."""

from __future__ import annotations

import pytest
import torch
from support.matrices import drawn, error, made
from support.paper_units import lay_out
from torch import Tensor

from rekindle.kernels.matmul import fragments, mma, naive, skinny, stream_k, tensor_core
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.stream_k import StreamKShape
from rekindle.kernels.matmul.tile_semaphores import semaphores
from rekindle.kernels.matmul.types import Packed

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, skinny, stream_k, fragments, tensor_core)


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in float32, so that the sums are compared and not what bfloat16 leaves of them."""
    wide = lambda x, widths: [x.new_empty(len(x), width, dtype=torch.float32) for width in widths]  # noqa: E731
    monkeypatch.setattr(tensor_core, "empty_outputs", wide)


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize(
    ("rows", "shape"), [(3, StreamKShape(4, 2)), (11, StreamKShape(2, 1)), (27, StreamKShape(1, 3))]
)
@pytest.mark.usefixtures("unrounded")
def test_products_agree_with_the_definition(type: str, rows: int, shape: StreamKShape) -> None:
    packed, values = made(type, 53, 768)  # the last block is not full
    x = drawn(rows, 768, dtype=BF16)
    (out,) = stream_k.multiply(x, [packed], shape)
    assert error(out, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("programs", [1, 2, 5, 7, 11, 12])
@pytest.mark.usefixtures("unrounded")
def test_however_many_programs_share_the_work_none_of_it_is_lost(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 units of two blocks: shares end within blocks and between them, and a block has up to 6 pieces."""
    monkeypatch.setattr(stream_k, "processors", lambda device: programs)
    packed, values = made("Q4_K", 40, 768)
    x = drawn(2, 768, dtype=BF16)
    (out,) = stream_k.multiply(x, [packed], StreamKShape(2, 1))
    assert error(out, x.float() @ values.T) < 1e-4
    assert not semaphores(x.device).any(), "every semaphore is back at zero"


def test_dense_matrices_share_the_launch_of_quantised_ones_of_any_type() -> None:
    (first, first_values), (second, second_values) = made("Q4_K", 37, 768), made("Q6_K", 70, 768, 1)
    dense, x = drawn(21, 768, dtype=BF16), drawn(9, 768, dtype=BF16)
    shape = StreamKShape(4, 3)
    outs = stream_k.multiply(x, [dense, first, dense[:5], second], shape)
    for out, values in zip(outs, [dense.float(), first_values, dense[:5].float(), second_values], strict=True):
        assert error(out, x.float() @ values.T) < 6e-3  # in bfloat16


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
def test_swiglu_agrees_with_the_definition(type: str) -> None:
    (gate, gate_values), (up, up_values) = made(type, 53, 768), made(type, 53, 768, 1)
    x = drawn(9, 768, dtype=BF16)
    out = stream_k.swiglu(x, gate, up, StreamKShape(4, 1))
    assert error(out, naive.swiglu(x.float(), gate_values, up_values)) < 8e-3  # the interpreter cuts bfloat16 off


def test_a_row_gives_the_same_beside_other_rows() -> None:
    packed, _ = made("Q4_K", 40, 768)
    x, other = drawn(3, 768, dtype=BF16), drawn(3, 769, dtype=BF16)[:, :768].contiguous()
    other[1] = x[1]
    (out,), (beside,) = stream_k.multiply(x, [packed]), stream_k.multiply(other, [packed])
    assert torch.equal(out[1], beside[1])
    assert not torch.equal(out[0], beside[0])


@pytest.mark.parametrize("shape", stream_k.BY_TILES.values())
def test_the_programs_of_a_launch_shape_fit_a_multiprocessor(shape: StreamKShape) -> None:
    assert shape.warps % 2 == 0, "gate and up"
    assert 96 <= shape.registers <= 255
    assert shape.registers * 32 * shape.warps * shape.resident <= stream_k.REGISTERS


def test_the_door_sends_large_launches_of_several_rows_here(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, values = made("Q4_K", 16, 256)
    taken: list[int] = []

    def multiply(x: Tensor, weights: list[Packed | Tensor]) -> list[Tensor]:
        taken.append(x.shape[0])
        return real(x, weights)

    real = stream_k.multiply
    monkeypatch.setattr(stream_k, "multiply", multiply)
    for least in (16 * 256, 16 * 256 + 1):
        monkeypatch.setattr(stream_k, "LEAST", least)
        for rows in (8, 9):
            x = drawn(rows, 256, dtype=BF16)
            assert error(fast.multiply(x, packed), x.float() @ values.T) < 6e-3
    assert taken == [9]
