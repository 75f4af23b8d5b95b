"""The host of several models: who waits for whom, and who is told what."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.api import ModelHost, ServedModel, Settings, model_host
from rekindle.api.errors import ModelNotLoaded, UnknownModel
from rekindle.errors import BadModelFile, QueueFull, RekindleError, Stopping

PATIENCE = 20.0


class Engine:
    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.error: Exception | None = None

    def drain(self) -> None: ...
    def end_requests(self) -> None: ...
    def wait_for_end(self) -> None: ...
    def stop(self) -> None:
        self.stopped.set()
        if self.error is not None:
            raise self.error


class Source:
    """A model that needs all the memory there is. Loads wait for `may_load`."""

    def __init__(self, name: str) -> None:
        self.settings = Settings(models=(name, f"{name}-alias"), context=100)
        self.may_load = threading.Event()
        self.may_load.set()
        self.engines: list[Engine] = []
        self.error: BaseException | None = None
        self.tidy_error: Exception | None = None

    def fits_beside(self, others: list[Any]) -> bool:
        return not others

    def load(self, others: list[Any]) -> ServedModel:
        assert not others, "two models are in the memory of one"
        assert self.may_load.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.engines.append(Engine())
        return ServedModel(self.engines[-1], None, self.settings)  # type: ignore[arg-type]

    def reason(self, error: RekindleError) -> str:
        return str(error)

    def tidy(self) -> None:
        if self.tidy_error is not None:
            raise self.tidy_error


class House:
    def __init__(self, idle: float | None = None) -> None:
        self.a, self.b = Source("a"), Source("b")
        self.host = ModelHost([self.a, self.b], idle).start()


@pytest.fixture
def open_house(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., House]]:
    # Counts of paper engines say nothing.
    monkeypatch.setattr(model_host.Slot, "known", [])
    monkeypatch.setattr(model_host, "sum_of", lambda each: None)
    monkeypatch.setattr(model_host, "ended", lambda status: None)
    opened: list[House] = []

    def open_one(**settings: Any) -> House:
        opened.append(House(**settings))
        return opened[-1]

    yield open_one
    for house in opened:
        house.a.may_load.set()
        house.b.may_load.set()
        house.host.stop()


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_model_with_a_live_request_is_never_unloaded_and_newcomers_for_it_queue_behind_who_waits(
    open_house: Callable[..., House],
) -> None:
    house = open_house()

    async def scene() -> None:
        first = await house.host.lease("a")
        for_b = asyncio.create_task(house.host.lease("b-alias"))
        await settled(lambda: house.host.slots[0].closed)
        again = asyncio.create_task(house.host.lease(None))
        await settled(lambda: house.host.waiting == 2)
        assert not house.a.engines[0].stopped.is_set()
        first.release()
        first.release()  # more than once is once
        second = await for_b
        assert house.a.engines[0].stopped.is_set()
        assert not again.done()
        second.release()
        (await again).release()
        assert (len(house.a.engines), len(house.b.engines)) == (2, 1)

    asyncio.run(scene())


def test_who_leaves_the_line_is_not_loaded_for_and_the_model_that_was_closed_goes_on(
    open_house: Callable[..., House],
) -> None:
    house = open_house()

    async def scene() -> None:
        held = await house.host.lease("a")
        for_b = asyncio.create_task(house.host.lease("b"))
        await settled(lambda: house.host.slots[0].closed)
        behind = asyncio.create_task(house.host.lease("a"))
        await settled(lambda: house.host.waiting == 2)
        for_b.cancel()
        (await behind).release()
        held.release()
        assert not house.b.engines
        assert not house.a.engines[0].stopped.is_set()

    asyncio.run(scene())


def test_a_lease_granted_to_who_has_just_left_is_taken_back(open_house: Callable[..., House]) -> None:
    house = open_house()

    async def scene() -> None:
        house.b.may_load.clear()
        for_b = asyncio.create_task(house.host.lease("b"))
        await settled(lambda: house.host.slots[1].state == "loading")
        house.b.may_load.set()
        for_b.cancel()
        await settled(lambda: house.host.slots[1].state == "ready")
        (await house.host.lease("a")).release()  # needs the memory of b, which nobody holds
        assert house.b.engines[0].stopped.is_set()

    asyncio.run(scene())


def test_a_failed_load_is_told_to_those_who_wait_and_hurts_nobody_else(open_house: Callable[..., House]) -> None:
    house = open_house()

    async def scene() -> None:
        house.b.error = BadModelFile("b.gguf is truncated")
        told = await asyncio.gather(*(house.host.lease("b") for _ in range(3)), return_exceptions=True)
        assert {type(each) for each in told} == {ModelNotLoaded}
        assert str(told[0]) == "the model b could not be loaded: b.gguf is truncated"
        house.b.error = None
        with pytest.raises(ModelNotLoaded, match="truncated"):
            await house.host.lease("b")  # at once, and without another try
        (await house.host.lease("a")).release()
        house.host.slots[1].failed_at -= model_host.REST
        (await house.host.lease("b")).release()

    asyncio.run(scene())


class Panic(BaseException):
    """As Rust's panics arrive: no Exception."""


def test_the_thread_of_the_models_outlives_a_panic_and_memory_that_does_not_come_back(
    open_house: Callable[..., House],
) -> None:
    house = open_house(idle=0.02)

    async def scene() -> None:
        house.a.tidy_error = house.b.tidy_error = RuntimeError("the driver is gone")
        house.b.error = Panic("a tokenizer has panicked")
        with pytest.raises(ModelNotLoaded, match="the model b could not be loaded: an internal error"):
            await asyncio.wait_for(house.host.lease("b"), PATIENCE)
        (await asyncio.wait_for(house.host.lease("a"), PATIENCE)).release()
        await settled(lambda: house.host.slots[0].state == "unloaded")
        (await asyncio.wait_for(house.host.lease("a"), PATIENCE)).release()

    asyncio.run(scene())


def test_what_a_failed_load_held_is_free_when_memory_is_given_back(open_house: Callable[..., House]) -> None:
    house = open_house()
    weights: list[weakref.ref[Engine]] = []
    alive: list[bool] = []

    def load(others: list[Any]) -> ServedModel:
        held = Engine()
        weights.append(weakref.ref(held))
        raise BadModelFile("b.gguf is truncated")

    async def scene() -> None:
        house.b.load, house.b.tidy = load, lambda: alive.append(weights[0]() is not None)  # type: ignore[method-assign]
        with pytest.raises(ModelNotLoaded, match="truncated"):
            await house.host.lease("b")
        await settled(lambda: bool(alive))
        assert alive == [False]

    asyncio.run(scene())


def test_the_line_has_an_end_and_names_that_are_not_served_are_refused(
    open_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_host, "LINE", 2)
    monkeypatch.setattr(model_host, "PATIENCE", 0.05)
    house = open_house()

    async def scene() -> None:
        held = await house.host.lease("a")
        waiting = [asyncio.create_task(house.host.lease("b")) for _ in range(2)]
        await settled(lambda: house.host.waiting == 2)
        with pytest.raises(QueueFull, match="2 requests wait"):
            await house.host.lease("b")
        with pytest.raises(UnknownModel, match="'c' is not served here; served: a, a-alias, b, b-alias"):
            await house.host.lease("c")
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, ModelNotLoaded)
        held.release()

    asyncio.run(scene())


def test_a_name_with_ollamas_tag_is_the_name_unless_a_model_is_called_so(open_house: Callable[..., House]) -> None:
    house = open_house()
    a, b = house.host.slots
    assert (house.host.find("b:latest"), house.host.find("a-alias:latest")) == (b, a)
    assert (house.host.find("b.gguf"), house.host.find("")) == (b, a)
    house.b.settings = Settings(models=("a:latest",), context=100)
    assert (house.host.find("a:latest"), house.host.find("a")) == (b, a)
    with pytest.raises(UnknownModel, match="'a:4b'"):
        house.host.find("a:4b")


def test_a_model_says_when_it_would_be_unloaded(open_house: Callable[..., House]) -> None:
    kept, idle = open_house(), open_house(idle=1000.0)
    assert kept.host.idle_left(kept.host.slots[0]) is None
    slot = idle.host.slots[0]
    slot.used_at -= 400.0
    assert 0 < (idle.host.idle_left(slot) or 0) <= 600
    lease = idle.host.lease_at_once("a")
    assert lease is not None
    slot.used_at -= 400.0
    assert idle.host.idle_left(slot) == 1000.0, "it counts from the end of its answers"
    lease.release()


def test_an_idle_model_is_unloaded_and_comes_back_when_it_is_asked_for(open_house: Callable[..., House]) -> None:
    house = open_house(idle=0.02)

    async def scene() -> None:
        held = await house.host.lease("a")
        engine = house.a.engines[-1]
        assert not engine.stopped.wait(0.06), "somebody uses it"
        held.release()
        await settled(engine.stopped.is_set)
        await settled(lambda: house.host.slots[0].state == "unloaded")
        (await house.host.lease("a")).release()

    asyncio.run(scene())


def test_a_stop_ends_the_line_waits_for_a_load_and_stops_what_it_gave(open_house: Callable[..., House]) -> None:
    house = open_house()

    async def scene() -> None:
        house.b.may_load.clear()
        for_b = asyncio.create_task(house.host.lease("b"))
        await settled(lambda: house.host.slots[1].state == "loading")
        house.host.end_requests()
        with pytest.raises(Stopping):
            await for_b
        with pytest.raises(Stopping):
            await house.host.lease("a")
        house.b.may_load.set()
        await asyncio.to_thread(house.host.stop)
        assert all(engine.stopped.is_set() for engine in house.a.engines + house.b.engines)

    asyncio.run(scene())


def test_an_engine_that_does_not_stop_in_order_keeps_nobody_from_the_next_model(
    open_house: Callable[..., House],
) -> None:
    house = open_house()

    async def scene() -> None:
        house.a.engines[0].error = OSError("the disk is gone")
        (await house.host.lease("b")).release()
        (await house.host.lease("a")).release()
        assert len(house.a.engines) == 2

    asyncio.run(scene())
