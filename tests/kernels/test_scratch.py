"""What the plan reserves for expanded weights is what the kernels take."""

from __future__ import annotations

from rekindle.kernels.matmul.triton import SCRATCH
from rekindle.placement.reserve import EXPANDED


def test_the_plan_reserves_the_scratch_that_the_kernels_take() -> None:
    assert EXPANDED == SCRATCH
