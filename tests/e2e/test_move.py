"""A shard that dies and cannot be started again: its layers move, and the stream goes on where it was."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.answers import Answer
from support.snapshot_lab import holds_nothing

from rekindle.build import Built, build_engine
from rekindle.config import Config, parse_shards
from rekindle.engine.types import Finished, Sampling
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.shards import start_shard
from rekindle.stages import LocalStage

FILES = {"dense": "tiny-qwen35-Q4_K_M.gguf", "moe": "tiny-qwen35moe-Q4_K_M.gguf"}
PROMPTS = [
    Prompt(tuple((11 * i + 29 * j) % 2000 for i in range(130 + 50 * j)), (Boundary(100, BoundaryKind.SYSTEM),))
    for j in range(2)
]
LENGTH = 24


def only_once(model: Path, folder: Path) -> str:
    """A shard's command that works the first time it is run."""
    script = folder / "only_once.sh"
    script.write_text(f'mkdir {folder}/used || exit 3\nexec {sys.executable} -m rekindle.cli shard {model} "$@"\n')
    return f"sh {script}"


def build(model: Path, devices: tuple[str, ...], shards: list[str], memory: list[str], **changes: Any) -> Built:
    wishes: dict[str, Any] = dict(context=1024, sequences=4, grid=64, threads=1)
    given = parse_shards(shards, memory, [])
    return build_engine(Config(model=model, devices=devices, shards=given, **{**wishes, **changes}))


def send(built: Built, prompt: Prompt, at_token: Callable[[int], object] | None = None) -> Answer:
    return Answer(built.engine, prompt, Sampling(temperature=0.8, seed=7), at_token, max_tokens=LENGTH)


def kill(built: Built) -> None:
    os.kill(built.hosts.pid("a"), signal.SIGKILL)  # type: ignore[union-attr]


def undisturbed_run(model: Path) -> list[list[int]]:
    built = build(model, ("cpu",), [], [])
    tokens = [send(built, prompt).tokens for prompt in PROMPTS]
    built.stop()
    return tokens


@pytest.mark.parametrize(("kind", "devices"), [("dense", ("cpu", "cpu@a")), ("moe", ("cpu@a", "cpu"))])
def test_the_span_moves_to_a_neighbour_and_no_token_is_repeated_or_lost(
    golden: Path, kind: str, devices: tuple[str, ...], tmp_path: Path
) -> None:
    model = golden / FILES[kind]
    undisturbed = undisturbed_run(model)
    built = build(model, devices, [f"a={only_once(model, tmp_path)}"], [])
    first = send(built, PROMPTS[0], at_token=lambda n: n == 5 and kill(built))
    second = send(built, PROMPTS[1])
    assert [first.tokens, second.tokens] == undisturbed
    assert all(isinstance(answer.last, Finished) for answer in (first, second))
    assert all(isinstance(stage, LocalStage) for stage in built.engine.pipeline.stages)
    assert [send(built, prompt).tokens for prompt in PROMPTS] == undisturbed
    assert built.engine.status().restored_tokens >= 2 * 100
    assert holds_nothing(built.engine)
    built.stop()


def test_a_shard_of_somebody_else_that_stays_away_is_replaced_too(golden: Path, tmp_path: Path) -> None:
    model = golden / FILES["dense"]
    endpoint = f"ipc://{tmp_path}/far"
    stage = f"--span 4:8 --device cpu --pages 64 --slots 4 --threads 1 --listen {endpoint}"
    far = start_shard(f"{sys.executable} -m rekindle.cli shard {model} {stage}".split(), endpoint, deadline=60)
    built = build(model, ("cpu", "cpu@far"), [f"far={endpoint}"], ["far=1GiB"], split="4,4")
    before = send(built, PROMPTS[0]).tokens
    far.stop()
    assert send(built, PROMPTS[0]).tokens == before
    assert isinstance(built.engine.pipeline.stages[1], LocalStage)
    built.stop()
