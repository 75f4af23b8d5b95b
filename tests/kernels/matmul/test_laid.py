"""Rows that are laid out for NVIDIA's matrix units, with their instructions on paper."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paper_units import lay_out
from test_matmul import drawn, error, made

from rekindle.kernels.matmul import laid, mma, nvidia
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.laid import LaidConfig

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, laid)


@pytest.mark.parametrize(("type", "rows", "down"), [("Q4_K", 19, 1), ("Q5_K", 11, 2), ("Q6_K", 32, 2), ("Q6_K", 5, 1)])
def test_products_agree_with_the_definition(type: str, rows: int, down: int) -> None:
    packed, values = made(type, 21, 768)  # 6 groups for 4 warps; the last tile is not full
    x = drawn(rows, 768, dtype=BF16)
    (out,) = laid.multiply(x, [packed], torch.ones(rows, 21), LaidConfig(down, 4, 128))
    assert error(out - 1, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("early", [True, False])
def test_matrices_of_several_types_share_a_launch(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laid, "starting_early", lambda device: {"EARLY": early})
    (four, four_values), (six, six_values) = made("Q4_K", 37, 512), made("Q6_K", 16, 512)
    dense = drawn(21, 512, dtype=BF16)
    x = drawn(17, 512, dtype=BF16)
    outs = laid.multiply(x, [dense, four, six], torch.zeros(17, 21), LaidConfig(2, 1, 128))
    assert error(outs[0], x.double() @ dense.double().T) < 1e-5
    assert error(outs[1], x.float() @ four_values.T) < 4e-3  # in bfloat16
    assert error(outs[2], x.float() @ six_values.T) < 4e-3


def test_rows_are_laid_out_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for form in (laid, nvidia):
        monkeypatch.setattr(form, "multiply", lambda x, w, r, form=form, then=None: taken.append(form) or [x])
    packed, wide = (dataclasses.replace(made("Q4_K", 16, 256)[0], rows=rows) for rows in (16, 8192))
    for rows, weight in ((1, packed), (2, packed), (16, wide), (17, wide), (32, wide)):
        fast.multiply(drawn(rows, 256, dtype=BF16), weight)
    assert taken == [nvidia, laid, nvidia, laid, laid]
