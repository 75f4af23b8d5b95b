"""The steps between the products, in C, against their definitions, for every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rekindle.kernels import attention, gated_delta, native, norm, rope, sampling
from rekindle.kernels.attention import naive as naive_attention
from rekindle.kernels.attention.rows import KV_DTYPES, row_size
from rekindle.kernels.conv import naive as naive_conv
from rekindle.kernels.gated_delta import RewindLog
from rekindle.kernels.gated_delta import naive as naive_delta
from rekindle.kernels.matmul import make_matrix
from rekindle.kernels.moe import SharedExpert, make_router, make_stack, moe, route
from rekindle.kernels.moe import naive as naive_moe
from rekindle.kernels.norm import naive as naive_norm
from rekindle.kernels.ragged import Ragged
from rekindle.spec import PAGE, AttentionSpec, DeltaSpec

pytestmark = pytest.mark.usefixtures("level")
MakeRagged = Callable[..., Ragged]
CPU = torch.device("cpu")
SPECS = (DeltaSpec(2, 6, 16, 24, 4), DeltaSpec(4, 4, 128, 128, 4), DeltaSpec(1, 3, 10, 67, 3))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("n", [1, 15, 64, 100])
@pytest.mark.parametrize("rows", [1, 5, 1500])
def test_norms(rows: int, n: int) -> None:
    x, y, weight = drawn(rows, n), drawn(rows, n, seed=1), drawn(n)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), naive_norm.rms_norm(x, weight, 1e-6))
    have, want = norm.add_rms_norm(x, y, weight, 1e-6), naive_norm.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(have[0], want[0])
    torch.testing.assert_close(have[1], want[1])


@pytest.mark.parametrize("n", [1, 15, 64, 1000])
def test_the_highest_logit_is_the_first_of_equals_and_none_where_there_is_no_number(n: int) -> None:
    logits = drawn(6, n + 3)[:, :n].round()
    logits[2, n // 2] = torch.nan
    logits[3, n // 2] = torch.inf
    logits[4] = -torch.inf
    want = [row.tolist().index(row.max()) for row in (logits[0], logits[1])]
    have = sampling.argmax(logits).tolist()
    assert have[:5] == [*want, -1, -1, -1]
    assert have[5] == logits[5].tolist().index(logits[5].max())


class Mixer:
    """Random weights and inputs of a DeltaNet layer, and what its two forms make of them."""

    def __init__(self, spec: DeltaSpec, rows: int, slots: int) -> None:
        self.spec = spec
        self.inputs, self.z = drawn(rows, spec.conv_channels), drawn(rows, spec.inner)
        self.a, self.b = drawn(rows, spec.value_heads), drawn(rows, spec.value_heads, seed=1)
        self.taps, self.norm = drawn(spec.conv_channels, spec.conv_width), drawn(spec.value_dim)
        self.decay, self.dt_bias = -drawn(spec.value_heads).abs(), drawn(spec.value_heads, seed=2)
        self.windows = drawn(slots, spec.conv_width - 1, spec.conv_channels)
        self.states = drawn(slots, spec.value_heads, spec.key_dim, spec.value_dim)

    def run(self, ragged: Ragged, rows: slice = slice(None), kept: RewindLog | None = None) -> Tensor:
        return gated_delta.gated_delta_step(
            self.inputs[rows], self.taps, self.windows, self.a[rows], self.b[rows], self.decay, self.dt_bias,
            self.states, ragged, self.spec, self.z[rows], self.norm, 1e-6, kept,
        )  # fmt: skip

    def by_definition(self, ragged: Ragged) -> tuple[Tensor, Tensor, Tensor]:
        windows, states = self.windows.clone(), self.states.clone()
        mixed = naive_conv.conv_silu(self.inputs, self.taps, windows, ragged)
        out = naive_delta.gated_delta(mixed, self.a, self.b, self.decay, self.dt_bias, states, ragged, self.spec)
        return naive_norm.gated_rms_norm(out, self.z, self.norm, 1e-6), windows, states


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("segments", [[(1, 0, 1)], [(2, 3, 70)], [(0, 5, 1), (2, 0, 9), (1, 7, 2)]])
def test_the_mixer_is_convolution_delta_rule_and_gated_norm(
    spec: DeltaSpec, segments: list[tuple[int, int, int]], make_ragged: MakeRagged
) -> None:
    ragged = make_ragged(segments)
    mixer = Mixer(spec, sum(length for *_, length in segments), 3)
    want, windows, states = mixer.by_definition(ragged)
    torch.testing.assert_close(mixer.run(ragged), want, atol=1e-4, rtol=1e-4)
    assert torch.equal(mixer.windows, windows)
    torch.testing.assert_close(mixer.states, states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_together_and_one_by_one_give_the_same_bits_and_rewind_rebuilds_them(
    spec: DeltaSpec, make_ragged: MakeRagged
) -> None:
    rows = 5
    single, block = Mixer(spec, rows, 2), Mixer(spec, rows, 2)
    states, windows, outs = [single.states.clone()], [single.windows.clone()], []
    for row in range(rows):
        outs.append(single.run(make_ragged([(1, row, 1)]), slice(row, row + 1)))
        states.append(single.states.clone())
        windows.append(single.windows.clone())
    kept = RewindLog.zeros(spec, 2, rows + 2, CPU)
    for tensor in kept.tensors:
        tensor.fill_(torch.nan)  # what is read was written
    assert torch.equal(block.run(make_ragged([(1, 0, rows)]), kept=kept), torch.cat(outs))
    assert torch.equal(block.states, states[0]), "a block that is logged leaves the state as it is"
    for count in range(rows + 1):
        settled = states[0].clone()
        gated_delta.replay_rows(kept, torch.tensor([1, count]), settled, block.windows)
        assert torch.equal(settled, states[count])
        assert torch.equal(block.windows, windows[count])


@pytest.mark.parametrize("spec", SPECS)
def test_slots_may_lie_apart_with_others_state_between_them(spec: DeltaSpec, make_ragged: MakeRagged) -> None:
    apart, alone = Mixer(spec, 9, 3), Mixer(spec, 9, 3)
    run = torch.full((3, alone.states[0].numel() + 64 + alone.windows[0].numel() + 64), torch.nan)
    apart.states = run[:, : alone.states[0].numel()].view_as(alone.states).copy_(alone.states)
    apart.windows = run[:, -alone.windows[0].numel() - 64 : -64].view_as(alone.windows).copy_(alone.windows)
    logs = [RewindLog.zeros(spec, 3, 9, CPU) for _ in range(2)]
    segments = make_ragged([(2, 0, 7), (0, 0, 1), (1, 0, 1)])
    assert torch.equal(apart.run(segments), alone.run(segments))
    assert torch.equal(apart.run(segments, kept=logs[0]), alone.run(segments, kept=logs[1]))
    for mixer, kept in zip((apart, alone), logs, strict=True):
        gated_delta.replay_rows(kept, torch.tensor([2, 5]), mixer.states, mixer.windows)
    assert torch.equal(apart.states, alone.states) and torch.equal(apart.windows, alone.windows)
    assert run.isnan().sum() == 3 * 128, "what lies between is as it was"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_several_slots_settle_each_by_itself(spec: DeltaSpec, threads: int, make_ragged: MakeRagged) -> None:
    """Longer ones, too, than the rows whose decay a replay computes at once."""
    lengths, keep, wanted = (1, 70, 9), (1, 67, 0), torch.get_num_threads()
    segments = [(slot, 0, length) for slot, length in enumerate(lengths)]
    together, single = Mixer(spec, sum(lengths), 3), Mixer(spec, sum(lengths), 3)
    kept = RewindLog.zeros(spec, 3, max(lengths), CPU)
    try:
        native.set_threads(threads)
        together.run(make_ragged(segments), kept=kept)
        for slot, count in enumerate(keep):
            gated_delta.replay_rows(kept, torch.tensor([slot, count]), together.states, together.windows)
    finally:
        native.set_threads(wanted)
    for slot, count in enumerate(keep):
        for row in range(sum(lengths[:slot]), sum(lengths[:slot]) + count):
            single.run(make_ragged([(slot, row, 1)]), slice(row, row + 1))
    assert torch.equal(together.states, single.states)
    assert torch.equal(together.windows, single.windows)


def test_what_is_no_number_goes_through_the_mixer(make_ragged: MakeRagged) -> None:
    mixer = Mixer(SPECS[0], 1, 1)
    mixer.inputs[0, 3] = torch.nan
    assert mixer.run(make_ragged([(0, 0, 1)])).isnan().any()


def filled(kv_type: str, positions: int, kv_heads: int, dim: int) -> Tensor:
    """Pages with so many positions, the rest no number."""
    pages = -(-positions // PAGE)
    empty = torch.full((pages, 2, PAGE, kv_heads, row_size(kv_type, dim)), torch.nan)
    kv = empty.to(KV_DTYPES[kv_type]) if kv_type != "q8" else torch.full(empty.shape, 255, dtype=torch.uint8)
    rows = attention.rows.to_rows(drawn(positions, 2, kv_heads, dim), KV_DTYPES[kv_type])
    for at in range(positions):
        kv[at // PAGE, :, at % PAGE] = rows[at]
    return kv


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8"])
@pytest.mark.parametrize("dim", [32, 96])
@pytest.mark.parametrize(("position", "rows"), [(0, 1), (70, 1), (1100, 1), (0, 40), (1000, 130), (2050, 3)])
def test_attention(kv_type: str, dim: int, position: int, rows: int, make_ragged: MakeRagged) -> None:
    kv, q, gate = filled(kv_type, position + rows, 2, dim), drawn(rows, 6, dim), drawn(rows, 6, dim, seed=1)
    ragged = make_ragged([(0, position, rows)])
    want = naive_attention.attend(q, kv, ragged, dim**-0.5)
    torch.testing.assert_close(attention.attend(q, kv, ragged, dim**-0.5), want, atol=2e-5, rtol=1e-4)
    gated = attention.attend_gated(q, kv, ragged, dim**-0.5, gate)
    torch.testing.assert_close(gated, naive_attention.sigmoid_gate(want, gate), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_type", ["f32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 40), (6, 2, 64), (2, 2, 7), (8, 1, 128), (128, 2, 24)])
@pytest.mark.parametrize("position", [0, 45, 1010])
def test_a_row_attends_with_the_same_bits_alone_and_among_others(
    kv_type: str, heads: int, kv_heads: int, dim: int, position: int, make_ragged: MakeRagged
) -> None:
    most = 33  # from 1010 on they lie on both sides of the edge between two groups of pages
    kv, q = filled(kv_type, position + most, kv_heads, dim), drawn(most, heads, dim)

    def attended(first: int, rows: int) -> Tensor:
        return attention.attend(q[first : first + rows], kv, make_ragged([(0, position + first, rows)]), dim**-0.5)

    alone = torch.cat([attended(row, 1) for row in range(most)])
    assert not alone.isnan().any()
    for rows in range(2, most + 1):
        assert torch.equal(attended(0, rows), alone[:rows]), rows
        assert torch.equal(attended(most - rows, rows), alone[-rows:]), rows


def test_what_is_no_number_in_a_later_row_does_not_reach_an_earlier_one(make_ragged: MakeRagged) -> None:
    kv, q = filled("f32", 40, 2, 32), drawn(8, 6, 32)
    clean = attention.attend(q, kv, make_ragged([(0, 32, 8)]), 0.2)
    kv[0, 1, 37] = torch.nan
    spoiled = attention.attend(q, kv, make_ragged([(0, 32, 8)]), 0.2)
    assert torch.equal(spoiled[:5], clean[:5])
    assert spoiled[5:].isnan().all()


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8"])
@pytest.mark.parametrize("rows", [1, 19])
def test_turning_and_storing(kv_type: str, rows: int, make_ragged: MakeRagged) -> None:
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=32, rope_dim=8, rope_theta=1e6, qk_norm=True, gated=True)
    ragged, frequencies = make_ragged([(0, 60, rows)]), rope.rope_frequencies(spec, "cpu")
    both, k, v = drawn(rows, 4, 64), drawn(rows, 2, 32), drawn(rows, 2, 32, seed=1)
    q, weights = both[..., :32], (drawn(32), drawn(32, seed=1))
    kv = torch.zeros(2, 2, PAGE, 2, row_size(kv_type, 32), dtype=KV_DTYPES[kv_type])
    want_kv = kv.clone()
    have = rope.norm_rope_store(q, k, v, *weights, 1e-6, frequencies, kv, ragged)
    want, turned = rope.naive.norm_rope(q, k, *weights, 1e-6, ragged.row_positions, frequencies)
    naive_attention.store_kv(want_kv, turned, v, ragged)
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    read = attention.rows.from_rows
    torch.testing.assert_close(read(kv), read(want_kv), atol=0.06 if kv_type == "q8" else 1e-5, rtol=0.01)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_experts(rows: int) -> None:
    experts, used, hidden, width = 12, 3, 64, 40
    gate, up, down = drawn(experts, width, hidden), drawn(experts, width, hidden, seed=1), drawn(experts, hidden, width)
    shared = drawn(24, hidden), drawn(24, hidden, seed=1), drawn(hidden, 24)
    h, scale = drawn(rows, hidden), drawn(hidden) / 8
    ids, weights = route(h, make_router(drawn(experts, hidden) / 8), used)
    want_ids, want_weights = naive_moe.route(h, drawn(experts, hidden) / 8, used)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights)
    stacks = [
        make_stack(raw(part).reshape(-1, raw(part).shape[-1]), "F32", tuple(part.shape), CPU, torch.float32)  # type: ignore[arg-type]
        for part in (gate, up, down)
    ]
    one = SharedExpert(
        *(make_matrix(raw(p), "F32", (p.shape[0], p.shape[1]), CPU, torch.float32) for p in shared), scale
    )
    want = naive_moe.moe(h, ids, weights, gate, up, down) + naive_moe.shared_expert(h, *shared, scale)
    together = moe(h, ids, weights, *stacks, one)
    torch.testing.assert_close(together, want, atol=1e-3, rtol=1e-4)
    alone = [moe(h[i : i + 1], ids[i : i + 1], weights[i : i + 1], *stacks, one) for i in range(rows)]
    assert torch.equal(together, torch.cat(alone))


def raw(values: Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


def test_a_router_that_sees_no_number_still_names_experts() -> None:
    ids, weights = route(torch.full((2, 64), torch.nan), make_router(drawn(5, 64)), 2)
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert weights.isnan().all()
