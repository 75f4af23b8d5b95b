"""Several replicas behind one router: the prefix decides, then the load; a dead replica costs no request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.answers import Answer

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.router import PUBLISHING, Router
from rekindle.engine.types import Failed, Finished, FinishReason, Request, Sampling, Started
from rekindle.errors import BadRequest, PromptTooLong, QueueFull, StageLost
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt, common_length
from rekindle.stages import Pipeline

PATIENCE = 60


class Mortal:
    """A local stage that can be told to die at its next forward, and never comes back."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self.dies_in: int | None = None  # forwards
        self.lost: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, *arguments: Any) -> Any:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                self.lost = "died"
        if self.lost is not None:
            raise StageLost("the stage is gone")
        return self._stage.forward(*arguments)

    def recover(self) -> None:
        raise StageLost("it does not come back")


class House:
    """Replicas that each have a cache of their own, or share one."""

    def __init__(self, tiny: Any, count: int = 2, shared: PrefixCache | None = None, queue: int = 16) -> None:
        self.stages = [Mortal(tiny.stage(slots=2)) for _ in range(count)]
        settings = EngineSettings(context=1024, grid=64, queue=queue)
        self.engines = [
            Engine(Pipeline([stage]), shared or PrefixCache(local_tiers(1 << 28)), settings) for stage in self.stages
        ]
        self.router = Router(self.engines)

    def start(self) -> House:
        for engine in self.engines:
            engine.start()
        return self

    @property
    def computed(self) -> list[int]:
        return [engine.status().computed_tokens for engine in self.engines]

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()


@pytest.fixture
def make_house(make_tiny: Any) -> Iterator[Callable[..., House]]:
    houses: list[House] = []

    def make(**wishes: Any) -> House:
        houses.append(House(make_tiny("dense"), **wishes))
        return houses[-1]

    yield make
    for house in houses:
        if house.engines[0]._thread.ident is not None:
            house.stop()


def ask(entry: Router | Engine, tokens: list[int], count: int = 4, gate: threading.Event | None = None) -> Answer:
    """`gate`: the request is held back at its first token until it is open."""
    prompt = Prompt(tuple(tokens), (Boundary(len(tokens), BoundaryKind.SYSTEM),))
    held = None if gate is None else lambda _: gate.wait(PATIENCE)
    return Answer(entry, prompt, at_token=held, max_tokens=count)


def talk(seed: int, length: int = 130) -> list[int]:
    return [(seed * 37 + 7 * i) % 320 for i in range(length)]


def test_a_conversation_returns_to_the_replica_that_holds_it(make_house: Callable[..., House]) -> None:
    house = make_house().start()
    gate = threading.Event()
    first = ask(house.router, talk(1), gate=gate)
    other = ask(house.router, talk(2))  # while the first replica is busy
    assert isinstance(other.last, Finished)
    gate.set()
    assert isinstance(first.last, Finished)
    assert house.computed == [130, 130]
    for seed, place in ((1, 0), (2, 1), (1, 0)):
        before = house.computed
        finished = ask(house.router, [*talk(seed), 5, 6, 7]).last
        assert isinstance(finished, Finished)
        assert finished.cache.restored >= 130
        assert house.computed[1 - place] == before[1 - place], "the other replica ran nothing"


class PaperReplica:
    """Ends an answer when it is told to, and publishes nothing but what it is given."""

    def __init__(self, published: Sequence[int] = ()) -> None:
        known = np.array(published, dtype=np.int32)
        self.prefixes = SimpleNamespace(known_length=lambda tokens, _: common_length(tokens, known))
        self.requests: list[Request] = []
        self.ended = 0

    def kept_length(self, tokens: Any, namespace: str) -> int:
        return 0

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def end(self, reason: FinishReason = FinishReason.STOP) -> None:
        """The oldest answer that has not ended."""
        ended = self.requests[self.ended]
        self.ended += 1
        ended.sink(Finished(reason, None, 130, 4, cast(Any, None), cast(Any, None)))


def test_a_conversation_returns_while_its_snapshots_are_still_being_published() -> None:
    replicas = [PaperReplica(), PaperReplica()]
    router = Router(cast(Any, replicas))
    router.submit(request_of(talk(1)))
    replicas[0].end()
    for seed in (2, 3, 4):
        router.submit(replace(request_of(talk(seed)), id=f"{seed}"))
    assert [len(replica.requests) for replica in replicas] == [3, 1], "the first is the busier one now"
    router.submit(request_of([*talk(1), 5, 6, 7]))
    assert len(replicas[0].requests) == 4
    router.submit(replace(request_of([*talk(1), 8]), namespace="another"))
    assert len(replicas[1].requests) == 2, "what was run for one name space is no reason for another"


def test_when_its_snapshots_have_long_been_published_nothing_is_kept_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas, now = [PaperReplica(), PaperReplica()], [100.0]
    monkeypatch.setattr("rekindle.engine.router.time", SimpleNamespace(monotonic=lambda: now[0]))
    router = Router(cast(Any, replicas))
    for seed in (1, 2):
        router.submit(replace(request_of(talk(seed)), id=f"{seed}"))
    replicas[0].end()
    assert len(router._just_run) == 1
    now[0] += PUBLISHING + 1
    replicas[1].end(FinishReason.CANCELLED)
    assert not router._just_run


@pytest.mark.parametrize("ends", [False, True], ids=["running", "just run"])
def test_a_few_tokens_behind_what_all_replicas_know_are_no_reason_to_wait_for_a_busy_one(ends: bool) -> None:
    """A published system prompt, and what the template writes behind it."""
    system, template = talk(1, 128), [9, 8, 7]
    replicas = [PaperReplica(system), PaperReplica(system)]
    router = Router(cast(Any, replicas))
    for number in range(6):
        router.submit(replace(request_of([*system, *template, 50 + number]), id=f"{number}"))
    assert [len(replica.requests) for replica in replicas] == [3, 3], "agents that come together share the replicas"
    for _ in range(2 if ends else 1):
        replicas[1].end()
    if ends:
        replicas[0].end()
    router.submit(replace(request_of([*system, *template, 99, 1, 2]), id="new"))
    assert [len(replica.requests) for replica in replicas] == [3, 4]


def test_what_was_cancelled_draws_nobody() -> None:
    """Perhaps nothing of it was computed."""
    replicas = [PaperReplica(), PaperReplica()]
    router = Router(cast(Any, replicas))
    for seed in (1, 2, 3):
        router.submit(replace(request_of(talk(seed)), id=f"{seed}"))
    replicas[0].end(FinishReason.CANCELLED)
    router.submit(replace(request_of(talk(4)), id="4"))
    router.submit(replace(request_of(talk(1)), id="again"))
    assert [len(replica.requests) for replica in replicas] == [3, 2], "the first runs two, the second one"


def test_among_equals_the_less_busy_one_takes_it(make_house: Callable[..., House]) -> None:
    house = make_house().start()
    gate = threading.Event()
    answers = [ask(house.router, talk(seed), gate=gate) for seed in range(4)]
    assert sorted(home for home, *_ in house.router._running.values()) == [0, 0, 1, 1]
    gate.set()
    assert all(isinstance(answer.last, Finished) for answer in answers)
    assert house.router._running == {}
    assert sorted(house.computed) == [260, 260]


def test_a_prompt_that_is_being_run_draws_its_twin(make_house: Callable[..., House]) -> None:
    house = make_house().start()
    gate = threading.Event()
    first = ask(house.router, talk(1), gate=gate)
    twin = ask(house.router, [*talk(1), 9])
    homes = {home for home, *_ in house.router._running.values()}
    assert len(homes) == 1
    gate.set()
    assert isinstance(first.last, Finished) and isinstance(twin.last, Finished)
    assert sum(house.computed) == 131, "the shared prefix ran once"


def test_replicas_that_share_a_cache_restore_what_another_has_computed(make_house: Callable[..., House]) -> None:
    house = make_house(shared=PrefixCache(local_tiers(1 << 28))).start()
    ask(house.engines[0], talk(1)).wait()
    until = time.monotonic() + 20
    while not house.engines[0].prefixes.known_length(talk(1)):  # published in the background
        assert time.monotonic() < until, "nothing was published"
    finished = ask(house.engines[1], [*talk(1), 5]).last
    assert isinstance(finished, Finished)
    assert finished.cache.restored_from["ram"] >= 130
    assert house.router.status().cache.published == house.engines[0].status().cache.published


def request_of(tokens: list[int]) -> Request:
    return Request("busy", Prompt(tuple(tokens)), Sampling(), 1, frozenset(), sink=lambda event: None)


def test_a_request_without_a_token_moves_on_when_its_replica_dies(make_house: Callable[..., House]) -> None:
    house = make_house().start()
    expected = ask(house.engines[1], talk(3)).tokens
    house.stages[0].dies_in = 1  # in the middle of the prompt
    house.router._running["busy"] = (1, request_of([0]), np.zeros(1))  # so that replica 0 is asked first
    answer = ask(house.router, talk(4))
    assert isinstance(answer.last, Finished)
    assert sum(isinstance(event, Started) for event in answer.events) == 1
    assert house.router._order(request_of(talk(9))) == [1, 0], "for a while it is asked last, busy as the other may be"
    del house.router._running["busy"]
    before = house.engines[0].status().computed_tokens
    for seed in (5, 6, 3):
        assert isinstance(ask(house.router, talk(seed)).last, Finished)
    assert house.engines[0].status().computed_tokens == before, "nobody goes where a stage was just lost"
    assert ask(house.router, talk(3)).tokens == expected


def test_a_request_whose_answer_has_begun_ends_with_the_loss(make_house: Callable[..., House]) -> None:
    house = make_house().start()
    house.stages[0].dies_in = 5  # three chunks, then two tokens more
    answer = ask(house.router, talk(1), count=20)  # replica 0 is asked first, and the other one could take it
    assert isinstance(answer.last, Failed)
    assert isinstance(answer.last.error, StageLost)
    assert 0 < len(answer.tokens) < 20
    assert house.router._running == {}
    assert house.computed[1] == 0


def test_where_all_refuse_the_reason_of_the_best_one_is_given(make_house: Callable[..., House]) -> None:
    house = make_house(queue=1)  # not started: what is taken waits
    entry = house.router
    ask(entry, talk(1))
    ask(entry, talk(2))
    with pytest.raises(QueueFull, match="the queue holds 1"):
        ask(entry, talk(3))
    with pytest.raises(PromptTooLong):
        ask(entry, [1] * 2000)
    with pytest.raises(BadRequest):
        ask(entry, [])
    assert len(entry._running) == 2


def test_a_cancelled_request_ends_wherever_it_is(make_house: Callable[..., House]) -> None:
    house = make_house().start()
    gate = threading.Event()
    answers = [ask(house.router, talk(seed), count=200, gate=gate) for seed in range(2)]
    for answer in answers:
        house.router.cancel(answer.id)
    gate.set()
    assert all(isinstance(a.last, Finished) and a.last.reason == "cancelled" for a in answers)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_request_that_is_cancelled_while_it_moves_ends_too(make_house: Callable[..., House], moment: str) -> None:
    house = make_house().start()
    house.stages[0].dies_in = 1
    second = house.engines[1]
    submit, reroute = second.submit, house.router.reroute

    def cancel_before(errand: Any, error: StageLost) -> bool:
        house.router.cancel(errand.request.id)
        return reroute(errand, error)

    def cancel_between(request: Request) -> None:
        house.router.cancel(request.id)  # neither replica has it now
        submit(request)

    if moment == "before":
        house.router.reroute = cancel_before  # type: ignore[method-assign]
    else:
        second.submit = cancel_between  # type: ignore[method-assign]
    answer = ask(house.router, talk(4), count=500)
    last = answer.last
    assert isinstance(last, Failed) if moment == "before" else isinstance(last, Finished) and last.reason == "cancelled"
    assert len(answer.tokens) < 500
    assert house.router._routed == {} == house.router._running


def test_the_status_counts_every_replica(make_house: Callable[..., House]) -> None:
    house = make_house().start()
    for seed in (1, 2, 3):
        ask(house.router, talk(seed)).wait()
    status = house.router.status()
    assert status.computed_tokens == 390
    assert status.slots == 4
    assert status.cache.published == sum(engine.status().cache.published for engine in house.engines)
    assert sum(status.cache.misses.values()) == 3
    assert status.broken is None
    house.engines[0]._inbox.broken = "a slot could not be closed"
    assert house.router.status().broken is None, "the other one serves"
    assert isinstance(ask(house.router, talk(1)).last, Finished)
    house.engines[1]._inbox.broken = "neither could this one"
    assert house.router.status().broken == "a slot could not be closed; neither could this one"
