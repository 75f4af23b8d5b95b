"""Laws of the gated delta rule, on the CPU forms."""

from __future__ import annotations

import pytest
import torch

from rekindle.kernels import gated_delta
from rekindle.kernels.gated_delta import RewindLog, chunked, naive
from rekindle.spec import DeltaSpec

SPECS = (DeltaSpec(2, 4, 8, 8, 4), DeltaSpec(2, 6, 16, 8, 4))


def _inputs(rows, spec):
    return (
        torch.randn(rows, spec.conv_channels),
        torch.randn(rows, spec.value_heads),
        torch.randn(rows, spec.value_heads),
        -torch.rand(spec.value_heads) - 0.1,
        torch.randn(spec.value_heads),
    )


def _states(slots, spec):
    return torch.randn(slots, spec.value_heads, spec.key_dim, spec.value_dim)


@pytest.mark.parametrize("spec", SPECS)
def test_the_definition_is_the_published_recurrence(make_ragged, spec):
    torch.manual_seed(0)
    mixed, a, b, decay, dt_bias = _inputs(3, spec)
    states = _states(2, spec)
    state = states[1].clone()
    out = naive.gated_delta(mixed, a, b, decay, dt_bias, states, make_ragged([(1, 0, 3)]), spec)
    width = spec.key_heads * spec.key_dim
    for t in range(3):
        for head in range(spec.value_heads):
            at = head % spec.key_heads * spec.key_dim
            q = mixed[t, at : at + spec.key_dim]
            k = mixed[t, width + at : width + at + spec.key_dim]
            v = mixed[t, 2 * width + head * spec.value_dim : 2 * width + (head + 1) * spec.value_dim]
            q = q / (q.dot(q) + 1e-6).sqrt() / spec.key_dim**0.5
            k = k / (k.dot(k) + 1e-6).sqrt()
            s = state[head] * torch.exp(decay[head] * torch.log1p(torch.exp(a[t, head] + dt_bias[head])))
            s = s + torch.outer(k, torch.sigmoid(b[t, head]) * (v - s.T @ k))
            state[head] = s
            torch.testing.assert_close(out[t, head], s.T @ q, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states[1], state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [2, 63, 64, 65, 130])
def test_chunks_agree_with_the_recurrence_in_outputs_and_state(make_ragged, spec, length):
    torch.manual_seed(length)
    inputs = _inputs(length, spec)
    states = _states(1, spec)
    expected_states = states.clone()
    ragged = make_ragged([(0, 0, length)])
    out = gated_delta.gated_delta(*inputs, states, ragged, spec)
    expected = naive.gated_delta(*inputs, expected_states, ragged, spec)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-4)


def test_nearly_equal_keys_without_decay_stay_exact():
    torch.manual_seed(5)
    rows, heads, dim = 192, 2, 16
    k = torch.nn.functional.normalize(torch.ones(dim) + 1e-3 * torch.randn(rows, heads, dim), dim=-1)
    inputs = naive.Inputs(
        torch.randn(rows, heads, dim), k, torch.randn(rows, heads, dim), torch.zeros(rows, heads),
        torch.full((rows, heads), 0.99),
    )  # fmt: skip
    state = torch.zeros(heads, dim, dim)
    exact = state.double()
    out = chunked.run_chunked(inputs, state)
    expected, _ = naive.run_rows(naive.Inputs(*(x.double() for x in inputs)), exact)
    assert (out - expected).norm() / expected.norm() < 1e-4
    assert (state - exact).norm() / exact.norm() < 1e-4


def test_segments_do_not_touch_one_anothers_bits(make_ragged):
    torch.manual_seed(6)
    spec = SPECS[0]
    segments = [(2, 0, 1), (0, 5, 70), (1, 9, 1)]
    mixed, a, b, decay, dt_bias = _inputs(72, spec)
    states = _states(3, spec)
    before = states.clone()
    together = gated_delta.gated_delta(mixed, a, b, decay, dt_bias, states, make_ragged(segments), spec)
    start = 0
    for slot, position, length in segments:
        rows = slice(start, start + length)
        alone_states = before.clone()
        alone = gated_delta.gated_delta(
            mixed[rows], a[rows], b[rows], decay, dt_bias, alone_states, make_ragged([(slot, position, length)]), spec
        )
        assert torch.equal(together[rows], alone)
        assert torch.equal(states[slot], alone_states[slot])
        start += length


def test_replayed_rows_rebuild_the_state_bit_for_bit(make_ragged):
    torch.manual_seed(7)
    spec = SPECS[1]
    mixed, a, b, decay, dt_bias = _inputs(5, spec)
    states = _states(1, spec)
    before = states[0].clone()
    kept = RewindLog.zeros(spec, 1, 6, torch.device("cpu"))
    for tensor in kept.tensors:
        tensor.fill_(torch.nan)  # what is read was written
    windows = torch.zeros_like(kept.windows)
    naive.gated_delta_rows(mixed, a, b, decay, dt_bias, states, make_ragged([(0, 3, 5)]), spec, kept)
    assert torch.equal(states[0], before), "a block that is logged leaves the state as it is"
    for count in range(6):
        expected = before[None].clone()
        for t in range(count):  # token by token, as plain decode would
            one = make_ragged([(0, 3 + t, 1)])
            naive.gated_delta(mixed[t : t + 1], a[t : t + 1], b[t : t + 1], decay, dt_bias, expected, one, spec)
        settled = before[None].clone()
        naive.replay_rows(kept, torch.tensor([0, count]), settled, windows)
        assert torch.equal(settled, expected)
