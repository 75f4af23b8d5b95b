"""Stages on the nodes of a real Ray cluster: the answers of one stage, also when an actor dies on the way."""

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
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.errors import BadConfig
from rekindle.prompt import Boundary, BoundaryKind, Prompt

os.environ["RAY_AUTH_MODE"] = "disabled"  # or it would write a token into the home folder
ray = pytest.importorskip("ray", reason="Ray is optional: pip install 'rekindle[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes on this host, three CPUs in all: one is left for an actor that has to move."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def moe(golden: Path) -> Path:
    return golden / "tiny-qwen35moe-Q4_K_M.gguf"


def build(model: Path, address: str | None) -> Built:
    return build_engine(Config(model=model, context=512, sequences=4, grid=64, threads=1, ray=address))


@pytest.fixture(scope="module")
def alone(moe: Path) -> Iterator[Built]:
    built = build(moe, None)
    yield built
    built.stop()


@pytest.fixture(scope="module")
def spread(moe: Path, cluster: str) -> Iterator[Built]:
    built = build(moe, cluster)
    yield built
    built.stop()


class Answer:
    def __init__(self, built: Built, seed: int, length: int = 150, at_token: Any = None) -> None:
        self.events: list[Event] = []
        self._at_token = at_token
        self._done = threading.Event()
        tokens = tuple(np.random.default_rng(seed).integers(0, 2000, length).tolist())
        prompt = Prompt(tokens, (Boundary(100, BoundaryKind.SYSTEM),))
        sampling = Sampling(temperature=0, logprobs=5)
        built.engine.submit(Request(str(id(self)), prompt, sampling, 10, frozenset(), sink=self._take))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Token) and self._at_token is not None and len(self.tokens) == 4:
            self._at_token()
        if isinstance(event, Finished | Failed):
            self._done.set()

    def wait(self) -> Answer:
        assert self._done.wait(120), "a request hangs"
        assert isinstance(self.events[-1], Finished), self.events[-1]
        return self

    @property
    def tokens(self) -> list[Token]:
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def restored(self) -> int:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last.cache.restored_ram


def test_the_stages_lie_on_both_nodes_and_answer_bit_for_bit(spread: Built, alone: Built) -> None:
    nodes = {stage.device.partition(" ")[0] for stage in spread.engine.pipeline.stages}
    assert len(spread.plan.stages) == 2
    assert len(nodes) == 2
    cold = Answer(spread, 1).wait()
    assert cold.tokens == Answer(alone, 1).wait().tokens  # tokens and log-probabilities
    again = Answer(spread, 1).wait()
    assert again.restored == 150
    assert again.tokens == cold.tokens


def test_several_requests_at_once_give_the_tokens_of_each_alone(spread: Built, alone: Built) -> None:
    together = [Answer(spread, seed) for seed in (2, 3, 4)]
    for answer, seed in zip(together, (2, 3, 4), strict=True):
        expected = Answer(alone, seed).wait()
        assert [event.token for event in answer.wait().tokens] == [event.token for event in expected.tokens]


def test_an_actor_killed_in_the_middle_of_an_answer_is_replaced_and_the_answer_goes_on(
    spread: Built, alone: Built
) -> None:
    stage: Any = spread.engine.pipeline.stages[1]
    answer = Answer(spread, 5, at_token=lambda: ray.kill(stage._session._actor)).wait()
    expected = Answer(alone, 5).wait()
    assert [event.token for event in answer.tokens] == [event.token for event in expected.tokens]
    assert all(each.pages().used == 0 for each in spread.engine.pipeline.stages)


def test_settings_that_contradict_a_cluster_are_refused(moe: Path) -> None:
    with pytest.raises(BadConfig, match="--ray takes the devices of its nodes"):
        build_engine(Config(model=moe, devices=("cpu",), ray="auto"))
