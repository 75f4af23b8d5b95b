"""Decode with a drafter of the real size at a scripted acceptance, beside plain decode in the same run.

    PYTHONPATH=src python3 scripts/gpu/bench_dflash.py --shape qwen3.6-27b --folder /dev/shm/models

Weights are random, of target and drafter. So that it is known what the target will say, logits are raised at the tokens
of a random text; and so that acceptance is known, the drafter makes its whole pass and its tokens are replaced by those
of the text, every N-th of which it does not know: N tokens then come of a block and the target's own token. 0: it is
never right; rests: it reads features and is never asked, which is what it costs at least. First cold, then with the
prompt restored from disk; plain decode too, since a capture and a restore take some time of the steps behind them.
Medians of --rounds rounds, in turns. A short table comes last, and the same as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rekindle.batch import Ask, Batch, Wanted
from rekindle.bench.synth import SHAPES, write_synthetic
from rekindle.build.drafts import load_drafter
from rekindle.build.stage import StageConfig, load_stage
from rekindle.engine.ahead import Stopwatch
from rekindle.engine.drafting import NO_DRAFTS, Drafts
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.spec import PAGE, ModelSpec
from rekindle.speculative.context import DrafterContext, layers_read
from rekindle.speculative.files import DrafterFile
from rekindle.speculative.spec import ConvSpec, DrafterSpec, DraftLayer, SelectorSpec, default_taps
from rekindle.speculative.width import MOST, Purse
from rekindle.stages import LocalStage, Pipeline
from rekindle.stages.types import PendingTokens, StageOutput, Unseen
from rekindle.weights import TensorInfo, open_weights

SURE = 1e4  # added to a logit: nothing else is drawn


def drafter_spec(shape: str, target: ModelSpec) -> DrafterSpec:
    """DFlash 1 for the dense 27B, DFlash 2 for 35B-A3B, in the sizes that are published; something small for others."""
    common = {"hidden": target.hidden, "vocab": target.vocab, "rope_theta": 1e7, "eps": 1e-6, "mask": target.vocab - 1}
    near = DraftLayer(2048, causal=True)
    if shape == "qwen3.6-27b":
        layers = (near, near, near, near, DraftLayer(None, causal=False))
        sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "width": 17408, "block": 16}
        return DrafterSpec(layers=layers, taps=default_taps(target.layers), **sizes, **common)
    two = {"conv": ConvSpec(2, 16), "selector": SelectorSpec(256, 16), "block": 8}
    free = DraftLayer(2048, causal=False)
    if shape == "qwen3.6-35b-a3b":
        sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "width": 6144}
        return DrafterSpec(layers=(free,) * 6, taps=(1, 6, 11, 16, 22, 27, 32, 37), **sizes, **two, **common)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "width": 256}
    return DrafterSpec(layers=(free,), taps=(0, target.layers - 1), **sizes, **two, **common)


class RandomDrafter(DrafterFile):
    """As if it were read from a file: matrices in BF16, as drafters are published, or in Q8_0; the rest in float32."""

    def __init__(self, spec: DrafterSpec, kind: str) -> None:
        self.spec = spec
        self.tensors = {name: _info(name, shape, kind) for name, shape in spec.tensors().items()}
        self._rng = np.random.default_rng(1)

    def raw(self, name: str) -> np.ndarray:
        rows, columns = self.tensors[name].shape
        dice = self._rng.integers(0, 256, 1 << 22, dtype=np.uint8)
        if self.tensors[name].type == "BF16":  # sign and fraction are random, the exponent is -6
            bits = (dice.astype(np.uint16) & 0x80) << 8 | 121 << 7 | dice & 0x7F
            return np.resize(bits, (rows, columns)).view(np.uint8)
        blocks = np.resize(dice, (rows * columns // 32, 34))
        blocks[:, :2] = np.array([0.03 / 74], np.float16).view(np.uint8)  # 74: spread of a random int8
        return blocks.reshape(rows, -1)

    def values(self, name: str) -> np.ndarray:
        mean = 1.0 if "norm" in name else 0.0
        return self._rng.normal(mean, 0.03, self.tensors[name].shape).astype(np.float32)

    def fingerprint(self) -> str:
        return "random"


def _info(name: str, shape: tuple[int, ...], kind: str) -> TensorInfo:
    count = int(np.prod(shape))
    if len(shape) != 2:
        return TensorInfo(name, shape, "F32", 4 * count)
    return TensorInfo(name, shape, kind, 2 * count if kind == "BF16" else count // 32 * 34)


class Scripted:
    """The drafter, which does all its work and answers from the text."""

    def __init__(self, drafter: DrafterContext, text: Sequence[int], prompt: int, vocab: int) -> None:
        self._drafter, self._text, self._prompt, self._vocab = drafter, text, prompt, vocab
        self._device = drafter.model.device
        self.begin(0.0)

    def begin(self, accept: float) -> None:
        """accept: tokens of a block and the target's own, together."""
        self.accept, self.passes, self._seconds = accept, 0, 0.0
        self._watches = list[Stopwatch]()  # of passes that nobody waits for
        self._tokens = torch.zeros(0, dtype=torch.int64, device=self._device)  # that the last of them told
        self._told = torch.tensor([self._says(at) for at in range(len(self._text))], device=self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        began = time.perf_counter()
        found = self._drafter.propose(asks)
        self.passes, self._seconds = self.passes + 1, self._seconds + time.perf_counter() - began
        firsts = (ask.position + 1 for ask in asks)
        return [tuple(map(self._says, range(at, at + len(its)))) for at, its in zip(firsts, found, strict=True)]

    @torch.inference_mode()
    def propose_ahead(self, asks: Sequence[Ask]) -> torch.Tensor:
        """Where the pass leaves its tokens those of the text are put, on the device."""
        self._watches.append(Stopwatch(self._device))
        found = self._drafter.propose_ahead(asks)
        self._watches[-1].stop()
        self.passes += 1
        for ask, tokens in zip(asks, found, strict=True):
            told = self._told[ask.position + 1 : ask.position + 1 + len(tokens)]
            tokens[: len(told)].copy_(told)
        self._tokens = found[0]
        return found

    @torch.inference_mode()
    def propose_behind(self, block: Unseen) -> torch.Tensor | None:
        """The same where the device alone knows how much of the last block is accepted, and so which tokens follow."""
        agreed = (self._tokens[: block.drafted] == block.drawn[: block.drafted]).long().cumprod(0).sum()
        self._watches.append(Stopwatch(self._device))
        found = self._drafter.propose_behind(block)
        self._watches[-1].stop()
        if found is None:
            del self._watches[-1]
            return None
        self.passes += 1
        at = block.position + 2 + agreed + torch.arange(found.shape[1], device=self._device)
        self._tokens = found[0].copy_(self._told[at.clamp(max=len(self._told) - 1)])
        return found

    def milliseconds(self) -> float:
        """Of a pass, when the device has made all of them."""
        return 1e3 * (self._seconds + sum(watch.seconds() for watch in self._watches)) / max(1, self.passes)

    def _says(self, position: int) -> int:
        token = self._text[position % len(self._text)]
        return token if self._knows(position) else (token + 1) % self._vocab

    def _knows(self, position: int) -> bool:
        """Positions that it does not know are `accept` apart, on average."""
        answered = position - self._prompt
        return self.accept > 0 and int(answered / self.accept) == int((answered - 1) / self.accept)


class Told(Pipeline):
    """The pipeline, whose target says the text."""

    def __init__(self, stage: LocalStage, text: Sequence[int], drafter: Any = None) -> None:
        super().__init__([stage], drafter=drafter)
        self._said = torch.tensor([*text, 0], device=stage.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, pending: PendingTokens | None = None) -> Future[StageOutput]:
        future = super().forward(batch, pending)
        logits, start = future.result().logits, 0
        for segment in batch.segments:
            count = segment.logit_rows
            if logits is not None and count:
                first = segment.position + 1 if segment.wanted is Wanted.ALL else segment.end
                rows = torch.arange(start, start + count, device=logits.device)
                logits[rows, self._said[first : first + count]] += SURE
            start += count
        return future


@dataclass(frozen=True, slots=True)
class Run:
    speed: float  # tokens of decode in a second
    per_step: float  # tokens of a block and the target's own
    restored: int
    passes: int = 0  # of the drafter …
    pass_ms: float = 0.0  # … and how long the device took for each; where the host waits, until it knew the tokens


class Bench:
    def __init__(self, arguments: argparse.Namespace, model: Path) -> None:
        self.file = open_weights(model)
        self.tokens, self.prompt = arguments.tokens, arguments.prompt
        cpu, length = arguments.device == "cpu", arguments.prompt + arguments.tokens
        self.pages = -(-length // PAGE) + 2
        kinds = {"kv_type": "f32", "dtype": "float32"} if cpu else {"kv_type": "bf16", "dtype": "bfloat16"}
        grid = min(2048, max(64, arguments.prompt))
        self.settings = EngineSettings(context=self.pages * PAGE, grid=grid, measure_drafts=not cpu)
        widths = {"rewind_rows": MOST + 1, "chunk": grid, "table_width": self.pages}
        spec = drafter_spec(arguments.shape, self.file.spec)
        config = StageConfig(arguments.device, self.file.spec.whole, 2, 2 * self.pages, **widths, **kinds)
        self.stage = load_stage(self.file, replace(config, taps=layers_read(spec)))
        rng = np.random.default_rng(0)
        self.text: list[int] = rng.integers(0, self.file.spec.drawable, length + 2).tolist()
        dtype = torch.float32 if cpu else torch.bfloat16
        drafter = RandomDrafter(spec, arguments.drafter_type)
        made = load_drafter(drafter, self.file, [self.stage], dtype, self.settings.context)
        assert isinstance(made, DrafterContext), "it was made from a DFlash spec"
        self.drafter = Scripted(made, self.text, self.prompt, self.file.spec.drawable)
        gc.collect()
        gc.freeze()  # as a server does: else a collection amid an answer looks at all that torch brings …
        sys.setswitchinterval(0.0005)  # … and the listener may keep the token loop waiting

    def engine(self, drafts: bool, folder: Path | None = None, rests: bool = False) -> Engine:
        disk = None if folder is None else DiskStore(folder, "f" * 64, 1 << 40)
        pipeline = Told(self.stage, self.text, self.drafter if drafts else None)
        settings = replace(self.settings, drafts=Drafts(model="dflash", off=None) if drafts else NO_DRAFTS)
        engine = Engine(pipeline, PrefixCache(local_tiers(0, disk)), settings)
        if rests:
            engine._measures.purses["dflash"] = purse = Purse()
            purse.settle(cost=1e9, accepted=0)  # it can afford no block
        return engine.start()

    def runs(self, accepts: Sequence[float], rounds: int, folder: Path | None = None) -> dict[str, Run]:
        """By what is accepted, "plain" and "rests"; of each the run whose speed is the median."""
        found: dict[str, list[Run]] = {}
        for name in ("plain", "rests", *(f"{accept:g}" for accept in accepts)) * rounds:
            self.drafter.begin(0 if name in ("plain", "rests") else float(name))
            engine = self.engine(drafts=name != "plain", folder=folder, rests=name == "rests")
            run = self.run(engine)
            end(engine)
            run = replace(run, passes=self.drafter.passes, pass_ms=self.drafter.milliseconds())
            found.setdefault(name, []).append(run)
        return {name: sorted(its, key=lambda run: run.speed)[len(its) // 2] for name, its in found.items()}

    def warm_up(self) -> None:
        for drafts in (False, True):
            self.drafter.begin(0)
            engine = self.engine(drafts)
            self.run(engine, 8)
            end(engine)

    def save_prompt(self, folder: Path) -> None:
        engine = self.engine(drafts=True, folder=folder)
        self.run(engine, 1)
        end(engine)

    def run(self, engine: Engine, tokens: int | None = None) -> Run:
        """Of an answer that is the text."""
        events, tokens = SimpleQueue[Event](), tokens or self.tokens
        prompt = Prompt(tuple(self.text[: self.prompt]))
        fields: dict[str, Any] = {"stop_tokens": frozenset(), "max_tokens": tokens, "sink": events.put}
        engine.submit(Request("r", prompt, Sampling(temperature=0), **fields))
        while not isinstance(event := events.get(timeout=600), Finished | Failed):
            pass
        assert isinstance(event, Finished), event
        draft, steps = event.draft, max(1, event.completion_tokens - 1 - event.draft.accepted)
        speed = (event.completion_tokens - 1) / max(event.timings.decode, 1e-9)
        return Run(speed, (event.completion_tokens - 1) / steps if draft.accepted else 1.0, event.cache.restored)


def end(engine: Engine) -> None:
    """All of it but the stage, which the next engine uses."""
    engine.end_requests()
    engine.wait_for_end()
    engine._restorer.stop()
    engine._publisher.stop()
    engine.prefixes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.6-27b", choices=tuple(SHAPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--accept", type=float, nargs="+", default=[0, 4, 5.5, 8])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--drafter-type", default="BF16", choices=("BF16", "Q8_0"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    model = arguments.folder / f"{arguments.shape}.gguf"
    if not model.exists():
        write_synthetic(model, arguments.shape)
    bench = Bench(arguments, model)
    bench.warm_up()
    cold = bench.runs(arguments.accept, arguments.rounds)
    with TemporaryDirectory(dir=arguments.folder) as cache:
        bench.save_prompt(Path(cache))
        disk = bench.runs(arguments.accept, arguments.rounds, Path(cache))
    bench.stage.stop()
    plain, restored = cold["plain"].speed, disk["plain"].speed
    print(f"{arguments.shape} on {arguments.device}: plain decode {plain:.1f} tok/s, from disk {restored:.1f}")
    print("accepted  per step   tok/s  × plain  passes, ms each   from disk: per step  × plain")
    for name, run in cold.items():
        again = disk[name]
        print(f"{name:>8} {run.per_step:9.2f} {run.speed:7.1f} {run.speed / plain:8.2f}", end=" ")
        print(f"{run.passes:7d} {run.pass_ms:8.2f}", end=" ")
        print(f"{again.per_step:21.2f} {again.speed / restored:8.2f}")
    tables = {
        where: {name: _json(run) for name, run in runs.items()} for where, runs in (("cold", cold), ("disk", disk))
    }
    print(json.dumps({"shape": arguments.shape, "rounds": arguments.rounds, **tables}))


def _json(run: Run) -> dict[str, float]:
    return {
        "speed": round(run.speed, 1),
        "per_step": round(run.per_step, 2),
        "restored": run.restored,
        "pass_ms": round(run.pass_ms, 2),
    }


if __name__ == "__main__":
    main()
