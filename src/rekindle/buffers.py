"""How large the runtime's shared buffers are. Rooms allocate them and the plan reserves them, both from here. No torch.

What a kind of layer needs for itself stands with the kind, in `spec/`.
"""

from __future__ import annotations

SCRATCH = 1 << 28  # quantised weights expanded at a time, of a matrix or of a layer's experts: 512 MiB in 16 bits

SINK_PAGES = 1  # pages at the beginning of a sequence that never leave the pool …
TAIL_PAGES = 4  # … and sealed pages at its end
STAGED_PAGES = 64  # pages of one layer in each of the two buffers between host and device
# Of the area through which cold experts pass in prefill: together they hold what a layer misses of 256 experts when one
# in four is cold, so that all of it can be on its way while the layers before compute.
STAGED_PARTS = 4
STAGED_EXPERTS = 16  # in each of them, at most

RECORDED_ROWS = 4096  # of the longest chunk that can be recorded: its graph has work memory of its own
USUAL_ROWS = 2048  # of a chunk on most GPUs; buffers that recorded chunks share have as many at least
DRAWN_ROWS = 64  # of a recorded draw, at most: all blocks of a batch together

IN_FLIGHT = 2  # captures that lie apart on a device until they are copied to the host …
MANY_IN_FLIGHT = 8  # … and where chunks are as long as can be: so many prompts may share one, and end in it
CAPTURED_PAGES = 64  # pages gathered on a device at a time, on their way to the host or back

SLAB_BYTES = 16 << 20  # of host memory that is used again, pinned beside a GPU
SLAB_MAKERS = 4  # threads that make them, beside a GPU
STOCK = 8  # slabs of a GPU that wait for captures, where no plan says how many: beside a GPU in another machine
UPLOAD_SLABS = 4  # through which memory that is not pinned goes up


def captures_in_flight(chunk: int) -> int:
    """That may lie apart on a device, where chunks have up to so many rows."""
    return MANY_IN_FLIGHT if chunk >= RECORDED_ROWS else IN_FLIGHT


def staged_experts(experts: int) -> int:
    """In each part of the staging area of layers with so many experts: two layers' in all parts together, at most."""
    return min(STAGED_EXPERTS, -(-experts // 2))
