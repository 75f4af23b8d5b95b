"""Check and time the mixer kernels on a GPU: PYTHONPATH=src python3 scripts/gpu/bench_mixers.py

First every kernel against its definition on fresh random inputs, then medians at the shapes of the two models, and a
short table last. Everything printed also goes to $OUT/bench_mixers.log when OUT is set. Exit code 1: a check failed.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton.testing

from rekindle.kernels import attention, conv, gated_delta, norm, rope, sampling
from rekindle.kernels.attention import naive as naive_attention
from rekindle.kernels.attention import triton as fast_attention
from rekindle.kernels.attention.rows import row_size, to_rows
from rekindle.kernels.conv import naive as naive_conv
from rekindle.kernels.conv import triton as fast_conv
from rekindle.kernels.gated_delta import chunked
from rekindle.kernels.gated_delta import naive as naive_delta
from rekindle.kernels.gated_delta import rows as delta_rows
from rekindle.kernels.gated_delta import step as delta_step
from rekindle.kernels.norm import naive as naive_norm
from rekindle.kernels.norm import triton as fast_norm
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rope import naive as naive_rope
from rekindle.kernels.sampling import naive as naive_sampling
from rekindle.kernels.sampling import triton as fast_sampling
from rekindle.spec import PAGE, AttentionSpec, DeltaSpec

DEVICE = "cuda"
SMALL = (AttentionSpec(16, 2, 256, 64, 1e7, qk_norm=True, gated=True), DeltaSpec(16, 32, 128, 128, 4), 2048)  # 35B-A3B
LARGE = (AttentionSpec(24, 4, 256, 64, 1e7, qk_norm=True, gated=True), DeltaSpec(16, 48, 128, 128, 4), 5120)  # 27B
SECONDS = 165.0  # after this no further configuration is tried

log_file = (Path(os.environ["OUT"]) / "bench_mixers.log").open("w") if "OUT" in os.environ else None
began = time.monotonic()
failures: list[str] = []
table: list[tuple[str, str, float, str, str]] = []
limits = {"GB/s": 0.0, "TFLOP/s": 0.0}


def say(line: str) -> None:
    print(line, flush=True)
    if log_file is not None:
        log_file.write(line + "\n")
        log_file.flush()


def late() -> bool:
    return time.monotonic() - began > SECONDS


def make_ragged(segments: Sequence[tuple[int, int, int]], spare: int = 0) -> Ragged:
    """Segments as (slot, position, length) over shuffled pages; `spare` more pages in every table."""
    slots, befores, lengths = (tuple(column) for column in zip(*segments, strict=True))
    wide = max(-(-(before + length) // PAGE) for before, length in zip(befores, lengths, strict=True)) + spare
    sizes = torch.tensor(lengths)
    pages = torch.randperm(wide * len(segments), dtype=torch.int32).view(len(segments), wide)
    positions = torch.cat([torch.arange(b, b + n) for b, n in zip(befores, lengths, strict=True)]).int().to(DEVICE)
    return Ragged(
        starts=torch.cat((torch.zeros(1), sizes.cumsum(0))).int().to(DEVICE),
        slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        row_positions=positions,
        row_places=positions,
        row_segments=torch.arange(len(segments)).repeat_interleave(sizes).int().to(DEVICE),
        tables=pages.to(DEVICE),
        lengths=lengths,
    )


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


# ---------------------------------------------------------------------------------------------------------- checks


def check(name: str, got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    error = float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    good = error <= limit  # NaN is not
    say(f"check {name:58s} {error:9.2e} (limit {limit:.0e}) {'ok' if good else 'WRONG'}")
    if not good:
        failures.append(name)


def rounding(dtype: torch.dtype) -> float:
    """Relative error allowed to a result that is itself rounded to dtype."""
    return 4e-3 if dtype == torch.bfloat16 else 2e-5


def delta_inputs(rows: int, spec: DeltaSpec, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        rand(rows, spec.conv_channels, dtype=dtype),
        rand(rows, spec.value_heads, dtype=dtype),
        rand(rows, spec.value_heads, dtype=dtype),
        -torch.rand(spec.value_heads, device=DEVICE) - 0.05,
        rand(spec.value_heads),
    )


def check_small(dtype: torch.dtype) -> None:
    tag, limit = str(dtype).removeprefix("torch."), rounding(dtype)
    x, y, weight = rand(7, 5120, dtype=dtype), rand(7, 5120, dtype=dtype), rand(5120)
    check(f"rms_norm {tag}", norm.rms_norm(x, weight, 1e-6), naive_norm.rms_norm(x.float(), weight, 1e-6), limit)
    total, normed = norm.add_rms_norm(x, y, weight, 1e-6)
    check(f"add_rms_norm sum {tag}", total, x + y, 0.0)
    check(f"add_rms_norm {tag}", normed, naive_norm.rms_norm((x + y).float(), weight, 1e-6), limit)
    o, z, weight = rand(5, 48, 128, dtype=dtype), rand(5, 6144, dtype=dtype), rand(128)
    expected = naive_norm.gated_rms_norm(o.float(), z.float(), weight, 1e-6)
    check(f"gated_rms_norm {tag}", norm.gated_rms_norm(o, z, weight, 1e-6), expected, limit)
    ragged = make_ragged([(0, 7, 3), (1, 60, 6)])
    both = rand(9, 24, 512, dtype=dtype)
    q, gate, k, v = both[..., :256], both[..., 256:], rand(9, 4, 256, dtype=dtype), rand(9, 4, 256, dtype=dtype)
    weights, frequencies = (rand(256), rand(256)), rope.rope_frequencies(LARGE[0], DEVICE)
    for first in (0, 1_000_000):
        settings = (*weights, 1e-6, ragged.row_positions + first, frequencies)
        for which, got, expected in zip(
            "qk", rope.norm_rope(q, k, *settings), naive_rope.norm_rope(q.float(), k.float(), *settings), strict=True
        ):
            check(f"norm_rope {which} from position {first} {tag}", got, expected, limit)
    kv = torch.zeros(ragged.tables.numel(), 2, PAGE, 4, 256, device=DEVICE, dtype=dtype)
    expected_kv = kv.clone()
    expected_q, expected_k = rope.norm_rope(q, k, *weights, 1e-6, ragged.row_positions, frequencies)
    naive_attention.store_kv(expected_kv, expected_k, v, ragged)
    turned = rope.norm_rope_store(q, k, v, *weights, 1e-6, frequencies, kv, ragged)
    check(f"norm_rope_store q {tag}", turned, expected_q, 0.0)
    check(f"norm_rope_store kv {tag}", kv, expected_kv, 0.0)
    gated = attention.sigmoid_gate(turned, gate)
    check(f"sigmoid_gate {tag}", gated, naive_attention.sigmoid_gate(turned.float(), gate.float()), limit)
    for lengths in ((1, 1, 1), (2, 1, 130, 3)):
        ragged = make_ragged([(2 * i, 9, n) for i, n in enumerate(lengths)])
        u, weight = rand(sum(lengths), 8192, dtype=dtype), rand(8192, 4)
        windows = rand(8, 3, 8192)
        expected_windows = windows.clone()
        out = conv.conv_silu(u, weight, windows, ragged)
        check(f"conv {lengths} {tag}", out, naive_conv.conv_silu(u.float(), weight, expected_windows, ragged), limit)
        check(f"conv windows {lengths} {tag}", windows, expected_windows, 0.0)
    logits = rand(3, 248320, dtype=dtype)
    check(f"argmax {tag}", sampling.argmax(logits), logits.argmax(-1), 0.0)


def check_delta(dtype: torch.dtype, spec: DeltaSpec) -> None:
    tag = f"{spec.value_heads}/{spec.key_heads} {str(dtype).removeprefix('torch.')}"
    for lengths in ((1,), (1,) * 9, (2, 1, 65, 130)):
        ragged = make_ragged([(len(lengths) - i, 7, n) for i, n in enumerate(lengths)])
        inputs = delta_inputs(sum(lengths), spec, dtype)
        states = rand(len(lengths) + 1, spec.value_heads, 128, 128)
        wide_states = states.clone()
        out = gated_delta.gated_delta(*inputs, states, ragged, spec)
        expected = naive_delta.gated_delta(*(x.float() for x in inputs), wide_states, ragged, spec)
        check(f"gated_delta {lengths} {tag}", out, expected, rounding(dtype))
        check(f"gated_delta state {lengths} {tag}", states, wide_states, 2e-4)
    check_step(dtype, spec, tag)
    inputs, before = delta_inputs(9, spec, dtype), rand(9, spec.value_heads, 128, 128)
    states = before.clone()
    ragged = make_ragged([(3, 7, 9)])
    kept = gated_delta.RewindLog.zeros(spec, 9, 12, torch.device(DEVICE))
    gated_delta.gated_delta_rows(*inputs, states, ragged, spec, kept)
    check(f"a block that is kept leaves the state as it is {tag}", states, before, 0.0)
    single, windows = before.clone(), torch.zeros_like(kept.windows)
    for t in range(9):
        part = [x[t : t + 1] for x in inputs[:3]]
        gated_delta.gated_delta(*part, *inputs[3:], single, make_ragged([(3, 7 + t, 1)]), spec)
        settled, where = states.clone(), torch.tensor([3, t + 1], dtype=torch.int32, device=DEVICE)
        gated_delta.replay_rows(kept, where, settled, windows)
        check(f"replay of {t + 1} rows is decode, exactly {tag}", settled, single, 0.0)


def check_step(dtype: torch.dtype, spec: DeltaSpec, tag: str) -> None:
    """Steps behind one another: of a row alone, and of many with rows that share a slot at the end as padding does."""
    for rows in (1, 12):
        check_steps(dtype, spec, f"x{rows} {tag}", rows, min(rows, 9))


def check_steps(dtype: torch.dtype, spec: DeltaSpec, tag: str, rows: int, real: int) -> None:
    _, a, b, decay, dt_bias = delta_inputs(rows, spec, dtype)
    taps, z, weight = rand(spec.conv_channels, 4), rand(rows, spec.inner, dtype=dtype), rand(128)
    states, windows = rand(10, spec.value_heads, 128, 128), rand(10, 3, spec.conv_channels)
    wide_states, wide_windows = states.clone(), windows.clone()
    ragged = make_ragged([(min(i, 9), 7, 1) for i in range(rows)])
    alone = make_ragged([(i, 7, 1) for i in range(real)])
    for step in range(40):
        u = rand(rows, spec.conv_channels, dtype=dtype)
        out = gated_delta.gated_delta_step(
            u, taps, windows, a, b, decay, dt_bias, states, ragged, spec, z, weight, 1e-6
        )
        mixed = naive_conv.conv_silu(u[:real].float(), taps, wide_windows, alone).to(dtype)
        wide = naive_delta.gated_delta(
            *(x.float() for x in (mixed, a[:real], b[:real], decay, dt_bias)), wide_states, alone, spec
        )
        if step in (0, 39):
            expected = naive_norm.gated_rms_norm(wide, z[:real].float(), weight, 1e-6)
            check(f"gated_delta_step {step} {tag}", out[:real], expected, 4e-3)
            check(f"gated_delta_step {step} windows {tag}", windows[:real], wide_windows[:real], 0.0)
            check(f"gated_delta_step {step} states {tag}", states[:real], wide_states[:real], 1e-3)
    counts = delta_step._window_semaphores(windows, spec)
    check(f"gated_delta_step: counters are back at zero {tag}", counts + 1, torch.ones_like(counts), 0.0)


def check_sampling() -> None:
    """Every draw by the definition, but for uniform numbers within rounding of an edge."""
    for name in ("fine", "coarse"):
        rows = 64
        logits = 3 * rand(rows, 248320)
        if name == "coarse":
            logits = logits.bfloat16().float()
        settings = torch.stack(
            (
                torch.rand(rows) + 0.3,
                torch.randint(1, 128, (rows,)).float(),
                0.5 + torch.rand(rows) / 2,
                torch.rand(rows) * 0.02,
                torch.rand(rows),
            )
        )
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
        for kind in ("top-k", "top-p"):
            if kind == "top-p":
                settings[1] = 0
                settings[3, ::2] = 0
            expected = naive_sampling.draw(values.double(), tokens, settings.double().to(DEVICE), 248320)
            got = fast_sampling.sample(logits, settings)
            same = float((got == expected).float().mean())
            again = bool((fast_sampling.sample(logits, settings) == got).all())
            say(f"check draws of {kind}, {name} logits: {same:.3f} as the definition, twice the same: {again}")
            if same < 0.9 or not again:
                failures.append(f"draws {kind} {name}")


def launch_early(early: bool) -> None:
    """Whether norms and delta steps begin while the launch before still runs."""
    arguments = {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
    fast_norm.pdl_arguments = delta_step.pdl_arguments = delta_rows.pdl_arguments = lambda device: arguments


def check_early() -> None:
    """A chain of dependent kernels gives the same bits whether they launch early or not."""
    xs, weight = rand(1, 2048, dtype=torch.bfloat16), rand(2048)

    def chain() -> torch.Tensor:
        x, h = xs, xs
        for _ in range(60):
            x, h = norm.add_rms_norm(x, h, weight, 1e-6)
        return h

    launch_early(False)
    _, expected = replayed(chain)
    launch_early(True)
    graph, got = replayed(chain)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    check("early launches, 60 norms in a chain", got, expected, 0.0)


def replayed(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    graph, result = capture(call)
    graph.replay()
    torch.cuda.synchronize()
    return graph, result


def check_long_delta(spec: DeltaSpec) -> None:
    """A whole prefill chunk in bfloat16, and nearly equal keys without decay, against float64."""
    for name in ("random", "nearly equal keys"):
        rows = 4096 if name == "random" else 512
        mixed, a, b, decay, dt_bias = delta_inputs(rows, spec, torch.bfloat16)
        states = rand(1, spec.value_heads, 128, 128)
        if name != "random":
            key = slice(16 * 128, 32 * 128)
            mixed[:, key] = (1 + 0.01 * rand(rows, 16 * 128)).bfloat16()
            decay, b = decay * 0, torch.full_like(b, 4.595)
        exact = naive_delta.split_inputs(mixed, a, b, decay, dt_bias, spec)
        exact = naive_delta.Inputs(*(x.double() for x in exact))
        wide = states[0].double()
        expected = chunked.run_chunked(exact, wide)
        out = gated_delta.gated_delta(mixed, a, b, decay, dt_bias, states, make_ragged([(0, 0, rows)]), spec)
        check(f"prefill {rows} {name}", out, expected, 4e-3)
        check(f"prefill {rows} {name}, state", states[0], wide, 5e-4)


def attention_case(
    segments: Sequence[tuple[int, int]], spec: AttentionSpec, dtype: torch.dtype, spare: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Ragged]:
    """q, gate, kv, ragged; what lies behind the segments in their last pages is NaN."""
    ragged = make_ragged([(i, position, n) for i, (position, n) in enumerate(segments)], spare)
    kv = rand(ragged.tables.numel(), 2, PAGE, spec.kv_heads, spec.head_dim, dtype=dtype)
    for row, (position, n) in zip(ragged.tables.tolist(), segments, strict=True):
        last = row[(position + n - 1) // PAGE]
        kv[last, :, (position + n - 1) % PAGE + 1 :] = torch.nan
    both = rand(sum(n for _, n in segments), spec.heads, 2 * spec.head_dim, dtype=dtype)
    return both[..., : spec.head_dim], both[..., spec.head_dim :], kv, ragged


def check_attention(dtype: torch.dtype, spec: AttentionSpec) -> None:
    tag = f"{spec.heads}/{spec.kv_heads} {str(dtype).removeprefix('torch.')}"
    # weights are rounded to the type of the activations before they meet the values
    limit = 6e-3 if dtype == torch.bfloat16 else 2e-5
    for segments in ([(0, 1)], [(5000, 1)], [(70, 1), (0, 1), (3000, 1)], [(1000, 9), (63, 2)], [(130, 300), (9, 1)]):
        q, gate, kv, ragged = attention_case(segments, spec, dtype)
        expected = naive_attention.attend(q.float(), kv.float(), ragged, 1 / 16)
        check(f"attend {segments} {tag}", attention.attend(q, kv, ragged, 1 / 16), expected, limit)
        gated = attention.attend_gated(q, kv, ragged, 1 / 16, gate)
        check(f"attend_gated {segments} {tag}", gated, naive_attention.sigmoid_gate(expected, gate.float()), limit)
    q, _, kv, ragged = attention_case([(2000, 5)], spec, dtype)
    halves = torch.arange(ragged.tables.shape[1], device=DEVICE).split(9)
    parts = [
        attention.attend_partial(q, kv, ragged.tables[0, half], half.int() * PAGE, ragged.row_positions, 1 / 16)
        for half in halves
    ]
    expected = naive_attention.attend(q.float(), kv.float(), ragged, 1 / 16)
    check(f"attend_partial, merged {tag}", attention.merge_partials(*zip(*parts, strict=True)), expected, limit)


def check_packed(spec: AttentionSpec) -> None:
    """q8 rows: the very bytes of the definition, and attention over them."""
    for segments in ([(5000, 1)], [(70, 1), (3000, 1)], [(1000, 9)], [(130, 300)]):
        q, _, plain, ragged = attention_case(segments, spec, torch.bfloat16)
        kv = to_rows(plain.nan_to_num(3.0), torch.uint8)
        expected_kv = kv.clone()
        k, v = (rand(q.shape[0], spec.kv_heads, spec.head_dim, dtype=torch.bfloat16) for _ in range(2))
        attention.store_kv(kv, k, v, ragged)
        naive_attention.store_kv(expected_kv, k, v, ragged)
        check(f"q8 store {segments}", kv.int(), expected_kv.int(), 0.0)
        expected = naive_attention.attend(q.float(), kv, ragged, 1 / 16)
        check(f"q8 attend {segments}", attention.attend(q, kv, ragged, 1 / 16), expected, 8e-3)


def time_packed(name: str, spec: AttentionSpec) -> None:
    for context, rows in ((4096, 1), (131072, 1), (32768, 16)):
        if late():
            break
        q, gate, plain, ragged = attention_case([(context - 1, rows)], spec, torch.bfloat16)
        kv = to_rows(plain.nan_to_num(0.0), torch.uint8)
        moved = (context + rows) * 2 * spec.kv_heads * row_size("q8", spec.head_dim)
        micros = graph_time(lambda _, a=(q, kv, ragged), g=gate: attention.attend_gated(*a, 1 / 16, g), 4)
        record("attend q8", f"{name} context {context} rows {rows}", micros, moved)


def check_graph(spec: AttentionSpec, delta: DeltaSpec) -> None:
    """A captured decode step must serve other positions, pages and slots than those it was captured with."""
    q, gate, kv, ragged = attention_case([(4999, 1), (0, 1)], spec, torch.bfloat16)
    kv.nan_to_num_(0.0)
    inputs = delta_inputs(2, delta, torch.bfloat16)
    states = rand(4, delta.value_heads, 128, 128)
    weight, windows = rand(delta.conv_channels, 4), rand(4, 3, delta.conv_channels)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        mixed = conv.conv_silu(inputs[0], weight, windows, ragged)
        return attention.attend_gated(q, kv, ragged, 1 / 16, gate), gated_delta.gated_delta(
            mixed, *inputs[1:], states, ragged, delta
        )

    graph, (attended, mixed_out) = capture(step)
    ragged.row_positions.copy_(torch.tensor([70, 3000]))
    ragged.tables.copy_(ragged.tables.flip(1))
    ragged.slots.copy_(torch.tensor([3, 1]))
    expected_windows, expected_states = windows.clone(), states.clone()
    graph.replay()
    torch.cuda.synchronize()
    expected = naive_attention.sigmoid_gate(naive_attention.attend(q.float(), kv.float(), ragged, 1 / 16), gate.float())
    check("replayed graph: attention", attended, expected, 6e-3)
    mixed = naive_conv.conv_silu(inputs[0].float(), weight, expected_windows, ragged).bfloat16()
    wide = (x.float() for x in (mixed, *inputs[1:]))
    check("replayed graph: delta", mixed_out, naive_delta.gated_delta(*wide, expected_states, ragged, delta), 4e-3)
    check("replayed graph: states", states, expected_states, 1e-3)
    check("replayed graph: windows", windows, expected_windows, 0.0)


# ---------------------------------------------------------------------------------------------------------- timing


def capture(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def graph_time(call: Callable[[int], object], copies: int) -> float:
    """Median µs of call(i), i running over `copies` sets of inputs inside one replayed graph."""
    graph, _ = capture(lambda: [call(i) for i in range(copies)])
    times = []
    for attempt in range(14):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        if attempt >= 4:
            times.append(first.elapsed_time(last) * 1000 / copies)
    return statistics.median(times)


def bench_time(call: Callable[[], object]) -> float:
    """Median µs of one call with a cold L2."""
    return float(triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median")) * 1000


def record(op: str, shape: str, micros: float, amount: float = 0.0, unit: str = "GB/s") -> None:
    """amount: bytes or operations of one call."""
    rate = amount / micros / (1e3 if unit == "GB/s" else 1e6)
    share = f"{100 * rate / limits[unit]:.0f} %" if amount and limits[unit] else ""
    table.append((op, shape, micros, f"{rate:,.0f} {unit}" if amount else "", share))
    say(f"time  {op:22s} {shape:44s} {micros:10.1f} µs  {table[-1][3]:>16s} {share:>6s}")


def measure_limits() -> None:
    source = rand(1 << 30, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    micros = bench_time(lambda: target.copy_(source))
    limits["GB/s"] = 4 * source.numel() / micros / 1e3
    x, y = rand(8192, 8192, dtype=torch.bfloat16), rand(8192, 8192, dtype=torch.bfloat16)
    limits["TFLOP/s"] = 2 * 8192**3 / bench_time(lambda: x @ y) / 1e6
    say(f"limits: copy {limits['GB/s']:,.0f} GB/s, bf16 product {limits['TFLOP/s']:.0f} TFLOP/s")


def time_norms(name: str, hidden: int) -> None:
    """A chain as in the model: every norm needs the one before."""
    xs, weight = rand(1, hidden, dtype=torch.bfloat16), [rand(hidden) for _ in range(40)]
    for early in (False, True):
        launch_early(early)

        def chain(_: int) -> None:
            x, h = xs, xs
            for i in range(40):
                x, h = norm.add_rms_norm(x, h, weight[i], 1e-6)

        record("add_rms_norm", f"{name} 1 × {hidden} early {early}", graph_time(chain, 1) / 40)


def time_step(name: str, delta: DeltaSpec, hidden: int, batch: int) -> None:
    """One decoded token's mixer between its matrices: in one launch, and in parts; a norm before it, for the chain."""
    bf16 = torch.bfloat16
    copies = max(4, 64 // batch)
    ragged = make_ragged([(i, 500, 1) for i in range(batch)])
    windows = [rand(batch, 3, delta.conv_channels) for _ in range(copies)]
    states = [rand(batch, delta.value_heads, 128, 128) for _ in range(copies)]
    u, a, b, decay, dt_bias = delta_inputs(batch, delta, bf16)
    taps, z, weight = rand(delta.conv_channels, 4), rand(batch, delta.inner, dtype=bf16), rand(128)
    moved = 8 * batch * delta.state_values
    x, norm_weight = rand(batch, hidden, dtype=bf16), rand(hidden)

    def step(i: int) -> object:
        return gated_delta.gated_delta_step(
            u, taps, windows[i], a, b, decay, dt_bias, states[i], ragged, delta, z, weight, 1e-6
        )

    def parts(i: int) -> object:
        mixed = conv.conv_silu(u, taps, windows[i], ragged)
        return norm.gated_rms_norm(
            gated_delta.gated_delta(mixed, a, b, decay, dt_bias, states[i], ragged, delta), z, weight, 1e-6
        )

    record("delta step", f"{name} batch {batch} in one", graph_time(step, copies), moved)
    for early in (False, True):
        launch_early(early)
        micros = graph_time(lambda i: (norm.add_rms_norm(x, x, norm_weight, 1e-6), step(i)), copies)
        record("norm + delta step", f"{name} batch {batch} early {early}", micros, moved)
    record("delta step", f"{name} batch {batch} in parts", graph_time(parts, copies), moved)
    for rows in ((32, 1), (32, 4), (64, 2), (16, 1)):
        if late():
            break
        delta_rows.ROWS = rows
        micros = graph_time(
            lambda i: gated_delta.gated_delta(u, a, b, decay, dt_bias, states[i], ragged, delta), copies
        )
        record("gated_delta decode", f"{name} batch {batch} columns, warps {rows}", micros, moved)
    delta_rows.ROWS = (32, 1)


def time_decode_attention(name: str, spec: AttentionSpec) -> None:
    usual, programs, least = fast_attention._tiles, fast_attention.PROGRAMS, fast_attention.LEAST
    for context, batch, rows in ((1, 1, 1), (4096, 1, 1), (32768, 1, 1), (131072, 1, 1), (32768, 1, 16)):
        variants = [(None, programs, least)]
        if context in (4096, 32768) and rows == 1:
            variants += [(None, programs, 2), (None, programs, 1), ((16, 64, 4, 5), programs, 1)]
        if rows == 16:
            variants += [
                (None, 2 * programs, least),
                ((128, 64, 8, 3), programs, least),
                ((64, 32, 4, 3), programs, least),
                ((128, 32, 8, 5), programs, least),
            ]
        # tables as wide as the graph that would serve this context
        width = 16
        while width * PAGE < context + rows:
            width *= 4
        spare = width - -(-(context - 1 + rows) // PAGE)
        q, gate, kv, ragged = attention_case([(context - 1, rows)] * batch, spec, torch.bfloat16, spare)
        expected = naive_attention.sigmoid_gate(
            naive_attention.attend(q.float(), kv.float(), ragged, 1 / 16), gate.float()
        )
        moved = batch * (context + rows) * 2 * spec.kv_heads * spec.head_dim * 2
        for tiles, fast_attention.PROGRAMS, fast_attention.LEAST in variants:
            if late():
                break
            fast_attention._tiles = usual if tiles is None else lambda *_, t=tiles: t
            shape = f"{name} context {context} rows {rows} {tiles or 'usual'}"
            shape += f" programs {fast_attention.PROGRAMS} least {fast_attention.LEAST}"
            check(shape, attention.attend_gated(q, kv, ragged, 1 / 16, gate), expected, 6e-3)
            micros = graph_time(lambda _, a=(q, kv, ragged), g=gate: attention.attend_gated(*a, 1 / 16, g), 4)
            record("attend", shape, micros, moved)
        fast_attention._tiles, fast_attention.PROGRAMS, fast_attention.LEAST = usual, programs, least
        del kv, expected


def time_prefill_delta(name: str, spec: DeltaSpec) -> None:
    inputs = delta_inputs(4096, spec, torch.bfloat16)
    states, ragged = rand(1, spec.value_heads, 128, 128), make_ragged([(0, 0, 4096)])
    # per row and head: K S, Q S, Kᵀ δ of 128 × 128, and K Kᵀ, Q Kᵀ, T R, M δ of 64 × 128
    work = 4096 * spec.value_heads * 2 * (3 * 128 * 128 + 4 * 64 * 128)
    micros = bench_time(lambda: gated_delta.gated_delta(*inputs, states, ragged, spec))
    record("gated_delta prefill", f"{name} 4096 rows", micros, work, "TFLOP/s")
    u, weight, windows = inputs[0], rand(spec.conv_channels, 4), rand(1, 3, spec.conv_channels)
    for config in ((32, 128, 4), (32, 64, 4), (64, 64, 4), (16, 256, 4), (32, 256, 8)):
        if late():
            break
        fast_conv.PREFILL = config
        micros = bench_time(lambda: conv.conv_silu(u, weight, windows, ragged))
        record("conv_silu prefill", f"{name} 4096 rows, tile and warps {config}", micros, 4 * u.numel())
    fast_conv.PREFILL = (32, 128, 4)


def time_sampling() -> None:
    for rows in (1, 16):
        logits = 3 * rand(rows, 248320)
        record("argmax", f"{rows} × 248320", graph_time(lambda _, x=logits: sampling.argmax(x), 4), 4 * logits.numel())
        for name, values in (("top_k 20", (0.7, 20, 0.8, 0.0, 0.4)), ("top_p 0.95", (0.7, 0, 0.95, 0.0, 0.4))):
            host = [torch.full((rows,), x) for x in values]
            settings = torch.stack([x.float() for x in host]).to(DEVICE)
            if values[1]:
                micros = graph_time(lambda _, x=logits, s=settings: fast_sampling.draw_best(x, s, 32), 4)
            else:
                micros = graph_time(lambda _, x=logits, s=settings: fast_sampling.draw_open(x, s), 4)
            record(f"sample {name}", f"{rows} × 248320, the kernels", micros)
            record(
                f"sample {name}",
                f"{rows} × 248320, called",
                bench_time(lambda x=logits, h=host: sampling.sample(x, *h)),
            )


def main() -> int:
    torch.manual_seed(int(time.time()))
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    check_small(torch.bfloat16)
    check_delta(torch.bfloat16, SMALL[1])
    check_step(torch.bfloat16, LARGE[1], "48/16 bfloat16")
    check_attention(torch.bfloat16, SMALL[0])
    check_long_delta(SMALL[1])
    check_graph(SMALL[0], SMALL[1])
    check_packed(SMALL[0])
    check_sampling()
    check_early()
    say(f"checks took {time.monotonic() - began:.0f} s")
    measure_limits()
    time_norms("35B-A3B", SMALL[2])
    time_norms("27B", LARGE[2])
    for batch in (1, 8, 32):
        time_step("35B-A3B", *SMALL[1:], batch)
    time_sampling()
    time_decode_attention("35B-A3B", SMALL[0])
    time_packed("35B-A3B", SMALL[0])
    time_step("27B", *LARGE[1:], 1)
    time_prefill_delta("35B-A3B", SMALL[1])
    time_prefill_delta("27B", LARGE[1])
    say(f"\n{math.ceil(time.monotonic() - began)} s; failed checks: {failures or 'none'}")
    for op, shape, micros, rate, share in table:
        say(f"{op:20s} {shape:72s} {micros:9.1f} µs {rate:>15s} {share:>6s}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
