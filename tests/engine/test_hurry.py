"""Threads that share the interpreter: those that nobody waits for give way to one that is in a hurry."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_lab import Answer, Lab, random_tokens

from rekindle import hurry
from rekindle.engine.admission import Admission
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.hurry import give_way, hurrying, let_pass
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.spec import Span
from rekindle.stages import Pipeline


def passes(waiting: threading.Thread, seconds: float = 60) -> bool:
    waiting.join(seconds)
    return not waiting.is_alive()


def test_a_piece_of_work_waits_until_nobody_is_in_a_hurry_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hurry, "MOST", 60)
    give_way()
    with hurrying:
        with hurrying:  # another engine
            pass
        waiting = threading.Thread(target=give_way, daemon=True)
        waiting.start()
        assert not passes(waiting, 0.05)
    assert passes(waiting)


def test_nobody_is_kept_waiting_for_good() -> None:
    with hurrying:
        began = time.monotonic()
        give_way()
        asyncio.run(let_pass())
        assert time.monotonic() - began >= hurry.MOST


def test_an_event_loop_goes_on_while_a_request_lets_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hurry, "MOST", 60)

    async def both() -> list[str]:
        done = list[str]()

        async def request() -> None:
            await let_pass()
            done.append("request")

        with hurrying:
            reading = asyncio.create_task(request())
            await asyncio.sleep(0.01)
            done.append("others")
        await reading
        return done

    assert asyncio.run(both()) == ["others", "request"]


def test_a_hurry_ends_with_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hurry, "MOST", 60)
    with pytest.raises(ValueError, match="on purpose"), hurrying:
        raise ValueError("on purpose")
    waiting = threading.Thread(target=give_way, daemon=True)
    waiting.start()
    assert passes(waiting)


def test_a_prompt_comes_into_its_slot_in_a_hurry_and_reads_give_way(
    make_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, prompt = Lab(make_tiny("dense")), Prompt(random_tokens(150, 1))
    engine = lab.engine(tmp_path)
    expected = Answer(engine, prompt).tokens
    engine.stop()

    ways, in_a_hurry, restore = list[str](), list[int](), Admission._restore
    monkeypatch.setattr(
        "rekindle.snapshots.loading.give_way", lambda: ways.append(threading.current_thread().name.rsplit("_", 1)[0])
    )

    monkeypatch.setattr(Pipeline, "async_steps", 1)  # as on a GPU

    def noted(admission: Admission, sequence: Any) -> Any:
        in_a_hurry.append(hurrying._count)
        return restore(admission, sequence)

    monkeypatch.setattr(Admission, "_restore", noted)
    engine = lab.engine(tmp_path)
    assert Answer(engine, prompt).tokens == expected
    engine.stop()
    assert {"rekindle-loader", "rekindle-disk-reader"} <= set(ways)
    assert in_a_hurry and all(in_a_hurry)


@pytest.mark.parametrize("device", ["cuda:0", "host:1 (cpu)"])
def test_a_launch_is_hurried_unless_it_is_all_of_the_work(
    make_tiny: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward of a stage in another process lasts until that one has answered."""
    stage, seen = Lab(make_tiny("dense")).stage(slots=2), list[bool]()
    monkeypatch.setattr(Pipeline, "async_steps", int(device.startswith("cuda")))
    engine = Engine(Pipeline([stage]), PrefixCache(local_tiers(1 << 28)), EngineSettings(context=2048, grid=64)).start()
    forward = engine.pipeline.forward
    engine.pipeline.forward = lambda *step: (seen.append(hurrying.now), forward(*step))[1]  # type: ignore[method-assign]
    assert Answer(engine, Prompt(random_tokens(100, 1))).finished
    engine.stop()
    assert set(seen) == {device.startswith("cuda")}


def test_nobody_gives_way_while_a_slot_is_filled_behind_the_batches_of_several_stages(
    make_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token loop waits for these batches meanwhile."""
    seen, restore = list[bool](), Admission._restore

    def noted(admission: Admission, sequence: Any) -> Any:
        seen.append(hurrying.now)
        return restore(admission, sequence)

    monkeypatch.setattr(Admission, "_restore", noted)
    engine = Lab(make_tiny("dense")).engine(spans=(Span(0, 4), Span(4, 8)))
    assert Answer(engine, Prompt(random_tokens(100, 1))).finished
    engine.stop()
    assert seen and not any(seen)
