"""Stages on the nodes of a real Ray cluster: the answers of one stage, also when an actor dies on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.answers import Answer
from support.snapshot_lab import holds_nothing

from rekindle.build import Built, build_engine
from rekindle.config import Config
from rekindle.engine.types import Sampling
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


def send(built: Built, seed: int, at_token: Callable[[int], object] | None = None) -> Answer:
    tokens = tuple(np.random.default_rng(seed).integers(0, 2000, 150).tolist())
    prompt = Prompt(tokens, (Boundary(100, BoundaryKind.SYSTEM),))
    sampling = Sampling(temperature=0, logprobs=5)
    return Answer(built.engine, prompt, sampling, at_token, patience=120, max_tokens=10)


def test_the_stages_lie_on_both_nodes_and_answer_bit_for_bit(spread: Built, alone: Built) -> None:
    nodes = {stage.device.partition(" ")[0] for stage in spread.engine.pipeline.stages}
    assert len(spread.plan.stages) == 2
    assert len(nodes) == 2
    cold = send(spread, 1)
    assert cold.finished and cold.rows == send(alone, 1).rows  # tokens and log-probabilities
    again = send(spread, 1)
    assert again.finished.cache.restored_from["ram"] == 150
    assert again.rows == cold.rows


def test_several_requests_at_once_give_the_tokens_of_each_alone(spread: Built, alone: Built) -> None:
    together = [send(spread, seed) for seed in (2, 3, 4)]
    for answer, seed in zip(together, (2, 3, 4), strict=True):
        expected = send(alone, seed)
        assert answer.finished and answer.tokens == expected.tokens


def test_an_actor_killed_in_the_middle_of_an_answer_is_replaced_and_the_answer_goes_on(
    spread: Built, alone: Built
) -> None:
    stage: Any = spread.engine.pipeline.stages[1]
    answer = send(spread, 5, at_token=lambda n: n == 4 and ray.kill(stage._session._actor))
    expected = send(alone, 5)
    assert answer.finished and answer.tokens == expected.tokens
    assert holds_nothing(spread.engine)


def test_settings_that_contradict_a_cluster_are_refused(moe: Path) -> None:
    with pytest.raises(BadConfig, match="--ray takes the devices of its nodes"):
        build_engine(Config(model=moe, devices=("cpu",), ray="auto"))
