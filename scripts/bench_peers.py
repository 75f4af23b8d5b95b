"""Rekindle beside llama.cpp (the `xllamacpp` package) on this machine: the same file, the same work, in one run.

    .venv/bin/pip install --no-deps xllamacpp==2026.10.11549
    .venv/bin/python scripts/bench_peers.py [MODEL.gguf]

Each server is measured in turn, several rounds, so that a busy moment of the machine does not fall on one alone; the
best of each counts. Prompts are fresh random tokens. One line of JSON comes last.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import xllamacpp

from rekindle.bench.speed import measure
from rekindle.build import build_engine, embedded_model
from rekindle.config import Config

PROMPT, ANSWER, ROUNDS = 256, 48, 4
THREADS = os.cpu_count() or 1


class Peer:
    """llama.cpp's own server inside this process."""

    def __init__(self, model: Path, vocab: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx = 2048
        params.n_parallel = 1
        params.cpuparams.n_threads = THREADS
        params.cpuparams_batch.n_threads = THREADS
        params.warmup = True
        self._server = xllamacpp.Server(params)
        self._vocab = vocab

    def measure(self, rng: np.random.Generator) -> tuple[float, float]:
        body = {
            "prompt": rng.integers(0, self._vocab, PROMPT).tolist(),
            "n_predict": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._server.handle_completions(body)
        timings = answer["timings"]
        return timings["prompt_per_second"], timings["predicted_per_second"]


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else embedded_model()
    torch.set_num_threads(THREADS)
    built = build_engine(Config(model=model, context=1024, sequences=1, cache_ram=0, threads=THREADS))
    peer = Peer(model, built.model.spec.vocab)
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        speed = measure(built, rng, PROMPT, ANSWER, 1)
        ours.append((speed.prefill, speed.decode))
        theirs.append(peer.measure(rng))
        time.sleep(0.5)  # llama.cpp's threads spin for a moment after their work
    built.engine.stop()
    best = {"rekindle": list(map(max, zip(*ours, strict=True))), "llama.cpp": list(map(max, zip(*theirs, strict=True)))}
    print(f"{'':12s}{'prefill ' + str(PROMPT):>16s}{'decode':>12s}   tok/s, best of {ROUNDS}, {THREADS} threads")
    for name, (prefill, decode) in best.items():
        print(f"{name:12s}{prefill:16.1f}{decode:12.1f}")
    print(json.dumps({"model": model.name, "machine": platform.processor() or platform.machine(), **best}))


if __name__ == "__main__":
    main()
