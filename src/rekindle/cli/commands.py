"""All commands; to import them takes seconds, since torch comes with most."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rekindle.cli import VERSION, bench, cache, devices, generate, inspect, launch, plan, replay, serve, shard
from rekindle.cli.logs import log_as
from rekindle.config import printable
from rekindle.errors import RekindleError

app = typer.Typer(
    name="rekindle",
    help="A local LLM server for hybrid models: no token is computed twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    pass


app.command("serve")(serve.serve)
app.command("launch")(launch.launch)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("devices")(devices.devices)
app.add_typer(bench.app, name="bench")
app.command("replay")(replay.replay)
app.add_typer(cache.app, name="cache")
app.add_typer(shard.app, name="shard")


LONGEST = 2000  # characters of an error: a file may quote itself at any length


def run() -> None:
    """What the command line asks for."""
    log_as("text")
    try:
        app()
    except RekindleError as error:
        print("rekindle:", printable(str(error)[:LONGEST], keep="\n"), file=sys.stderr)
        sys.exit(1)
