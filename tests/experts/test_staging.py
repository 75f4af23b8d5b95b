"""What waits for what around the staging area, on streams made of paper: by this a chunk can be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from rekindle.experts.staging import STAGED_PARTS, _TwoStreams


class PaperStream:
    """Work in order; what all of it waits for, itself included."""

    def __init__(self, *_: object, **__: object) -> None:
        self.done = frozenset[str]()

    def wait_event(self, event: PaperEvent) -> None:
        assert event.recorded is not None, "an event that nobody recorded since recording began"
        self.done |= event.recorded


class PaperEvent:
    everyone: list[PaperEvent]

    def __init__(self) -> None:
        self.recorded: frozenset[str] | None = None
        self.everyone.append(self)

    def record(self, stream: PaperStream | None = None) -> None:
        self.recorded = (stream or Paper.current).done


class Paper:
    """Notes work by name, with all that is behind when it begins."""

    current: PaperStream

    def __init__(self) -> None:
        self.behind: dict[str, frozenset[str]] = {}

    def work(self, name: str) -> None:
        self.behind[name] = Paper.current.done
        Paper.current.done |= {name}


@contextmanager
def on(stream: PaperStream) -> Iterator[None]:
    before, Paper.current = Paper.current, stream
    yield
    Paper.current = before


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    PaperEvent.everyone, Paper.current = [], PaperStream()
    for name, stub in (("Stream", PaperStream), ("Event", PaperEvent), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Paper.current)
    return Paper()


GROUPS = STAGED_PARTS + 1  # of a layer: some part is filled twice


def run_layers(paper: Paper, order: _TwoStreams, layers: int, ahead: bool, began: str) -> None:
    """As `PackedWeights.stream` does it. Work is named by layer and group, copies and products by their part too."""
    paper.work(f"{began} tables")
    order.begin()
    for layer in range(layers):
        at = f"{began} {layer}"
        paper.work(f"{at} route")
        if ahead:
            with order.ahead():
                paper.work(f"{at} list")
        else:
            paper.work(f"{at} list")
            order.begin()
        paper.work(f"{at} resident")
        for group in range(GROUPS):
            part = order.turn()
            with order.copying(part):
                paper.work(f"{at}.{group} copy to {part}")
            with order.computing(part):
                paper.work(f"{at}.{group} read of {part}")


def record(paper: Paper, order: _TwoStreams, ahead: bool, began: str = "a") -> list[str]:
    """A forward of two layers, and its work in the order in which it was handed over. No event is known before."""
    for event in PaperEvent.everyone:
        event.recorded = None
    Paper.current.done = order._side.done = frozenset()  # type: ignore[attr-defined]
    known = set(paper.behind)
    run_layers(paper, order, 2, ahead, began)
    return [name for name in paper.behind if name not in known]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_recorded_forward_waits_for_nothing_from_before_it_and_leaves_no_copy_behind(
    paper: Paper, ahead: bool
) -> None:
    order = _TwoStreams(torch.device("cuda"))
    for began in "abc":
        done = record(paper, order, ahead, began)
        assert set(done) <= Paper.current.done, "all streams are joined at the end"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_part_is_read_when_it_is_filled_and_filled_when_nobody_reads_it(paper: Paper, ahead: bool) -> None:
    order = _TwoStreams(torch.device("cuda"))
    done = record(paper, order, ahead)
    for part in range(STAGED_PARTS):
        its = [name for name in done if name.endswith((f"copy to {part}", f"read of {part}"))]
        assert len(its) >= 4
        for earlier, later in pairwise(its):
            assert earlier in paper.behind[later]
    for name in done:
        layer = name.split(".")[0]
        assert "copy" not in name or {"a tables", f"{layer} list"} <= paper.behind[name]
        assert "resident" not in name or f"{name.removesuffix(' resident')} list" in paper.behind[name]


def test_copies_run_ahead_of_the_layer_as_far_as_there_is_room(paper: Paper) -> None:
    order = _TwoStreams(torch.device("cuda"))
    record(paper, order, ahead=True)
    last = f"a 0.{GROUPS - 1} read"
    for group in range(STAGED_PARTS):
        (behind,) = (seen for name, seen in paper.behind.items() if name.startswith(f"a 1.{group} copy"))
        assert "a 1 route" not in behind, "they do not wait to hear what is chosen"
        assert any(name.startswith(last) for name in behind) == (group == STAGED_PARTS - 1), "nor for the layer before"


def test_copies_of_what_was_chosen_wait_for_the_choice(paper: Paper) -> None:
    order = _TwoStreams(torch.device("cuda"))
    record(paper, order, ahead=False)
    for name, behind in paper.behind.items():
        assert "copy" not in name or f"{name.split('.')[0]} route" in behind
