"""Rows that are laid out for NVIDIA's tensor cores, with their instructions on paper."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.matrices import drawn, error, made
from support.paper_units import lay_out

from rekindle.kernels.matmul import fragments, mma, skinny, tensor_core
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.fragments import FragmentsConfig

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, fragments)


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in float32, so that the sums are compared and not what bfloat16 leaves of them."""
    wide = lambda x, widths: [x.new_empty(len(x), width, dtype=torch.float32) for width in widths]  # noqa: E731
    monkeypatch.setattr(tensor_core, "empty_outputs", wide)


@pytest.mark.parametrize(("type", "rows", "down"), [("Q4_K", 19, 1), ("Q5_K", 11, 2), ("Q6_K", 32, 2), ("Q6_K", 5, 1)])
@pytest.mark.usefixtures("unrounded")
def test_products_agree_with_the_definition(type: str, rows: int, down: int) -> None:
    packed, values = made(type, 21, 768)  # 6 groups for 4 warps; the last tile is not full
    x = drawn(rows, 768, dtype=BF16)
    (out,) = fragments.multiply(x, [packed], FragmentsConfig(down, 4, 128))
    assert error(out, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("early", [True, False])
def test_matrices_of_several_types_share_a_launch(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "pdl_arguments", lambda device: {"PDL": early})
    (four, four_values), (six, six_values) = made("Q4_K", 37, 512), made("Q6_K", 16, 512)
    dense = drawn(21, 512, dtype=BF16)
    x = drawn(17, 512, dtype=BF16)
    outs = fragments.multiply(x, [dense, four, six], FragmentsConfig(2, 1, 128))
    assert error(outs[0], x.double() @ dense.double().T) < 4e-3
    assert error(outs[1], x.float() @ four_values.T) < 4e-3  # in bfloat16
    assert error(outs[2], x.float() @ six_values.T) < 4e-3


def test_rows_are_laid_out_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for form in (fragments, tensor_core, skinny):
        monkeypatch.setattr(form, "multiply", lambda x, w, form=form, prefetch=None: taken.append(form) or [x])
    packed, wide = (dataclasses.replace(made("Q4_K", 16, 256)[0], rows=rows) for rows in (16, 8192))
    for rows, weight in ((1, packed), (2, packed), (8, wide), (16, wide), (17, wide), (32, wide)):
        fast.multiply(drawn(rows, 256, dtype=BF16), weight)
    assert taken == [tensor_core, skinny, skinny, skinny, fragments, fragments]
