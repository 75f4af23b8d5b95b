"""What a DeltaNet layer keeps of blocks under verify, counted where it lies."""

from __future__ import annotations

import pytest
import torch
from support.paper_machine import GIB, one_gpu

from rekindle.layers import SlotMemory
from rekindle.layers.delta import DeltaState
from rekindle.placement import Wishes, known_shapes, make_plan
from rekindle.spec import DeltaSpec


def kept(state: DeltaState) -> int:
    """Bytes of everything that the layer holds beside the state and the window of every slot."""
    assert state.log is not None
    values = [getattr(state, name) for name in DeltaState.__slots__] + list(state.log.tensors)
    tensors = {value.data_ptr(): value for value in values if isinstance(value, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values()) - state.states.nbytes - state.windows.nbytes


@pytest.mark.parametrize(("name", "most"), [("27B", 1_000_000), ("35B-A3B", 800_000)])
def test_blocks_of_16_rows_take_less_than_a_megabyte_a_layer_as_the_plan_counts_them(name: str, most: int) -> None:
    """Rows and windows, everything included; the recurrent state of a layer is 3.1 MB on the 27B, and is not copied."""
    spec, sizes = known_shapes(name, "Q4_K_M")
    slots, delta = 2, next(mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec))
    state = DeltaState(delta, SlotMemory(slots, torch.device("cpu")))
    state.make_room(16, torch.bfloat16)
    assert kept(state) == (slots + 1) * delta.rewind_bytes(16, value_bytes=2)
    assert kept(state) / (slots + 1) < most < delta.state_values * 4
    stage = make_plan(one_gpu(48 * GIB), spec, sizes, Wishes(8192, sequences=slots, rewind_rows=16)).stage(0)
    layers = sum(mixer == delta for mixer in spec.mixers)
    assert stage.bytes_of("rewind rows") == layers * kept(state)


def test_a_layer_that_has_room_for_longer_blocks_keeps_as_much_as_the_plan_counts_for_them() -> None:
    delta = DeltaSpec(2, 6, 16, 24, 4)
    state = DeltaState(delta, SlotMemory(3, torch.device("cpu")))
    for rows in (4, 16, 32):
        state.make_room(rows, torch.float32)
        assert kept(state) == 4 * delta.rewind_bytes(rows)
