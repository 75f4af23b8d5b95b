"""Products in C against their definition, for every type, instruction set and number of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lanes import laid, stored
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels import native
from rekindle.kernels.matmul import cpu, gather_rows, multiply, multiply_all, swiglu
from rekindle.kernels.matmul.types import Lanes, Matrix


def lanes(matrix: Matrix) -> Lanes:
    assert matrix.lanes is not None
    return matrix.lanes


def in_sixteen_bits(x: Tensor) -> Tensor:
    """The definition of what the integer products take for x."""
    blocks = x.unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 32639
    return ((blocks / scales.clamp_min(1e-30)).round() * scales).flatten(-2)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 37])
@pytest.mark.parametrize("type", cpu.TYPES)
def test_laid_rows_have_the_values_of_the_stored_ones(type: str, rows: int, level: str) -> None:
    matrix, values = laid(type, rows, 512)
    assert torch.equal(cpu.values(lanes(matrix), torch.arange(rows)), values)
    assert matrix.nbytes == cpu.nbytes(type, rows, 512)


@pytest.mark.parametrize("type", cpu.TYPES)
def test_laid_rows_are_looked_up_as_stored_ones_are_in_any_order_and_again(type: str, level: str) -> None:
    (matrix, _), (raw, values) = laid(type, 37, 256), stored(type, 37, 256)
    ids = torch.tensor([36, 0, 15, 16, 36, 32, 1, 36, 0], dtype=torch.int32)
    for numbers in (ids, ids.long(), ids.repeat_interleave(2)[::2]):
        have = gather_rows(matrix, numbers)
        assert torch.equal(have, cpu.stored_rows(raw, type, 256, numbers))
        assert torch.equal(have, values[numbers.long()])


@pytest.mark.parametrize("type", cpu.TYPES)
def test_rows_beyond_a_laid_table_are_no_numbers(type: str, level: str) -> None:
    """In its last group too, which is filled up."""
    matrix, values = laid(type, 37, 256)
    have = gather_rows(matrix, torch.tensor([37, 0, -1, 1 << 30, 36]))
    assert have[[0, 2, 3]].isnan().all()
    assert torch.equal(have[[1, 4]], values[[0, 36]])


@pytest.mark.parametrize("type", cpu.TYPES)
def test_rows_of_a_stored_table_are_its_values_and_rows_beyond_it_no_numbers(type: str, level: str) -> None:
    raw, values = stored(type, 5, 256)
    have = cpu.stored_rows(raw[:4], type, 256, torch.tensor([3, 0, 4, -1, 3]))
    assert torch.equal(have[[0, 1, 4]], values[[3, 0, 3]])
    assert have[[2, 3]].isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 16, 17, 33])
@pytest.mark.parametrize("type", cpu.TYPES)
def test_a_product_is_that_of_the_values_with_x_in_sixteen_bits(type: str, rows: int, level: str) -> None:
    matrix, values = laid(type, 37, 512)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
    want = (in_sixteen_bits(x) if type in cpu.QUANTISED else x).double() @ values.double().T
    assert (multiply(x, matrix) - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("type", cpu.TYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it_or_the_threads(type: str, level: str) -> None:
    matrix, _ = laid(type, 70, 256)
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([multiply(row[None], matrix) for row in x])
    try:
        for threads in (1, 3):
            native.set_threads(threads)
            for rows in (2, 7, 33):
                assert torch.equal(multiply(x[:rows], matrix), alone[:rows])
    finally:
        native.set_threads(1)


@pytest.mark.parametrize("type", cpu.QUANTISED)
def test_instruction_sets_agree_to_the_last_bit_where_they_fuse(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    found = []
    for name in native.levels():
        if name != "plain":
            native.library.cache_clear()
            monkeypatch.setenv(native.SWITCH, name)
            found.append(multiply(x, laid(type, 33, 512)[0]))
    native.library.cache_clear()
    assert all(torch.equal(one, found[0]) for one in found)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 33), out=st.integers(1, 70), blocks=st.integers(1, 5), offset=st.integers(0, 3), data=st.data()
)
def test_any_shape_and_any_view_of_x(rows: int, out: int, blocks: int, offset: int, data: st.DataObject) -> None:
    type = data.draw(st.sampled_from(cpu.TYPES))
    columns = blocks * (256 if type in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS") else 32)
    matrix, values = laid(type, out, columns, seed=out)
    wide = torch.randn(rows, columns + 7, generator=torch.Generator().manual_seed(rows))
    x = wide[:, offset : offset + columns]
    seen, exact = (in_sixteen_bits(x) if type in cpu.QUANTISED else x).double(), values.double()
    rounded = 2e-6 * (seen.abs() @ exact.abs().T)  # of what is added up, which may cancel
    ties = 2 * seen.abs().max() / 32767 * exact.abs().max()  # two values of x that lie between two codes
    assert bool(((multiply(x, matrix) - seen @ exact.T).abs() <= rounded + ties).all())
    assert torch.equal(multiply(x, matrix), multiply(x.contiguous(), matrix))


@pytest.mark.parametrize("columns", [1, 7, 31, 33, 100])
def test_floats_take_any_number_of_columns(columns: int, level: str) -> None:
    for type in ("F32", "F16", "BF16"):
        matrix, values = laid(type, 21, columns)
        x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(multiply(x, matrix), x @ values.T, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("type", cpu.TYPES)
def test_what_is_no_number_reaches_every_output_of_its_row_and_no_other(type: str, bad: float, level: str) -> None:
    matrix, _ = laid(type, 20, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    clean = multiply(x, matrix)
    x[1, 77] = bad
    out = multiply(x, matrix)
    if type in cpu.QUANTISED or bad != bad:
        assert out[1].isnan().all()
    else:
        assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_zeros_and_numbers_too_small_for_a_scale_give_zeros(level: str) -> None:
    matrix, _ = laid("Q4_K", 20, 256)
    assert torch.equal(multiply(torch.zeros(2, 256), matrix), torch.zeros(2, 20))
    assert multiply(torch.full((1, 256), 1e-38), matrix).abs().max() < 1e-30


def test_several_matrices_in_one_call_and_the_gated_pair(level: str) -> None:
    gate, up = laid("Q4_K", 48, 256, seed=1)[0], laid("Q6_K", 48, 256, seed=2)[0]
    small = laid("F32", 3, 256)[0]
    x = torch.randn(11, 256, generator=torch.Generator().manual_seed(0))
    parts = multiply_all(x, [small, gate, up])
    for part, matrix in zip(parts, [small, gate, up], strict=True):
        assert torch.equal(part, multiply(x, matrix))
    want = silu(parts[1]) * parts[2]
    assert torch.allclose(swiglu(x, gate, up), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(multiply(x.bfloat16(), gate), multiply(x.bfloat16().float(), gate).bfloat16())


@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("type", cpu.TYPES)
def test_every_value_of_an_output_is_written(type: str, rows: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs lie in memory that held something else: here, what is no number."""
    weight, x = lanes(laid(type, 37, 256)[0]), torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
    clean, taken = cpu.multiply_all(x, [weight])[0], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size: taken(*size).fill_(torch.nan))
    assert torch.equal(cpu.multiply_all(x, [weight])[0], clean)
