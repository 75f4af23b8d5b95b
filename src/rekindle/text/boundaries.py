"""Where snapshots may be taken: positions derived from the special tokens that begin messages.

ChatML, conversation with a system message (| is a boundary):

    <|im_start|>system … <|im_end|>\\n<|im_start|> | user … <|im_end|>\\n<|im_start|> | assistant\\n<think>\\n |
                                              SYSTEM                            MESSAGE                  END

A boundary lies just behind the role-start token, before the role word. Every next message, whatever its role, and the
generation prompt share the tokens up to there, so the state is of use to all of them; one token later it would not be.
Where a family has another role-start token for each role, the boundary lies in front of it, for the same reason.
The first role start of a prompt is no boundary: nothing worth keeping lies before it. A line of the system prompt that
has a date begins at one: tomorrow's prompt parts from today's there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rekindle.errors import BadRequest
from rekindle.prompt import Boundary, BoundaryKind, Prompt, ids_of
from rekindle.text.tokenizer import Tokenizer

# Role-start tokens of known families, for prompts that come as tokens, without a template to ask.
KNOWN_ROLE_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "<|start|>")

# Tokens that open a tool call inside an assistant's turn.
TOOL_OPENERS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")

ASSISTANT_ROLES = ("assistant", "model")
SYSTEM_ROLES = ("system", "developer")
_ROLE_TOKENS = 4  # tokens behind a role start that certainly hold the role word

# One boundary per position. Of several reasons for it, the one that retention values most is kept.
_PRECEDENCE = (
    BoundaryKind.END,
    BoundaryKind.SYSTEM,
    BoundaryKind.MARK,
    BoundaryKind.MESSAGE,
    BoundaryKind.TOOL,
)


@dataclass(frozen=True, slots=True)
class RoleStarts:
    """The tokens that begin messages, and on which side of them a boundary lies."""

    ids: frozenset[int]
    behind: bool  # one token for all roles: the boundary lies behind it

    def boundary_at(self, index: int) -> int:
        return index + 1 if self.behind else index

    def last_in(self, tokens: Sequence[int]) -> int | None:
        """The index of the last role start."""
        return next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i] in self.ids), None)


@dataclass(frozen=True, slots=True)
class Structure:
    """What is known of a prompt besides its tokens."""

    starts: tuple[int, ...]  # indices of role-start tokens, ascending
    system: int | None  # which of `starts` begins the first message behind system + tools
    tool_openers: tuple[int, ...] = ()  # indices of tokens that open tool calls
    marks: tuple[int, ...] = ()  # positions the client asked for
    dated: tuple[int, ...] = ()  # positions before what changes with the clock


def known_role_starts(tokenizer: Tokenizer) -> RoleStarts:
    """The role-start tokens of known families that this vocabulary has as control tokens."""
    ids = (tokenizer.id_of(name) for name in KNOWN_ROLE_STARTS)
    return RoleStarts(frozenset(i for i in ids if i is not None and i in tokenizer.control_ids), behind=True)


def tool_opener_ids(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.id_of(name) for name in TOOL_OPENERS)
    return frozenset(i for i in ids if i is not None and i in tokenizer.special_ids)


def boundaries_of_tokens(
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    role_starts: RoleStarts | None = None,
) -> Prompt:
    """A prompt that came as tokens: every special token in it counts as real."""
    key = _checked(tokens, tokenizer)
    roles = role_starts or known_role_starts(tokenizer)
    starts, opened = _places(key, roles.ids), _places(key, tool_opener_ids(tokenizer))
    begins_with_system = bool(starts) and _role_is(tokens, starts[0], roles, tokenizer, SYSTEM_ROLES)
    structure = Structure(starts, 1 if begins_with_system else None, opened)
    return with_boundaries(tokens, structure, roles, tokenizer, key)


def before_last_message(prompt: Prompt, roles: RoleStarts) -> Prompt | None:
    """The prompt up to the boundary at its last message; None if it has no second message."""
    start = roles.last_in(prompt.tokens)
    end = roles.boundary_at(start) if start is not None else 0
    if not any(boundary.position == end for boundary in prompt.boundaries):
        return None
    return Prompt(prompt.tokens[:end], tuple(b for b in prompt.boundaries if b.position <= end))


def _checked(tokens: Sequence[int], tokenizer: Tokenizer) -> np.ndarray:
    """The ids, each of which the vocabulary has."""
    size = tokenizer.vocab_size
    with suppress(BadRequest):
        key = ids_of(tokens)
        if not len(key) or (key.min() >= 0 and key.max() < size):
            return key
    i, wrong = next((i, token) for i, token in enumerate(tokens) if not 0 <= token < size)
    raise BadRequest(f"prompt[{i}] is {wrong}, the vocabulary has {size} tokens", "prompt")


def _places(key: np.ndarray, ids: frozenset[int]) -> tuple[int, ...]:
    """Where one of the few `ids` stands, ascending."""
    return tuple(sorted(place for token in ids for place in (key == token).nonzero()[0].tolist()))


def with_boundaries(
    tokens: Sequence[int],
    structure: Structure,
    roles: RoleStarts,
    tokenizer: Tokenizer,
    key: np.ndarray | None = None,
) -> Prompt:
    """The prompt with every boundary its structure gives. key: the tokens as an array, where there is one."""
    end = len(tokens)
    messages = [roles.boundary_at(i) for i in structure.starts[1:]]
    kinds: dict[int, set[BoundaryKind]] = {}

    def add(positions: Iterable[int], kind: BoundaryKind) -> None:
        for position in positions:
            if 0 < position <= end:
                kinds.setdefault(position, set()).add(kind)

    add([*messages, *structure.dated], BoundaryKind.MESSAGE)
    if structure.system is not None and 0 < structure.system < len(structure.starts):
        add([roles.boundary_at(structure.starts[structure.system])], BoundaryKind.SYSTEM)
    add(structure.marks, BoundaryKind.MARK)
    add(_tool_positions(tokens, structure, roles, tokenizer), BoundaryKind.TOOL)
    add([end], BoundaryKind.END)
    boundaries = (Boundary(at, next(k for k in _PRECEDENCE if k in kinds[at])) for at in sorted(kinds))
    marks = tuple(sorted({at for at in structure.marks if 0 < at <= end}))
    return Prompt(tuple(tokens), tuple(boundaries), marks, ids_of(tokens) if key is None else key)


def _tool_positions(tokens: Sequence[int], structure: Structure, roles: RoleStarts, tokenizer: Tokenizer) -> list[int]:
    """Behind each tool opener in an assistant's turn. System prompts show the call syntax too; that is no call."""
    positions = []
    upcoming = iter(structure.starts)
    start, after = None, next(upcoming, None)
    for opener in structure.tool_openers:
        while after is not None and after < opener:
            start, after = after, next(upcoming, None)
        if start is not None and _role_is(tokens, start, roles, tokenizer, ASSISTANT_ROLES):
            positions.append(opener + 1)
    return positions


def _role_is(
    tokens: Sequence[int], start: int, roles: RoleStarts, tokenizer: Tokenizer, words: tuple[str, ...]
) -> bool:
    """Whether the message that starts there has one of these roles."""
    if not roles.behind:
        return any(word in tokenizer.token_text(tokens[start]) for word in words)
    return tokenizer.decode(tokens[start + 1 : start + 1 + _ROLE_TOKENS]).startswith(words)
