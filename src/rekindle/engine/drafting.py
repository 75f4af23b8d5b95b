"""What sequences draft: tokens that may follow, which the target verifies in one step.

The target draws its own token after every row of the block, with the sequence's settings and the random number of that
position, so the answer has the tokens of a run without drafts. Drafters combine: what the text itself proposes comes
first, since it costs nothing; else the drafter with weights is asked, for all sequences of a step at once. Why a
sequence does not draft is said here, in `of` and in `propose`; the step's own reason, a prefill chunk in the same
batch, is the scheduler's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, Protocol

from rekindle.batch import PENDING, Ask
from rekindle.engine.ahead import Ahead, PassBehind
from rekindle.engine.types import DraftReport
from rekindle.speculative.cost import Costs
from rekindle.speculative.width import MOST, DrafterWidth, Purse, Width
from rekindle.stages.layout import round_up
from rekindle.stages.types import Unseen

LEARNT = 4096  # tokens of a prompt that the drafter takes in per step: some milliseconds, while the device computes
NEAR = 64  # tokens that it takes in before it proposes; it proposes nothing while more are missing


class Drafter(Protocol):
    """Of one sequence; proposes from its tokens alone."""

    def __len__(self) -> int:
        """Tokens it has taken in."""
        ...

    def extend(self, tokens: Sequence[int]) -> None: ...
    def propose(self, most: int) -> tuple[int, ...]: ...


class Draft:
    """One sequence's drafters, the width of their blocks, and what became of them. Without a drafter it proposes
    nothing, and `off` says why."""

    def __init__(
        self,
        name: str = "off",
        drafter: Drafter | None = None,
        off: str | None = None,
        width: Width | None = None,
        model: Width | None = None,
        fault: Callable[[], str | None] = lambda: None,
    ) -> None:
        """model: the width of blocks that the pipeline's drafter proposes; None where it has none. fault: why it
        proposes nothing from now on."""
        self._name = name
        self._drafter = drafter
        self._off = off
        self._width = width or Width()
        self._model = model
        self._fault = fault
        self._proposed_by = self._width  # the last block
        self._expects = False  # a step was held back for tokens that the drafter expects
        self._cold_from: int | None = None
        self._blocks = 0
        self._proposed, self._accepted = list[int](), list[int]()  # tokens by their place in a block

    def learn(self, tokens: Sequence[int]) -> None:
        """Take in what is new of the sequence's tokens, a part of a long prompt at a time."""
        if self._drafter is not None and (known := len(self._drafter)) < len(tokens):
            self._drafter.extend(tokens[known : known + LEARNT])

    def expects(self, tokens: Sequence[int], most: int) -> bool:
        """Whether there is a proposal after `tokens`, where the one after them may be drawn already but not known."""
        self._expects = bool(self._look_up(tokens, most))
        return self._expects or self.asks_for(tokens, most) > 0

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow. None while it rests, or has not taken in all of a long prompt."""
        found = self._look_up(tokens, most)
        if self._expects and not found:
            self._width.rest(len(tokens))
        self._expects = False
        self._proposed_by = self._width
        return found

    def asks_for(self, tokens: Sequence[int], most: int) -> int:
        """Tokens that the pipeline's drafter is asked for, where the text itself proposes none."""
        if self._model is None or most < 1 or self._fault() is not None:
            return 0
        return min(most, self._model.at(len(tokens)))

    @property
    def will_go_on(self) -> bool:
        """Whether the pipeline's drafter, which has proposed the last block, will likely be asked for the next one."""
        return self._model is not None and self._proposed_by is self._model and self._model.goes_on

    def take_model(self) -> None:
        """The next block is proposed by the pipeline's drafter."""
        assert self._model is not None, "it was asked"
        self._proposed_by = self._model

    def _look_up(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        if self._drafter is None:
            return ()
        most = min(most, self._width.at(len(tokens)))
        if most < 1 or len(tokens) - len(self._drafter) > NEAR:
            return ()
        self.learn(tokens)
        return self._drafter.propose(most)

    def note_context(self, position: int, known: range, reach: int) -> None:
        """A state was restored at `position`, and the pipeline's drafter has read the positions `known` before it."""
        whole = known.stop == position and len(known) >= min(position, reach)
        self._cold_from = None if whole or self._model is None else known.start if len(known) else position

    def note(self, length: int, proposed: int, accepted: int) -> None:
        """A block came back; the sequence has `length` tokens now."""
        self._blocks += 1
        _count_places(self._proposed, proposed)
        _count_places(self._accepted, accepted)
        self._proposed_by.note(length, proposed, accepted)

    def note_unused(self, length: int) -> None:
        """What was proposed after `length` tokens is not verified: it has cost the pass, if there was one, and no
        row."""
        self._proposed_by.note(length, 0, 0)

    def report(self) -> DraftReport:
        off = self._off if self._model is None else self._fault()
        if off is None and not self._blocks and self._name != "off":
            off = "nothing was proposed that would have paid for its time"
        positions = tuple(zip_longest(self._proposed, self._accepted, fillvalue=0))
        proposed, accepted = sum(self._proposed), sum(self._accepted)
        return DraftReport(self._name, off, self._blocks, proposed, accepted, self._cold_from, positions)


def _count_places(counts: list[int], tokens: int) -> None:
    """One more block with so many tokens."""
    counts += [0] * (tokens - len(counts))
    for place in range(tokens):
        counts[place] += 1


def filling_step(width: int, extra: Callable[[int], float]) -> int:
    """As many tokens as fill the rows of a recorded step, since its padding costs as much: of the step that has room
    for `width`, or of the next smaller one where that saves more than half of the tokens which are then left out."""
    if not width:
        return 0
    more = min(MOST, round_up(width + 1) - 1)
    fewer = max((size for size in range(1, width + 1) if round_up(size + 1) == size + 1), default=more)
    return fewer if extra(more) - extra(fewer) > (width - fewer) / 2 else more


@dataclass(frozen=True, slots=True)
class Measures:
    """What an engine has found out about drafting, for all its sequences."""

    costs: Costs | None = None  # None: nothing is measured
    recorded: bool = False  # steps are recorded, with their rows rounded up
    longest: int = MOST  # tokens that the pipeline's drafter proposes at most
    purses: dict[str, Purse] = field(default_factory=dict)  # by drafter
    fault: Callable[[], str | None] = lambda: None  # of the pipeline's drafter, from which on it is not asked

    def of_text(self, name: str) -> Width:
        """For what a new sequence drafts from its text."""
        if (costs := self.costs) is None:
            return Width()
        extra = partial(costs.extra, with_pass=False)
        filled = partial(filling_step, extra=extra) if self.recorded else None
        return Width(extra, self._purse(name), filled, lambda: costs.knows_plain)

    def of_model(self, name: str) -> Width:
        """For what the pipeline's drafter drafts for a new sequence."""
        if (costs := self.costs) is None:
            return Width()
        extra = partial(costs.extra, with_pass=True)
        return DrafterWidth(
            extra,
            self._purse(name),
            ready=lambda: costs.knows_plain,
            longest=self.longest,
            sequences=lambda: costs.sequences,
            goes_on=lambda: costs.will_know_plain,
        )

    def _purse(self, name: str) -> Purse:
        return self.purses.setdefault(name, Purse())


@dataclass(frozen=True, slots=True)
class Drafts:
    """Which drafters an engine's sequences have; none where `make` and `model` are None, and `off` says why."""

    name: str = "off"
    make: Callable[[], Drafter] | None = None  # for one sequence; it has taken in nothing yet
    off: str | None = "no drafter was asked for"
    model: str | None = None  # the name of the pipeline's drafter, where sequences use it

    def of(self, max_tokens: int, measures: Measures | None = None) -> Draft:
        """For a sequence with an answer of at most `max_tokens` tokens."""
        if self.make is None and self.model is None:
            return Draft(off=self.off)
        if max_tokens < 3:
            return Draft(off=f"an answer of {max_tokens} tokens at most leaves nothing to draft")
        measures = measures or Measures()
        model = None if self.model is None else measures.of_model(self.model)
        width = measures.of_text(self.name)
        name = " and ".join(n for n in (self.name if self.make else None, self.model) if n)
        return Draft(name, self.make() if self.make else None, width=width, model=model, fault=measures.fault)


NO_DRAFTS = Drafts()


class DraftPass(Protocol):
    """A sequence as the proposer sees it."""

    @property
    def draft(self) -> Draft: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def verifies_unseen(self) -> bool:
        """Whether a step with it may verify drafted tokens that the host does not know."""

    def propose(self) -> tuple[int, ...]: ...
    def admit(self, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the drafted tokens that may follow."""

    def ask(self) -> Ask | None: ...


class Proposals(NamedTuple):
    tokens: list[tuple[int, ...]]  # what each sequence drafts, perhaps nothing; PENDING: the device alone knows it
    ahead: Ahead | None = None  # what these are


class Proposer:
    """Drafts for the sequences of a step."""

    def __init__(
        self,
        ask: Callable[[Sequence[Ask]], list[tuple[int, ...]]] | None = None,
        costs: Costs | None = None,
        launch: Callable[[Sequence[Ask]], Ahead | None] | None = None,
        launch_behind: Callable[[Unseen], PassBehind | None] | None = None,
    ) -> None:
        """ask: the pipeline's drafter, if it has one. launch: the same without a wait for its tokens, where the stages
        can take them from the device. launch_behind: without a wait for what is accepted of the block before."""
        self._ask = ask
        self._costs = costs
        self._launch = launch
        self._launch_behind = launch_behind
        self._behind: PassBehind | None = None  # of the block that is being verified

    def note_sequences(self, count: int) -> None:
        if self._costs is not None:
            self._costs.sequences = max(1, count)

    def go_on(self, block: Unseen) -> PassBehind | None:
        """Have the block behind this one drafted at once: the device would stand still while the host reads what was
        accepted, and has the next pass launched."""
        self._behind = None if self._launch_behind is None else self._launch_behind(block)
        return self._behind

    def propose(self, sequences: Iterable[DraftPass]) -> Proposals:
        drafting = list(sequences)
        behind = self._behind
        if drafting:
            self._behind = None  # it is for the step after its block, and for no other
        found = [sequence.propose() for sequence in drafting]
        if self._ask is None:
            return Proposals(found)
        asks = {i: ask for i, s in enumerate(drafting) if not found[i] and (ask := s.ask()) is not None}
        if not asks:
            return Proposals(found)
        ahead = self._launched(drafting, list(asks.values()), behind)
        passed = self._passed(list(asks.values())) if ahead is None else [(PENDING,) * count for count in ahead.counts]
        for (i, ask), drafted in zip(asks.items(), passed, strict=True):
            drafting[i].draft.take_model()
            found[i] = drafting[i].admit(drafted)
            if not found[i]:
                drafting[i].draft.note_unused(ask.position + 1)
        return Proposals(found, ahead)

    def _launched(self, step: Sequence[DraftPass], asks: Sequence[Ask], behind: PassBehind | None) -> Ahead | None:
        """None where the host has to know the tokens, of all blocks of the step or of none. Those that it does not know
        come from one place: the drafter, or the step before."""
        if self._launch is None or any(sequence.in_flight or not sequence.verifies_unseen for sequence in step):
            return None
        return (behind and behind.ahead(asks)) or self._launch(asks)

    def _passed(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        assert self._ask is not None, "only a pipeline with a drafter is asked"
        began = time.monotonic()
        found = self._ask(asks)
        if self._costs is not None:
            self._costs.note_pass([len(drafted) for drafted in found], time.monotonic() - began)
        return found
