"""A next-token-prediction (MTP) block against a second definition in loops, and its context, handed over whole."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.mtp_files import folder_with_block

from rekindle.batch import Ask, Batch, Segment
from rekindle.build.drafts import load_drafter
from rekindle.errors import SnapshotMismatch
from rekindle.layers import load_span
from rekindle.snapshots.types import DRAFTER_LAYER, Part
from rekindle.speculative.context import WAITING
from rekindle.speculative.mtp_context import LAST, MtpContext
from rekindle.speculative.mtp_file import MtpFile
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

# The definition in loops, float64, one position after the other; no K or V is kept between calls


class Loops:
    def __init__(self, file: WeightFile) -> None:
        self.spec = file.spec
        names = [name for name in file.tensors if name.startswith(f"blk.{self.spec.layers}.")]
        self.w = {re.sub(r"^blk\.\d+\.", "", name): file.values(name).astype(np.float64) for name in names}
        self.table = file.values("token_embd.weight").astype(np.float64)
        self.output = file.values("output.weight").astype(np.float64)
        self.output_norm = file.values("output_norm.weight").astype(np.float64)

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / math.sqrt(float(x @ x) / len(x) + self.spec.eps) * weight

    def propose(self, tokens: Sequence[int], hidden: np.ndarray, most: int) -> list[int]:
        """tokens: all known ones, the last of them not run yet; hidden [positions run, hidden]: what left the last
        layer."""
        zero = np.zeros((1, self.spec.hidden))
        states = [*zero, *(self.norm(row, self.output_norm) for row in hidden)]  # states[q]: what the row at q reads
        known, found = list(tokens), list[int]()
        for _ in range(most):
            inputs = [self.enter(token, h) for token, h in zip(known, states, strict=True)]
            last = self.block(inputs)
            states.append(last)
            found.append(int((self.output @ last)[: self.spec.drawable].argmax()))
            known.append(found[-1])
        return found

    def enter(self, token: int, h: np.ndarray) -> np.ndarray:
        both = self.norm(self.table[token], self.w["nextn.enorm.weight"]), self.norm(h, self.w["nextn.hnorm.weight"])
        return self.w["nextn.eh_proj.weight"] @ np.concatenate(both)

    def block(self, inputs: list[np.ndarray]) -> np.ndarray:
        """The row of the last position, after the block's norm."""
        x = inputs[-1] + self.attention([self.norm(row, self.w["attn_norm.weight"]) for row in inputs])
        x = x + self.ffn(self.norm(x, self.w["post_attention_norm.weight"]))
        return self.norm(x, self.w["nextn.shared_head_norm.weight"])

    def attention(self, rows: list[np.ndarray]) -> np.ndarray:
        spec, dim = self.spec.attention, self.spec.attention.head_dim
        both = (self.w["attn_q.weight"] @ rows[-1]).reshape(spec.heads, 2, dim)
        keys = [self.heads(self.w["attn_k.weight"] @ row, "attn_k_norm.weight", p) for p, row in enumerate(rows)]
        values = [(self.w["attn_v.weight"] @ row).reshape(spec.kv_heads, dim) for row in rows]
        query = self.heads(both[:, 0].reshape(-1), "attn_q_norm.weight", len(rows) - 1)
        out = np.zeros((spec.heads, dim))
        for head in range(spec.heads):
            kv = head // (spec.heads // spec.kv_heads)
            scores = np.array([query[head] @ key[kv] for key in keys]) / math.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[head] = sum(a * value[kv] for a, value in zip(weights / weights.sum(), values, strict=True))
            out[head] /= 1 + np.exp(-both[head, 1])
        return self.w["attn_output.weight"] @ out.reshape(-1)

    def heads(self, x: np.ndarray, norm: str, position: int) -> np.ndarray:
        rows = x.reshape(-1, self.spec.attention.head_dim)
        return np.array([self.turned(self.norm(row, self.w[norm]), position) for row in rows])

    def turned(self, x: np.ndarray, position: int) -> np.ndarray:
        spec, out = self.spec.attention, x.copy()
        half = spec.rope_dim // 2
        for j in range(half):
            angle = position * spec.rope_theta ** (-j / half)
            out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
            out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
        return out

    def ffn(self, x: np.ndarray) -> np.ndarray:
        ffn = self.spec.ffn
        if not ffn.is_moe:
            return self.swiglu(x, *(self.w[f"ffn_{part}.weight"] for part in ("gate", "up", "down")))
        scores = self.w["ffn_gate_inp.weight"] @ x
        share = np.exp(scores - scores.max())
        best = sorted(range(ffn.experts), key=lambda e: -share[e])[: ffn.used]
        experts = [self.w[f"ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        routed = sum(share[e] * self.swiglu(x, *(stack[e] for stack in experts)) for e in best)
        shared = self.swiglu(x, *(self.w[f"ffn_{part}_shexp.weight"] for part in ("gate", "up", "down")))
        gate = 1 / (1 + np.exp(-(self.w["ffn_gate_inp_shexp.weight"].reshape(-1) @ x)))
        return routed / sum(share[e] for e in best) + gate * shared

    @staticmethod
    def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        g = gate @ x
        return down @ (g / (1 + np.exp(-g)) * (up @ x))


class Made:
    """A target with a block, its context over slots, and the definition."""

    def __init__(self, folder: Path) -> None:
        self.target = open_weights(folder)
        self.loops = Loops(self.target)
        span = load_span(self.target, self.target.spec.whole, torch.device("cpu"), torch.float32)
        self.stage = LocalStage(span, slots=3, pages=8, kv_type="f32")

    def context(self, context: int = 256) -> MtpContext:
        made = load_drafter(MtpFile(self.target), self.target, [self.stage], torch.float32, context)
        assert isinstance(made, MtpContext)
        return MtpContext(made.model, "an identity", 3, context, kv_type=torch.float32)

    def text(self, count: int, seed: int = 1) -> tuple[tuple[int, ...], torch.Tensor]:
        """Tokens, and what leaves the last layer at each."""
        dice = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, self.target.spec.drawable, (count,), generator=dice).tolist()
        return tuple(tokens), torch.randn(count, self.target.spec.hidden, generator=dice)


@pytest.fixture(scope="module", params=["dense", "moe"])
def made(request: Any, make_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    source = make_tiny(request.param).folder
    return Made(folder_with_block(source, tmp_path_factory.mktemp("mtp") / "m"))


def fed(
    context: MtpContext, tokens: Sequence[int], hidden: torch.Tensor, start: int, stop: int, slot: int = 1, **more: Any
) -> None:
    segment = Segment(slot, start, tuple(tokens[start:stop]), features=stop - start)
    context.read(Batch((segment,), **more), [hidden[start:stop]])


@pytest.mark.parametrize("count", [0, 1, 2, 17, WAITING + 9])
def test_the_guesses_are_those_of_the_definition(made: Made, count: int) -> None:
    tokens, hidden = made.text(count + 1)
    context = made.context()
    if count:
        fed(context, tokens, hidden, 0, count)
    ours = context.propose([Ask(1, count, tokens[count], 4)])
    assert list(ours[0]) == made.loops.propose(tokens, hidden[:count].double().numpy(), 4)
    assert len(set(made.loops.propose(tokens, hidden[:count].double().numpy(), 4))) > 1


def test_the_rows_are_those_of_the_definition(made: Made) -> None:
    """Not only the likeliest tokens: K, V and the row after the norm, within 1e-4."""
    tokens, hidden = made.text(12)
    context = made.context()
    fed(context, tokens, hidden, 0, 11)
    context._settle([1])
    model, keys = context.model, [context._contexts(1)[0]]
    row = model._row(torch.tensor([tokens[11]]), model._final(hidden[10:11]), torch.tensor([11]), keys, [0])
    loops = made.loops
    states = [np.zeros(loops.spec.hidden), *(loops.norm(h, loops.output_norm) for h in hidden[:11].double().numpy())]
    inputs = [loops.enter(token, h) for token, h in zip(tokens, states, strict=True)]
    assert np.abs(row[0].numpy() - loops.block(inputs)).max() < 1e-4 * np.abs(loops.block(inputs)).max()


def test_sequences_of_different_lengths_chain_together(made: Made) -> None:
    context, asks, wanted = made.context(), [], []
    for slot, (count, most) in enumerate([(5, 4), (20, 1), (9, 6)]):
        tokens, hidden = made.text(count + 1, seed=slot)
        fed(context, tokens, hidden, 0, count, slot)
        asks.append(Ask(slot, count, tokens[count], most))
        wanted.append(tuple(made.loops.propose(tokens, hidden[:count].double().numpy(), most)))
    assert context.propose(asks) == wanted


@pytest.mark.parametrize("cuts", [(0, 40), (0, 1, 2, 40), (0, 13, 14, 30, 40)])
def test_it_does_not_matter_how_the_text_was_cut(made: Made, cuts: tuple[int, ...]) -> None:
    tokens, hidden = made.text(41)
    context = made.context()
    for start, stop in pairwise(cuts):
        fed(context, tokens, hidden, start, stop)
    wanted = made.loops.propose(tokens, hidden[:40].double().numpy(), 3)
    assert list(context.propose([Ask(1, 40, tokens[40], 3)])[0]) == wanted


@pytest.mark.parametrize("kept", range(5))
def test_after_a_rewind_the_guesses_are_those_of_what_is_left(made: Made, kept: int) -> None:
    tokens, hidden = made.text(30)
    context = made.context()
    fed(context, tokens, hidden, 0, 20)
    wrong = torch.randn(5, made.target.spec.hidden)
    fed(context, [*tokens[:20], 1, 2, 3, 1, 2], torch.cat((hidden[:20], wrong)), 20, 25, rewindable=True)
    context.rewind(1, 20 + kept)
    seen = [*tokens[:20], *[1, 2, 3, 1][:kept]]
    both = torch.cat((hidden[:20], wrong[:kept])).double().numpy()
    assert list(context.propose([Ask(1, 20 + kept, 3, 3)])[0]) == made.loops.propose([*seen, 3], both, 3)


def test_tokens_that_only_the_device_knows_are_read_there(made: Made) -> None:
    tokens, hidden = made.text(31)
    context = made.context()
    fed(context, tokens, hidden, 0, 29)
    pending = SimpleNamespace(tokens=torch.tensor([7, tokens[29]]), rows=(0,), sources=(1,))
    context.read(Batch((Segment(1, 29, (-1,), features=1),)), [hidden[29:30]], pending)
    wanted = made.loops.propose(tokens, hidden[:30].double().numpy(), 3)
    assert list(context.propose([Ask(1, 30, tokens[30], 3)])[0]) == wanted


def test_a_context_is_handed_over_whole(made: Made) -> None:
    tokens, hidden = made.text(50)
    one, two = made.context(), made.context()
    fed(one, tokens, hidden, 0, 40)
    (part,) = one.capture(1)
    two.restore(0, 40, [part])
    assert two.context(0) == range(0, 40)
    fed(one, tokens, hidden, 40, 45)
    fed(two, tokens, hidden, 40, 45, slot=0)
    wanted = tuple(made.loops.propose(tokens[:46], hidden[:45].double().numpy(), 4))
    assert one.propose([Ask(1, 45, tokens[45], 4)]) == two.propose([Ask(0, 45, tokens[45], 4)]) == [wanted]


def test_a_part_that_does_not_fit_is_refused(made: Made) -> None:
    tokens, hidden = made.text(20)
    context = made.context()
    fed(context, tokens, hidden, 0, 20)
    (part,) = context.capture(1)
    for change in ({LAST: part.tensors[LAST][:, 1:]}, {"kv0": part.tensors["kv0"][:, 1:, :1]}, {"more": torch.ones(1)}):
        with pytest.raises(SnapshotMismatch, match="the drafter's context in the snapshot is"):
            context.prepare_restore(0, 20, [Part(DRAFTER_LAYER, {**part.tensors, **change})])


def test_without_a_part_it_begins_at_the_next_position(made: Made) -> None:
    """It guesses nothing first: the row of the last token lacks what stands before it."""
    tokens, hidden = made.text(30)
    context = made.context()
    context.restore(1, 25, [])
    assert context.propose([Ask(1, 25, tokens[25], 3)]) == [()]
    assert context.capture(1) == ()
    fed(context, tokens, hidden, 25, 26)
    assert len(context.propose([Ask(1, 26, tokens[26], 3)])[0]) == 3
    fed(context, tokens, hidden, 26, 28)
    assert context.context(1) == range(25, 28)


def test_a_ring_forgets_what_is_out_of_reach(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of 30 positions gives the guesses of a run that saw only their features."""
    monkeypatch.setattr("rekindle.speculative.context.FULL", 30)
    tokens, hidden = made.text(101)
    whole, short = made.context(), made.context()
    assert whole.reach == 31
    fed(whole, tokens, hidden, 0, 100)
    short.read(Batch((Segment(1, 0, tuple(tokens[:100]), features=31),)), [hidden[69:100]])
    asked = Ask(1, 100, tokens[100], 4)
    assert whole.propose([asked]) == short.propose([asked])
    (part,) = short.capture(1)
    whole.restore(2, 100, [part])
    assert len(whole.context(2)) == whole.reach
