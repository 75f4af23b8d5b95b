"""Slots of a layer may lie apart, with other layers' state between them: same bits, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from rekindle.kernels.conv import triton as conv_triton
from rekindle.kernels.gated_delta import RewindLog, replay_of, triton
from rekindle.kernels.gated_delta import rows as row_kernels
from rekindle.kernels.gated_delta import step as step_kernel
from rekindle.spec import DeltaSpec

SPEC, SLOTS = DeltaSpec(2, 4, 16, 16, 4), 3
BETWEEN = 64  # values of nobody behind every piece


class Apart:
    """States and windows [slots, …] of two layers in one run, slot by slot; and the same values, each alone."""

    def __init__(self) -> None:
        shapes = [(SPEC.value_heads, SPEC.key_dim, SPEC.value_dim), (SPEC.conv_width - 1, SPEC.conv_channels)] * 2
        sizes = [torch.Size(shape).numel() for shape in shapes]
        each = sum(sizes) + len(sizes) * BETWEEN
        self.run, at = torch.full((SLOTS * each,), torch.nan), 0
        self.pieces, self.alone = list[torch.Tensor](), list[torch.Tensor]()
        for shape, size in zip(shapes, sizes, strict=True):
            alone = torch.randn(SLOTS, *shape)
            self.alone.append(alone)
            self.pieces.append(self.run.as_strided((SLOTS, *shape), (each, *alone.stride()[1:]), at))
            self.pieces[-1].copy_(alone)
            at += size + BETWEEN

    def check(self) -> None:
        for piece, alone in zip(self.pieces, self.alone, strict=True):
            assert torch.equal(piece, alone)
        left = self.run.isnan().sum().item()
        assert left == SLOTS * len(self.pieces) * BETWEEN, "what lies between is as it was"


def _inputs(rows):
    heads, channels = SPEC.value_heads, SPEC.conv_channels
    shared = torch.randn(rows, channels), torch.randn(rows, heads), torch.randn(rows, heads)
    return *shared, -torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(channels, SPEC.conv_width)


@pytest.mark.parametrize("segments", [[(2, 0, 1), (0, 0, 1)], [(1, 0, 70), (2, 0, 1)], [(0, 0, 5)]])
def test_chunks_and_rows(make_ragged, segments):
    torch.manual_seed(1)
    ragged, apart = make_ragged(segments), Apart()
    u, a, b, decay, dt_bias, taps = _inputs(sum(length for *_, length in segments))
    outs = list[torch.Tensor]()
    for states, windows, *_ in (apart.pieces, apart.alone):
        mixed = conv_triton.conv_silu(u, taps, windows, ragged)
        outs.append(triton.gated_delta(mixed, a, b, decay, dt_bias, states, ragged, SPEC))
    assert torch.equal(*outs)
    apart.check()


def test_a_decode_step_in_one_launch(make_ragged):
    torch.manual_seed(2)
    ragged, apart = make_ragged([(2, 0, 1), (0, 0, 1)]), Apart()
    u, a, b, decay, dt_bias, taps = _inputs(2)
    z, weight = torch.randn(2, SPEC.inner), torch.randn(SPEC.value_dim)
    args = decay, dt_bias
    outs = [
        step_kernel.gated_delta_step(u, taps, windows, a, b, *args, states, ragged, SPEC, z, weight, 1e-6)
        for states, windows, *_ in (apart.pieces, apart.alone)
    ]
    assert torch.equal(*outs)
    apart.check()


def test_blocks_that_are_replayed_in_one_launch_for_both_layers(make_ragged):
    torch.manual_seed(3)
    ragged, apart = make_ragged([(2, 0, 4), (1, 0, 2)]), Apart()
    u, a, b, decay, dt_bias, taps = _inputs(6)
    for tensors in (apart.pieces, apart.alone):
        states, windows, logs = tensors[::2], tensors[1::2], list[RewindLog]()
        for its_states, its_windows in zip(states, windows, strict=True):
            logs.append(RewindLog.zeros(SPEC, SLOTS, 4, torch.device("cpu")))
            mixed = conv_triton.conv_silu(u, taps, its_windows, ragged, logs[-1])
            row_kernels.gated_delta_rows(mixed, a, b, decay, dt_bias, its_states, ragged, SPEC, logs[-1])
        for slot, count in ((2, 3), (1, 0)):
            replay_of(logs, states, windows)(torch.tensor([slot, count], dtype=torch.int32))
    apart.check()
