"""Memory that is shared live, through HTTP: what a server with its defaults keeps, and one that is held to 22.1 GiB.

    PYTHONPATH=src python3 scripts/gpu/bench_live.py [--only held,defaults-moe] [--budget 22.1] [--seconds 340]

Random weights in the exact shapes; servers as people start them, asked with random token prompts. Snapshots go to a
new folder beside the models, and kernels to a new cache, so that each server knows nothing of earlier runs and the
first one compiles what it needs.

held      35B-A3B, `--vram 22.1GiB --context 131072` (--budget says another number of GiB): the first request of a
          fresh server, 1,024 tokens, and the kernels that were compiled, or loaded from Triton's cache, after the
          server said that it was ready; then ten turns of 300 new tokens on 32,768, their time to first token over
          that of `defaults-moe` (goal 2)
defaults  35B-A3B (defaults-moe) and 27B (defaults-dense), `--context 40960` and, with -own behind the name, the model's
          own limit, nothing else: a prompt of 32,768 tokens sent twice (the second time nothing is computed), then ten
          turns of 300 new tokens (nothing is restored over the link: all comes from the tier `device`)
mix       two conversations at once, of 65,536 and of 1,024 tokens, held alike: bench_trade.py --only mix, in a process
          of its own (contexts of zeros there: what a step reads does not depend on what is in it)

--only takes beginnings of these names. One table comes last, all answers as JSON in $OUT, what the servers said in
$OUT/live.log. What would begin after --seconds is left out and named. Exit code 1: some figure misses its goal.
--device cpu runs the script on tiny models, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_serve import Server

from rekindle.bench.client import LoadClient, ServedAnswer
from rekindle.bench.load import Load
from rekindle.bench.synth import write_synthetic

LOOP = asyncio.Runner()  # one for all requests: their connections are kept
STARTED = time.perf_counter()
SLOWER = 2.0  # times the turn's time to first token with all in VRAM
ANSWER = 8  # tokens of every answer
OWN, HELD = "its own limit", "held"


@dataclass(frozen=True)
class Scale:
    """What is asked of whom; lengths in tokens."""

    dense: str = "qwen3.6-27b"
    sparse: str = "qwen3.6-35b-a3b"
    context: int = 40_960
    held: tuple[str, ...] = ("--context", "131072")  # options of a server that is held to a budget
    more: tuple[str, ...] = ()  # options of every server
    first: int = 1024
    prompt: int = 32_768
    turn: int = 300
    turns: int = 10
    vocab: int = 32_000


TINY = Scale("tiny", "tiny-moe", 2048, ("--context", "2048"), ("--threads", "1"), 64, 500, 30, 3, 400)


@dataclass
class Row:
    what: str
    figure: str
    goal: str = ""
    met: bool | None = None  # None: there is no goal


@dataclass
class Told:
    """All that was measured."""

    rows: list[Row] = field(default_factory=list)
    turns: dict[str, float] = field(default_factory=dict)  # milliseconds to the first token, the median, by server
    answers: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, what: str, figure: str, goal: str = "", met: bool | None = None) -> None:
        self.rows.append(Row(what, figure, goal, met))
        print(f"{time.perf_counter() - STARTED:6.1f} s  {what}: {figure}", flush=True)


# -- one server -----------------------------------------------------------------------------------------------------


class Client:
    """Asks one server, one request after another; every answer is told."""

    def __init__(self, server: Server, name: str, scale: Scale, told: Told) -> None:
        self._load = Load(vocab=scale.vocab, seed=zlib.crc32(name.encode()))
        self._client, self._name, self._told = LoadClient(server.url), name, told

    def prompt(self, length: int, *names: object) -> list[int]:
        return self._load.tokens(length, *names)

    def ask(self, what: str, prompt: list[int]) -> ServedAnswer:
        answer = LOOP.run(self._client.ask(what, self._client.question(prompt, ANSWER)))
        if answer.failure is not None:
            raise RuntimeError(f"{what}: {answer.failure}")
        self._told.answers.append(
            {"server": self._name, "what": what, "prompt": answer.prompt, "first_ms": 1000 * answer.first,
             "gaps_ms": [1000 * gap for gap in answer.gaps], "restored": answer.restored, "computed": answer.computed}
        )  # fmt: skip
        return answer


@contextmanager
def serving(path: Path, arguments: list[str], out: Path) -> Iterator[Server]:
    """A server with a new folder for snapshots beside the model, where the disk of the machine is no limit."""
    snapshots = Path(tempfile.mkdtemp(prefix="rekindle-live-", dir=path.parent))
    try:
        server = Server([str(path), *arguments, "--cache-dir", str(snapshots)], out / "live.log", "", None)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(snapshots, ignore_errors=True)


def kernels(server: Server) -> dict[str, int]:
    """First launched until now, by how they came: compiled, or loaded from Triton's cache."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as page:
        found = re.findall(r'^rekindle_kernels_total\{how="(\w+)"\} (\S+)', page.read().decode(), re.MULTILINE)
    return {how: int(float(count)) for how, count in found}


def converse(client: Client, scale: Scale, prompt: list[int], said: list[int]) -> list[ServedAnswer]:
    """Turns of new tokens on a prompt that was answered."""
    answers = list[ServedAnswer]()
    for turn in range(scale.turns):
        prompt = prompt + said + client.prompt(scale.turn, "turn", turn)
        answers.append(client.ask(f"turn {turn + 1}", prompt))
        said = answers[-1].ids
    return answers


def over_the_link(answer: ServedAnswer) -> int:
    return sum(tokens for tier, tokens in answer.restored.items() if tier != "device")


def tell_turns(name: str, told: Told, answers: list[ServedAnswer]) -> None:
    linked = sum(map(over_the_link, answers))
    kept = [answer.restored.get("device", 0) for answer in answers]
    computed = [answer.computed for answer in answers]
    said = f"{linked} over the link, {min(kept):,} to {max(kept):,} kept; computed {min(computed)} to {max(computed)}"
    told.add(f"{name}: tokens restored in {len(answers)} turns", said, "0 over the link", linked == 0)
    firsts = [1000 * answer.first for answer in answers]
    told.turns[name] = statistics.median(firsts)
    every = " ".join(f"{first:.0f}" for first in firsts)
    told.add(f"{name}: first token of a turn", f"median {told.turns[name]:.1f} ms ({every})")


# -- the parts ------------------------------------------------------------------------------------------------------


def held(scale: Scale, folder: Path, out: Path, told: Told, options: Sequence[str]) -> None:
    """A fresh server of the MoE model with cold experts: its first request, then turns."""
    name = f"{scale.sparse}, {HELD} {' '.join(options)}"
    path = model(folder, scale.sparse)
    with serving(path, [*scale.held, *scale.more, *options], out) as server:
        client, before = Client(server, name, scale, told), kernels(server)
        first = client.ask("first request", client.prompt(scale.first, "first"))
        after = kernels(server)
        late = {how: count - before.get(how, 0) for how, count in after.items()}
        said = f"{1000 * first.first:.0f} ms after a start of {server.seconds:.1f} s"
        told.add(f"{name}: first token of a first prompt of {scale.first:,}", said)
        goal = late.get("compiled", 0) == 0
        told.add(f"{name}: kernels amid it", f"{late or 'no stage counts them'}", "0 compiled", goal)
        prompt = client.prompt(scale.prompt, "long")
        cold = client.ask("cold", prompt)
        told.add(f"{name}: first token of a cold prompt of {scale.prompt:,}", f"{1000 * cold.first:.0f} ms")
        tell_turns(name, told, converse(client, scale, prompt, cold.ids))
        whole = {how: count - before.get(how, 0) for how, count in kernels(server).items()}
        told.add(f"{name}: kernels in all requests", f"{whole}", "0 compiled", whole.get("compiled", 0) == 0)


def defaults(scale: Scale, folder: Path, out: Path, told: Told, shape: str, context: int | None) -> None:
    """As it comes: the same prompt twice, then turns."""
    name = f"{shape}, context {context or OWN}"
    path = model(folder, shape)
    limit = [] if context is None else ["--context", str(context)]
    with serving(path, [*limit, *scale.more], out) as server:
        client = Client(server, name, scale, told)
        prompt = client.prompt(scale.prompt, "long")
        cold, again = client.ask("cold", prompt), client.ask("again", prompt)
        said = f"computed {again.computed}, restored {again.restored}, {1000 * again.first:.0f} ms"
        told.add(f"{name}: {scale.prompt:,} again", f"{said} (cold {1000 * cold.first:.0f} ms)", "computed 0",
                 again.computed == 0)  # fmt: skip
        tell_turns(name, told, converse(client, scale, prompt, again.ids))


def mix(folder: Path, out: Path, told: Told, device: str, budget: float, seconds: float) -> None:
    """Two conversations at once, against fixed pools."""
    script = Path(__file__).parent / "bench_trade.py"
    command = [sys.executable, str(script), "--only", "mix", "--budgets", str(budget), "--folder", str(folder)]
    command += ["--device", device, "--seconds", f"{seconds:.0f}"]
    done = subprocess.run(command, env=os.environ | {"OUT": str(out)}, capture_output=True, text=True, timeout=600)
    (out / "live.log").open("a").write(done.stdout + done.stderr)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"bench_trade.py ended with {done.returncode}: {done.stderr[-500:]}")
    found = json.loads((out / "bench_trade.json").read_text())
    speeds = {str(row["pool"]): row["mix"] for row in found["rows"]}
    told.answers.append({"mix": speeds})
    fixed = [speed for pool, speed in speeds.items() if pool != "traded"]
    said = ", ".join(f"{pool} {speed:.0f}" for pool, speed in speeds.items())
    share = speeds["traded"] / max(fixed) if fixed else None
    told.add("65,536 and 1,024 at once, tok/s by pool", f"{said}" + (f"; {share:.2f} of the best" if share else ""),
             "0.95 of the best", None if share is None else share >= 0.95)  # fmt: skip
    told.left_out += found["left_out"]


def model(folder: Path, shape: str) -> Path:
    path = folder / f"{shape}.gguf"
    if not path.exists():
        began = time.perf_counter()
        write_synthetic(path, shape)
        print(f"wrote {path.name} in {time.perf_counter() - began:.1f} s", flush=True)
    return path


def compare_turns(scale: Scale, told: Told) -> None:
    """Turns of the server that is held, over those of one that has all in VRAM."""
    roomy = told.turns.get(f"{scale.sparse}, context {scale.context}")
    for name, first in list(told.turns.items()):
        if f", {HELD} " in name and roomy is not None:
            ratio = first / roomy
            told.add(f"{name}: turn ÷ all in VRAM", f"{ratio:.2f}", f"at most {SLOWER:g}", ratio <= SLOWER)


def show(told: Told) -> None:
    wide = max((len(row.what) for row in told.rows), default=0)
    print()
    for row in told.rows:
        verdict = "" if row.met is None else "yes" if row.met else "NO"
        print(f"{row.what:{wide}}  {verdict:3}  {row.figure}" + (f"  [{row.goal}]" if row.goal else ""))
    missed = [row.what for row in told.rows if row.met is False]
    print(f"missed: {'; '.join(missed) or 'nothing'}. Left out: {'; '.join(told.left_out) or 'nothing'}")


def parts(options: argparse.Namespace, scale: Scale, out: Path, told: Told) -> dict[str, Callable[[], None]]:
    """By name, those first without which the others say little."""
    folder = options.folder

    def left() -> float:
        return max(10.0, options.seconds - (time.perf_counter() - STARTED))

    budget = [] if options.device == "cpu" else ["--vram", f"{options.budget}GiB"]
    every: dict[str, Callable[[], None]] = {
        "held": lambda: held(scale, folder, out, told, budget),
        "defaults-moe": lambda: defaults(scale, folder, out, told, scale.sparse, scale.context),
        "mix": lambda: mix(folder, out, told, options.device, options.budget, left()),
        "defaults-moe-own": lambda: defaults(scale, folder, out, told, scale.sparse, None),
        "defaults-dense": lambda: defaults(scale, folder, out, told, scale.dense, scale.context),
        "defaults-dense-own": lambda: defaults(scale, folder, out, told, scale.dense, None),
    }
    return {name: part for name, part in every.items() if name.startswith(tuple(options.only.split(",")))}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--seconds", type=float, default=340)
    parser.add_argument("--only", default="", help="beginnings of names, such as held,defaults-moe; all if left out")
    parser.add_argument("--budget", type=float, default=22.1, help="GiB that a server is held to")
    parser.add_argument("--device", default="cuda:0", help="cpu: the script itself, on tiny models")
    options = parser.parse_args()
    scale, told = TINY if options.device == "cpu" else Scale(), Told()
    out = Path(os.environ.get("OUT", ".")).absolute()
    os.environ["TRITON_CACHE_DIR"] = compiled = tempfile.mkdtemp(prefix="rekindle-live-kernels-")
    try:
        for name, part in parts(options, scale, out, told).items():
            if time.perf_counter() - STARTED > options.seconds:
                told.left_out.append(name)
                continue
            try:
                part()
            except (RuntimeError, SystemExit, subprocess.TimeoutExpired) as error:  # the others can still be measured
                told.add(name, f"failed: {error}", "an answer", False)
    finally:
        shutil.rmtree(compiled, ignore_errors=True)
    compare_turns(scale, told)
    show(told)
    kept = {"rows": [asdict(row) for row in told.rows], "answers": told.answers, "left_out": told.left_out}
    (out / "bench_live.json").write_text(json.dumps(kept))
    return 1 if any(row.met is False for row in told.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
