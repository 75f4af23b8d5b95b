"""Two to sixteen rows through NVIDIA's tensor cores as one row goes, the instructions laid out on paper."""

from __future__ import annotations

import pytest
import torch
from support.matrices import drawn, error, made
from support.paper_units import lay_out

from rekindle.kernels.matmul import fragments, mma, naive, skinny, stream_k, tensor_core
from rekindle.kernels.matmul.skinny import SkinnyConfig

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, skinny, stream_k, fragments, tensor_core)


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in float32 and full of what is no number, so that the sums are compared, and all of them."""
    poisoned = lambda x, widths: [torch.full((len(x), width), torch.nan) for width in widths]  # noqa: E731
    monkeypatch.setattr(tensor_core, "empty_outputs", poisoned)


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (2, SkinnyConfig(1, 2)),
        (8, SkinnyConfig(2, 2, 2)),
        (5, SkinnyConfig(2, 1, ordered=True)),
        (11, SkinnyConfig(1, 4, 2, ordered=True)),
        (13, SkinnyConfig(1, 2, 2, ordered=True)),
        (16, SkinnyConfig(1, 2)),
    ],
)
@pytest.mark.usefixtures("unrounded")
def test_products_agree_with_the_definition(type: str, rows: int, config: SkinnyConfig) -> None:
    packed, values = made(type, 53, 768)  # the last tile is not full, nor the last step
    x = drawn(rows, 768, dtype=BF16)
    (out,) = skinny.multiply(x, [packed], config)
    # The interpreter rounds products that the card fuses, and cuts off what is left of sums where the card rounds.
    assert error(out, x.float() @ values.T) < (6e-4 if config.ordered else 1e-4)


def test_x_in_order_has_its_sums_as_two_numbers_each() -> None:
    x = drawn(11, 512, dtype=BF16)
    values, sums, half_sums = (part.float() for part in skinny.ordered(x))
    padded = torch.zeros(16, 512)
    padded[:11] = x.float()
    by_block = padded.view(2, 8, 2, 4, 2, 32).sum(-1)  # n-tile, g, pair, t, which of two blocks
    found = sums.view(2, 2, 8, 4, 2, 2).sum(4)  # pair, n-tile, g, t, upper and lower, which
    assert torch.allclose(found, -128 * by_block.permute(2, 0, 1, 3, 4), rtol=1e-4, atol=1e-2)
    by_half = padded.view(2, 8, 2, 2, 4, 2, 16).sum(-1)  # n-tile, g, pair, which four blocks, t, half
    found = half_sums.view(2, 2, 8, 4, 2, 2, 2).sum(4)
    assert torch.allclose(found, -160 * by_half.permute(2, 0, 1, 4, 3, 5), rtol=1e-4, atol=1e-2)
    fragmented = fragments.to_fragments(x).values.float()
    assert torch.equal(values, fragmented)


@pytest.mark.parametrize("rows", [3, 4, 6, 7])
@pytest.mark.usefixtures("unrounded")
def test_a_matrix_of_one_tile_is_taken_twice_by_two(rows: int) -> None:
    packed, values = made("Q4_K", 16, 512)
    x = drawn(rows, 512, dtype=BF16)
    (out,) = skinny.multiply(x, [packed], SkinnyConfig(2, 2, 2))
    assert error(out, x.float() @ values.T) < 1e-4


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("config", [SkinnyConfig(1, 4), SkinnyConfig(2, 2, 2, ordered=True)])
def test_dense_matrices_share_the_launch_of_quantised_ones_of_any_type(
    config: SkinnyConfig, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny, "pdl_arguments", lambda device: {"PDL": early})
    (first, first_values), (second, second_values) = made("Q4_K", 37, 768), made("Q6_K", 70, 768, 1)
    dense, x = drawn(21, 768, dtype=BF16), drawn(7, 768, dtype=BF16)
    behind, _ = made("Q4_K", 40, 256, 2)
    outs = skinny.multiply(x, [dense, first, dense[:5], second], config, behind)
    for out, values in zip(outs, [dense.float(), first_values, dense[:5].float(), second_values], strict=True):
        assert error(out, x.float() @ values.T) < 6e-3  # in bfloat16


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize(
    ("rows", "config"),
    [(3, SkinnyConfig(1, 2, 2)), (5, SkinnyConfig(4, 1)), (9, SkinnyConfig(2, 2, 2, ordered=True))],
)
def test_swiglu_agrees_with_the_definition(type: str, rows: int, config: SkinnyConfig) -> None:
    (gate, gate_values), (up, up_values) = made(type, 37, 768), made(type, 37, 768, 1)
    x = drawn(rows, 768, dtype=BF16)
    out = skinny.swiglu(x, gate, up, config)
    assert error(out, naive.swiglu(x.float(), gate_values, up_values)) < 8e-3  # the interpreter cuts bfloat16 off


def test_rows_that_lie_apart_are_read_where_they_lie() -> None:
    packed, values = made("Q4_K", 40, 512)
    x = drawn(3, 516, dtype=BF16)[:, :512]
    (out,) = skinny.multiply(x, [packed])
    assert error(out, x.float() @ values.T) < 6e-3


@pytest.mark.parametrize("config", [SkinnyConfig(1, 2), SkinnyConfig(1, 2, ordered=True)])
def test_a_row_gives_the_same_beside_other_rows_and_however_many(config: SkinnyConfig) -> None:
    packed, _ = made("Q4_K", 40, 768)
    x, other = drawn(3, 768, dtype=BF16), drawn(7, 768, dtype=BF16)
    other[1] = x[1]
    (out,), (beside,) = skinny.multiply(x, [packed], config), skinny.multiply(other, [packed], config)
    assert torch.equal(out[1], beside[1])
    assert not torch.equal(out[0], beside[0])


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("six_bits", [True, False])
@pytest.mark.parametrize("rows", [2, 8, 9, 16])
@pytest.mark.parametrize(("width", "columns"), [(5120, 17408), (34816, 5120), (32, 256), (2048, 512)])
def test_a_config_fits_the_matrix(width: int, columns: int, rows: int, six_bits: bool, paired: bool) -> None:
    config = skinny.skinny_config(rows, width, columns, torch.device("cpu"), paired, six_bits)
    assert config.tiles * config.down % 2 == 0 or not paired
    assert 1 <= config.warps <= 8
    assert config.across <= max(1, columns // 256)


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("ordered", [True, False])
def test_parts_of_the_columns_add_up_to_the_product(type: str, ordered: bool) -> None:
    packed, values = made(type, 37, 1280)  # three steps of two warps, the last for one of them
    x = drawn(3, 1280, dtype=BF16)
    (out,) = skinny.multiply(x, [packed], SkinnyConfig(1, 2, ordered=ordered, parts=2))
    assert out.shape == (2, 3, 37)
    assert all(part.abs().max() > 0 for part in out)
    assert error(out.sum(0), x.float() @ values.T) < 6e-4
