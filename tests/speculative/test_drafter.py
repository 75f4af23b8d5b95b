"""The drafter's forward and its files, against a second definition written in loops from the equations."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.drafter_files import random_weights, write_folder, write_gguf

from rekindle.errors import BadModelFile
from rekindle.spec import AttentionSpec, FfnSpec, ModelSpec
from rekindle.speculative.files import open_drafter
from rekindle.speculative.naive import context_rows, draft_rows, load, select
from rekindle.speculative.spec import ConvSpec, DrafterSpec, DraftLayer, SelectorSpec, default_taps

FULL, SLIDING = DraftLayer(None, causal=False), DraftLayer(5, causal=True)
V1 = DrafterSpec(
    hidden=32, heads=4, kv_heads=2, head_dim=16, width=48, vocab=50, layers=(SLIDING, FULL), block=6, mask=49,
    taps=(1, 3, 4), rope_theta=1e7, eps=1e-6,
)  # fmt: skip
V2 = replace(V1, layers=(DraftLayer(5, causal=False),) * 2, conv=ConvSpec(2, 16), selector=SelectorSpec(8, 4), block=5)
SPECS = {
    "v1": V1,
    "v2": V2,
    "feature norms": replace(V1, feature_norms=True, context_norm_per_layer=True),
    "gate per head": replace(V1, gate=4),
    "gate per channel": replace(V1, gate=64),
    "all full": replace(V1, layers=(FULL, FULL)),
}


# The definition in loops, float64


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(float(x @ x) / len(x) + eps) * weight


def turn(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half, out = len(x) // 2, x.copy()
    for j in range(half):
        angle = position * theta ** (-j / half)
        out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return out


class Loops:
    def __init__(self, spec: DrafterSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self.w = {name: tensor.double().numpy() for name, tensor in weights.items()}

    def context(self, features: np.ndarray) -> np.ndarray:
        rows = []
        for row in features:
            taps = np.split(row, len(self.spec.taps))
            if self.spec.feature_norms:
                taps = [norm(tap, self.w[f"feature_norm.{i}.weight"], self.spec.eps) for i, tap in enumerate(taps)]
            rows.append(norm(self.w["fc.weight"] @ np.concatenate(taps), self.w["context_norm.weight"], self.spec.eps))
        return np.array(rows).reshape(len(features), self.spec.hidden)

    def forward(self, context: np.ndarray, block: np.ndarray, position: int) -> np.ndarray:
        h = block.copy()
        for index in range(len(self.spec.layers)):
            h = h + self.sublayer(index, h, "attn", lambda x, n, i=index: self.attention(i, context, x, n, position))
            h = h + self.sublayer(index, h, "ffn", lambda x, _, i=index: self.ffn(i, x))
        return np.array([norm(row, self.w["output_norm.weight"], self.spec.eps) for row in h])

    def sublayer(self, index: int, h: np.ndarray, name: str, inner: Any) -> np.ndarray:
        n = np.array([norm(row, self.w[f"blk.{index}.{name}_norm.weight"], self.spec.eps) for row in h])
        if self.spec.conv is None:
            return inner(n, n)
        return self.conv(index, name, 1, n, inner(self.conv(index, name, 0, n, n), n))

    def conv(self, index: int, name: str, side: int, n: np.ndarray, x: np.ndarray) -> np.ndarray:
        assert self.spec.conv is not None
        base, projection = self.w[f"blk.{index}.{name}_conv.base"], self.w[f"blk.{index}.{name}_conv.weight"]
        taps, group, groups = self.spec.conv.taps, self.spec.conv.group, self.spec.hidden // self.spec.conv.group
        out = np.zeros_like(x)
        for i in range(len(x)):
            dynamic = (projection @ n[i]).reshape(2, taps, groups)
            for c in range(self.spec.hidden):
                for t in range(taps):
                    if i - t >= 0:
                        out[i, c] += (base[side, t, c] + dynamic[side, t, c // group]) * x[i - t, c]
        return out

    def attention(self, index: int, context: np.ndarray, x: np.ndarray, n: np.ndarray, position: int) -> np.ndarray:
        spec, layer = self.spec, self.spec.layers[index]
        w = {name.removeprefix(f"blk.{index}."): v for name, v in self.w.items() if name.startswith(f"blk.{index}.")}
        rows = [(position - len(context) + i, row, False) for i, row in enumerate(context)]
        if spec.context_norm_per_layer:
            rows = [(p, norm(row, w["attn_norm.weight"], spec.eps), False) for p, row, _ in rows]
        rows += [(position + i, row, True) for i, row in enumerate(x)]
        keys = [self.heads(w["attn_k.weight"] @ row, w["attn_k_norm.weight"], p) for p, row, _ in rows]
        values = [(w["attn_v.weight"] @ row).reshape(spec.kv_heads, -1) for _, row, _ in rows]
        out = np.zeros((len(x), spec.heads, spec.head_dim))
        for i, row in enumerate(x):
            query = self.heads(w["attn_q.weight"] @ row, w["attn_q_norm.weight"], position + i)
            seen = [
                j for j, (p, _, inside) in enumerate(rows)
                if (not layer.causal or p <= position + i if inside else layer.window is None
                    or position + i - p < layer.window)
            ]  # fmt: skip
            for head in range(spec.heads):
                kv = head // (spec.heads // spec.kv_heads)
                scores = np.array([query[head] @ keys[j][kv] for j in seen]) / math.sqrt(spec.head_dim)
                weights = np.exp(scores - scores.max())
                out[i, head] = sum(a * values[j][kv] for a, j in zip(weights / weights.sum(), seen, strict=True))
            if spec.gate:
                gate = np.log1p(np.exp(w["attn_gate.weight"] @ n[i]))
                out[i] *= gate.reshape(spec.heads, -1)
        return out.reshape(len(x), -1) @ w["attn_output.weight"].T

    def heads(self, x: np.ndarray, weight: np.ndarray, position: int) -> np.ndarray:
        rows = x.reshape(-1, self.spec.head_dim)
        return np.array([turn(norm(row, weight, self.spec.eps), position, self.spec.rope_theta) for row in rows])

    def ffn(self, index: int, x: np.ndarray) -> np.ndarray:
        gate, up = x @ self.w[f"blk.{index}.ffn_gate.weight"].T, x @ self.w[f"blk.{index}.ffn_up.weight"].T
        return gate / (1 + np.exp(-gate)) * up @ self.w[f"blk.{index}.ffn_down.weight"].T


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("context", [0, 1, 4, 17])
def test_the_forward_is_that_of_the_equations(spec: DrafterSpec, context: int) -> None:
    weights, loops = random_weights(spec), Loops(spec, random_weights(spec))
    dice = torch.Generator().manual_seed(1)
    features = torch.randn(context, spec.features, generator=dice)
    block = torch.randn(spec.block, spec.hidden, generator=dice)
    rows = context_rows(spec, weights, features)
    np.testing.assert_allclose(rows, loops.context(features.double().numpy()), atol=2e-5)
    ours = draft_rows(spec, weights, rows, block, 40)
    wanted = loops.forward(loops.context(features.double().numpy()), block.double().numpy(), 40)
    np.testing.assert_allclose(ours, wanted, atol=1e-4)


def test_the_selector_walks_greedily() -> None:
    weights, loops = random_weights(V2), Loops(V2, random_weights(V2))
    dice = torch.Generator().manual_seed(2)
    rows, logits = torch.randn(5, V2.hidden, generator=dice), torch.randn(5, V2.vocab, generator=dice)
    last, wanted = 7, []
    for i in range(1, 5):
        candidates = sorted(range(V2.vocab), key=lambda b: -float(logits[i, b]))[:4]
        bridge = loops.w["selector.hidden.weight"] @ rows[i].double().numpy()
        a = loops.w["selector.predecessor"][last]
        score = {b: float(logits[i, b]) + float((a * bridge) @ loops.w["selector.successor"][b]) for b in candidates}
        last = max(score, key=lambda b: score[b])
        wanted.append(last)
    assert select(V2, weights, rows, logits, 7) == wanted


# Files


@pytest.mark.parametrize("nested", [False, True], ids=["block_size on top", "block_size nested"])
@pytest.mark.parametrize("spec", [V1, V2], ids=["v1", "v2"])
def test_a_folder_says_what_it_was_made_with(tmp_path: Path, spec: DrafterSpec, nested: bool) -> None:
    weights = random_weights(spec)
    file = open_drafter(write_folder(tmp_path / "d", spec, weights, nested))
    assert file.spec == spec
    for name, tensor in load(file).items():
        torch.testing.assert_close(tensor, weights[name].half().float(), rtol=0, atol=0)


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", ["dflash", "dflash-draft", "qwen35-dflash-draft"])
@pytest.mark.parametrize("spec", [V1, V2], ids=["v1", "v2"])
def test_a_gguf_file_says_what_it_was_made_with(
    tmp_path: Path, spec: DrafterSpec, architecture: str, quant: str
) -> None:
    if spec is V2 and architecture != "dflash":
        spec = V1
    weights = random_weights(spec)
    file = open_drafter(write_gguf(tmp_path / "d.gguf", spec, weights, architecture, quant))
    assert replace(file.spec, rope_theta=1e7, eps=1e-6) == spec
    for name, tensor in load(file).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0.02 if quant == "Q8_0" else 0)


def test_a_gguf_file_that_lists_its_tokens_need_not_count_them(tmp_path: Path) -> None:
    file = open_drafter(write_gguf(tmp_path / "d.gguf", V1, random_weights(V1), "dflash", "F32", names_tokens=True))
    assert file.spec.vocab == V1.vocab


def target(hidden: int = 32, layers: int = 8, vocab: int = 50) -> ModelSpec:
    attention = AttentionSpec(4, 2, 16, 16, 1e6)
    return ModelSpec("qwen3", "target", hidden, vocab, (attention,) * layers, FfnSpec(64), 1e-6, 4096, tied=False)


def test_a_drafter_that_does_not_fit_is_refused_with_both_sides() -> None:
    V1.check_target(target(), "d.gguf")
    with pytest.raises(BadModelFile, match=r"d\.gguf reads rows of 32 values, target has rows of 64"):
        V1.check_target(target(hidden=64), "d.gguf")
    with pytest.raises(BadModelFile, match=r"layers \[1, 3, 4\], target has 4 layers"):
        V1.check_target(target(layers=4), "d.gguf")
    with pytest.raises(BadModelFile, match="masks with token 49, target has 40 tokens"):
        V1.check_target(target(vocab=40), "d.gguf")


def test_a_file_that_is_no_drafter_is_named(tmp_path: Path) -> None:
    weights = random_weights(V1)
    with pytest.raises(BadModelFile, match="does not exist"):
        open_drafter(tmp_path / "none")
    with pytest.raises(BadModelFile, match="architecture 'llama'; drafters have dflash"):
        open_drafter(write_gguf(tmp_path / "l.gguf", V1, weights, "llama", "F32"))
    less = {name: tensor for name, tensor in weights.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(BadModelFile, match=r"has no tensor blk\.1\.ffn_up\.weight"):
        open_drafter(write_folder(tmp_path / "less", V1, less, nested=True))
    wide = weights | {"fc.weight": torch.zeros(32, 64)}
    with pytest.raises(BadModelFile, match=r"fc\.weight is \(32, 64\), its numbers ask for \(32, 96\)"):
        open_drafter(write_folder(tmp_path / "wide", V1, wide, nested=True))


def test_taps_that_a_file_does_not_name_are_the_usual_ones() -> None:
    assert default_taps(64) == (1, 16, 31, 46, 61)
    assert default_taps(40) == (1, 10, 19, 28, 37)


if "REKINDLE_GOLDEN" in os.environ:

    @pytest.mark.parametrize("length", [1, 9, 70])
    def test_the_forward_is_that_of_the_authors(length: int) -> None:
        folder = Path(os.environ["REKINDLE_GOLDEN"]) / "dflash"
        file = open_drafter(folder)
        weights, cases = load(file), load_file(folder / "cases.safetensors")
        context = context_rows(file.spec, weights, cases[f"features_{length}"])
        rows = draft_rows(file.spec, weights, context, cases[f"block_{length}"], length)
        assert float((rows - cases[f"hidden_{length}"]).abs().max()) <= 1e-4
