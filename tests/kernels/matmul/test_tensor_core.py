"""The form for NVIDIA's tensor cores, with its instructions laid out on paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.matrices import drawn, error, made
from support.paper_units import array, lay_out

from rekindle.kernels.matmul import fragments, mma, naive, skinny, stream_k, tensor_core
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.types import Matrix

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, tensor_core, skinny, stream_k, fragments)


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in float32, so that the sums are compared and not what bfloat16 leaves of them."""
    wide = lambda x, widths: [x.new_empty(len(x), width, dtype=torch.float32) for width in widths]  # noqa: E731
    monkeypatch.setattr(tensor_core, "empty_outputs", wide)


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize(("rows", "ahead"), [(1, False), (3, True), (11, False)])
@pytest.mark.usefixtures("unrounded")
def test_products_agree_with_the_definition(type: str, rows: int, ahead: bool) -> None:
    packed, values = made(type, 21, 768)
    x = drawn(rows, 768, dtype=BF16)
    config = tensor_core.FewConfig(warps=2, n_tiles={1: 0, 3: 1, 11: 2}[rows], ahead=ahead)
    (out,) = tensor_core.multiply(x, [packed], config)
    assert error(out, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("columns", [1024, 1280])
@pytest.mark.usefixtures("unrounded")
def test_one_row_agrees_whether_or_not_its_turns_come_out_even(type: str, columns: int) -> None:
    packed, values = made(type, 21, columns)
    x = drawn(1, columns, dtype=BF16)
    (out,) = tensor_core.multiply(x, [packed], tensor_core.FewConfig(2, 0, False))
    assert error(out, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("columns", [9 * 512, 1280])  # nine turns of two warps; three, the last for one of them
def test_parts_of_the_columns_add_up_to_the_product(type: str, columns: int) -> None:
    packed, values = made(type, 37, columns)
    x = drawn(1, columns, dtype=BF16)
    (out,) = tensor_core.multiply(x, [packed], config=tensor_core.FewConfig(2, 0, False, parts=2))
    assert out.shape == (2, 1, 37)
    assert all(part.abs().max() > 0 for part in out)
    assert error(out.sum(0), x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_only_a_long_and_narrow_matrix_is_left_in_parts_and_for_one_row_only_of_six_bits(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in (tensor_core, skinny):
        monkeypatch.setattr(form, "LONG", 1024)
        monkeypatch.setattr(form, "WIDE", 64)
    shapes = {("Q6_K", 32, 1024): 2, ("Q4_K", 32, 1024): 1, ("Q6_K", 64, 1024): 1, ("Q6_K", 32, 768): 1}
    for (type, width, columns), parts in shapes.items():
        packed, values = made(type, width, columns)
        x = drawn(rows, columns, dtype=BF16)
        out = fast.multiply_in_parts(x, packed)
        if rows > 1:  # of any type, but not of many rows
            parts = 2 if rows < 9 and (width, columns) == (32, 1024) else 1
        assert out.shape == ((parts, rows, width) if parts > 1 else (rows, width))
        assert error(out.view(parts, rows, width).float().sum(0), x.float() @ values.T) < 6e-3


def test_the_units_take_no_matrix_of_fewer_rows_than_one_of_their_tiles() -> None:
    x = drawn(1, 256, dtype=BF16)
    assert [fast.uses_tensor_cores(x, made("Q4_K", rows, 256)[0]) for rows in (15, 16)] == [False, True]


@pytest.fixture(name="fetched")
def _fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Address and bytes of all that is asked for ahead, on a card whose launches begin early."""
    asked: list[tuple[int, int]] = []

    def bring(p: Any, nbytes: Any, live: Any) -> None:
        for address in np.broadcast_to(array(p), array(live).shape)[array(live) != 0]:
            asked.append((int(address), array(nbytes).item()))

    monkeypatch.setattr(tensor_core, "bring", bring)
    monkeypatch.setattr(tensor_core, "pdl_arguments", lambda device: {"PDL": True})
    return asked


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 30])
@pytest.mark.usefixtures("unrounded")
def test_the_next_matrix_is_fetched_from_its_beginning_and_never_past_its_end(
    type: str, nbytes: int, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_core, "PREFETCHED", nbytes)
    monkeypatch.setattr(tensor_core, "PREFETCHERS", 3)
    (packed, values), (behind, _) = made("Q4_K", 70, 512), made(type, 64, 1024, 1)
    x = drawn(1, 512, dtype=BF16)
    (out,) = tensor_core.multiply(x, [packed], prefetch=behind)
    assert error(out, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses
    for plane in behind.planes:
        mine = sorted(piece for piece in fetched if 0 <= piece[0] - plane.data_ptr() < plane.nbytes)
        assert len(mine) == 3, "of five programs the last three"
        ends = [address + size for address, size in mine]
        assert [plane.data_ptr(), *ends[:-1]] == [address for address, _ in mine], "from its beginning, without gaps"
        share = min(1.0, nbytes / behind.nbytes) * plane.nbytes
        assert 0.8 * share <= ends[-1] - plane.data_ptr() <= share


def test_of_several_parts_only_one_fetches_what_comes_behind_them(fetched: list[tuple[int, int]]) -> None:
    (packed, _), (behind, _) = made("Q6_K", 37, 1024), made("Q4_K", 40, 256, 2)
    tensor_core.multiply(
        drawn(1, 1024, dtype=BF16), [packed], config=tensor_core.FewConfig(2, 0, False, parts=2), prefetch=behind
    )
    assert len(fetched) == len(set(fetched)) == 3 * len(behind.planes), "of three programs, each plane once"


def test_gate_and_up_fetch_what_comes_behind_them(fetched: list[tuple[int, int]]) -> None:
    (gate, gate_values), (up, up_values) = made("Q4_K", 21, 512), made("Q4_K", 21, 512, 1)
    x, (behind, _) = drawn(1, 512, dtype=BF16), made("Q4_K", 40, 256, 2)
    out = tensor_core.swiglu(x, gate, up, prefetch=behind)
    assert error(out, naive.swiglu(x.float(), gate_values, up_values)) < 8e-3
    assert behind.codes.data_ptr() in dict(fetched)


def test_only_one_row_lets_the_next_launch_in_late_and_several_rows_do_not_begin_early_where_they_run_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_core, "pdl_arguments", lambda device: {"PDL": True})
    behind, _ = made("Q4_K", 5, 256)
    one, two = torch.zeros(1, 256, dtype=BF16), torch.zeros(2, 256, dtype=BF16)
    long = tensor_core.LARGE // 256
    assert tensor_core.trigger_arguments(one, long, behind) == {"PDL": True, "TRIGGER_LATE": True, "PREFETCH": True}
    assert tensor_core.trigger_arguments(one, 16, None) == {"PDL": True, "TRIGGER_LATE": True, "PREFETCH": False}
    assert tensor_core.trigger_arguments(two, long, behind) == {"PDL": False, "TRIGGER_LATE": False, "PREFETCH": False}
    assert tensor_core.trigger_arguments(two, 16, behind) == {"PDL": True, "TRIGGER_LATE": False, "PREFETCH": False}


def test_the_door_names_the_next_matrix_only_where_the_units_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[object] = []

    def products(
        x: torch.Tensor, weights: object, config: object = None, prefetch: object = None
    ) -> list[torch.Tensor]:
        named.append(prefetch)
        return [x]

    monkeypatch.setattr(tensor_core, "multiply", products)
    (packed, _), (other, _) = made("Q4_K", 17, 256), made("Q8_0", 17, 256)
    x, matrix = drawn(1, 256, dtype=BF16), Matrix((17, 256), packed=packed)
    for prefetch in (matrix, Matrix((17, 256), packed=other), Matrix((17, 256), dense=drawn(17, 256)), None):
        fast.multiply_by_all(x, [matrix], prefetch)
        fast.multiply_in_parts(x, packed, prefetch)
    assert [id(each) for each in named] == [id(packed)] * 2 + [id(None)] * 6


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.usefixtures("unrounded")
def test_two_tiles_of_a_warp_share_one_x(ahead: bool) -> None:
    packed, values = made("Q6_K", 53, 512)  # the last tile is not full
    x = drawn(3, 512, dtype=BF16)
    (out,) = tensor_core.multiply(x, [packed], tensor_core.FewConfig(2, 1, ahead, tiles=2))
    assert error(out, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize(
    ("rows", "config", "early"),
    [
        (1, tensor_core.FewConfig(4, 0, True), True),
        (7, tensor_core.FewConfig(2, 1, True), False),
        (19, tensor_core.FewConfig(2, 2, False, 2), True),
    ],
)
def test_dense_matrices_share_the_launch_of_quantised_ones(
    rows: int, config: tensor_core.FewConfig, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_core, "pdl_arguments", lambda device: {"PDL": early})
    (packed, values), dense = made("Q4_K", 37, 768), drawn(21, 768, dtype=BF16)  # 6 groups for 4 warps
    x = drawn(rows, 768, dtype=BF16)
    outs = tensor_core.multiply(x, [dense, packed, dense[:5]], config)
    assert error(outs[0], x.double() @ dense.double().T) < 4e-3
    assert error(outs[1], x.float() @ values.T) < 4e-3  # in bfloat16
    assert error(outs[2], x.float() @ dense[:5].float().T) < 6e-3


def test_dense_matrices_stay_out_of_the_launch_where_nothing_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_core, "multiply", None)
    x, dense = drawn(3, 256, dtype=BF16), drawn(5, 256, dtype=BF16)
    (out,) = fast.multiply_by_all(x, [Matrix((5, 256), dense=dense)])
    assert error(out, x.float() @ dense.float().T) < 6e-3


@pytest.mark.usefixtures("unrounded")
def test_more_rows_than_a_program_takes_and_one_warp() -> None:
    packed, values = made("Q4_K", 16, 256)
    x = drawn(19, 256, dtype=BF16)
    (out,) = tensor_core.multiply(x, [packed], tensor_core.FewConfig(1, 2, False))
    assert error(out, x.float() @ values.T) < 1e-4  # the interpreter rounds products that the card fuses


@pytest.mark.parametrize("rows", [1, 9])
def test_swiglu_agrees_with_the_definition(rows: int) -> None:
    (gate, gate_values), (up, up_values) = made("Q4_K", 21, 768), made("Q4_K", 21, 768, 1)
    x = drawn(rows, 768, dtype=BF16)
    out = tensor_core.swiglu(x, gate, up, tensor_core.FewConfig(4, 2 if rows > 8 else 0, False))
    assert (
        error(out, naive.swiglu(x.float(), gate_values, up_values)) < 8e-3
    )  # the interpreter cuts bfloat16 off where the card rounds


def test_the_door_sends_each_matrix_its_way() -> None:
    (first, first_values), (other, other_values) = made("Q4_K", 18, 256), made("Q8_0", 7, 256, 1)
    dense = drawn(5, 256, dtype=BF16)
    matrices = [Matrix((5, 256), dense=dense), Matrix((18, 256), packed=first), Matrix((7, 256), packed=other)]
    for rows in (1, 3):
        x = drawn(rows, 256, dtype=BF16)
        some = matrices if rows == 1 else matrices[:2]  # the interpreter has no bfloat16 tiles
        outs = fast.multiply_by_all(x, some)
        for out, values in zip(outs, [dense.float(), first_values, other_values][: len(some)], strict=True):
            assert error(out, x.float() @ values.T) < 6e-3


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(("width", "columns"), [(5120, 17408), (34816, 5120), (32, 256)])
def test_a_config_fits_the_rows_and_pairs_its_warps(width: int, columns: int, rows: int, paired: bool) -> None:
    config = tensor_core.few_config(width, columns, rows, paired)
    assert config.warps % (2 if paired else 1) == 0
    assert 1 <= config.warps <= 8
    assert (config.n_tiles == 0) == (rows == 1)
    assert rows > 8 or config.n_tiles <= 1
