"""`rekindle replay`: agent-like conversations against a live server, with every prompt token accounted for."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rekindle.bench.conversations import Sizes
from rekindle.bench.recorded import OWN, read_session, session_file
from rekindle.bench.replay import OwnServer, Row, Server, Total
from rekindle.bench.replay import replay as run_replay

COLUMNS = ("conversation", "turn", "sent", "RAM", "disk", "computed", "unseen", "first token")
FORM = "{:<12} {:>5} {:>7} {:>7} {:>7} {:>9} {:>7} {:>12}"


def replay(
    url: Annotated[
        str | None, typer.Argument(help="A running server; one is started for the purpose if left out.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="For the server it starts; the embedded model if left out.")
    ] = None,
    serve: Annotated[str, typer.Option(help="More options for the server it starts, as one string.")] = "",
    scale: Annotated[float, typer.Option(help="Times the size of system prompts and turns.")] = 1.0,
    turns: Annotated[int, typer.Option(help="Requests per conversation.", min=5)] = 6,
    answer: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 8,
    session: Annotated[
        Path | None, typer.Option(help="A recorded session: JSON lines, one request each (bench/sessions/README.md).")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="This conversation only; may be given several times.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="REKINDLE_API_KEY", help="For the running server.")] = None,
    check: Annotated[bool, typer.Option(help="Fail where a conversation misses its goal.")] = False,
) -> None:
    """Replay conversations and compare what was computed with what had never been seen: a table, then one line of JSON.

    A server it starts itself is also restarted in the middle of each conversation, on the same cache folder.
    """
    requests = read_session(session or session_file(OWN))
    sizes = Sizes(turns=turns, answer=answer).scaled(scale)
    with _server(url, model, serve, api_key) as server:
        print(FORM.format(*COLUMNS))
        totals = run_replay(server, sizes, requests, only or (), _show)
    Console().print(_summary(totals))
    if url is not None:
        print("no conversation with a restart in its middle: the server is not ours to restart")
    print(json.dumps({"scale": scale, "conversations": [total.as_dict() for total in totals]}))
    if check and not all(total.holds for total in totals):
        raise typer.Exit(1)


@contextmanager
def _server(url: str | None, model: Path | None, options: str, key: str | None) -> Iterator[Server]:
    if url is not None:
        yield Server(url, key)
        return
    with tempfile.TemporaryDirectory(prefix="rekindle-replay-") as folder:
        arguments = [*([str(model)] if model else []), "--cache-dir", folder, "--sequences", "4", *shlex.split(options)]
        server = OwnServer(arguments)
        try:
            yield server
        finally:
            server.stop()


def _show(row: Row) -> None:
    if row.restarted:
        print("-- the server was stopped and started again")
    counts = (row.sent, row.ram, row.disk, row.computed, row.unseen)
    print(FORM.format(row.conversation, row.turn + 1, *counts, f"{row.first_token_ms:,.0f} ms"), flush=True)


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
