"""What clients of `rekindle serve` see on a GPU, line by line, by the load generator of `rekindle bench serve`.

    PYTHONPATH=src python3 scripts/gpu/bench_serve.py --shape qwen3.6-35b-a3b [--only NAME,NAME] [--profile]
                                                                              [--timeline]
    PYTHONPATH=src python3 scripts/gpu/bench_serve.py --shape qwen3.6-35b-a3b --grammar [--streams 1,32]

Random weights in the exact shape; a server process, asked over HTTP with random token prompts; then one with a folder
for snapshots, which is stopped and started again. --profile says after each line where the engine's thread was, sampled
every millisecond; --timeline what the server did in the longest gap, and while a first token was waited for. A short
table comes last, the JSON of every row is written to $OUT.

--grammar measures something else: answers with and without a JSON schema, in turns, so many streams at once, and prints
one table: tokens per second of all streams together, from the first token of any to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

from timeline import between

from rekindle.bench.client import LoadClient, ServedAnswer
from rekindle.bench.load import Load, LoadRow, rows_of, run_load

SERVE = "from rekindle.cli import main; main()"
PROFILED = r"""
import collections, json, signal, sys, threading, time
counts = collections.Counter()
def sample():
    while True:
        time.sleep(0.001)
        thread = next((t for t in threading.enumerate() if t.name == "engine"), None)
        frame = sys._current_frames().get(thread.ident) if thread else None
        names = []
        while frame is not None:
            code = frame.f_code
            names.append(code.co_filename.rsplit("/", 1)[-1].removesuffix(".py") + "." + code.co_name)
            frame = frame.f_back
        counts[tuple(names)] += 1
def dump(*_):
    waiting = "inbox.receive"
    taken = [(stack, n) for stack, n in counts.copy().items() if stack and waiting not in stack[:3]]
    counts.clear()
    total = sum(n for _, n in taken) or 1
    inclusive, leaf = collections.Counter(), collections.Counter()
    for stack, n in taken:
        leaf[stack[0]] += n
        for name in set(stack):
            inclusive[name] += n
    show = lambda c, k: "  ".join(f"{name} {100 * n // total}%" for name, n in c.most_common(k))
    print(f"PROFILE {total} ms\n  in: {show(inclusive, 34)}\n  at: {show(leaf, 16)}", flush=True)
threading.Thread(target=sample, daemon=True).start()
signal.signal(signal.SIGUSR2, dump)
"""


LONG = 0.03  # seconds of a call that is told of a start
WATCHED = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import timeline; timeline.watch(%r)\n"


class Server:
    """A process; whatever it says goes to a file."""

    def __init__(self, arguments: list[str], log: Path, before: str, source: str | None) -> None:
        """before: code that the process runs first."""
        self.began = time.perf_counter()
        self.watched, code = bool(before), before + SERVE
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | ({"PYTHONPATH": source} if source else {}),
        )  # fmt: skip
        self.url, self._ready, self._log = "", threading.Event(), log.open("a")
        threading.Thread(target=self._read, daemon=True).start()
        self._ready.wait(400)
        if not self.url:
            raise SystemExit(f"the server did not start; see {log}")
        self.seconds = time.perf_counter() - self.began

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.write(f"{time.perf_counter() - self.began:8.2f} {line}")
            self._log.flush()
            if match := re.search(r"chat in a browser\s+(http://\S+?)/?\s*$", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def dump(self) -> None:
        self.process.send_signal(signal.SIGUSR2)
        time.sleep(0.3)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120)


LINES = {
    "new": Load(prompts=(1, 8, 64, 512), requests=6, answer=8),
    "turn 200 on 8192": Load(prompts=(8192,), requests=3, answer=8, turns=3, turn=200),
    # In words, of which one is some five tokens here: a synthetic vocabulary has little but bytes.
    "messages, 200 on 8192": Load(prompts=(1700,), requests=3, answer=8, turns=3, turn=40, chat=True),
    "turn 300 on 32768": Load(prompts=(32768,), requests=2, answer=8, turns=3, turn=300),
    "restored": Load(prompts=(8, 512, 4096, 32768), requests=3, answer=8, again=1),
    "32 at once": Load(prompts=(512,), requests=32, concurrency=32, answer=32),
    "answer of 2048": Load(prompts=(512,), requests=2, answer=2048),
    "4 streams, intruder": Load(prompts=(512,), requests=4, concurrency=4, answer=1500, intruder=32768),
}
KEPT = {  # asked of a server with a folder, and again of the next one
    "restart, 33068": Load(prompts=(33068,), requests=1, answer=64),
    "restart, 32 at once": Load(prompts=(512,), requests=32, concurrency=32, answer=32),
}


def ask(server: Server, name: str, load: Load, vocab: int, calls: Path | None) -> dict[str, object]:
    """calls: where a server with a timeline writes what it did."""
    seed = zlib.crc32(name.removeprefix("before ").removeprefix("after ").encode())
    load = replace(load, vocab=vocab, seed=seed)
    answers = asyncio.run(run_load(LoadClient(server.url), load))
    rows = rows_of(answers)
    for row in rows:
        say(name, row)
    if server.watched:
        server.dump()
    if calls is not None:
        tell_waits(answers, calls)
    return {"line": name, "rows": [row.as_dict() for row in rows]}


def tell_start(server: Server, calls: Path | None) -> None:
    print(f"ready after {server.seconds:.1f} s", flush=True)
    if calls is not None:
        server.dump()
        print(*between(calls, server.began, server.began + server.seconds, LONG), sep="\n", flush=True)


def tell_waits(answers: list[ServedAnswer], calls: Path) -> None:
    """What the server did in the longest gap of all answers of one name, and before the first token of a usual one."""
    for what in dict.fromkeys(answer.what for answer in answers):
        own = sorted((each for each in answers if each.what == what and each.arrivals), key=lambda each: each.first)
        if not own:
            continue
        usual, longest = own[len(own) // 2], max(own, key=lambda each: max(each.gaps, default=0.0))
        waits = [("first token", usual.sent, usual.arrivals[0])]
        if longest.gaps:
            at = longest.gaps.index(max(longest.gaps))
            waits.append((f"gap behind event {at + 1}", longest.arrivals[at], longest.arrivals[at + 1]))
        for kind, began, ended in waits:
            print(f"  {what}, {kind}: {1000 * (ended - began):.2f} ms", *between(calls, began, ended), sep="\n")


# -- with and without a grammar -------------------------------------------------------------------------------------

GOALS = {1: 3.0, 32: 10.0}  # per cent that a grammar may cost, by streams
DRAWN = {"temperature": 1, "seed": 7}  # so that random weights write more than one token over and over


def schema_of(answer: int) -> dict[str, object]:
    """An object that takes more than so many tokens to write, with values of several kinds."""
    kinds: list[dict[str, object]] = [
        {"type": "string", "minLength": 80},
        {"type": "integer", "minimum": 100, "maximum": 99999},
        {"enum": ["celsius", "fahrenheit", "kelvin"]},
        {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 6},
    ]
    properties = {f"field_{number}": kinds[number % len(kinds)] for number in range(max(8, answer // 4))}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def compare_grammar(
    server: Server, streams: list[int], answer: int, rounds: int, vocab: int
) -> list[dict[str, object]]:
    schema = {"type": "json_schema", "json_schema": {"name": "bench", "strict": True, "schema": schema_of(answer)}}
    clients = {
        "plain": LoadClient(server.url, fields=DRAWN),
        "grammar": LoadClient(server.url, fields={**DRAWN, "ignore_eos": False, "response_format": schema}),
    }
    for client in clients.values():  # kernels, the table of the vocabulary, the compiled grammar
        speed_of(client, 1, 8, vocab, "warm")
    told = list[dict[str, object]]()
    for count in streams:
        speeds: dict[str, list[float]] = {name: [] for name in clients}
        for number in range(rounds):
            for name, client in clients.items():
                speeds[name].append(speed_of(client, count, answer, vocab, number))
        told.append({"streams": count, **speeds})
    return told


def speed_of(client: LoadClient, streams: int, answer: int, vocab: int, seed: object) -> float:
    mixed = zlib.crc32(f"{seed} {streams}".encode())
    load = Load(prompts=(64,), requests=streams, concurrency=streams, answer=answer, vocab=vocab, seed=mixed)
    answers = asyncio.run(run_load(client, load))
    if bad := next((each.failure for each in answers if each.failure is not None), None):
        raise SystemExit(f"a request failed: {bad}")
    if short := next((each.tokens for each in answers if each.tokens < answer), None):
        raise SystemExit(f"an answer ended after {short} of {answer} tokens")
    began, ended = min(each.arrivals[0] for each in answers), max(each.arrivals[-1] for each in answers)
    return sum(each.tokens - 1 for each in answers) / (ended - began)


def show_grammar(told: list[dict[str, object]]) -> None:
    print("streams | plain tok/s | with a schema tok/s | cost | goal")
    for row in told:
        plain, grammar = (statistics.median(row[name]) for name in ("plain", "grammar"))  # type: ignore[call-overload]
        goal = GOALS.get(int(str(row["streams"])))
        print(f"{row['streams']:>7} | {plain:11.1f} | {grammar:19.1f} | {100 * (1 - grammar / plain):4.1f} % | "
              f"{'' if goal is None else f'{goal:g} %'}")  # fmt: skip


def say(name: str, row: LoadRow) -> None:
    print(
        f"{name:20s} {row.what:22s} first {row.first_p50:8.1f} worst {row.first_worst:8.1f} last {row.last_first:8.1f} "
        f"gap {row.gap_p50:6.2f} p99 {row.gap_p99:7.2f} worst {row.gap_worst:7.2f} tok/s {row.decode:6.1f} "
        f"restored {sum(row.restored.values()):7d} computed {row.computed:6d} {row.failure or ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--context", default="40960")
    parser.add_argument("--sequences", default="32")
    parser.add_argument("--serve", default="", help="more options for the server")
    parser.add_argument("--name", default="serve")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--source", help="PYTHONPATH of the server, to measure another version of it")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--grammar", action="store_true", help="what a JSON schema costs, and nothing else")
    parser.add_argument("--streams", default="1,32", help="of --grammar")
    parser.add_argument("--answer", type=int, default=512, help="tokens, of --grammar")
    parser.add_argument("--rounds", type=int, default=3, help="of --grammar")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    path, log = options.folder / f"{options.shape}.gguf", out / f"{options.name}.log"
    if not path.exists():
        from rekindle.bench.synth import write_synthetic

        began = time.perf_counter()
        write_synthetic(path, options.shape)
        print(f"wrote {path.name} in {time.perf_counter() - began:.1f} s", flush=True)
    only = [name for name in options.only.split(",") if name]
    common = [str(path), "--context", options.context, "--sequences", options.sequences, "--cache-ram", "24GiB"]
    common += options.serve.split()
    calls = out / f"{options.name}-calls.json" if options.timeline else None
    before = WATCHED % str(calls.absolute()) if calls is not None else PROFILED if options.profile else ""
    told = list[dict[str, object]]()
    if options.grammar:
        server = Server([*common, "--cache-disk", "0"], log, before, options.source)
        try:
            streams = [int(count) for count in options.streams.split(",")]
            told = compare_grammar(server, streams, options.answer, options.rounds, options.vocab)
        finally:
            server.stop()
        show_grammar(told)
        (out / f"{options.name}.json").write_text(json.dumps(told))
        print(json.dumps(told))
        return
    lines = {name: load for name, load in LINES.items() if not only or any(part in name for part in only)}
    if lines:
        # No disk: a file of random weights is the same each time, and the next run would find its prompts.
        server = Server([*common, "--cache-disk", "0"], log, before, options.source)
        tell_start(server, calls)
        try:
            for name, load in lines.items():
                told.append(ask(server, name, load, options.vocab, calls))
        finally:
            server.stop()
    kept = {name: load for name, load in KEPT.items() if not only or any(part in name for part in only)}
    folder = options.folder / "rekindle-bench-snapshots"
    for turn in ("before", "after") if kept else ():
        server = Server([*common, "--cache-dir", str(folder)], log, before, options.source)
        print(f"{turn} the restart: ", end="")
        tell_start(server, calls)
        try:
            for name, load in kept.items():
                told.append(ask(server, f"{turn} {name}", load, options.vocab, calls))
        finally:
            server.stop()
    shutil.rmtree(folder, ignore_errors=True)
    (out / f"{options.name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
