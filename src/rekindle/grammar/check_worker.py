"""The process that reads grammars first: run as a script, with the standard library and llguidance alone.

A schema of a few hundred bytes can take minutes and gigabytes to compile, in one call that no other thread can
interrupt. So it is read here, without a vocabulary, and the operating system ends the process when it needs too much.

EBNF becomes Lark's notation here too: that takes time that grows with the square of its rules.

Reads requests and writes answers, one line of JSON each: {"source", "seconds"} gives {"refused", "source"}. refused is
null where the grammar reads, and source is then the grammar in the library's form alone.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

MEMORY = 1 << 31  # bytes of address space
LIMITS = LLParserLimits(verbose_errors=False)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Of processor time, after which the process ends, also in the middle of one long call.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = _read(request["source"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _read(source: str) -> dict[str, Any]:
    try:
        source = _without_ebnf(source)
    except Exception as error:  # the library raises plain ones too, and Python where the text nests too deep
        return {"refused": str(error)[:500], "source": None}
    try:
        refused = LLMatcher.validate_grammar(source, limits=LIMITS)
    except BaseException as error:  # a panic of the library is no Exception
        refused = f"the grammar's library failed: {error}"
    is_error = bool(refused) and not refused.startswith("WARNING")
    return {"refused": refused if is_error else None, "source": None if is_error else source}


def _without_ebnf(source: str) -> str:
    whole = json.loads(source)
    for grammar in whole["grammars"]:
        if "ebnf" in grammar:
            grammar["lark_grammar"] = gbnf_to_lark(grammar.pop("ebnf"))
    return json.dumps(whole)


if __name__ == "__main__":
    main()
