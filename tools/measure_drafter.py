"""What a DFlash drafter is worth to a model: its accepted length on prompts, by the engine that serves them.

    PYTHONPATH=src python tools/measure_drafter.py MODEL DRAFTER --prompts chats.jsonl

A line of the file is {"messages": [...]}, which is cut after the last turn that is not the assistant's,
{"prompt": "text"}, or {"tokens": [...], "written": N}: the first N are the prompt. The prompts are answered greedily,
one after the other:

    plain               without drafts
    cold                in blocks as wide as the drafter can
    RAM                 the same, every prompt restored from RAM
    served              in blocks as wide as a server finds that they pay
    disk                whole blocks again, after a restart, every prompt restored from disk
    disk_two_stages     the same on two stages, each with half of the layers
    cold_two_stages     on two stages, without a restore

The accepted length is tokens per verified block, the target's own token included: 1 is no gain.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rekindle.build import Model, StageConfig, choose_types, open_model, set_threads
from rekindle.build.drafts import load_drafter
from rekindle.build.stage import load_stage
from rekindle.build.types import DTYPES
from rekindle.engine.drafting import Draft, Drafts, Measures
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.errors import BadConfig, RekindleError
from rekindle.placement import pages_for
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.spec import Span
from rekindle.speculative.context import layers_read
from rekindle.speculative.files import DrafterFile, open_drafter
from rekindle.speculative.width import MOST, Width
from rekindle.stages import LocalStage, Pipeline
from rekindle.text import ChatTemplate

Row = dict[str, float]
GREEDY = Sampling(temperature=0)
CHUNK = 2048  # rows of a prefill chunk
GAP = 0.05  # seconds in an answer, while others' prompts run
RAM, DISK = 1 << 30, 4 << 30  # bytes of snapshots


@dataclass(frozen=True, slots=True)
class Target:
    model: Model
    device: str
    context: int  # tokens of prompt and answer together
    sequences: int

    @property
    def types(self) -> tuple[str, str]:
        """Of activations and of KV, as a server chooses them."""
        return choose_types(self.model.file, [self.device])

    def stage(self, span: Span, width: int = 0, taps: tuple[int, ...] = ()) -> LocalStage:
        """width: pages of a sequence; where it is said, a GPU's steps are recorded. taps: that a drafter reads."""
        (dtype, kv_type), pages = self.types, self.sequences * pages_for(self.context)
        config = StageConfig(self.device, span, self.sequences, pages, kv_type=kv_type, dtype=dtype, chunk=CHUNK)
        return load_stage(self.model.file, replace(config, rewind_rows=MOST + 1, table_width=width, taps=taps))

    def engine(
        self, drafter: DrafterFile | None = None, spans: Sequence[Span] = (), ram: int = 0, folder: Path | None = None
    ) -> Engine:
        """Of as many stages as there are spans; ram, folder: where snapshots are kept, and how many bytes of them."""
        file, reader = self.model.file, None
        taps = () if drafter is None else layers_read(drafter.spec)
        stages = [self.stage(span, pages_for(self.context), taps) for span in spans or (file.spec.whole,)]
        if drafter is not None:
            reader = load_drafter(drafter, file, stages, DTYPES[self.types[0]], self.context)
        tiers = local_tiers(ram, None if folder is None else DiskStore(folder, file.fingerprint(), DISK))
        gap = GAP if self.device.startswith("cuda") else None  # prompts alone in their steps, which are recorded
        settings = EngineSettings(
            self.context,
            queue=2 * self.sequences,
            grid=CHUNK,
            turns=gap is not None,
            max_gap=gap,
            drawable=file.spec.drawable,
            measure_drafts=True,
        )
        engine = Engine(Pipeline(stages, drafter=reader), PrefixCache(tiers), settings)
        engine.make_ready(file.spec.vocab)
        return engine.start()

    def prompts(self, path: Path, answer: int) -> Iterator[Prompt]:
        """Those that leave room for an answer of so many tokens."""
        found = (self.prompt(entry, where) for entry, where in entries(path))
        return (prompt for prompt in found if len(prompt.tokens) + answer <= self.context)

    def prompt(self, entry: Any, where: str) -> Prompt:
        """Up to the last turn that is not the assistant's, or up to the answer."""
        if isinstance(entry, dict) and "tokens" in entry:
            tokens, written = tokens_of(entry, where, self)
            return Prompt(tokens[:written])
        if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
            return Prompt(tuple(self.model.tokenizer.encode(entry["prompt"])))
        messages = turns_of(entry, where)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise BadConfig(f"{where} asks nothing")
        return self.template(where).render(messages)

    def template(self, where: str) -> ChatTemplate:
        if self.model.template is None:
            raise BadConfig(f"{where} has messages, and {self.model.name} has no chat template")
        return self.model.template


def entries(path: Path) -> Iterator[tuple[Any, str]]:
    """Of a file of JSON lines, and where each stands."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            try:
                yield json.loads(line), where
            except json.JSONDecodeError as error:
                raise BadConfig(f"{where} is no JSON: {error}") from None


def tokens_of(entry: dict[str, Any], where: str, target: Target) -> tuple[tuple[int, ...], int]:
    """Token ids, and where in them an answer begins."""
    tokens, written, vocab = entry["tokens"], entry.get("written"), target.model.spec.vocab
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocab for token in tokens):
        raise BadConfig(f"{where}: tokens are no list of ids below {vocab}")
    inside = min(len(tokens), target.context)
    if not isinstance(written, int) or not 0 < written < inside:
        raise BadConfig(f"{where}: an answer from {written} on does not lie in the first {inside} tokens")
    return tuple(tokens), written


def turns_of(entry: Any, where: str) -> list[Any]:
    turns = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise BadConfig(f"{where} has neither messages with roles nor a prompt")
    return list(turns)


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]  # with the token that ended it
    end: Finished


def ask(target: Target, engine: Engine, prompt: Prompt, sampling: Sampling, longest: int, name: str) -> Future[Answer]:
    """name: of the request, and of its name space: no request restores what another one left."""
    tokens, answer = list[int](), Future[Answer]()

    def take(event: Event) -> None:
        if isinstance(event, Token):
            tokens.append(event.token)
        elif isinstance(event, Finished):
            answer.set_result(Answer([*tokens, *([] if event.stop_token is None else [event.stop_token])], event))
        elif isinstance(event, Failed):
            answer.set_exception(event.error)

    stops = target.model.tokenizer.stop_ids
    engine.submit(Request(name, prompt, sampling, longest, stops, take, namespace=name))
    return answer


class WholeBlocks(Width):
    """As wide as the drafter can, whatever became of the last one."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def at(self, length: int) -> int:
        return self._tokens

    def note(self, length: int, proposed: int, accepted: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class WholeDrafts(Drafts):
    tokens: int = 0  # of a block, without the one that is known

    def of(self, max_tokens: int, measures: Measures | None = None) -> Draft:
        return Draft("dflash", model=WholeBlocks(self.tokens))


def row_of(answers: Sequence[Answer], plain: Sequence[Answer]) -> Row:
    drafts = [answer.end.draft for answer in answers]
    blocks, accepted = sum(draft.blocks for draft in drafts), sum(draft.accepted for draft in drafts)
    tokens, decode = sum(len(a.tokens) for a in answers), sum(a.end.timings.decode for a in answers)
    return {
        "accepted length": 1 + accepted / blocks if blocks else 1.0,
        "blocks": blocks,
        "restored": sum(answer.end.cache.restored for answer in answers),
        "tokens": tokens,
        "tokens per second": (tokens - len(answers)) / decode if decode else 0.0,
        "answers unlike plain ones": sum(a.tokens != b.tokens for a, b in zip(answers, plain, strict=True)),
    }


def evaluate(target: Target, drafter: Path, prompts: Sequence[Prompt], longest: int) -> dict[str, Row]:
    """One prompt after the other; each has a name space of its own for every way of drafting."""
    file, layers, answers = open_drafter(drafter), target.model.spec.layers, dict[str, list[Answer]]()
    halves = Span(0, layers // 2), Span(layers // 2, layers)
    plain, served = Drafts(off="to compare"), Drafts(off=None, model="dflash")
    whole = WholeDrafts("whole", off=None, tokens=file.spec.block - 1)

    def run(engine: Engine, **runs: Drafts) -> None:
        for name, drafts in runs.items():
            engine.settings = replace(engine.settings, drafts=drafts)
            names = (f"{drafts.name} {drafts.model} {number}" for number in range(len(prompts)))
            asked = zip(prompts, names, strict=True)
            answers[name] = [ask(target, engine, prompt, GREEDY, longest, id).result() for prompt, id in asked]
        engine.stop()

    with tempfile.TemporaryDirectory() as snapshots:
        kept = Path(snapshots)
        engine = target.engine(file, ram=RAM, folder=kept)
        run(engine, first=plain, plain=plain, cold=whole, RAM=whole, first_served=served, served=served)
        run(target.engine(file, folder=kept), disk=whole)
        run(target.engine(file, halves, folder=kept), disk_two_stages=whole)
    run(target.engine(file, halves), cold_two_stages=whole)
    for first in ("first", "first_served"):  # prompts that are captured meanwhile, or a process that has just begun
        del answers[first]
    return {name: row_of(its, answers["plain"]) for name, its in answers.items()}


def table(rows: dict[str, Row]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [["run", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(f"{row[column]:.4g}" for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """With what every tool here asks for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or a folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt and its answer")
    parser.add_argument("--longest", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--sequences", type=int, default=16, help="that are answered at once, where many are")
    return parser


def target_of(options: argparse.Namespace) -> Target:
    if options.threads:
        set_threads(options.threads)
    return Target(open_model(options.model), options.device, options.context, options.sequences)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("drafter", type=Path, help="a folder, or a GGUF file")
    options = parser.parse_args()
    target = target_of(options)
    rows = evaluate(target, options.drafter, list(target.prompts(options.prompts, options.longest)), options.longest)
    print(table(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    try:
        main()
    except RekindleError as error:
        sys.exit(f"measure_drafter: {error}")
