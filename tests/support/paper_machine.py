"""Small models and machines made of numbers, for the laws of placement."""

from __future__ import annotations

from hypothesis import strategies as st

from rekindle.placement import Device, LayerSizes, Machine, Sizes, Wishes
from rekindle.spec import AttentionSpec, DeltaSpec, FfnSpec, MixerSpec, ModelSpec

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POOL_TARGET = 65_536  # tokens
ATTENTION = AttentionSpec(heads=8, kv_heads=4, head_dim=64, rope_dim=16, rope_theta=1e4)
DELTA = DeltaSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_width=4)


def small_spec(mixers: tuple[MixerSpec, ...], ffn: FfnSpec) -> ModelSpec:
    """KV of one token and layer: 2 · 4 · 64 values, 1 KiB in bf16."""
    return ModelSpec(
        architecture="qwen35moe" if ffn.is_moe else "qwen35",
        name="paper",
        hidden=128,
        vocab=1000,
        mixers=mixers,
        ffn=ffn,
        eps=1e-6,
        context=1 << 20,
        tied=False,
    )


def every_fourth(layers: int) -> tuple[MixerSpec, ...]:
    return tuple(ATTENTION if i % 4 == 3 else DELTA for i in range(layers))


def moe(layers: int = 8, experts: int = 16, expert: int = 2 * MIB) -> tuple[ModelSpec, Sizes]:
    spec = small_spec(every_fourth(layers), FfnSpec(experts=experts, used=2, expert_width=32, shared_width=32))
    layer = LayerSizes(mixer=3 * MIB, shared=MIB, expert=expert, experts=experts)
    return spec, Sizes(10 * MIB, 12 * MIB, 512, (layer,) * layers, widest=100_000)


def dense(layers: int = 8) -> tuple[ModelSpec, Sizes]:
    spec = small_spec(every_fourth(layers), FfnSpec(width=256))
    return spec, Sizes(10 * MIB, 12 * MIB, 512, (LayerSizes(mixer=3 * MIB, dense=8 * MIB),) * layers, widest=100_000)


def gpu(budget: int, name: str = "gpu", speed: float = 1.0) -> Device:
    return Device(name, "cuda", budget, speed)


def cpu(budget: int, name: str = "cpu", speed: float = 1.0) -> Device:
    return Device(name, "cpu", budget, speed, host=True)


def one_gpu(budget: int, ram: int = 1 << 50) -> Machine:
    return Machine((gpu(budget),), ram)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, Sizes]:
    layers = draw(st.integers(1, 8))
    mixers = tuple(draw(st.lists(st.sampled_from((ATTENTION, DELTA)), min_size=layers, max_size=layers)))
    experts = draw(st.sampled_from([0, 4, 16]))
    ffn = FfnSpec(experts=experts, used=2, expert_width=32, shared_width=32) if experts else FfnSpec(width=256)
    weights = tuple(
        LayerSizes(
            mixer=draw(st.integers(1, 4 * MIB)),
            dense=0 if experts else draw(st.integers(1, 8 * MIB)),
            shared=draw(st.integers(1, MIB)) if experts else 0,
            expert=draw(st.integers(1, 4 * MIB)) if experts else 0,
            experts=experts,
        )
        for _ in range(layers)
    )
    outer = draw(st.integers(1, 16 * MIB))
    return small_spec(mixers, ffn), Sizes(outer, outer, 512, weights, widest=draw(st.integers(0, 10 * MIB)))


@st.composite
def wishes_for(draw: st.DrawFn, spec: ModelSpec, context: int | None = None, pools: bool = True) -> Wishes:
    rows = st.lists(st.integers(0, 50), min_size=spec.ffn.experts, max_size=spec.ffn.experts)
    counts = st.lists(rows, min_size=spec.layers, max_size=spec.layers)
    return Wishes(
        context=draw(st.integers(1, 1 << 20)) if context is None else context,
        sequences=draw(st.integers(1, 8)),
        kv_type=draw(st.sampled_from(["bf16", "f16", "f32", "q8"])),
        pool=draw(st.none() | st.integers(4096, 100_000)) if pools else None,
        drafter_bytes=draw(st.sampled_from([0, 20 * MIB])),
        taps=draw(st.sampled_from([(), (0,), (0, spec.layers - 1)])),
        expert_cache_share=draw(st.sampled_from([0.0, 1 / 16, 0.25, 1.0])),
        counts=draw(st.none() | counts) if spec.ffn.is_moe else None,
        kv_mode=draw(st.sampled_from(["exact", "sparse"])),
        rewind_rows=draw(st.sampled_from([0, 16])),
        compute_bytes=draw(st.sampled_from([2, 4])),
        chunk=draw(st.sampled_from([64, 512])),
        cache_ram=draw(st.sampled_from([0, 100 * MIB, 1 << 40])),
    )


budgets = st.integers(350 * MIB, 1000 * MIB) | st.integers(1, 2 * GIB)
