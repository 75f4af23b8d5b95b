"""What one client had computed, no other restores, waits for, or is sent to."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.snapshot_lab import GREEDY, Answer, Lab, random_tokens, wait_until

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.router import Router
from rekindle.engine.types import Request, Started, Token
from rekindle.errors import QueueFull
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.stages import Pipeline

PROMPT = Prompt(random_tokens(300, 5))


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def engine_over(stage: Any) -> Engine:
    return Engine(Pipeline([stage]), PrefixCache(local_tiers(1 << 28)), EngineSettings(context=2048, grid=64)).start()


def test_a_hit_in_another_name_space_is_a_miss_and_the_answer_is_the_same(lab: Lab) -> None:
    engine = engine_over(lab.stage())
    reports = []
    for namespace in ("alice", "alice", "bob", "", "bob"):
        answer = Answer(engine, PROMPT, namespace=namespace)
        reports.append((answer.tokens, answer.finished.cache.restored > 0))
    assert [restored for _, restored in reports] == [False, True, False, False, True]
    assert len({tuple(tokens) for tokens, _ in reports}) == 1
    told = Answer(engine, PROMPT, namespace="carol").finished.cache
    assert told.miss == "nothing has been published yet"
    assert told.divergence is not None and (told.divergence.position, told.divergence.seen) == (0, None)
    engine.stop()


def test_nobody_waits_for_the_twin_of_another_client(lab: Lab) -> None:
    """Two prompts with one beginning run side by side: in one name space the second waits for the first's boundary."""
    for second, restores in (("alice", True), ("bob", False)):
        engine = engine_over(lab.stage())
        gate = threading.Event()
        engine._inbox.put(lambda gate=gate: gate.wait(60) and None)  # both are there before the first step
        answers = [Answer(engine, PROMPT, namespace=name) for name in ("alice", second)]
        gate.set()
        assert [answer.finished.cache.restored > 0 for answer in answers] == [False, restores]
        engine.stop()


def test_a_prompt_that_waits_for_its_twin_holds_up_its_own_name_space_only(lab: Lab) -> None:
    engine = engine_over(lab.stage())
    gate, order = threading.Event(), list[str]()
    engine._inbox.put(lambda: gate.wait(60) and None)  # all are in line before the first step
    long = Prompt(random_tokens(1500, 6))
    short = Prompt(random_tokens(20, 7))
    for number, (name, prompt) in enumerate([("alice", long), ("alice", long), ("alice", PROMPT), ("bob", short)]):
        request = Request(
            f"{name}{number}",
            prompt,
            GREEDY,
            1,
            frozenset(),
            sink=lambda event, name=name: order.append(name) if isinstance(event, Token) else None,
            namespace=name,
        )
        engine.submit(request)
    gate.set()
    wait_until(lambda: len(order) == 4)
    assert order[0] == "bob", "whose prompt is short"
    engine.stop()


class PaperReplica:
    """Takes requests and knows prefixes by name space; `kept` tokens of them in a slot."""

    def __init__(self, known: dict[str, int], kept: int = 0) -> None:
        self.known = known
        self.kept = kept
        self.taken: list[str] = []
        self.prefixes = self

    def known_length(self, tokens: Any, namespace: str = "") -> int:
        return self.known.get(namespace, 0)

    def kept_length(self, tokens: Any, namespace: str) -> int:
        return self.kept

    def submit(self, request: Request) -> None:
        self.taken.append(request.id)

    def cancel(self, request_id: str) -> None:
        pass


def test_a_request_goes_to_the_replica_that_knows_its_own_clients_prefix() -> None:
    replicas = [PaperReplica({"alice": 300}), PaperReplica({"bob": 100})]
    router = Router(replicas)  # type: ignore[arg-type]

    def send(id: str, namespace: str) -> None:
        router.submit(Request(id, PROMPT, GREEDY, 1, frozenset(), sink=lambda event: None, namespace=namespace))

    for id, namespace in (("1", "bob"), ("2", "alice"), ("3", "bob")):
        send(id, namespace)
    assert (replicas[0].taken, replicas[1].taken) == (["2"], ["1", "3"])
    send("4", "carol")
    assert replicas[0].taken[-1] == "4", "what others run is no reason to go there: the least busy one is"


def test_a_kept_slot_draws_a_request_only_where_nothing_longer_is_known() -> None:
    for kept, chosen in ((100, 1), (300, 0)):
        replicas = [PaperReplica({"": 300}, kept), PaperReplica({"": 300})]
        router = Router(replicas)  # type: ignore[arg-type]
        for id in ("1", "2"):
            prompt = PROMPT if id == "2" else Prompt(random_tokens(300, 8))
            router.submit(Request(id, prompt, GREEDY, 1, frozenset(), sink=lambda event: None))
        assert "2" in replicas[chosen].taken


def test_name_spaces_take_turns_in_the_queue(lab: Lab) -> None:
    engine = engine_over(lab.stage())
    gate, order = threading.Event(), list[str]()
    engine._inbox.put(lambda: gate.wait(60) and None)  # all are in line before the first step
    for number, namespace in enumerate(["alice"] * 6 + ["bob"] * 3 + ["carol"]):
        request = Request(
            f"{namespace}{number}",
            Prompt(random_tokens(8, 50 + number)),
            GREEDY,
            1,
            frozenset(),
            sink=lambda event, name=namespace: order.append(name) if isinstance(event, Started) else None,
            namespace=namespace,
        )
        engine.submit(request)
    gate.set()
    wait_until(lambda: len(order) == 10)
    assert order == ["alice", "bob", "carol", "alice", "bob", "alice", "bob", "alice", "alice", "alice"]
    engine.stop()


def test_nobody_is_refused_because_of_the_requests_of_another_name_space(lab: Lab) -> None:
    settings = EngineSettings(context=2048, grid=64, queue=3)
    engine = Engine(Pipeline([lab.stage()]), PrefixCache(local_tiers(1 << 28)), settings).start()
    gate = threading.Event()
    engine._inbox.put(lambda: gate.wait(60) and None)  # nobody is let in meanwhile
    of_alice = [Answer(engine, PROMPT, namespace="alice") for _ in range(3)]
    with pytest.raises(QueueFull, match="3 requests are waiting, the queue holds 3"):
        Answer(engine, PROMPT, namespace="alice")
    of_bob = Answer(engine, PROMPT, namespace="bob")
    assert engine.status().waiting == 4
    gate.set()
    assert all(answer.wait().tokens for answer in (*of_alice, of_bob))
    assert engine.status().waiting == 0
    engine.stop()
