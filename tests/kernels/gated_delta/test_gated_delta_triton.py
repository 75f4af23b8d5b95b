"""The Triton delta rule computes the definition: outputs and final states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rekindle.kernels.conv import naive as conv
from rekindle.kernels.conv import triton as conv_triton
from rekindle.kernels.gated_delta import RewindLog, naive, replay_of, triton
from rekindle.kernels.gated_delta import rows as row_kernels
from rekindle.kernels.gated_delta import step as step_kernel
from rekindle.kernels.norm import naive as norm
from rekindle.spec import DeltaSpec

TWICE, THRICE = DeltaSpec(2, 4, 16, 16, 4), DeltaSpec(1, 3, 16, 32, 4)


def _inputs(rows, spec, dtype=torch.float32):
    return (
        torch.randn(rows, spec.conv_channels + 3).to(dtype)[:, : spec.conv_channels],
        torch.randn(rows, spec.value_heads).to(dtype),
        torch.randn(rows, spec.value_heads).to(dtype),
        -torch.rand(spec.value_heads) - 0.1,
        torch.randn(spec.value_heads),
    )


def _states(slots, spec):
    return torch.randn(slots, spec.value_heads, spec.key_dim, spec.value_dim)


def _error(got, expected):
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("spec", [TWICE, THRICE])
@pytest.mark.parametrize("lengths", [(1,), (2,), (63,), (64,), (65,), (130,), (1, 1, 1), (1, 70, 2, 1, 64)])
def test_outputs_and_states_agree(make_ragged, spec, lengths):
    torch.manual_seed(sum(lengths))
    inputs = _inputs(sum(lengths), spec)
    states = _states(len(lengths) + 2, spec)
    expected_states = states.clone()
    slots = torch.randperm(len(lengths) + 2).tolist()
    ragged = make_ragged([(slots[i], 5, length) for i, length in enumerate(lengths)])
    out = triton.gated_delta(*inputs, states, ragged, spec)
    expected = naive.gated_delta(*inputs, expected_states, ragged, spec)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [2, 63, 64])
def test_padding_of_a_recorded_chunk_is_computed_too_also_a_single_row_of_it(make_ragged, rows):
    """The step is chosen by `lengths`, which say nothing of what is left for padding."""
    torch.manual_seed(rows)
    inputs, states = _inputs(64, TWICE), _states(3, TWICE)
    expected_states = states.clone()
    exact = make_ragged([(1, 5, rows), (2, 0, 64 - rows)])
    out = triton.gated_delta(*inputs, states, replace(exact, lengths=(64, 0)), TWICE)
    expected = naive.gated_delta(*inputs, expected_states, exact, TWICE)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-4)


def test_halves_of_operands_keep_the_state_near_the_definition(make_ragged):
    torch.manual_seed(1)
    inputs = _inputs(130, TWICE, torch.float16)
    states = _states(1, TWICE)
    expected_states = states.clone()
    ragged = make_ragged([(0, 0, 130)])
    out = triton.gated_delta(*inputs, states, ragged, TWICE)
    wide = (x.float() for x in inputs)
    expected = naive.gated_delta(*wide, expected_states, ragged, TWICE)
    assert _error(out, expected) < 5e-4  # the outputs themselves are float16
    assert _error(states, expected_states) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nearly_equal_keys_without_decay_stay_exact(make_ragged, dtype):
    torch.manual_seed(2)
    spec = DeltaSpec(1, 2, 16, 16, 4)
    rows = 192
    mixed = torch.randn(rows, spec.conv_channels)
    mixed[:, 16:32] = 1 + 1e-3 * torch.randn(rows, 16)
    mixed = mixed.to(dtype)
    a, b = torch.zeros(rows, 2), torch.full((rows, 2), 4.595)  # β = 0.99
    decay, dt_bias = torch.zeros(2), torch.zeros(2)  # g = 0
    states = torch.zeros(1, 2, 16, 16)
    expected_states = states.clone()
    ragged = make_ragged([(0, 0, rows)])
    out = triton.gated_delta(mixed, a, b, decay, dt_bias, states, ragged, spec)
    expected = naive.gated_delta(mixed.float(), a, b, decay, dt_bias, expected_states, ragged, spec)
    assert _error(out, expected) < 1e-3
    assert _error(states, expected_states) < 1e-4


@pytest.mark.parametrize("spec", [TWICE, THRICE])
def test_a_decode_step_is_convolution_then_recurrence_then_norm(make_ragged, spec):
    torch.manual_seed(3)
    _, a, b, decay, dt_bias = _inputs(3, spec)
    states, windows = _states(3, spec), torch.randn(3, spec.conv_width - 1, spec.conv_channels)
    taps = torch.randn(spec.conv_channels, spec.conv_width)
    z, weight = torch.randn(3, spec.inner), torch.randn(spec.value_dim)
    expected_states, expected_windows = states.clone(), windows.clone()
    ragged = make_ragged([(2, 5, 1), (0, 9, 1), (1, 0, 1)])
    for _ in range(4):  # longer than the window
        inputs = torch.randn(3, spec.conv_channels + 2)[:, : spec.conv_channels]
        out = step_kernel.gated_delta_step(
            inputs, taps, windows, a, b, decay, dt_bias, states, ragged, spec, z, weight, 1e-6
        )
        mixed = conv.conv_silu(inputs, taps, expected_windows, ragged)
        step = naive.gated_delta(mixed, a, b, decay, dt_bias, expected_states, ragged, spec)
        torch.testing.assert_close(out, norm.gated_rms_norm(step, z, weight, 1e-6), atol=1e-5, rtol=1e-4)
        assert torch.equal(windows, expected_windows)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-4)


def test_padded_rows_that_share_a_slot_leave_the_others_alone(make_ragged):
    torch.manual_seed(5)
    _, a, b, decay, dt_bias = _inputs(4, THRICE)
    inputs, z = torch.randn(4, THRICE.conv_channels), torch.randn(4, THRICE.inner)
    taps, weight = torch.randn(THRICE.conv_channels, 4), torch.randn(THRICE.value_dim)
    states, windows = _states(2, THRICE), torch.randn(2, 3, THRICE.conv_channels)

    def step(rows, states, windows):
        ragged = make_ragged([(0, 5, 1), (1, 0, 1), (1, 0, 1), (1, 0, 1)][:rows])
        parts = (x[:rows] for x in (a, b))
        args = (inputs[:rows], taps, windows, *parts, decay, dt_bias, states, ragged, THRICE, z[:rows], weight, 1e-6)
        return step_kernel.gated_delta_step(*args)

    for _ in range(3):
        alone_states, alone_windows = states.clone(), windows.clone()
        alone = step(1, alone_states, alone_windows)
        assert torch.equal(step(4, states, windows)[:1], alone)
        assert torch.equal(states[0], alone_states[0])
        assert torch.equal(windows[0], alone_windows[0])


def _block(spec, inputs, states, windows, ragged, kept, kernels):
    """Convolution, then the recurrence, both keeping their rows."""
    rule, convolution = kernels
    mixed, a, b, decay, dt_bias = inputs
    mixed = convolution.conv_silu(mixed, _taps(spec), windows, ragged, kept)
    return rule.gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, kept)


def _taps(spec):
    return torch.arange(1.0, 4 * spec.conv_channels + 1).view(-1, 4).sin()


@pytest.mark.parametrize("spec", [TWICE, THRICE])
def test_kept_rows_are_those_of_the_definition_padding_included(make_ragged, spec):
    torch.manual_seed(4)
    inputs = _inputs(8, spec)
    ragged = make_ragged([(1, 3, 5), (2, 0, 3)])
    ragged = replace(ragged, lengths=(8, 0))  # as a recorded step sees it: a block of up to 8, and padding
    made = []
    for kernels in ((row_kernels, conv_triton), (naive, conv)):
        torch.manual_seed(5)
        states, windows = _states(3, spec), torch.randn(3, 3, spec.conv_channels)
        kept = RewindLog.zeros(spec, 3, 8, torch.device("cpu"))
        out = _block(spec, inputs, states, windows, ragged, kept, kernels)
        made.append((out, states, windows, *kept.tensors))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_padding_that_no_row_was_left_for_keeps_nothing(make_ragged):
    """A full block in a recorded step: the segment of padding behind it is empty."""
    states, kept = _states(3, TWICE), RewindLog.zeros(TWICE, 3, 4, torch.device("cpu"))
    before = states.clone()
    for tensor in kept.tensors:
        tensor.fill_(torch.nan)
    ragged = replace(make_ragged([(1, 0, 4), (2, 0, 0)]), lengths=(4, 0))
    row_kernels.gated_delta_rows(*_inputs(4, TWICE), states, ragged, TWICE, kept)
    assert torch.equal(states, before), "nor does a block that is logged move its state"
    for rows in (kept.k, kept.delta, kept.g):
        assert rows[1].isfinite().all()
        assert rows[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spec", [TWICE, THRICE])
def test_replayed_rows_rebuild_state_and_window_bit_for_bit(make_ragged, spec, dtype):
    """Inputs of the convolution are logged in their own type."""
    torch.manual_seed(4)
    inputs = _inputs(7, spec)
    inputs = (inputs[0].to(dtype), *inputs[1:])
    states, windows = _states(2, spec), torch.randn(2, 3, spec.conv_channels)
    kernels = row_kernels, conv_triton
    # Two layers, with states of their own: both move on in one launch, each by its own log.
    layers = [(states, windows), (states.mul(2), windows.mul(3))]
    befores, logs = [(s.clone(), w.clone()) for s, w in layers], []
    for layer in layers:
        logs.append(RewindLog.zeros(spec, 2, 6, torch.device("cpu"), dtype))
        for tensor in logs[-1].tensors:
            tensor.fill_(torch.nan)  # what is read was written
        _block(spec, inputs, *layer, make_ragged([(1, 3, 5), (0, 0, 2)]), logs[-1], kernels)
    assert all(torch.equal(s, before) for (s, _), (before, _) in zip(layers, befores, strict=True)), "states stay"
    for slot, first, most in ((1, 0, 5), (0, 5, 2)):
        for count in range(most + 1):
            after = [(s.clone(), w.clone()) for s, w in layers]
            replay_of(logs, *zip(*after, strict=True))(torch.tensor([slot, count], dtype=torch.int32))
            for (got, window), before in zip(after, befores, strict=True):
                expected, moved = _one_by_one(spec, inputs, before, slot, range(first, first + count), make_ragged)
                assert torch.equal(got[slot], expected[slot])
                assert torch.equal(window[slot], moved[slot])
                assert torch.equal(got[1 - slot], before[0][1 - slot]), "the other slot's block waits for its own count"


def _one_by_one(spec, inputs, before, slot, rows, make_ragged):
    """State and window after single rows, none of which is logged."""
    states, windows = (x.clone() for x in before)
    mixed, a, b, decay, dt_bias = inputs
    for row in rows:
        ragged, one = make_ragged([(slot, row, 1)]), slice(row, row + 1)
        convolved = conv_triton.conv_silu(mixed[one], _taps(spec), windows, ragged)
        triton.gated_delta(convolved, a[one], b[one], decay, dt_bias, states, ragged, spec)
    return states, windows


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_forms_of_smaller_cards_agree(make_ragged, dtype):
    torch.manual_seed(5)
    spec = DeltaSpec(1, 2, 16, 64, 4)
    inputs, states = _inputs(70, spec, dtype), _states(1, spec)
    expected_states, ragged = states.clone(), make_ragged([(0, 0, 70)])
    out = triton.gated_delta(*inputs, states, ragged, spec)
    expected = naive.gated_delta(*(x.float() for x in inputs), expected_states, ragged, spec)
    assert _error(out, expected) < (1e-5 if dtype == torch.float32 else 5e-4)
    assert _error(states, expected_states) < 1e-5
