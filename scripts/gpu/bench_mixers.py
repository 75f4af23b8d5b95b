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
from rekindle.kernels.conv import naive as naive_conv
from rekindle.kernels.gated_delta import chunked
from rekindle.kernels.gated_delta import naive as naive_delta
from rekindle.kernels.gated_delta import triton as fast_delta
from rekindle.kernels.norm import naive as naive_norm
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rope import naive as naive_rope
from rekindle.spec import PAGE, AttentionSpec, DeltaSpec

DEVICE = "cuda"
SMALL = (AttentionSpec(16, 2, 256, 64, 1e7, qk_norm=True, gated=True), DeltaSpec(16, 32, 128, 128, 4), 2048)  # 35B-A3B
LARGE = (AttentionSpec(24, 4, 256, 64, 1e7, qk_norm=True, gated=True), DeltaSpec(16, 48, 128, 128, 4), 5120)  # 27B
SECONDS = 210.0  # after this no further configuration is tried

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
    return Ragged(
        starts=torch.cat((torch.zeros(1), sizes.cumsum(0))).int().to(DEVICE),
        slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        positions=torch.tensor(befores, dtype=torch.int32, device=DEVICE),
        row_positions=torch.cat([torch.arange(b, b + n) for b, n in zip(befores, lengths, strict=True)])
        .int()
        .to(DEVICE),
        row_segments=torch.arange(len(segments)).repeat_interleave(sizes).int().to(DEVICE),
        tables=pages.to(DEVICE),
        lengths=lengths,
        befores=befores,
        slot_list=slots,
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
    inputs = delta_inputs(9, spec, dtype)
    z, weight, states = rand(9, spec.inner, dtype=dtype), rand(128), rand(9, spec.value_heads, 128, 128)
    ragged, wide_states, before = make_ragged([(i, 7, 1) for i in range(9)]), states.clone(), states.clone()
    out = gated_delta.gated_delta_norm(*inputs, states, ragged, spec, z, weight, 1e-6)
    expected = naive_delta.gated_delta(*(x.float() for x in inputs), wide_states, ragged, spec)
    check(f"gated_delta_norm {tag}", out, naive_norm.gated_rms_norm(expected, z.float(), weight, 1e-6), rounding(dtype))
    check(f"gated_delta_norm state {tag}", states, wide_states, 2e-5)
    states = before.clone()
    ragged = make_ragged([(3, 7, 9)])
    _, rows = gated_delta.gated_delta_rows(*inputs, states, ragged, spec)
    check(f"replay of all rows is exact {tag}", gated_delta.replay_rows(before[3], *rows, 9), states[3], 0.0)
    single = before.clone()
    for t in range(4):
        part = [x[t : t + 1] for x in inputs[:3]]
        gated_delta.gated_delta(*part, *inputs[3:], single, make_ragged([(3, 7 + t, 1)]), spec)
    check(f"replay of 4 rows is decode, exactly {tag}", gated_delta.replay_rows(before[3], *rows, 4), single[3], 0.0)


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
    ragged.positions.copy_(ragged.row_positions)
    ragged.tables.copy_(ragged.tables.flip(1))
    ragged.slots.copy_(torch.tensor([3, 1]))
    after = Ragged(
        ragged.starts, ragged.slots, ragged.positions, ragged.row_positions, ragged.row_segments, ragged.tables,
        (1, 1), (70, 3000), (3, 1),
    )  # fmt: skip
    expected_windows, expected_states = windows.clone(), states.clone()
    graph.replay()
    torch.cuda.synchronize()
    expected = naive_attention.sigmoid_gate(naive_attention.attend(q.float(), kv.float(), after, 1 / 16), gate.float())
    check("replayed graph: attention", attended, expected, 6e-3)
    mixed = naive_conv.conv_silu(inputs[0].float(), weight, expected_windows, after).bfloat16()
    wide = (x.float() for x in (mixed, *inputs[1:]))
    check("replayed graph: delta", mixed_out, naive_delta.gated_delta(*wide, expected_states, after, delta), 4e-3)
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


def time_small(name: str, spec: AttentionSpec, delta: DeltaSpec, hidden: int) -> None:
    """The ops of one decoded token, in a graph over rotating inputs."""
    bf16 = torch.bfloat16
    ragged = make_ragged([(0, 500, 1)])
    xs, weight = [rand(1, hidden, dtype=bf16) for _ in range(40)], rand(hidden)
    record(
        "add_rms_norm", f"{name} 1 × {hidden}", graph_time(lambda i: norm.add_rms_norm(xs[i], xs[i], weight, 1e-6), 40)
    )
    both = rand(1, spec.heads, 512, dtype=bf16)
    k, weights, frequencies = rand(1, spec.kv_heads, 256, dtype=bf16), rand(256), rope.rope_frequencies(spec, DEVICE)
    kv = rand(ragged.tables.numel(), 2, PAGE, spec.kv_heads, 256, dtype=bf16)
    micros = graph_time(
        lambda _: rope.norm_rope_store(both[..., :256], k, k, weights, weights, 1e-6, frequencies, kv, ragged), 40
    )
    record("norm_rope_store", f"{name} 1 row", micros)
    for batch in (1, 16):
        copies = 64 if batch == 1 else 8
        ragged = make_ragged([(i, 500, 1) for i in range(batch)])
        windows = [rand(batch, 3, delta.conv_channels) for _ in range(copies)]
        inputs, conv_weight = delta_inputs(batch, delta, bf16), rand(delta.conv_channels, 4)
        u, z, weight = inputs[0], rand(batch, delta.inner, dtype=bf16), rand(128)
        states = [rand(batch, delta.value_heads, 128, 128) for _ in range(copies)]
        micros = graph_time(lambda i, w=windows, r=ragged, u=u, c=conv_weight: conv.conv_silu(u, c, w[i], r), copies)
        record("conv_silu decode", f"{name} batch {batch}", micros, batch * delta.window_values * 8)
        moved = 8 * batch * delta.state_values
        for step in ((32, 4), (16, 4), (64, 4), (64, 8)):
            if late():
                break
            fast_delta.STEP = step
            micros = graph_time(
                lambda i, s=states, r=ragged, x=inputs: gated_delta.gated_delta(*x, s[i], r, delta), copies
            )
            record("gated_delta decode", f"{name} batch {batch} columns, warps {step}", micros, moved)
        fast_delta.STEP = (32, 4)
        for warps in (4, 8, 16):
            if late():
                break
            fast_delta.NORMED_WARPS = warps
            micros = graph_time(
                lambda i, s=states, r=ragged, x=inputs, z=z, w=weight: gated_delta.gated_delta_norm(
                    *x, s[i], r, delta, z, w, 1e-6
                ),
                copies,
            )
            record("gated_delta_norm", f"{name} batch {batch} warps {warps}", micros, moved)
        fast_delta.NORMED_WARPS = 8
        o = rand(batch, delta.value_heads, 128, dtype=bf16)
        micros = graph_time(lambda _, o=o, z=z, w=weight: norm.gated_rms_norm(o, z, w, 1e-6), copies)
        record("gated_rms_norm", f"{name} batch {batch}", micros)


def time_decode_attention(name: str, spec: AttentionSpec) -> None:
    usual = fast_attention._tiles
    for context, batch, rows in ((1, 1, 1), (4096, 1, 1), (131072, 1, 1), (8192, 16, 1), (32768, 1, 16)):
        configs = [None]
        if context == 131072:
            configs = [
                None,
                (16, 32, 4, 5),
                (16, 32, 4, 9),
                (16, 64, 4, 3),
                (16, 64, 4, 5),
                (16, 64, 8, 5),
                (16, 32, 2, 7),
            ]
        if rows == 16:
            configs = [None, (64, 64, 8, 2), (64, 64, 8, 3), (128, 32, 8, 3), (128, 32, 8, 5)]
        # tables as wide as the longest context a graph would serve
        spare = 0 if context * batch > 100_000 else 131072 // PAGE // batch - context // PAGE
        q, gate, kv, ragged = attention_case([(context - 1, rows)] * batch, spec, torch.bfloat16, spare)
        moved = batch * (context + rows) * 2 * spec.kv_heads * spec.head_dim * 2
        for config in configs:
            if late():
                break
            fast_attention._tiles = usual if config is None else lambda *_, c=config: c
            micros = graph_time(lambda _, a=(q, kv, ragged), g=gate: attention.attend_gated(*a, 1 / 16, g), 4)
            shape = f"{name} context {context} batch {batch} rows {rows} {config or 'usual'}"
            record("attend decode", shape, micros, moved)
        fast_attention._tiles = usual
        del kv


def time_prefill_attention(name: str, spec: AttentionSpec) -> None:
    usual = fast_attention._tiles
    for position in (0, 28672):
        q, gate, kv, ragged = attention_case([(position, 4096)], spec, torch.bfloat16)
        work = 4 * spec.heads * spec.head_dim * (4096 * position + 4096 * 4096 / 2)
        configs = [None, (64, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 8, 5)] if position == 0 else [None]
        for config in configs:
            if late():
                break
            fast_attention._tiles = usual if config is None else lambda *_, c=config: c
            micros = bench_time(lambda a=(q, kv, ragged), g=gate: attention.attend_gated(*a, 1 / 16, g))
            record("attend prefill", f"{name} 4096 rows at {position} {config or 'usual'}", micros, work, "TFLOP/s")
        fast_attention._tiles = usual


def time_prefill_delta(name: str, spec: DeltaSpec) -> None:
    inputs = delta_inputs(4096, spec, torch.bfloat16)
    states, ragged = rand(1, spec.value_heads, 128, 128), make_ragged([(0, 0, 4096)])
    # per row and head: K S, Q S, Kᵀ δ of 128 × 128, and K Kᵀ, Q Kᵀ, T R, M δ of 64 × 128
    work = 4096 * spec.value_heads * 2 * (3 * 128 * 128 + 4 * 64 * 128)
    for config in ((32, 4, 2), (64, 4, 2), (16, 4, 2), (32, 8, 2)):
        if late():
            break
        fast_delta.PASS = config
        micros = bench_time(lambda: gated_delta.gated_delta(*inputs, states, ragged, spec))
        record("gated_delta prefill", f"{name} 4096 rows columns, warps, stages {config}", micros, work, "TFLOP/s")
    fast_delta.PASS = (32, 4, 2)
    u, weight, windows = inputs[0], rand(spec.conv_channels, 4), rand(1, 3, spec.conv_channels)
    micros = bench_time(lambda: conv.conv_silu(u, weight, windows, ragged))
    record("conv_silu prefill", f"{name} 4096 rows", micros, 4 * u.numel())
    time_fla(name, spec, inputs)


def time_fla(name: str, spec: DeltaSpec, inputs: tuple[torch.Tensor, ...]) -> None:
    """The library's chunked form as a competitor, where its package was brought along."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as missing:
        say(f"fla is not here ({missing})")
        return
    parts = naive_delta.split_inputs(*inputs, spec)
    tiles = spec.value_heads // spec.key_heads
    q, k, v = (x.repeat(1, t, 1)[None].bfloat16() for x, t in zip(parts[:3], (tiles, tiles, 1), strict=True))
    state = rand(1, spec.value_heads, 128, 128)

    def call() -> object:
        return chunk_gated_delta_rule(
            q, k, v, parts.g[None], parts.beta[None], scale=1.0, initial_state=state, output_final_state=True
        )

    try:
        with torch.no_grad():
            record("fla chunked prefill", f"{name} 4096 rows (heads repeated, normed before)", bench_time(call))
            _, final = call()
    except Exception as reason:  # a competitor that fails is a line of the report, not our failure
        say(f"fla failed: {type(reason).__name__}: {str(reason)[:200]}")
        return
    wide = state[0].double()
    chunked.run_chunked(naive_delta.Inputs(*(x.double() for x in parts)), wide)
    say(f"fla state error {float((final[0].double() - wide).norm() / wide.norm()):.2e}")


def time_rest() -> None:
    for rows in (1, 16):
        logits = rand(rows, 248320)
        record("argmax", f"{rows} × 248320", graph_time(lambda _, x=logits: sampling.argmax(x), 4), 4 * logits.numel())
        host = [torch.full((rows,), x) for x in (0.7, 20, 0.8, 0.0, 0.4)]
        record("sample top_k 20", f"{rows} × 248320", bench_time(lambda x=logits, h=host: sampling.sample(x, *h)))
    x, weight = rand(4096, 2048, dtype=torch.bfloat16), rand(2048)
    record("add_rms_norm", "4096 × 2048", bench_time(lambda: norm.add_rms_norm(x, x, weight, 1e-6)), 8 * x.numel())


def main() -> int:
    torch.manual_seed(int(time.time()))
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for dtype in (torch.bfloat16, torch.float32):
        check_small(dtype)
        check_delta(dtype, SMALL[1])
        check_attention(dtype, SMALL[0])
    check_delta(torch.bfloat16, LARGE[1])
    check_attention(torch.bfloat16, LARGE[0])
    check_long_delta(SMALL[1])
    check_graph(SMALL[0], SMALL[1])
    say(f"checks took {time.monotonic() - began:.0f} s")
    measure_limits()
    time_prefill_delta("35B-A3B", SMALL[1])
    time_small("35B-A3B", *SMALL)
    time_decode_attention("35B-A3B", SMALL[0])
    time_prefill_attention("35B-A3B", SMALL[0])
    time_rest()
    time_prefill_delta("27B", LARGE[1])
    time_decode_attention("27B", LARGE[0])
    say(f"\n{math.ceil(time.monotonic() - began)} s; failed checks: {failures or 'none'}")
    for op, shape, micros, rate, share in table:
        say(f"{op:20s} {shape:56s} {micros:9.1f} µs {rate:>15s} {share:>6s}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
