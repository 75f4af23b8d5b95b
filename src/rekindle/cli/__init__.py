"""One module per command; what they print is for people."""

from __future__ import annotations

import logging
import sys

import typer
from rich.console import Console
from rich.logging import RichHandler

from rekindle.cli import bench, cache, devices, generate, inspect, plan, replay, serve, shard
from rekindle.errors import RekindleError

app = typer.Typer(
    name="rekindle",
    help="A local LLM server for hybrid models: no token is computed twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("devices")(devices.devices)
app.add_typer(bench.app, name="bench")
app.command("replay")(replay.replay)
app.add_typer(cache.app, name="cache")
app.add_typer(shard.app, name="shard")


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=Console(stderr=True), show_path=False)]
    )
    try:
        app()
    except RekindleError as error:
        print(f"rekindle: {error}", file=sys.stderr)
        sys.exit(1)
