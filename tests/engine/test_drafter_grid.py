"""Greedy answers are those of a run without drafts: wherever layers and states lie, however often a drafter is right,
wherever an answer ends. And sampled ones have the target's distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drafter_files import tiny_drafter
from support.mtp_files import folder_with_block
from support.paper_drafter import paper_drafts
from support.paper_hall import QUICK
from support.snapshot_lab import PLENTY, Answer, Lab, RecordingCache, random_tokens

from rekindle.build.drafts import DraftWeights
from rekindle.engine.drafting import Drafts
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Sampling
from rekindle.experts import RoutingCounts, SpanExperts
from rekindle.layers import load_span
from rekindle.prefix import local_tiers
from rekindle.prompt import Prompt
from rekindle.shards import RemoteStage, ShardServer, Terms
from rekindle.spec import Span
from rekindle.speculative.files import open_drafter
from rekindle.speculative.mtp_file import MtpFile
from rekindle.stages import LocalStage, Pipeline, Stage

LENGTH = 24
THREE = (Span(0, 2), Span(2, 5), Span(5, 8))
RIGHT = {"always": 1.0, "never": 0.0, "sometimes": 0.6}
ENDS = {"by length": None, "inside a block": 7}


class House:
    """Places where engines run, over one model with routed experts."""

    def __init__(self, tiny: Any, folder: Path, sequences: int) -> None:
        self.tiny, self.lab, self.folder, self.sequences = tiny, Lab(tiny), folder, sequences

    def engine(self, stages: list[Stage], drafts: Drafts) -> Engine:
        settings = EngineSettings(context=2048, grid=64, drafts=drafts)
        return Engine(Pipeline(stages), RecordingCache(local_tiers(PLENTY)), settings).start()

    @contextmanager
    def split(self, drafts: Drafts) -> Iterator[Engine]:
        yield from _run(self.lab.engine(spans=THREE, drafts=drafts))

    @contextmanager
    def remote(self, drafts: Drafts) -> Iterator[Engine]:
        middle, address = Span(3, 6), f"ipc://{self.folder}/shard"
        dtypes = {"hidden_dtype": "float32", "kv_dtype": "float32"}
        server = ShardServer({"middle": self.lab.stage(middle)}, address, fingerprint="tiny", **dtypes)
        server.start()
        terms = Terms("tiny", middle, "float32", "float32", slots=4)
        far = RemoteStage(server.endpoint, "middle", terms, deadlines=QUICK)
        yield from _run(self.engine([self.lab.stage(Span(0, 3)), far, self.lab.stage(Span(6, 8))], drafts))
        server.stop()

    @contextmanager
    def cold_experts(self, drafts: Drafts) -> Iterator[Engine]:
        file = self.tiny.open()
        experts = SpanExperts([[1, 5]] * file.spec.layers, [2] * file.spec.layers, RoutingCounts(file.spec.layers, 8))
        model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32, experts=experts)
        yield from _run(self.engine([LocalStage(model, slots=4, pages=64, kv_type="f32")], drafts))

    @contextmanager
    def small_pool(self, drafts: Drafts) -> Iterator[Engine]:
        """Two pages on the device for each sequence, which may be open; a prompt has three."""
        stage = self.tiny.stage(slots=4, pages=2 * self.sequences, host_pages=64)
        yield from _run(self.engine([stage], drafts))
        assert stage.paging().page_outs

    @contextmanager
    def ram(self, drafts: Drafts) -> Iterator[Engine]:
        yield from _run(self.lab.engine(drafts=drafts))

    @contextmanager
    def disk(self, drafts: Drafts, spans: tuple[Span, ...] = ()) -> Iterator[Engine]:
        yield from _run(self.lab.engine(self.folder, spans=spans, drafts=drafts))

    @contextmanager
    def disk_split(self, drafts: Drafts) -> Iterator[Engine]:
        with self.disk(drafts, THREE) as engine:
            yield engine


def _run(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.stop()


Open = Callable[[Drafts], AbstractContextManager[Engine]]
# Where the first turn of a conversation runs, and where the second does: in the same engine, or after a restart.
PLACES = {
    "split": ("split", None),
    "remote": ("remote", None),
    "cold experts": ("cold_experts", None),
    "small pool": ("small_pool", None),
    "RAM": ("ram", None),
    "disk": ("disk", "disk"),
    "restart onto another split": ("disk", "disk_split"),
    "restart onto one stage": ("disk_split", "disk"),
}


@pytest.fixture(scope="module")
def tiny(make_tiny: Any) -> Any:
    return make_tiny("moe")


@pytest.fixture(scope="module")
def plain(tiny: Any) -> Iterator[Callable[[Prompt], list[int]]]:
    engine, known = Lab(tiny).engine(ram=0), dict[tuple[int, ...], list[int]]()

    def answer(asked: Prompt) -> list[int]:
        if asked.tokens not in known:
            known[asked.tokens] = Answer(engine, asked, max_tokens=LENGTH).tokens
        return known[asked.tokens]

    yield answer
    engine.stop()


def ending(at: int | None) -> Callable[[int], bool] | None:
    left = [at]

    def ends(token: int) -> bool:
        assert left[0] is not None
        left[0] -= 1
        return left[0] == 0

    return None if at is None else ends


@pytest.mark.parametrize("sequences", [1, 3], ids=["alone", "batched"])
@pytest.mark.parametrize("at", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_greedy_answers_are_those_without_drafts(
    tiny: Any, plain: Any, tmp_path: Path, place: tuple[str, str | None], right: float, at: int | None, sequences: int
) -> None:
    """Two turns; the second goes on from what the first answered, and its prompt is restored."""
    house = House(tiny, tmp_path, sequences)
    first = [Prompt(random_tokens(150 + 7 * seed, seed)) for seed in range(sequences)]
    answers = [plain(asked)[:at] for asked in first]
    both = zip(first, answers, strict=True)
    second = [Prompt((*asked.tokens, *answer, *random_tokens(9, 50))) for asked, answer in both]
    texts = [[*asked.tokens, *plain(asked)] for asked in (*first, *second)]
    drafts = paper_drafts(right, *texts)
    blocks = 0

    def turn(engine: Engine, prompts: list[Prompt]) -> None:
        nonlocal blocks
        given = [Answer(engine, asked, max_tokens=LENGTH, stop_when=ending(at)) for asked in prompts]
        assert [answer.tokens for answer in given] == [plain(asked)[:at] for asked in prompts]
        blocks += sum(answer.finished.draft.blocks for answer in given)
        if prompts is second:
            assert [a.finished.cache.restored for a in given] == [len(p.tokens) - 10 for p in second]

    with getattr(house, place[0])(drafts) as engine:
        turn(engine, first)
        if place[1] is None:
            turn(engine, second)
    if place[1] is not None:
        with getattr(house, place[1])(drafts) as engine:
            turn(engine, second)
    assert blocks >= 2 * sequences


# Distribution

VOCAB, TOKENS, RUNS = 4, 3, 700
SEEDS = {"1": 5, "2": 5, "mtp": 5}


def weights_of(tiny: Any, folder: Path, version: str) -> tuple[Any, DraftWeights]:
    """A drafter of that version of DFlash, or MTP, and the model with it."""
    if version != "mtp":
        return tiny, open_drafter(tiny_drafter(folder, tiny.open().spec, int(version), SEEDS[version]))
    tiny = type(tiny)(folder_with_block(tiny.folder, folder, SEEDS[version]), tiny.reference)
    return tiny, MtpFile(tiny.open())


def probabilities(tiny: Any, asked: Prompt, temperature: float) -> dict[tuple[int, ...], float]:
    """Of every answer of TOKENS tokens, by the library's own model."""
    found = {}
    for answer in product(range(VOCAB), repeat=TOKENS):
        rows = tiny.reference_logits([*asked.tokens, *answer])[len(asked.tokens) - 1 : -1] / temperature
        found[answer] = math.exp(sum(float(row.log_softmax(-1)[t]) for row, t in zip(rows, answer, strict=True)))
    return found


def chi_squared(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    runs = counts.total()
    return sum((counts[answer] - runs * p) ** 2 / (runs * p) for answer, p in expected.items())


def critical(freedom: int, deviations: float = 3.7) -> float:
    """What one run in ten thousand exceeds (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + deviations * math.sqrt(part)) ** 3


@pytest.mark.parametrize("version", ["1", "2", "mtp"])
def test_sampled_answers_have_the_targets_distribution(make_tiny: Any, tmp_path: Path, version: str) -> None:
    """At a high temperature, over many short runs; the drafter is right now and then. A test that could not tell would
    not tell this distribution from that of another temperature either."""
    tiny, file = weights_of(make_tiny("dense", vocab_size=VOCAB), tmp_path / "d", version)
    asked, drafted = Prompt(tuple(token % VOCAB for token in random_tokens(40, 3))), [0, 0]
    engine = Lab(tiny).engine(drafter=file, drafts=Drafts(model="drafter", off=None))
    counts = Counter[tuple[int, ...]]()
    for start in range(0, RUNS, 4):
        answers = [
            Answer(engine, asked, Sampling(temperature=2.5, seed=seed), max_tokens=TOKENS + 2)
            for seed in range(start, start + 4)
        ]
        for answer in answers:
            counts[tuple(answer.tokens[:TOKENS])] += 1
            report = answer.finished.draft
            drafted = [drafted[0] + report.proposed, drafted[1] + report.accepted]
    engine.stop()
    assert 0.05 * drafted[0] < drafted[1] < drafted[0]
    freedom = VOCAB**TOKENS - 1
    assert chi_squared(counts, probabilities(tiny, asked, 2.5)) < critical(freedom)
    assert chi_squared(counts, probabilities(tiny, asked, 1.5)) > critical(freedom)
