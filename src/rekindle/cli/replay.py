"""`rekindle replay`: agent-like conversations against a live server, with every prompt token accounted for."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rekindle.bench.conversations import ConversationSizes
from rekindle.bench.recorded import OWN, read_session, session_file
from rekindle.bench.replay import OwnServer, ReplayRow, ReplayServer, Total
from rekindle.bench.replay import replay as run_replay
from rekindle.cli.tables import show_table


def replay(
    url: Annotated[
        str | None, typer.Argument(help="A running server; one is started for the purpose if left out.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="For the server it starts; the embedded model if left out.")
    ] = None,
    serve: Annotated[str, typer.Option(help="More options for the server it starts, as one string.")] = "",
    scale: Annotated[float, typer.Option(help="Times the size of system prompts and turns.", min=0.05)] = 1.0,
    turns: Annotated[int, typer.Option(help="Requests per conversation.", min=5)] = 6,
    answer: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 8,
    session: Annotated[
        Path | None,
        typer.Option(
            help="A recorded session of yours instead of ours: JSON lines, one request each "
            "(src/rekindle/bench/sessions/README.md). The other conversations run too, unless --only names recorded."
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="This conversation only; may be given several times.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="REKINDLE_API_KEY", help="For the running server.")] = None,
    check: Annotated[bool, typer.Option(help="Fail where a conversation misses its goal.")] = False,
) -> None:
    """Replay conversations and compare what was computed with what had never been seen: a table, then one line of JSON.

    A server it starts itself is also restarted in the middle of each conversation, on the same cache folder.
    """
    requests = read_session(session or session_file(OWN))
    sizes = ConversationSizes(turns=turns, answer=answer).scaled(scale)
    with _server(url, model, serve, api_key) as server:
        totals = run_replay(server, sizes, requests, only or (), _Printer().show)
    summary = _summary(totals)
    if scale < 1:
        summary.caption = "goals are for --scale 1: in smaller ones the few tokens that turns compute again weigh more"
    show_table(summary)
    if url is not None:
        print("no conversation with a restart in its middle: the server is not ours to restart")
    print(json.dumps({"scale": scale, "conversations": [total.as_dict() for total in totals]}))
    if check and not all(total.holds for total in totals):
        raise typer.Exit(1)


@contextmanager
def _server(url: str | None, model: Path | None, options: str, key: str | None) -> Iterator[ReplayServer]:
    if url is not None:
        yield ReplayServer(url, key)
        return
    with _ending_in_order(), tempfile.TemporaryDirectory(prefix="rekindle-replay-") as folder:
        arguments = [*([str(model)] if model else []), "--cache-dir", folder, "--sequences", "4", *shlex.split(options)]
        server = OwnServer(arguments)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM too ends the server and removes its snapshots, which may be gigabytes."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Printer:
    """A line per turn; the first one tells which tiers the server has."""

    def __init__(self) -> None:
        self._has_begun = False

    def show(self, row: ReplayRow) -> None:
        if not self._has_begun:
            self._has_begun = True
            print(_line("conversation", "turn", "sent", row.restored, "computed", "unseen", "first token"))
        if row.restarted:
            print("-- the server was stopped and started again")
        tokens = (str(row.sent), map(str, row.restored.values()), str(row.computed), str(row.unseen))
        print(_line(row.conversation, str(row.turn + 1), *tokens, f"{row.first_token_ms:,.0f} ms"), flush=True)


def _line(
    conversation: str, turn: str, sent: str, restored: Iterable[str], computed: str, unseen: str, first: str
) -> str:
    tiers = " ".join(f"{tier:>7}" for tier in restored)
    return f"{conversation:<12} {turn:>4} {sent:>7} {tiers} {computed:>9} {unseen:>7} {first:>12}"


def _summary(totals: list[Total]) -> Table:
    head = ("conversation", "restart", "computed", "unseen", "ratio", "goal", "+ background")
    table = Table(*head, box=None, header_style="bold", title="\nprompt tokens computed ÷ never seen before")
    for total in totals:
        table.add_row(
            total.conversation,
            "yes" if total.restart else "",
            f"{total.computed:,}",
            f"{total.unseen:,}",
            f"{total.ratio:.3f}",
            f"{total.goal:.2f}{'' if total.holds else ' missed'}",
            f"{total.ratio_with_background:.3f}",
        )
    return table
