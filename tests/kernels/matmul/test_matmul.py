"""Every kernel that reads planes against the values the gguf package gives for the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from support.matrices import drawn, error, made, random_rows
from torch.nn.functional import silu

from rekindle.kernels import matmul
from rekindle.kernels.matmul import expand, naive, scalar_gemv, tile_semaphores, tiled, tiles
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.packing import FORMATS, _fold
from rekindle.kernels.matmul.tile_semaphores import semaphores
from rekindle.kernels.matmul.types import Matrix

TYPES = sorted(FORMATS)
CPU = torch.device("cpu")


@pytest.mark.parametrize("type", TYPES)
def test_planes_hold_exactly_the_stored_weights(type: str) -> None:
    packed, values = made(type, 5, 512)
    torch.testing.assert_close(naive.packed_values(packed), values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type", TYPES)
def test_planes_are_hardly_larger_than_the_file(type: str) -> None:
    packed, _ = made(type, 4, 1024)
    assert packed.nbytes <= 1.04 * random_rows(type, 4, 1024).nbytes


@pytest.mark.parametrize("type", TYPES)
def test_packing_by_slabs_changes_nothing(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = made(type, 7, 256)
    monkeypatch.setattr("rekindle.kernels.matmul.packing.SLAB", 512)
    for plane, expected in zip(made(type, 7, 256)[0].planes, whole.planes, strict=True):
        assert torch.equal(plane, expected)


@pytest.mark.parametrize("type", TYPES)
def test_one_row_agrees_with_the_definition(type: str) -> None:
    packed, values = made(type, 13, 768)
    x = drawn(1, 768)
    assert error(fast.multiply(x, packed), naive.multiply(x, values)) < 2e-6


@pytest.mark.parametrize("config", [(4, 32, 1), (8, 16, 1), (2, 64, 2)])
@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
def test_one_row_does_not_depend_on_the_tile(type: str, config: tuple[int, int, int]) -> None:
    packed, values = made(type, 9, 1280)
    x = drawn(1, 1280)
    assert (
        error(scalar_gemv.launch_row(x, [packed], scalar_gemv.RowConfig(*config))[0], naive.multiply(x, values)) < 2e-6
    )


def test_one_launch_serves_matrices_of_different_types() -> None:
    made_ones = [made("Q4_K", 10, 512), made("Q6_K", 7, 512, 1), made("Q8_0", 3, 512, 2)]
    dense = drawn(5, 512)
    matrices = [Matrix((v.shape[0], 512), packed=p) for p, v in made_ones] + [Matrix(tuple(dense.shape), dense=dense)]
    x = drawn(1, 512)
    outs = fast.multiply_row_by_all(x, [*matrices, matrices[0]])
    for out, values in zip(outs, [*(v for _, v in made_ones), dense, made_ones[0][1]], strict=True):
        assert error(out, naive.multiply(x, values)) < 2e-6


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("rows", [2, 17])
def test_a_few_rows_agree_with_the_definition(type: str, rows: int) -> None:
    packed, values = made(type, 70, 256)
    x = drawn(rows, 256)
    assert error(tiled.few_rows(x, packed), naive.multiply(x, values)) < 2e-6


@pytest.mark.parametrize("rows", [3, 16, 64, 100])
def test_any_number_of_rows_agrees(rows: int) -> None:
    packed, values = made("Q4_K", 33, 256)
    x = drawn(rows, 256)
    assert error(tiled.few_rows(x, packed), naive.multiply(x, values)) < 2e-6


def test_a_sum_cut_into_parts_is_the_same_sum_and_leaves_the_semaphores_at_zero() -> None:
    packed, values = made("Q6_K", 70, 1280)
    x = drawn(5, 1280)
    config = tiled.RowsConfig(out=32, blocks=4, split=4, warps=4, stages=2)
    out = tiled.few_rows(x, packed, config=config)
    assert error(out, naive.multiply(x, values)) < 2e-6
    assert not semaphores(CPU).any()
    assert torch.equal(out, tiled.few_rows(x, packed, config=config))


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_swiglu_agrees_with_the_definition(rows: int) -> None:
    (gate, gate_values), (up, up_values) = made("Q4_K", 21, 256), made("Q4_K", 21, 256, 1)
    x = drawn(rows, 256)
    assert error(fast.swiglu(x, gate, up), naive.swiglu(x, gate_values, up_values)) < 2e-6


def test_swiglu_takes_matrices_of_different_types() -> None:
    (gate, gate_values), (up, up_values) = made("Q4_K", 21, 256), made("Q6_K", 21, 256, 1)
    x = drawn(2, 256)
    assert error(fast.swiglu(x, gate, up), naive.swiglu(x, gate_values, up_values)) < 2e-6


@pytest.mark.parametrize("type", TYPES)
def test_expand_gives_the_values(type: str) -> None:
    packed, values = made(type, 11, 768)
    out = torch.full((11, 768), float("nan"))
    torch.testing.assert_close(expand.expand(packed, out), values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gathered_rows_are_the_rows_asked_for(type: str, dtype: torch.dtype) -> None:
    packed, values = made(type, 11, 256)
    ids = torch.tensor([7, 0, 10, 7], dtype=dtype)
    torch.testing.assert_close(expand.gather_rows(packed, ids), values[ids.long()], rtol=1e-6, atol=1e-7)
    assert torch.equal(matmul.gather_rows(Matrix((11, 256), dense=values), ids), values[ids.long()])


def test_a_matrix_larger_than_the_scratch_is_expanded_by_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, values = made("Q4_K", 23, 256)
    monkeypatch.setattr(expand, "SCRATCH", 2000)
    x = drawn(4, 256)
    assert error(expand.many_rows(x, packed), naive.multiply(x, values)) < 2e-6


def test_float16_rows_keep_their_type() -> None:
    packed, values = made("Q4_K", 18, 256)
    for rows in (1, 4):
        x = drawn(rows, 256, dtype=torch.float16)
        out = fast.multiply(x, packed)
        assert out.dtype == torch.float16
        assert error(out, naive.multiply(x, values)) < 2e-3


@pytest.mark.parametrize("type", [*TYPES, "Q3_K"])
def test_without_kernels_in_c_a_matrix_is_expanded_on_the_cpu(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "SLAB", 600)
    monkeypatch.setattr(matmul.cpu, "can_multiply", lambda: False)
    if type == "Q3_K":
        raw = np.random.default_rng(0).integers(0, 60, (5, 110), dtype=np.uint8)
    else:
        raw = random_rows(type, 5, 256)
    raw.flags.writeable = False
    matrix = matmul.make_matrix(raw, type, (5, 256), CPU, torch.float32)
    values = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type]))
    assert torch.equal(matrix.values, values)
    x = drawn(3, 256)
    torch.testing.assert_close(matmul.multiply(x, matrix), x @ values.T)
    torch.testing.assert_close(matmul.multiply_all(x, [matrix, matrix])[1], x @ values.T)
    torch.testing.assert_close(matmul.swiglu(x, matrix, matrix), silu(x @ values.T) * (x @ values.T))


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_plain_types_are_read_as_they_are(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul.cpu, "can_multiply", lambda: False)
    stored = drawn(3, 40).to(matmul.PLAIN[type])
    raw = stored.view(torch.uint8).numpy()
    matrix = matmul.make_matrix(raw, type, (3, 40), CPU, torch.float32)
    assert torch.equal(matrix.values, stored.float())


def test_every_stream_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_semaphores, "stream_of", lambda device: 7)
    beside = tile_semaphores.semaphores(CPU)
    assert tile_semaphores.semaphores(CPU) is beside
    monkeypatch.setattr(tile_semaphores, "stream_of", lambda device: 0)
    assert tile_semaphores.semaphores(CPU) is not beside


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize("type", ["Q4_K", "Q8_0"])
def test_the_forms_of_smaller_cards_agree(type: str) -> None:
    (gate, gate_values), (up, up_values) = made(type, 40, 256), made(type, 40, 256, seed=1)
    x = drawn(17, 256)
    assert error(fast.multiply(x, gate), naive.multiply(x, gate_values)) < 2e-6
    expected = silu(naive.multiply(x, gate_values)) * naive.multiply(x, up_values)
    assert error(fast.swiglu(x, gate, up), expected) < 2e-6


@pytest.mark.parametrize("type", ["Q4_K", "Q5_0", "Q6_K"])
def test_a_choice_between_addresses_reads_what_one_between_pointers_does(
    type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gate, _), (up, _) = made(type, 6, 512), made(type, 6, 512, seed=1)
    x = drawn(1, 512)
    expected = fast.swiglu(x, gate, up)
    monkeypatch.setattr(tiles, "is_hip", lambda: True)
    assert torch.equal(fast.swiglu(x, gate, up), expected)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("words", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 5])
def test_fields_lie_in_a_word_in_their_order(width: int, words: int, n: int) -> None:
    fields = torch.from_numpy(np.random.default_rng(width).integers(0, 1 << width, (n, 32 // width, words)))
    expected = sum(fields[:, j] << width * j for j in range(32 // width))
    folded = _fold(fields.to(torch.uint8), width)
    assert folded.dtype == torch.int32
    assert folded.is_contiguous()
    assert torch.equal(folded.to(torch.int64) & 0xFFFFFFFF, expected)
