"""The part of the package xllamacpp that scripts/bench_peers.py calls, answered at once and with nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class CommonParams:
    def __init__(self) -> None:
        self.model = SimpleNamespace(path="")
        self.n_ctx, self.n_parallel, self.warmup = 0, 1, False
        self.cpuparams, self.cpuparams_batch = SimpleNamespace(n_threads=0), SimpleNamespace(n_threads=0)


class Server:
    def __init__(self, params: CommonParams) -> None:
        assert params.model.path and params.n_ctx > 0 and params.cpuparams.n_threads > 0

    def handle_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["prompt"] and body["n_predict"] > 0
        return {"content": ""}
