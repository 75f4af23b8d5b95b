"""The drafter as it runs beside an engine: the forward of the definition, and a context that is handed over whole."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.drafter_files import random_weights, write_folder, write_gguf
from support.launches import Launches

from rekindle.batch import Ask, Batch, Segment
from rekindle.errors import SnapshotMismatch
from rekindle.kernels.matmul import Matrix
from rekindle.snapshots.types import DRAFTER_LAYER, Part
from rekindle.speculative import naive
from rekindle.speculative.context import WAITING, DrafterContext
from rekindle.speculative.dflash import Dflash, DraftBlocks, load_dflash
from rekindle.speculative.files import DrafterFile, open_drafter
from rekindle.speculative.recorded import Recorder
from rekindle.speculative.spec import ConvSpec, DrafterSpec, DraftLayer, SelectorSpec
from rekindle.stages.types import Unseen

V1 = DrafterSpec(
    hidden=32, heads=4, kv_heads=2, head_dim=16, width=64, vocab=50,
    layers=(DraftLayer(5, causal=True), DraftLayer(None, causal=False)), block=6, mask=49, taps=(1, 3, 4),
    rope_theta=1e7, eps=1e-6,
)  # fmt: skip
V2 = replace(V1, layers=(DraftLayer(5, causal=False),) * 2, conv=ConvSpec(2, 16), selector=SelectorSpec(32, 4), block=5)
HEAD = torch.randn(50, 32, generator=torch.Generator().manual_seed(3))
TABLE = torch.randn(50, 32, generator=torch.Generator().manual_seed(4))


def embed(tokens: torch.Tensor) -> torch.Tensor:
    return TABLE[tokens]


def made(file: DrafterFile, slots: int = 3, context: int = 64, record: Recorder | None = None) -> DrafterContext:
    model = load_dflash(file, torch.device("cpu"), torch.float32, embed, Matrix((50, 32), dense=HEAD), 50)
    return DrafterContext(model, "an identity", slots, context, kv_type=torch.float32, record=record)


@pytest.fixture(scope="module", params=["v1", "v2", "gguf"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DrafterFile:
    folder = tmp_path_factory.mktemp("drafter")
    if request.param == "gguf":
        return open_drafter(write_gguf(folder / "d.gguf", V1, random_weights(V1), "dflash", "Q8_0"))
    spec = V1 if request.param == "v1" else V2
    return open_drafter(write_folder(folder / "d", spec, random_weights(spec), nested=True))


def features(count: int, seed: int = 5) -> list[torch.Tensor]:
    """Of taps 1, 3 and 4."""
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 32, generator=dice) for _ in range(3)]


def rows(taps: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    return [tap[start:stop] for tap in taps]


def blocks_of(context: DrafterContext, *blocks: tuple[int, int, int]) -> DraftBlocks:
    """(position, token, slot) of each."""
    numbers = [(token, position, slot, context._known[slot].start) for position, token, slot in blocks]
    return DraftBlocks(*torch.tensor(numbers).T)


def fed(context: DrafterContext, slot: int, taps: Sequence[torch.Tensor], start: int, stop: int, **batch: bool) -> None:
    segment = Segment(slot, start, (0,) * (stop - start), features=stop - start)
    context.read(Batch((segment,), **batch), rows(taps, start, stop))


@pytest.mark.parametrize("count", [0, 1, 4, 17])
def test_blocks_of_several_sequences_are_those_of_the_definition(file: DrafterFile, count: int) -> None:
    drafter, weights, spec = made(file), naive.load(file), file.spec
    taps = features(count)
    fed(drafter, 1, taps, 0, count) if count else None
    known = drafter._known[1]
    known.position = count
    drafter._settle([1])
    blocks = blocks_of(drafter, (count, 7, 1), (0, 9, 0))
    ours, proposed = (
        drafter.model.run(blocks, drafter._rings),
        drafter.model.propose(blocks, drafter._rings, spec.block - 1),
    )
    for length, token, got, tokens in zip((count, 0), (7, 9), ours, proposed.tolist(), strict=True):
        ctx = naive.context_rows(spec, weights, torch.cat(rows(taps, 0, length), dim=1))
        wanted = naive.draft_rows(
            spec, weights, ctx, embed(torch.tensor([token, *[spec.mask] * (spec.block - 1)])), length
        )
        assert float((got - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())
        logits = wanted @ HEAD.T
        expected = naive.select(spec, weights, wanted, logits, token) if spec.selector else None
        assert tokens == (expected or logits[1:].argmax(dim=1).tolist())


def test_fewer_tokens_are_the_first_of_more(file: DrafterFile) -> None:
    drafter = made(file)
    fed(drafter, 0, features(9), 0, 9)
    whole = drafter.propose([Ask(0, 9, 3, 99)])[0]
    assert len(whole) == file.spec.block - 1
    for most in range(1, len(whole)):
        assert drafter.propose([Ask(0, 9, 3, most)])[0] == whole[:most]


def test_however_features_come_the_context_is_the_same(file: DrafterFile) -> None:
    """In one chunk, row by row, in blocks that are gone back over, and beside other sequences."""
    count, taps = 3 * WAITING + 5, features(3 * WAITING + 20)
    whole, single, blocks = made(file, context=512), made(file, context=512), made(file, context=512)
    fed(whole, 0, taps, 0, count)
    for at in range(count):
        fed(single, 0, taps, at, at + 1)
    at = 0
    while at < count:
        stop = min(at + 5, count + 3)
        fed(blocks, 0, taps, at, stop, rewindable=True)
        at = min(at + 3, count)
        blocks.rewind(0, at)
    other = features(30, seed=9)
    for context in (single, blocks):
        fed(context, 2, other, 0, 30)
    asks = [Ask(0, count, 8, 9), Ask(2, 30, 4, 9)]
    fed(whole, 2, other, 0, 30)
    assert whole.propose(asks) == single.propose(asks) == blocks.propose(asks)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(kept(whole), kept(blocks), strict=True))


def kept(context: DrafterContext) -> list[torch.Tensor]:
    (part,) = context.capture(0)
    return [tensor for name, tensor in part.tensors.items() if name != "identity"]


def test_a_pass_over_features_that_wait_takes_two_copies(file: DrafterFile) -> None:
    """Numbers to the device, and features of all taps and positions to their places; then the recorded pass."""
    drafter = made(file, slots=4, context=256, record=lambda step: (step(), lambda: None)[1])
    taps = features(40)
    fed(drafter, 0, taps, 0, 30)
    drafter.propose_ahead([Ask(0, 30, 1, 4)])
    for at in range(30, 34):
        fed(drafter, 0, taps, at, at + 1)
    with Launches() as launches:
        drafter.propose_ahead([Ask(0, 34, 1, 4)])
    assert launches.counts == {"copy_": 1, "_foreach_copy_": 1}


def test_a_recorded_pass_settles_and_proposes_what_any_other_does(file: DrafterFile) -> None:
    """Blocks of one to four sequences, gone back over; rests, in which more features wait than a pass takes in."""
    plain, recorded = made(file, slots=4, context=256), made(file, slots=4, context=256, record=lambda step: step)
    dice, at = random.Random(7), [0] * 4
    taps = [features(400, seed=slot) for slot in range(4)]
    for _ in range(60):
        drafting = dice.sample(range(4), dice.randint(1, 4))
        asks = list[Ask]()
        for slot in drafting:
            count = dice.choice((1, 3, 6, 40))
            rewindable, keep = count <= 6, dice.randint(1, count)
            for context in (plain, recorded):
                fed(context, slot, taps[slot], at[slot], at[slot] + count, rewindable=rewindable)
                if rewindable:
                    context.rewind(slot, at[slot] + keep)
            at[slot] += keep if rewindable else count
            asks.append(Ask(slot, at[slot], dice.randrange(49), dice.randint(1, 9)))
        assert recorded.propose(asks) == plain.propose(asks)
        for slot in (slot for slot in range(4) if at[slot] > 300):
            for context in (plain, recorded):
                context.close(slot)
            at[slot] = 0
    for slot in (slot for slot in range(4) if at[slot]):
        pairs = zip(plain.capture(slot)[0].tensors.values(), recorded.capture(slot)[0].tensors.values(), strict=True)
        assert all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in pairs)


ENDS = frozenset({7, 11})


@pytest.mark.parametrize("how", ["as it assumed", "the answer took less"])
def test_a_pass_behind_a_block_drafts_what_one_does_that_knows_what_was_accepted(file: DrafterFile, how: str) -> None:
    """The target agrees with more or fewer tokens of the block, and an end may be among them. Where an answer took less
    than that the context begins anew, and later blocks are those of a drafter which knows no more."""
    plain, recorded = made(file, slots=4, context=256), made(file, slots=4, context=256, record=lambda step: step)
    dice, taps, at, seen = random.Random(5), features(400), 20, set[int]()
    for context in (plain, recorded):
        fed(context, 1, taps, 0, at)
    token = 3
    for _ in range(24):
        width = dice.randint(1, recorded.longest)
        block = recorded.propose([Ask(1, at, token, width)])[0]
        assert plain.propose([Ask(1, at, token, width)])[0] == block
        agreed = dice.randint(0, width)
        drawn = [*block[:agreed], (block[agreed] + 1) % 49 if agreed < width else 5, *[9] * (width - agreed)]
        for context in (plain, recorded):
            fed(context, 1, taps, at, at + 1 + width, rewindable=True)
        unseen = Unseen(1, at, width, torch.tensor(drawn), ENDS)
        found = recorded.propose_behind(unseen)
        assert found is not None
        taken = next((n for n, its in enumerate(drawn[: agreed + 1], 1) if its in ENDS), agreed + 1)
        seen.add(taken)
        less = how != "as it assumed" and taken > 1
        at, token = at + taken - less, drawn[taken - 1 - less]
        for context in (plain, recorded):
            if context.context(1).stop > at:
                context.rewind(1, at)
        recorded.note_behind(1, None if less else at)
        if less:
            assert recorded.context(1) == range(at, at)
            plain._known[1].begin(at)
        else:
            assert plain.propose([Ask(1, at, token, recorded.longest)])[0] == tuple(found[0].tolist())
    assert len(seen) > 2
    for context in (plain, recorded):  # else it may have begun anew right here
        fed(context, 1, taps, at, at + 1)
    pairs = zip(plain.capture(1)[0].tensors.values(), recorded.capture(1)[0].tensors.values(), strict=True)
    assert all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in pairs)


def test_a_pass_behind_logits_that_are_no_numbers_looks_up_no_token_before_the_first(
    file: DrafterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, taps, looked_up = made(file, slots=4, context=256, record=lambda step: step), features(60), list[int]()
    embed = drafter.model.embed
    fed(drafter, 0, taps, 0, 20)
    drafter.propose([Ask(0, 20, 1, 3)])
    fed(drafter, 0, taps, 20, 24, rewindable=True)
    seen = lambda ids: (looked_up.extend(ids.tolist()), embed(ids))[1]  # noqa: E731
    monkeypatch.setattr(type(drafter.model), "embed", property(lambda self: seen), raising=False)
    assert drafter.propose_behind(Unseen(0, 20, 3, torch.full((4,), -1), frozenset())) is not None
    assert looked_up and min(looked_up) >= 0


def test_no_pass_goes_behind_a_block_with_more_features_than_it_takes_in(file: DrafterFile) -> None:
    drafter, taps = made(file, slots=4, context=256, record=lambda step: step), features(60)
    fed(drafter, 0, taps, 0, 20)
    fed(drafter, 0, taps, 20, 24, rewindable=True)
    drawn = torch.tensor([1, 2, 3, 4])
    assert drafter.propose_behind(Unseen(0, 20, 3, drawn, frozenset())) is None, "20 positions have not been settled"
    drafter.rewind(0, 22)
    drafter.propose([Ask(0, 22, 1, 3)])
    fed(drafter, 0, taps, 22, 26, rewindable=True)
    assert drafter.propose_behind(Unseen(0, 22, 3, drawn, frozenset(range(99)))) is None, "so many ends are not known"
    assert drafter.propose_behind(Unseen(0, 22, 3, drawn, frozenset(range(9)))) is not None


def test_a_captured_context_goes_on_as_if_it_had_not_been(file: DrafterFile) -> None:
    taps, whole, again = features(90), made(file), made(file)
    fed(whole, 0, taps, 0, 50)
    parts = whole.capture(0)
    assert [part.layer for part in parts] == [DRAFTER_LAYER]
    again.restore(2, 50, [Part(0, {}), *parts])
    assert again.context(2) == range(50 - min(50, whole.reach), 50)
    ask = Ask(0, 50, 8, 9)
    assert again.propose([replace(ask, slot=2)]) == whole.propose([ask])
    fed(whole, 0, taps, 50, 60)
    fed(again, 2, taps, 50, 60)
    assert again.propose([Ask(2, 60, 1, 9)]) == whole.propose([Ask(0, 60, 1, 9)])


def test_without_a_context_of_its_own_a_drafter_begins_at_the_position(file: DrafterFile) -> None:
    """A snapshot without a drafter's part, or with another's."""
    stranger = made(file)
    stranger._identity = torch.zeros(4, dtype=torch.uint8)
    fed(stranger, 0, features(20), 0, 20)
    fresh = made(file)
    empty = fresh.model.propose(DraftBlocks(*torch.tensor([[8], [20], [0], [20]])), fresh._rings, 4).tolist()
    for parts in ((), stranger.capture(0)):
        drafter = made(file)
        drafter.restore(1, 20, parts)
        assert drafter.context(1) == range(20, 20)
        assert drafter.capture(1) == ()
        assert drafter.propose([Ask(1, 20, 8, 4)]) == [tuple(empty[0])]
        fed(drafter, 1, features(30), 20, 21)
        assert drafter.context(1) == range(20, 21)


def test_a_gap_in_the_features_begins_the_context_anew(file: DrafterFile) -> None:
    drafter, fresh = made(file), made(file)
    fed(drafter, 0, features(40), 0, 10)
    drafter.read(Batch((Segment(0, 10, (0,) * 5),)), ())
    assert drafter.capture(0) == ()
    fed(drafter, 0, features(40), 15, 40)
    fresh.restore(0, 15, ())
    fed(fresh, 0, features(40), 15, 40)
    assert drafter.propose([Ask(0, 40, 2, 4)]) == fresh.propose([Ask(0, 40, 2, 4)])


def test_a_part_that_cannot_be_its_own_is_refused_and_nothing_changes(file: DrafterFile) -> None:
    drafter = made(file)
    fed(drafter, 0, features(20), 0, 20)
    (part,) = drafter.capture(0)
    for name in ("kv0", "kv1"):
        short = Part(DRAFTER_LAYER, {**part.tensors, name: part.tensors[name][:, :1]})
        with pytest.raises(SnapshotMismatch, match="the drafter keeps"):
            drafter.prepare_restore(0, 20, [short])
    with pytest.raises(SnapshotMismatch):
        drafter.prepare_restore(0, 3, [part])
    assert drafter.context(0) == range(0, 20)
    drafter.close(0)
    assert drafter.context(0) == range(0)


def test_keys_in_16_bits_as_engines_keep_them_move_a_row_by_little(tmp_path: Path) -> None:
    spec = replace(V1, layers=(DraftLayer(None, causal=False),) * 2)
    file = open_drafter(write_folder(tmp_path / "d", spec, random_weights(spec), nested=False))
    exact = made(file)
    coarse = DrafterContext(exact.model, "an identity", 3, 64)
    for context in (exact, coarse):
        fed(context, 0, features(40), 0, 40)
        context._settle([0])
    a, b = (c.model.run(blocks_of(c, (40, 7, 0)), c._rings) for c in (exact, coarse))
    assert 0 < float((a - b).abs().max()) <= 0.05 * float(a.abs().max())


if "REKINDLE_GOLDEN" in os.environ:

    @pytest.mark.parametrize("length", [1, 9, 70])
    def test_the_forward_is_that_of_the_authors(length: int) -> None:
        folder = Path(os.environ["REKINDLE_GOLDEN"]) / "dflash"
        file, cases = open_drafter(folder), load_file(folder / "cases.safetensors")
        block, taken = cases[f"block_{length}"], cases[f"features_{length}"].chunk(3, dim=1)
        model = load_dflash(
            file, torch.device("cpu"), torch.float32, lambda tokens: block, Matrix((1, 256), dense=block[:1]), 1
        )
        drafter = DrafterContext(model, "golden", 1, 128, kv_type=torch.float32)
        fed(drafter, 0, taken, 0, length)
        drafter._settle([0])
        rows = model.run(blocks_of(drafter, (length, 0, 0)), drafter._rings)[0]
        assert float((rows - cases[f"hidden_{length}"]).abs().max()) <= 1e-4


class PaperCopies:
    """Copies that come when they are waited for."""

    def __init__(self) -> None:
        self.done, self._pairs = False, list[tuple[torch.Tensor, torch.Tensor]]()

    def copy_live(self, tensors: Sequence[torch.Tensor]) -> PaperCopies:
        self._pairs += [(torch.full_like(tensor, 7), tensor.clone()) for tensor in tensors]
        return self

    def to_host(self) -> list[torch.Tensor]:
        return [to for to, _ in self._pairs]

    @property
    def ready(self) -> PaperCopies:
        return self

    def wait(self) -> None:
        self.done = True
        for to, tensor in self._pairs:
            to.copy_(tensor)


def test_captures_are_waited_for_by_whoever_restores_them(file: DrafterFile) -> None:
    plain, again, copies = made(file), made(file), PaperCopies()
    context = DrafterContext(plain.model, "an identity", 3, 64, kv_type=torch.float32, copies=copies)
    for each in (plain, context):
        fed(each, 0, features(20), 0, 20)
    parts = context.capture(0)
    assert not copies.done
    again.restore(1, 20, parts)
    assert copies.done
    assert again.propose([Ask(1, 20, 8, 4)]) == plain.propose([Ask(0, 20, 8, 4)])


@pytest.mark.parametrize("recorded", [False, True])
def test_a_capture_and_a_proposal_of_one_slot_settle_its_features_once(
    file: DrafterFile, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """In a pipeline of several stages the capture at a prompt's end runs in the drafter's thread while the engine's
    asks for the first block."""
    record: Recorder | None = (lambda step: step) if recorded else None
    alone, shared, taps = made(file), made(file, record=record), features(20)
    for context in (alone, shared):
        fed(context, 0, taps, 0, 20)
    ask, inside, both, busy = Ask(0, 20, 7, 3), threading.Event(), threading.Event(), threading.Lock()
    compute = Dflash.context

    def slowly(*given: Any) -> Any:
        alone_here = busy.acquire(blocking=False)
        inside.set()
        if not alone_here:
            both.set()
        both.wait(0.3)  # the other would come in now, if it could
        try:
            return compute(*given)
        finally:
            if alone_here:
                busy.release()

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(Dflash, "context", slowly)
        captured = threads.submit(kept, shared)
        assert inside.wait(10)
        proposed = threads.submit(shared.propose, [ask])
        got, blocks = captured.result(10), proposed.result(10)
    assert not both.is_set() and blocks == alone.propose([ask])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, kept(alone), strict=True))
