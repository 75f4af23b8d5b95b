"""A few rows through NVIDIA's matrix units in equal shares, the instructions laid out on paper."""

from __future__ import annotations

import pytest
import torch
from paper_units import lay_out
from test_matmul import drawn, error, made
from torch import Tensor

from rekindle.kernels.matmul import laid, mma, naive, nvidia, shares
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.arrivals import counters
from rekindle.kernels.matmul.shares import ShareForm
from rekindle.kernels.matmul.types import Packed

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, shares, laid, nvidia)


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize(("rows", "form"), [(3, ShareForm(4, 2)), (11, ShareForm(2, 1)), (27, ShareForm(1, 3))])
def test_products_agree_with_the_definition(type: str, rows: int, form: ShareForm) -> None:
    packed, values = made(type, 53, 768)  # the last block is not full
    x, residual = drawn(rows, 768, dtype=BF16), drawn(rows, 53)
    (out,) = shares.multiply(x, [packed], residual, form)
    assert error(out, residual + x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("programs", [1, 2, 5, 7, 11, 12])
def test_however_many_programs_share_the_work_none_of_it_is_lost(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 units of two blocks: shares end within blocks and between them, and a block has up to 6 pieces."""
    monkeypatch.setattr(shares, "processors", lambda device: programs)
    packed, values = made("Q4_K", 40, 768)
    x = drawn(2, 768, dtype=BF16)
    (out,) = shares.multiply(x, [packed], torch.zeros(2, 40), ShareForm(2, 1))
    assert error(out, x.float() @ values.T) < 1e-4
    assert not counters(x.device).any(), "every counter is back at zero"


def test_dense_matrices_share_the_launch_of_quantised_ones_of_any_type() -> None:
    (first, first_values), (second, second_values) = made("Q4_K", 37, 768), made("Q6_K", 70, 768, 1)
    dense, x = drawn(21, 768, dtype=BF16), drawn(9, 768, dtype=BF16)
    form = ShareForm(4, 3)
    outs = shares.multiply(x, [dense, first, dense[:5], second], torch.zeros(9, 21), form)
    assert error(outs[0], x.double() @ dense.double().T) < 1e-5
    for out, values in zip(outs[1:], [first_values, dense[:5].float(), second_values], strict=True):
        assert error(out, x.float() @ values.T) < 6e-3  # in bfloat16


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
def test_swiglu_agrees_with_the_definition(type: str) -> None:
    (gate, gate_values), (up, up_values) = made(type, 53, 768), made(type, 53, 768, 1)
    x = drawn(9, 768, dtype=BF16)
    out = shares.swiglu(x, gate, up, ShareForm(4, 1))
    assert error(out, naive.swiglu(x.float(), gate_values, up_values)) < 8e-3  # the interpreter cuts bfloat16 off


def test_a_row_gives_the_same_beside_other_rows() -> None:
    packed, _ = made("Q4_K", 40, 768)
    x, other = drawn(3, 768, dtype=BF16), drawn(3, 769, dtype=BF16)[:, :768].contiguous()
    other[1] = x[1]
    (out,), (beside,) = shares.multiply(x, [packed]), shares.multiply(other, [packed])
    assert torch.equal(out[1], beside[1])
    assert not torch.equal(out[0], beside[0])


@pytest.mark.parametrize("form", [shares.UP_TO_16, shares.UP_TO_32])
def test_the_programs_of_a_form_fit_a_multiprocessor(form: ShareForm) -> None:
    assert form.warps % 2 == 0, "gate and up"
    assert 96 <= form.registers <= 255
    assert form.registers * 32 * form.warps * form.resident <= shares.REGISTERS


def test_the_door_sends_large_launches_of_many_rows_here(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, values = made("Q4_K", 16, 256)
    taken: list[int] = []

    def multiply(x: Tensor, weights: list[Packed | Tensor], residual: Tensor | None) -> list[Tensor]:
        taken.append(x.shape[0])
        return real(x, weights, residual)

    real = shares.multiply
    monkeypatch.setattr(shares, "multiply", multiply)
    for least in (16 * 256, 16 * 256 + 1):
        monkeypatch.setattr(shares, "LEAST", least)
        for rows in (8, 9):
            x = drawn(rows, 256, dtype=BF16)
            assert error(fast.multiply(x, packed), x.float() @ values.T) < 6e-3
    assert taken == [9]
