"""What both ends of a link must agree on before the first forward."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.shards.frames import DTYPES, Hello
from rekindle.spec import Span


@dataclass(frozen=True, slots=True)
class Terms:
    fingerprint: str  # of the model, from its weights
    span: Span
    hidden_dtype: str  # of the residual stream between stages
    kv_dtype: str
    slots: int  # the head asks for at least so many …
    pages: int = 0  # … for the pages of one sequence at its context limit, on the device or in host memory …
    rewind_rows: int = 0  # … and for room for blocks of so many rows

    def __post_init__(self) -> None:
        assert self.hidden_dtype in DTYPES, f"hidden dtype {self.hidden_dtype!r} is none of {list(DTYPES)}"


def terms_of(hello: Hello) -> dict[str, str | int]:
    return {
        "model fingerprint": hello.fingerprint,
        "span": f"[{hello.start}, {hello.stop})",
        "hidden dtype": hello.hidden_dtype,
        "kv dtype": hello.kv_dtype,
    }


def disagreements(shard: Terms, hello: Hello) -> list[str]:
    """Every point where the two ends differ, with both sides."""
    has = {
        "model fingerprint": shard.fingerprint,
        "span": str(shard.span),
        "hidden dtype": shard.hidden_dtype,
        "kv dtype": shard.kv_dtype,
    }
    wants = terms_of(hello)
    points = [f"{name}: shard has {has[name]}, head expects {wants[name]}" for name in has if has[name] != wants[name]]
    counts = [
        ("slots", shard.slots, hello.slots),
        ("pages (--pages and --host-pages together)", shard.pages, hello.pages),
        ("rows of a block (--rewind-rows)", shard.rewind_rows, hello.rewind_rows),
    ]
    return points + [f"{name}: shard has {has}, head needs {needs}" for name, has, needs in counts if has < needs]
