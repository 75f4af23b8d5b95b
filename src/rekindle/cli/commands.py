"""All commands. Each is imported when it is called: torch comes with most, and takes seconds."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from rekindle.cli import INTERRUPTED, VERSION
from rekindle.cli.logs import log_as
from rekindle.config import printable
from rekindle.errors import RekindleError

# How each begins to tell of itself; its module has the same name.
HELP = {
    "serve": "Serve models over HTTP: OpenAI's, Anthropic's and Ollama's APIs, and a chat page.",
    "launch": "Start a coding agent that talks to this server.",
    "generate": "Answer one prompt.",
    "inspect": "Show architecture, layers by kind, sizes and quantisations; reads the header only.",
    "plan": "Show the plan for a model: every byte by name, how fast decode is expected to be, why, and what stands "
    "next to it.",
    "devices": "List the devices that --devices can name, their memory and their measured speed.",
    "bench": "Speed of a model here (`run`, the default: its options are in `bench run --help`), speed of a server as "
    "its clients see it (`serve`), and synthetic models.",
    "replay": "Replay conversations and compare what was computed with what had never been seen: a table, then one "
    "line of JSON.",
    "cache": "Snapshots on disk: list, show, verify, prune, export, import.",
    "shard": "Host stages for a server, or make keys for its links.",
}


def command_named(name: str) -> TyperCommand | TyperGroup:
    try:
        module = import_module(f"rekindle.cli.{name}")
    except KeyboardInterrupt:  # here, since click would say that it was aborted
        sys.exit(INTERRUPTED)
    if not gc.isenabled():  # the process is this command's alone: what was imported is exempt from here on
        gc.freeze()
        gc.enable()
    if hasattr(module, "app"):
        group = typer.main.get_group(module.app)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name)(getattr(module, name))
    command = typer.main.get_command(alone)
    assert isinstance(command, TyperCommand), f"{name} is one command"
    return command


class _ByName(TyperGroup):
    def resolve_command(self, ctx: typer.Context, args: list[str]):  # type: ignore[no-untyped-def, override]
        """Where one is called, not where all are listed."""
        if args and args[0] in HELP:
            self.commands[args[0]] = command_named(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="rekindle",
    cls=_ByName,
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


for _name, _help in HELP.items():
    app.command(_name, help=_help)(lambda: None)


LONGEST = 2000  # characters of an error: a file may quote itself at any length


def run() -> None:
    """What the command line asks for."""
    log_as("text")
    try:
        app()
    except RekindleError as error:
        print("rekindle:", printable(str(error)[:LONGEST], keep="\n"), file=sys.stderr)
        sys.exit(1)
