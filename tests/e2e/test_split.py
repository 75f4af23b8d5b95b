"""However the model is split, over processes or not: the same tokens and the same logits."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.answers import Answer
from support.snapshot_lab import holds_nothing

from rekindle.build import Built, StageConfig, build_engine
from rekindle.build.shards import Shards
from rekindle.build.stage import load_stage
from rekindle.config import Config, parse_shards
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.router import Router
from rekindle.engine.types import CacheReport, Sampling
from rekindle.errors import BadConfig, LinkRefused, StageLost
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.shards import keygen, start_shard
from rekindle.snapshots.disk import DiskStore
from rekindle.spec import Span
from rekindle.stages import Pipeline
from rekindle.weights import open_weights

ONE, TWO, THREE = ("cpu",), ("cpu", "cpu@a"), ("cpu@a", "cpu", "cpu@b")
FILES = {"dense": "tiny-qwen35-Q4_K_M.gguf", "moe": "tiny-qwen35moe-Q4_K_M.gguf"}
GROWTH = 40  # tokens that a conversation grows by


def shard_command(model: Path) -> str:
    return f"{sys.executable} -m rekindle.cli shard {model}"


def build(model: Path, devices: tuple[str, ...], cache_dir: Path | None = None, **changes: Any) -> Built:
    named = sorted({name.partition("@")[2] for name in devices} - {""})
    shards = parse_shards([f"{name}={shard_command(model)}" for name in named], [], [])
    wishes: dict[str, Any] = dict(context=1024, sequences=4, grid=64, threads=1, cache_dir=cache_dir)
    return build_engine(Config(model=model, devices=devices, **{**wishes, "shards": shards, **changes}))


def send(built: Built | ByHand, tokens: list[int], boundary: int) -> Answer:
    prompt = Prompt(tuple(tokens), (Boundary(boundary, BoundaryKind.SYSTEM),))
    entry = built.entry if isinstance(built, Built) else built.engine
    return Answer(entry, prompt, Sampling(temperature=0, logprobs=5), max_tokens=6)


def logits_of(answer: Answer) -> np.ndarray:
    """[tokens, 5]: the log-probabilities of the likeliest."""
    return np.array([[p for _, p in row.logprob.top] for row in answer.rows if row.logprob is not None])


def talk(seed: int, length: int = 150) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2000, length + GROWTH).tolist()


def ask(built: Built | ByHand, seed: int, grown: bool = False) -> Answer:
    """The beginning of a conversation, or one turn more of it. Waits for the answer."""
    answer = send(built, talk(seed) if grown else talk(seed)[:-GROWTH], boundary=150)
    assert answer.finished.cache is not None
    return answer


def ask_together(built: Built | ByHand, seeds: list[int]) -> list[Answer]:
    answers = [send(built, talk(seed), boundary=150) for seed in seeds]
    assert all(answer.finished.cache for answer in answers)
    return answers


def same_bits(a: Answer, b: Answer) -> bool:
    return a.tokens == b.tokens and np.array_equal(logits_of(a), logits_of(b))


def leaks_nothing(built: Built | ByHand) -> bool:
    return holds_nothing(built.engine)


class Truth:
    """What one stage without any cache to restore from answers, computed once."""

    def __init__(self, model: Path) -> None:
        self._built = build(model, ONE, cache_ram=0)
        self._known: dict[tuple[int, bool], Answer] = {}

    def of(self, seed: int, grown: bool = False) -> Answer:
        if (seed, grown) not in self._known:
            self._known[seed, grown] = ask(self._built, seed, grown)
        return self._known[seed, grown]

    def stop(self) -> None:
        self._built.stop()


@pytest.fixture(scope="module", params=["dense", "moe"])
def kind(request: Any, golden: Path) -> Iterator[tuple[Path, Truth]]:
    model = golden / FILES[request.param]
    truth = Truth(model)
    yield model, truth
    truth.stop()


def test_every_split_gives_the_bits_of_one_stage_cold_from_ram_and_from_anothers_disk(
    kind: tuple[Path, Truth], tmp_path: Path
) -> None:
    """Four servers, one after the other on one cache folder: one stage, two, three with two shards, one again."""
    model, truth = kind
    for seed, devices in enumerate([ONE, TWO, THREE, ONE]):
        built = build(model, devices, tmp_path)
        assert len(built.plan.stages) == len(devices)
        before = [old for old in range(seed) if old >= seed - 2]  # what the two servers before have saved
        for old in before:
            restored = ask(built, old, grown=True)
            assert restored.finished.cache.restored_from["disk"] >= 150, f"{devices} finds what another split saved"
            assert same_bits(restored, truth.of(old, grown=True))
        cold = ask(built, seed)
        assert cold.finished.cache.restored == 0
        assert same_bits(cold, truth.of(seed))
        if seed < 3:  # the last server's conversation is not gone on with from disk, so it goes on from RAM
            again = ask(built, seed)
            assert again.finished.cache.restored_from["ram"] == 150
            assert same_bits(again, truth.of(seed))
        assert leaks_nothing(built)
        built.stop()


SEEDS = [10, 11, 12, 13]


def check_together(built: Built | ByHand, truth: Truth) -> list[CacheReport]:
    """Many at once get the tokens of each alone, and logits that differ by the rounding of a batch."""
    answers = ask_together(built, SEEDS)
    for answer, seed in zip(answers, SEEDS, strict=True):
        alone = truth.of(seed, grown=True)
        assert answer.tokens == alone.tokens
        assert np.allclose(logits_of(answer), logits_of(alone), atol=1e-3)
    assert leaks_nothing(built)
    return [answer.finished.cache for answer in answers]


def test_a_split_answers_many_at_once_like_one_stage_answers_each_alone(
    kind: tuple[Path, Truth], tmp_path: Path
) -> None:
    """Cold and from RAM in two stages, from its disk in three with two shards, from RAM and from the disk in one."""
    model, truth = kind
    for devices in (TWO, THREE, ONE):
        built = build(model, devices, tmp_path)
        caches = check_together(built, truth)
        assert all((cache.restored > 0) == (devices != TWO) for cache in caches)
        assert all(cache.restored_from["disk"] > 0 for cache in caches if devices != TWO)
        assert all(cache.restored_from["ram"] > 0 for cache in check_together(built, truth))
        built.stop()


class ByHand:
    """Two stages here and one in a shard between them, which no list of devices of one CPU can name."""

    def __init__(self, model: Path, cache_dir: Path) -> None:
        file = open_weights(model)
        orders = [StageConfig("cpu", Span(a, b), 4, 64) for a, b in ((0, 3), (3, 6), (6, 8))]
        self._shards = Shards(
            Config(model=model, threads=1, shards=parse_shards([f"m={shard_command(model)}"], [], []))
        )
        self._shards.start(["cpu@m"], [orders[1]])
        middle = self._shards.connect("cpu@m", orders[1], file.fingerprint())
        stages = [load_stage(file, orders[0]), middle, load_stage(file, orders[2])]
        prefixes = PrefixCache(local_tiers(1 << 28, DiskStore(cache_dir, "f" * 16, 1 << 30)))
        self.engine = Engine(Pipeline(stages), prefixes, EngineSettings(context=1024, grid=64)).start()

    def stop(self) -> None:
        self.engine.stop()
        self._shards.stop()


def test_three_stages_of_which_one_is_remote_give_the_bits_of_one_stage(
    kind: tuple[Path, Truth], tmp_path: Path
) -> None:
    model, truth = kind
    built = ByHand(model, tmp_path)
    assert same_bits(ask(built, 30), truth.of(30))
    from_ram = ask(built, 30)
    assert from_ram.finished.cache.restored_from["ram"] == 150
    assert same_bits(from_ram, truth.of(30))
    check_together(built, truth)
    built.stop()
    built = ByHand(model, tmp_path)
    from_disk = ask(built, 30, grown=True)
    assert from_disk.finished.cache.restored_from["disk"] >= 150
    assert same_bits(from_disk, truth.of(30, grown=True))
    assert all(cache.restored_from["disk"] > 0 for cache in check_together(built, truth))
    built.stop()


def test_two_replicas_behind_one_door_share_what_they_have_computed(golden: Path) -> None:
    model = golden / FILES["dense"]
    built = build(model, TWO, replicas=2)
    assert isinstance(built.entry, Router)
    here, there = built.entry.replicas
    assert [len(engine.pipeline.stages) for engine in (here, there)] == [1, 1]
    # The same conversation on one after the other: what one has computed, the other restores.
    for engine, restored in ((here, 0), (there, 150)):
        answer = send(replace(built, engine=engine, router=None), talk(40)[:150], boundary=100)
        assert answer.finished.cache.restored_from["ram"] == restored
    # Two prompts that nobody knows, at once: each replica runs one.
    before = [engine.status().computed_tokens for engine in (here, there)]
    both = [send(built, talk(seed), boundary=150) for seed in (41, 42)]
    assert all(answer.finished.cache.restored == 0 for answer in both)
    after = [engine.status().computed_tokens for engine in (here, there)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [190, 190]
    assert built.entry.status().slots == 8
    built.stop()


# A shard that somebody else started


class Far:
    """A shard behind an encrypted link, as its owner would run it."""

    def __init__(self, model: Path, folder: Path, span: str = "4:8") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.head_key, self.shard_key = folder / "head.key", folder / "shard.key"
        keygen(self.head_key)
        keygen(self.shard_key)
        stage = f"--span {span} --device cpu --pages 64 --slots 4 --threads 1 --listen {self.endpoint}"
        keys = f"--key {self.shard_key} --allow {self.head_key}.pub"
        self._command = [*shard_command(model).split(), *stage.split(), *keys.split()]
        self.process = start_shard(self._command, self.endpoint, deadline=60)

    def restart(self) -> None:
        self.process = start_shard(self._command, self.endpoint, deadline=60)

    def build(self, model: Path, head_key: Path | None = None) -> Built:
        shards = parse_shards([f"far={self.endpoint}"], ["far=1GiB"], [f"far={self.shard_key}.pub"])
        return build(model, ("cpu", "cpu@far"), split="4,4", shards=shards, link_key=head_key or self.head_key)


def test_a_running_shard_serves_over_an_encrypted_link_and_is_found_again_after_its_restart(
    dense: Path, tmp_path: Path
) -> None:
    truth, far = Truth(dense), Far(dense, tmp_path)
    built = far.build(dense)
    assert same_bits(ask(built, 20), truth.of(20))
    os.kill(far.process.pid, signal.SIGKILL)
    answer = send(built, talk(21), boundary=150)
    far.restart()
    assert answer.tokens == truth.of(21, grown=True).tokens
    built.stop()
    assert far.process.returncode is None, "a shard that the head did not start is not stopped by it"
    far.process.stop()
    truth.stop()


def test_a_running_shard_refuses_another_span_and_another_head(dense: Path, tmp_path: Path) -> None:
    far = Far(dense, tmp_path, span="3:8")
    with pytest.raises(LinkRefused, match=r"span: shard has \[3, 8\), head expects \[4, 8\)"):
        far.build(dense)
    stranger = tmp_path / "stranger.key"
    keygen(stranger)
    with pytest.raises(LinkRefused, match="does not allow this head's key"):
        far.build(dense, stranger)
    far.process.stop()


# What cannot be, said at once


@pytest.fixture(scope="module")
def dense(golden: Path) -> Path:
    return golden / FILES["dense"]


@pytest.mark.parametrize(
    ("devices", "split", "says"),
    [
        (("tpu:0",), "auto", "'tpu:0' is no device"),
        (("cuda:7",), "auto", "this machine has 0 such devices|needs a torch"),
        (("cpu", "cpu"), "auto", "names cpu more than once"),
        (("cpu", "cpu@b"), "auto", "lies in the shard 'b', --shard gives a"),
        (("cpu",), "auto", "--shard gives a, --devices puts nothing there"),
        (("cpu", "cpu@a"), "8,0", "0 among 8,0"),
        (("cpu", "cpu@a"), "1.0,-1.0", "-1.0 among 1.0,-1.0 must be a finite number above 0"),
        (("cpu", "cpu@a"), "1.0", "--split 1.0 is for 1 device, --devices names 2"),
        (("cpu", *(f"cuda:{i}@a" for i in range(8))), "auto", "9 devices cannot share 8 layers"),
    ],
)
def test_devices_that_cannot_be_are_refused_before_anything_is_started(
    dense: Path, devices: tuple[str, ...], split: str, says: str
) -> None:
    shards = parse_shards(["a=/nowhere/no-such-program"], ["a=1GiB"], [])
    with pytest.raises(BadConfig, match=says):
        build(dense, devices, split=split, shards=shards)


@pytest.mark.parametrize(
    ("shard", "error", "says"),
    [
        ("a=/nowhere/no-such-program", BadConfig, "no-such-program"),
        ("a=false", StageLost, "'false' ended with status 1 before it was ready"),
    ],
)
def test_a_shard_that_cannot_be_started_is_named(dense: Path, shard: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build(dense, TWO, shards=parse_shards([shard], [], []))


def test_more_replicas_than_devices_are_refused(dense: Path) -> None:
    with pytest.raises(BadConfig, match="--replicas is 3, each needs a device of its own and there is only cpu, cpu@a"):
        build(dense, TWO, replicas=3)


def test_a_shard_of_another_model_is_refused_with_both_sides_named(dense: Path, golden: Path) -> None:
    command = shard_command(golden / FILES["moe"])
    with pytest.raises(LinkRefused, match=r"model fingerprint: shard has .* head expects"):
        build(dense, TWO, shards=parse_shards([f"a={command}"], [], []))


@pytest.mark.parametrize(
    ("shards", "memory", "says"),
    [
        (["lab"], [], "'lab' is not NAME=VALUE"),
        (["a=x", "a=y"], [], "gives a name twice"),
        (["a=x"], ["b=1GiB"], "--shard-memory names b; --shard gives a"),
        (["a=x"], ["a=much"], "'much' is not a size"),
    ],
)
def test_shard_settings_that_do_not_read_are_refused(shards: list[str], memory: list[str], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        parse_shards(shards, memory, [])
