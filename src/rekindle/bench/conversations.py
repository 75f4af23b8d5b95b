"""What replayed conversations say: scripts that send messages, or a raw prompt, and are sent the answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Posted:
    """A request of any dialect, as a client sent it."""

    path: str
    body: dict[str, Any]


Said = list[Message] | str | Posted  # of one request: messages, a raw prompt, or all of it
Script = Generator[Said, Message, None]  # yields what each request says, is sent the assistant's message


@dataclass(frozen=True, slots=True)
class ConversationSizes:
    """In words, which are tokens for most vocabularies. A server's fixed cost per turn is a token or two: against
    turns of a few words it would be all that is measured, so the default turn is a few hundred."""

    system: int = 300
    turn: int = 200
    turns: int = 6
    answer: int = 8  # tokens
    document: int = 3200

    def scaled(self, scale: float) -> ConversationSizes:
        system, turn, document = (round(size * scale) for size in (self.system, self.turn, self.document))
        return ConversationSizes(system, turn, self.turns, self.answer, document)


BRANCHES = 3  # prompts that part in the middle of one message

TEXT = (
    "the value of each line in this file is read once and kept until a test asks for it again so that no work is done "
    "twice when a user changes one name or moves a block from here to there and then runs all checks on both sides "
    "with more time than before we look at what came back and write down where it went wrong first"
)


def prose(count: int, seed: str) -> str:
    """Words without sense, the same for the same seed."""
    chosen = random.Random(seed).choices(TEXT.split(), k=count)
    lines = [" ".join(chosen[i : i + 12]) for i in range(0, count, 12)]
    return "\n".join(lines)


def _system(sizes: ConversationSizes, seed: str) -> Message:
    return {"role": "system", "content": prose(sizes.system, seed)}


def _result(sizes: ConversationSizes, seed: str) -> Message:
    """A tool's result, as agents send it: long, and in a user turn. No two begin alike: a common beginning would
    count as seen, and no server can tell before the second one comes that it is worth a snapshot."""
    return {"role": "user", "content": prose(sizes.turn, seed)}


def _without_thinking(answer: Message) -> Message:
    return {"role": "assistant", "content": answer["content"] or "."}


def growing(sizes: ConversationSizes, seed: str) -> Script:
    """Each turn appends the answer as it came and a new tool result."""
    messages = [_system(sizes, seed)]
    for turn in range(sizes.turns):
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append((yield messages))


def thinking(sizes: ConversationSizes, seed: str) -> Script:
    """The client sends answers back without what the model thought."""
    messages = [_system(sizes, seed)]
    for turn in range(sizes.turns):
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append(_without_thinking((yield messages)))


def subagents(sizes: ConversationSizes, seed: str) -> Script:
    """Three conversations in turns, under one system prompt."""
    system = _system(sizes, seed)
    each: list[list[Message]] = [[system], [system], [system]]
    for turn in range(sizes.turns):
        messages = each[turn % 3]
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append((yield messages))


def edited(sizes: ConversationSizes, seed: str) -> Script:
    """A growing conversation in which, past its middle, one line of an early tool result changes."""
    messages = [_system(sizes, seed)]
    for turn in range(sizes.turns):
        if turn == sizes.turns - 2:
            messages[3] = {"role": "user", "content": _with_an_edit(messages[3]["content"])}
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append((yield messages))


def _with_an_edit(text: str) -> str:
    lines = text.split("\n")
    lines[len(lines) // 3] = "[this line was cleared]"
    return "\n".join(lines)


def branching(sizes: ConversationSizes, seed: str) -> Script:
    """Three questions, each in one message behind the same document."""
    document = prose(sizes.document, seed)
    for turn in range(BRANCHES):
        yield [{"role": "user", "content": f"{document}\n\n{_question(sizes, seed, turn)}"}]


def stamped(sizes: ConversationSizes, seed: str) -> Script:
    """A long system prompt with the time of the call in its middle; each call is a conversation of its own."""
    before, after = (prose(sizes.document // 2, f"{seed} {half}") for half in ("before", "after"))
    for turn in range(BRANCHES):
        system = f"{before}\nIt is now {10 + 3 * turn}:{7 * turn + 12} o'clock.\n{after}"
        yield [{"role": "system", "content": system}, _result(sizes, f"{seed} {turn}")]


def raw(sizes: ConversationSizes, seed: str) -> Script:
    """Completions of three texts that begin alike."""
    shared = prose(sizes.document, seed)
    for turn in range(BRANCHES):
        yield f"{shared}\n{_question(sizes, seed, turn)}"


def _question(sizes: ConversationSizes, seed: str, turn: int) -> str:
    return f"{turn + 1}. {prose(sizes.turn // 5, f'{seed} {turn}')}?"


class ScriptedConversation(NamedTuple):
    script: Callable[[ConversationSizes, str], Script]
    goal: float  # the ratio that must hold
    turns: int | None = None  # requests, where that is not for the user to say


SCRIPTS = {
    "growing": ScriptedConversation(growing, 1.01),
    "thinking": ScriptedConversation(thinking, 1.05),
    "subagents": ScriptedConversation(subagents, 1.01),
    "edited": ScriptedConversation(edited, 1.05),
    "branching": ScriptedConversation(branching, 1.15, BRANCHES),
    "stamped": ScriptedConversation(stamped, 1.15, BRANCHES),
    "raw": ScriptedConversation(raw, 1.15, BRANCHES),
}
