"""Two models behind one door, and memory for one: whoever asks gets the answer of the model that was named."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rekindle.api import Guard, ModelHost, create_app
from rekindle.build import ConfiguredModel, Preset, TextOptions, make_sources
from rekindle.build.memory import Budgets
from rekindle.config import Config

SWITCHES = 10
RAM = 128 << 20  # bytes: one of the two fits
FILES = {"dense": "tiny-qwen35-Q4_K_M.gguf", "moe": "tiny-qwen35moe-Q8_0.gguf"}


class Door:
    def __init__(self, host: ModelHost, sources: list[ConfiguredModel]) -> None:
        self.host, self.sources = host, sources
        self.client = TestClient(create_app(host, Guard()))

    def ask(self, model: str, prompt: str) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.client.get("/v1/models").json()["data"]}


@contextmanager
def open_door(golden: Path, names: list[str], cache: Path | None = None) -> Iterator[Door]:
    common = {"devices": ("cpu",), "context": 512, "sequences": 4, "threads": 1, "ram": RAM, "cache_ram": 32 << 20}
    presets = [
        Preset(Config(model=golden / FILES[name], cache_dir=cache, **common), name)  # type: ignore[arg-type]
        for name in names
    ]
    sources = make_sources(presets, TextOptions())
    door = Door(ModelHost(sources).start(), sources)
    try:
        with door.client:
            yield door
    finally:
        door.host.stop()
        gc.unfreeze()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def our_threads() -> list[str]:
    """Without those of the clients and of the event loop, which come and go."""
    others = ("AnyIO", "asyncio", "ThreadPoolExecutor")
    return sorted(each.name for each in threading.enumerate() if not each.name.startswith(others))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


PROMPTS = [f"{word} and the rest of it, {word} once more" for word in ("river", "mountain")]


def test_ten_switches_under_load_give_every_answer_of_the_right_model_and_leave_nothing_behind(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.build.source.free_memory", lambda: Budgets(RAM, {}))
    expected = {}
    for name in FILES:
        with open_door(golden, [name]) as alone:
            expected |= {(name, prompt): alone.ask("any", prompt)["choices"][0]["text"] for prompt in PROMPTS}
    assert expected["dense", PROMPTS[0]] != expected["moe", PROMPTS[0]], "the two can be told apart"
    with open_door(golden, list(FILES), tmp_path) as door, ThreadPoolExecutor(8) as clients:
        engines, sizes, threads, files = [], [], [], []
        while sum(slot.loads for slot in door.host.slots) <= SWITCHES:
            turn = len(sizes)
            first, second = ("moe", "dense") if turn % 2 == 0 else ("dense", "moe")
            asked = [(name, prompt) for prompt in PROMPTS for name in (first, first, second)]
            answers = clients.map(lambda each: door.ask(*each), asked)
            for which, answer in zip(asked, answers, strict=True):
                assert answer["choices"][0]["text"] == expected[which]
            restored = door.ask(first, PROMPTS[0])["rekindle"]["restored"]
            assert sum(restored.values()), "snapshots outlive an unload"
            engines += [weakref.ref(source.built.engine) for source in door.sources if source.built is not None]
            sizes.append(resident())
            threads.append(our_threads())
            files.append(descriptors())
        alive = {id(engine) for ref in engines if (engine := ref()) is not None}
        assert len(alive) == 1, "an engine that was stopped is gone"
        assert sizes[-1] - sizes[1] < 48 << 20, [size >> 20 for size in sizes]
        # Threads of pools start when they are first needed; one left behind by every switch would be ten.
        assert len(threads[-1]) <= max(map(len, threads[:2])) + SWITCHES // 2, threads
        assert files[-1] <= max(files[:2]), files
        states = door.states()
        assert sorted(states[name] for name in FILES) == ["ready", "unloaded"]
        page = door.client.get("/metrics").text
        assert f'rekindle_model_loads_total{{model="dense",outcome="ready"}} {door.host.slots[0].loads}.0' in page
        unknown = door.client.post("/v1/completions", json={"model": "gpt", "prompt": "x"})
        assert unknown.status_code == 404
        assert "served: dense, moe" in unknown.json()["error"]["message"]


def test_models_that_fit_together_stay_loaded_together(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.build.source.free_memory", lambda: Budgets(4 * RAM, {}))
    with open_door(golden, list(FILES)) as door:
        for name in ("moe", "dense", FILES["moe"].removesuffix(".gguf")):
            door.ask(name, PROMPTS[0])
        assert [slot.loads for slot in door.host.slots] == [1, 1]
        plans = [source.built.plan for source in door.sources if source.built is not None]
        assert sum(plan.host_total for plan in plans) <= 4 * RAM


def test_a_file_that_went_bad_fails_its_own_requests_only(golden: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes((golden / FILES["moe"]).read_bytes())
    FILES["bad"] = str(bad)
    try:
        with open_door(golden, ["dense", "bad"]) as door:
            bad.write_bytes(b"GGUF and no more")
            failed = door.client.post("/v1/completions", json={"model": "bad", "prompt": "x"})
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_not_loaded")
            assert "bad.gguf" in failed.json()["error"]["message"]
            assert str(tmp_path) not in failed.text, "clients learn nothing of folders"
            assert door.ask("dense", PROMPTS[0])["choices"]
            assert door.states()["bad"] == "failed"
            assert door.client.get("/ready").status_code == 200
    finally:
        del FILES["bad"]
