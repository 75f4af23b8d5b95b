"""Three nodes of a real Ray cluster on one host: three stages of one model, or two whole replicas behind one router."""

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
from rekindle.engine.router import Router
from rekindle.engine.types import Sampling
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


def send(built: Built, seed: int, at_token: Callable[[int], object] | None = None) -> Answer:
    tokens = tuple(np.random.default_rng(seed).integers(0, 2000, 150).tolist())
    prompt = Prompt(tokens, (Boundary(100, BoundaryKind.SYSTEM),))
    sampling = Sampling(temperature=0.9, seed=seed)
    return Answer(built.entry, prompt, sampling, at_token, patience=120, max_tokens=10)


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
    together = [send(built, seed) for seed in (1, 2, 3)]
    assert [answer.tokens for answer in together] == [send(truth, seed).tokens for seed in (1, 2, 3)]
    assert send(built, 1).finished.cache.restored_from["ram"] == 150
    killed = send(built, 4, at_token=lambda n: n == 4 and ray.kill(stages[2]._session._actor))
    assert killed.tokens == send(truth, 4).tokens
    assert holds_nothing(built.engine)
    built.stop()


def test_replicas_divide_the_nodes_and_share_what_they_have_computed(golden: Path, cluster: str, truth: Built) -> None:
    built = build(golden, ray=cluster, replicas=2)
    assert isinstance(built.entry, Router)
    engines = built.entry.replicas
    assert sorted(len(engine.pipeline.stages) for engine in engines) == [1, 2]
    together = [send(built, seed) for seed in (5, 6, 7, 8)]
    assert [answer.tokens for answer in together] == [send(truth, seed).tokens for seed in (5, 6, 7, 8)]
    assert all(engine.status().computed_tokens for engine in engines), "both have worked"
    for seed in (5, 6, 7, 8):
        assert send(built, seed).finished.cache.restored_from["ram"] == 150
    built.stop()


def test_more_replicas_than_nodes_are_refused(golden: Path, cluster: str) -> None:
    with pytest.raises(BadConfig, match="--replicas is 4, each needs a device of its own"):
        build(golden, ray=cluster, replicas=4)
