"""What one decode step pays for a link: round trips of a one-row forward to a shard in another process.

    python scripts/bench_link.py [--hidden 2048] [--rows 1] [--steps 3000] [--tcp]

The stage at the other end gives its hidden rows back, so all that is measured is the link. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rekindle.batch import Batch, Segment
from rekindle.shards import (
    HeadKeys,
    RemoteStage,
    ShardKeys,
    ShardServer,
    Terms,
    serve_forever,
    shared_keys,
    start_shard,
)
from rekindle.snapshots.types import Part
from rekindle.spec import Span
from rekindle.stages.types import PageCount, PendingTokens, StageOutput

SPAN = Span(1, 2)
GOAL = 300.0  # microseconds, the median round trip over ipc at hidden 2048


class MirrorStage:
    """Gives back what it gets."""

    span, slots, device = SPAN, 1, "cpu"

    def forward(self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None = None) -> StageOutput:
        return StageOutput(hidden, None)

    def open(self, slot: int) -> None: ...
    def close(self, slot: int) -> None: ...
    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def rewind(self, slot: int, position: int) -> None: ...
    def stop(self) -> None: ...

    def capture(self, slot: int) -> Sequence[Part]:
        return []

    def pages(self) -> PageCount:
        return PageCount(0, 0, 0)


def host(endpoint: str, key: Path) -> None:
    torch.set_num_threads(1)
    pair = shared_keys(key)
    server = ShardServer(
        {"mirror": MirrorStage()},
        endpoint,
        fingerprint="mirror",
        hidden_dtype="bfloat16",
        kv_dtype="bfloat16",
        keys=ShardKeys(pair, frozenset({pair.public})) if endpoint.startswith("tcp://") else None,
    )
    serve_forever(server)


def measure(stage: RemoteStage, hidden: int, rows: int, steps: int) -> list[float]:
    x = torch.randn(rows, hidden).to(torch.bfloat16)
    times = []
    for step in range(steps + steps // 10):
        batch = Batch((Segment(0, step * rows, tuple(range(rows))),))
        if not step:
            assert torch.equal(stage.forward(batch, x).hidden, x), "the mirror is blind"
            continue
        begin = time.perf_counter()
        stage.forward(batch, x)
        if step >= steps // 10:  # the first tenth warms up
            times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tcp", action="store_true", help="loopback, with CURVE, instead of ipc")
    parser.add_argument("--host", nargs=2, metavar=("ENDPOINT", "KEY"), help=argparse.SUPPRESS)  # the other process
    wishes = parser.parse_args()
    if wishes.host:
        host(wishes.host[0], Path(wishes.host[1]))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        endpoint = "tcp://127.0.0.1:*" if wishes.tcp else f"ipc://{folder}/mirror"
        pair = shared_keys(key := Path(folder) / "link.key")
        shard = start_shard([sys.executable, __file__, "--host", endpoint, str(key)], None, deadline=60)
        keys = HeadKeys(pair, pair.public) if wishes.tcp else None
        stage = RemoteStage(shard.endpoint, "mirror", Terms("mirror", SPAN, "bfloat16", "bfloat16", 1), keys=keys)
        times = measure(stage, wishes.hidden, wishes.rows, wishes.steps)
        stage.stop()
        shard.stop()
    median, p99 = statistics.median(times), times[int(len(times) * 0.99)]
    result = {
        "transport": "tcp" if wishes.tcp else "ipc",
        "hidden": wishes.hidden,
        "rows": wishes.rows,
        "steps": len(times),
        "median_us": round(median, 1),
        "p99_us": round(p99, 1),
        "goal_us": GOAL,
    }
    print(f"round trip of {wishes.rows} x {wishes.hidden} bf16: median {median:.0f} µs, p99 {p99:.0f} µs")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
