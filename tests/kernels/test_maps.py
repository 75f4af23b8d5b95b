"""The tables at the top of `kernels.matmul` and `kernels.moe` say what the choosing functions choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rekindle.kernels import matmul, moe
from rekindle.kernels.matmul import mma
from rekindle.kernels.matmul import triton as products
from rekindle.kernels.matmul.packing import FORMATS
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe import triton as experts
from rekindle.kernels.moe.triton import Shared

MOST_ROWS = 4096
# Outputs and columns of matrices that stand for others, in which products on tensor cores differ.
SIZES = (4096, 4096), (8192, 2048), (16384, 4096), (151936, 2048)


def ranges(choice: Callable[[int], object]) -> Iterator[tuple[str, object]]:
    """("first-last", choice) for every stretch of row counts that are served alike; "first-" for the last."""
    first, last = 1, choice(1)
    for rows in range(2, MOST_ROWS + 1):
        if (now := choice(rows)) != last:
            yield str(first) if first == rows - 1 else f"{first}-{rows - 1}", last
            first, last = rows, now
    yield f"{first}-", last


def line(*cells: object) -> str:
    return f"    {cells[0]!s:34}{cells[1]!s:12}{cells[2]}"


def takes(type: str) -> bool:
    """The type's planes can be read by the tensor core kernels."""
    empty = torch.empty(0)
    return mma.takes(Packed(type, 16, 256, empty, None, empty, None))


@pytest.fixture
def table_of_products() -> str:
    lines = []
    for width, columns in SIZES:
        spans = ranges(lambda rows, size=(width, columns): products.choose(rows, *size, tensor_cores=True))
        lines += [line(f"tensor cores, {width} × {columns}", *span) for span in spans]
    lines += [line("otherwise", *span) for span in ranges(lambda rows: products.choose(rows, 4096, 4096, False))]
    for name, *size, has in (
        ("gated, tensor cores, 8192 × 2048", 8192, 2048, True),
        ("gated, tensor cores, 16384 × 4096", 16384, 4096, True),
        ("gated, otherwise", 4096, 4096, False),
    ):
        spans = ranges(
            lambda rows, size=size, has=has: products.choose_swiglu(rows, *size, True, has) or "two products"
        )
        lines += [line(name, *span) for span in spans]
    return "\n".join(lines)


@pytest.fixture
def table_of_experts() -> str:
    lines = []
    for name, tensor_cores in (("tensor cores", True), ("otherwise", False)):
        spans = ranges(lambda rows, has=tensor_cores: experts.choose(rows, True, has, Shared.NONE))
        lines += [line(name, *span) for span in spans]
    spans = ranges(lambda rows: experts.choose(rows, False, True, Shared.NONE))
    lines += [line("gate and up of two types", *span) for span in spans]
    return "\n".join(lines)


def test_the_map_of_products_is_what_is_chosen(table_of_products: str) -> None:
    assert table_of_products in (matmul.__doc__ or ""), table_of_products


def test_the_map_of_experts_is_what_is_chosen(table_of_experts: str) -> None:
    assert table_of_experts in (moe.__doc__ or ""), table_of_experts


def test_the_types_that_the_tensor_core_kernels_read_are_those_of_the_map() -> None:
    assert [type for type in FORMATS if takes(type)] == ["Q4_K", "Q5_K", "Q6_K"]
    assert "Q4_K, Q5_K or Q6_K" in (matmul.__doc__ or "")


def test_no_two_types_share_a_launch_of_gate_and_up() -> None:
    cases = [(rows, has) for rows in (1, 8, 9, 33, 128) for has in (True, False)]
    assert {products.choose_swiglu(rows, 16384, 4096, False, has) for rows, has in cases} == {None}


@pytest.mark.parametrize(
    ("shared", "chosen"),
    [
        (Shared.NONE, "tensor_core.by_pair"),
        (Shared.TENSOR_CORES, "tensor_core.by_pair"),
        (Shared.PAIR, "pairs.by_pair"),
        (Shared.APART, "integers.run_experts"),
    ],
)
def test_pairs_are_taken_where_the_shared_expert_can_be_one_of_them(shared: Shared, chosen: str) -> None:
    assert experts.choose(1, True, True, shared) == experts.choose(8, True, True, shared) == chosen
