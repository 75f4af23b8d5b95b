"""The text of an answer, parsed while it is written: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rekindle.text.parsing.calls import CallReader, NoCall
from rekindle.text.parsing.reader import SPACE, Reader, Steps, overlap
from rekindle.text.parsing.types import CallBroken, CallCut, Content, Event, NotACall, Reasoning, Tool

THINK, END_THINK = "<think>", "</think>"
OPENINGS = {THINK: END_THINK, "<|channel>thought": "<channel|>"}  # what ends reasoning by what opens it; Gemma's second


class AnswerParser:
    """Push text, get events. Their sum does not depend on how the text was cut into pieces.

    thinking: the prompt ends inside <think>, so the answer begins with reasoning.
    bare_json: an answer that is nothing but a JSON object may be a call; not where the client asked for JSON.
    marker: what opens a call, where nothing else does; None: whatever opens one in some format.
    Without tools nothing is a call.
    """

    def __init__(
        self, tools: Sequence[Tool] = (), thinking: bool = False, bare_json: bool = True, marker: str | None = None
    ) -> None:
        self._reader = Reader()
        self._events: list[Event] = []
        self._calls = CallReader(self._reader, {tool.name: tool for tool in tools}, self._events.append)
        self._bare_json = bare_json
        self._space = ""  # before what may be a call: it belongs to the content only if content follows
        self._blank = True  # no content yet
        self._line_start = True  # the last character was no letter: call: may begin a call
        self._markers = self._known_markers() if marker is None or not tools else (marker,)
        self.is_thinking = thinking  # the text so far ends inside the reasoning
        self._steps = self._answer(thinking)
        next(self._steps)

    def push(self, text: str) -> list[Event]:
        self._reader.feed(text)
        return self._advance()

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The answer is over. is_cut: by its limit, so that a call may lack its rest."""
        self._reader.ended, self._reader.is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events = self._events[:]
        self._events.clear()
        return events

    def _known_markers(self) -> tuple[str, ...]:
        if not self._calls.tools:
            return ()
        tags = (f"<{name}>" for name in self._calls.tools)
        return ("<tool_call>", "<function=", "<tool_code>", "call:", *tags)

    def _answer(self, thinking: bool) -> Steps[None]:
        yield
        end = END_THINK if thinking else (yield from self._opens_thinking())
        if end is not None:
            self.is_thinking = True
            yield from self._reasoning(end)
        yield from self._content()

    def _opens_thinking(self) -> Steps[str | None]:
        """What ends the reasoning where the answer itself begins with some, maybe after blanks."""
        while True:
            begins = self._reader.rest.lstrip(SPACE)
            opening = next((each for each in OPENINGS if begins.startswith(each)), None)
            if opening is not None:
                self._reader.take(len(self._reader.rest) - len(begins) + len(opening))
                return OPENINGS[opening]
            if not any(each.startswith(begins) for each in OPENINGS) or not (yield from self._reader.more()):
                return None

    def _reasoning(self, end: str) -> Steps[None]:
        """Blanks at both ends are not part of it: templates write their own."""
        yield from self._reader.skip_space()
        reader = self._reader
        while (at := reader.rest.find(end)) < 0:
            sure = reader.rest[: len(reader.rest) - overlap(reader.rest, (end,))].rstrip(SPACE)
            self._emit_reasoning(reader.take(len(sure)))
            if not (yield from reader.more()):
                self._emit_reasoning(reader.take(len(reader.rest)).rstrip(SPACE))
                return
        self._emit_reasoning(reader.take(at).rstrip(SPACE))
        reader.take(len(end))
        self.is_thinking = False
        yield from reader.skip_space()

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _content(self) -> Steps[None]:
        reader = self._reader
        while True:
            if self._blank and self._bare_json and self._calls.tools and (yield from self._opens_object()):
                yield from self._attempt("{")
                continue
            at, marker = self._find_marker()
            if marker:
                self._emit_content(reader.take(at))
                yield from self._attempt(marker)
                continue
            self._emit_content(reader.take(len(reader.rest) - overlap(reader.rest, self._markers)))
            if not (yield from reader.more()):
                self._emit_content(reader.take(len(reader.rest)))
                if self._calls.index < 0:
                    self._release_space()
                return

    def _opens_object(self) -> Steps[bool]:
        while not (begins := self._reader.rest.lstrip(SPACE)):
            if not (yield from self._reader.more()):
                return False
        if begins.startswith("{"):
            self._space += self._reader.take(len(self._reader.rest) - len(begins))
            return True
        return False

    def _find_marker(self) -> tuple[int, str | None]:
        found = [(at, marker) for marker in self._markers for at in self._places(marker)]
        return min(found, default=(-1, None), key=lambda pair: pair[0])

    def _places(self, marker: str) -> Iterable[int]:
        """Where it stands first; call: only counts where no word runs into it."""
        at = self._reader.rest.find(marker)
        while at >= 0:
            free = not self._reader.rest[at - 1].isalnum() if at else self._line_start
            if marker != "call:" or free:
                yield at
                return
            at = self._reader.rest.find(marker, at + 1)

    def _attempt(self, marker: str) -> Steps[None]:
        """Read a call that opens with the marker; where there is none, the marker is content and what follows it is
        looked at again."""
        reader, calls = self._reader, self._calls
        before = calls.index
        reader.mark()
        if marker != "{":
            reader.take(len(marker))
        try:
            yield from self._call(marker)
        except NoCall as error:
            raw, began = reader.unmark(), calls.begun
            if began and reader.is_cut:
                calls.cut()
                self._events.append(CallCut(calls.index, self._space + raw + reader.take(len(reader.rest))))
                self._space, self._blank = "", False
                return
            if began:
                calls.begun = False
                self._events.append(CallBroken(calls.index, self._space + raw, str(error)))
                self._space, self._blank = "", False
                return
            reader.rest = raw + reader.rest
            if calls.index > before:  # calls were made, and what stands after them is read as any other text
                self._space, self._blank = "", False
                return
            reader.take(len(marker))
            self._events.append(NotACall(str(error)))
            self._emit_content(marker)
        else:
            reader.unmark()
            self._space, self._blank = "", False

    def _call(self, marker: str) -> Steps[None]:
        calls = self._calls
        match marker:
            case "<tool_call>":
                yield from calls.tool_call()
            case "<function=":
                yield from calls.function()
            case "<tool_code>":
                yield from calls.tool_code()
            case "call:":
                yield from calls.relaxed()
            case "{":
                yield from calls.bare_json()
            case _:
                yield from calls.named_tag(marker[1:-1])

    def _emit_content(self, text: str) -> None:
        if not text:
            return
        self._line_start = not text[-1].isalnum()
        if not self._calls.tools:
            self._blank = False
            self._events.append(Content(text))
            return
        kept = text.rstrip(SPACE)
        if kept:
            self._events.append(Content(self._space + kept))
            self._space, self._blank = "", False
        self._space += text[len(kept) :]

    def _release_space(self) -> None:
        if self._space:
            self._events.append(Content(self._space))
            self._space = ""
