"""Three nodes of a real Ray cluster on one host: three stages of one model, or two whole replicas behind one door."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.build import Built, build_engine
from rekindle.config import Config
from rekindle.engine.router import Router
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.errors import BadConfig
from rekindle.prompt import Boundary, BoundaryKind, Prompt

os.environ["RAY_AUTH_MODE"] = "disabled"  # or it would write a token into the home folder
ray = pytest.importorskip("ray", reason="Ray is optional: pip install 'rekindle[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Four CPUs in all: one is left for an actor that has to move."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def build(golden: Path, **wishes: Any) -> Built:
    model = golden / "tiny-qwen35-Q4_K_M.gguf"
    return build_engine(Config(model=model, context=512, sequences=4, grid=64, threads=1, **wishes))


class Answer:
    def __init__(self, built: Built, seed: int, at_token: Any = None) -> None:
        self._events: list[Event] = []
        self._at_token = at_token
        self._done = threading.Event()
        tokens = tuple(np.random.default_rng(seed).integers(0, 2000, 150).tolist())
        prompt = Prompt(tokens, (Boundary(100, BoundaryKind.SYSTEM),))
        sampling = Sampling(temperature=0.9, seed=seed)
        built.door.submit(Request(str(id(self)), prompt, sampling, 10, frozenset(), sink=self._take))

    def _take(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Token) and self._at_token is not None and len(self._events) == 5:
            self._at_token()
        if isinstance(event, Finished | Failed):
            self._done.set()

    @property
    def last(self) -> Finished:
        assert self._done.wait(120), "a request hangs"
        last = self._events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def tokens(self) -> list[int]:
        assert self.last
        return [event.token for event in self._events if isinstance(event, Token)]


@pytest.fixture(scope="module")
def truth(golden: Path) -> Iterator[Built]:
    built = build(golden)
    yield built
    built.stop()


def test_three_stages_on_three_nodes_answer_like_one_also_when_an_actor_dies(
    golden: Path, cluster: str, truth: Built
) -> None:
    built = build(golden, ray=cluster)
    stages: Any = built.engine.pipeline.stages
    assert len({stage.device.partition(" ")[0] for stage in stages}) == 3
    together = [Answer(built, seed) for seed in (1, 2, 3)]
    assert [answer.tokens for answer in together] == [Answer(truth, seed).tokens for seed in (1, 2, 3)]
    assert Answer(built, 1).last.cache.restored_ram == 150
    killed = Answer(built, 4, at_token=lambda: ray.kill(stages[2]._session._actor))
    assert killed.tokens == Answer(truth, 4).tokens
    assert all(stage.pages().used == 0 for stage in built.engine.pipeline.stages)
    built.stop()


def test_replicas_divide_the_nodes_and_share_what_they_have_computed(golden: Path, cluster: str, truth: Built) -> None:
    built = build(golden, ray=cluster, replicas=2)
    assert isinstance(built.door, Router)
    engines = built.door.replicas
    assert sorted(len(engine.pipeline.stages) for engine in engines) == [1, 2]
    together = [Answer(built, seed) for seed in (5, 6, 7, 8)]
    assert [answer.tokens for answer in together] == [Answer(truth, seed).tokens for seed in (5, 6, 7, 8)]
    assert all(engine.status().computed_tokens for engine in engines), "both have worked"
    for seed in (5, 6, 7, 8):
        assert Answer(built, seed).last.cache.restored_ram == 150
    built.stop()


def test_more_replicas_than_nodes_are_refused(golden: Path, cluster: str) -> None:
    with pytest.raises(BadConfig, match="--replicas is 4, each needs a device of its own"):
        build(golden, ray=cluster, replicas=4)
