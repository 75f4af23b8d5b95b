"""`rekindle bench`: how fast a model runs here, and models to try it with."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from rekindle.bench.client import LoadClient
from rekindle.bench.load import Load, LoadRow, rows_of, run_load
from rekindle.bench.ops import Op, top_ops
from rekindle.bench.speed import Report, run_bench
from rekindle.bench.synth import SHAPES, shape_totals, write_synthetic
from rekindle.build import Built
from rekindle.build.probe import probe_device
from rekindle.cli import options
from rekindle.cli.tables import show_table
from rekindle.config import Config, printable, show_bytes
from rekindle.errors import BadConfig


class RunUnlessNamed(TyperGroup):
    """`rekindle bench MODEL` is `rekindle bench run MODEL`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["run", *args])


app = typer.Typer(
    cls=RunUnlessNamed,
    help="Speed of a model here (`run`, the default: its options are in `bench run --help`), speed of a server as its "
    "clients see it (`serve`), and synthetic models.",
)


@app.command("synth")
def synth(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")],
    path: Annotated[Path | None, typer.Argument(help="Where to write it; SHAPE.gguf here if left out.")] = None,
) -> None:
    """Write a GGUF with random weights in the exact shape and quantisation mix of a real model."""
    target = path or Path(f"{shape}.gguf")
    if target.exists():
        raise BadConfig(f"{target} exists; name another file or remove it")
    if not target.parent.is_dir():
        raise BadConfig(f"{target} cannot be written: there is no folder {target.parent}")
    print(f"{target}: writes {show_bytes(shape_totals(shape).total)}", flush=True)
    try:
        write_synthetic(target, shape)
    except OSError as error:
        raise BadConfig(f"{target} cannot be written: {error.strerror}") from error
    print(f"{target}: done")


@app.command("serve")
def serve(
    url: Annotated[str, typer.Argument(help="An OpenAI-style server, such as http://127.0.0.1:8080.")],
    prompt: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given several times.")] = None,
    answer: Annotated[int, typer.Option(help="Answer tokens; stop tokens do not end an answer.")] = 64,
    requests: Annotated[int, typer.Option(help="Requests of every prompt length.")] = 4,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    rate: Annotated[
        float | None, typer.Option(help="Requests that begin per second, at random moments, however many run already.")
    ] = None,
    prefix: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    turns: Annotated[int, typer.Option(help="Requests of a conversation, each with all turns before it.")] = 1,
    turn: Annotated[int, typer.Option(help="New tokens of every turn after the first.")] = 200,
    again: Annotated[int, typer.Option(help="Times to send everything again, which shows what a cache gives.")] = 0,
    intruder: Annotated[
        int, typer.Option(help="Tokens of one more prompt, sent while the others are being answered; 0 sends none.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed sends the same prompts; any if left out, so that all are new.")
    ] = None,
    vocab: Annotated[int, typer.Option(help="Token ids are drawn below this.")] = 32_000,
    lowest: Annotated[
        int | None, typer.Option(help="Token ids are drawn from here on; 1,000 if left out, or half of --vocab.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send messages of words, as agents do; what is given in tokens is in words then."),
    ] = False,
    model: Annotated[str | None, typer.Option(help="Model id, for servers that need one.")] = None,
    token_ids: Annotated[
        bool, typer.Option(help="Ask for the answer's token ids, on which a conversation goes on.")
    ] = True,
    api_key: Annotated[str | None, typer.Option(envvar="REKINDLE_API_KEY", help="For the server.")] = None,
) -> None:
    """Put load on a server and report what its clients see: a table for people, then one line of JSON.

    First token: from the request sent to the first event with tokens. Gap: between two such events of one answer.
    """
    load = Load(
        prompts=tuple(prompt or [512]),
        answer=answer,
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        prefix=prefix,
        turns=turns,
        turn=turn,
        again=again,
        intruder=intruder,
        seed=random.SystemRandom().getrandbits(32) if seed is None else seed,
        vocab=vocab,
        lowest=lowest,
        chat=chat,
    )
    rows = rows_of(asyncio.run(run_load(LoadClient(url, api_key, model, token_ids), load)))
    show_table(load_table(rows))
    for row in rows:
        if row.failure is not None:
            hint = " (--vocab bounds the ids that are sent)" if "vocabulary" in row.failure else ""
            Console(stderr=True).print(f"{row.what}: {row.failed} of {row.requests} failed: {row.failure}{hint}")
    print(json.dumps({"seed": load.seed, "rows": [row.as_dict() for row in rows]}))
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def load_table(rows: Sequence[LoadRow]) -> Table:
    names = ("", "n", "first token", "last", "gap", "worst", "tok/s", "all", "restored", "computed")
    table = Table(*names, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        figures = [
            f"{row.first_p50:,.1f}…{row.first_worst:,.1f}",
            f"{row.last_first:,.0f}",
            f"{row.gap_p50:,.1f}…{row.gap_p99:,.1f}",
            f"{row.gap_worst:,.1f}",
            f"{row.decode:,.0f}",
            f"{row.output_tokens_per_second:,.0f}",
            f"{sum(row.restored.values()):,}",
            f"{row.computed:,}",
        ]
        if row.requests == row.failed:
            figures = ["–"] * len(figures)
        elif row.is_part:  # of answers that had begun before
            figures[:2] = figures[6:] = "–", "–"
        table.add_row(row.what, str(row.requests - row.failed), *figures)
    table.caption = (
        "ms: first token (median…worst), last of the first tokens since the first request, gap (median…p99), worst gap"
        "; tokens of answers per second: of one, of all of this name together, while others ran too"
    )
    if any(row.is_part for row in rows):
        table.caption += "; beside an intruder: what came of the other answers until its first token"
    return table


@app.command("run")
def run(
    model: options.ModelPath = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given several times.", min=1)] = None,
    answer: Annotated[int, typer.Option(help="Answer tokens.", min=1)] = 64,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences at once; may be given several times.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs per row; the best counts.", min=1)] = 3,
    ops: Annotated[bool, typer.Option("--ops", help="Also where the time goes, by operation.")] = False,
    devices: options.Devices = "auto",
    split: options.Split = "auto",
    context: options.Context = None,
    grid: options.Grid = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
) -> None:
    """Measure prefill and decode: a table for people, then one line of JSON. `run` may be left out."""
    prompts, batches = prompt or [128, 512], batch or [1, 4]
    config = Config(
        model=model,
        devices=options.names(devices),
        split=split,
        context=context,
        sequences=max(batches),
        grid=grid,
        dtype=dtype,
        threads=threads,
        cache_ram=0,
        draft="off",  # the table says what a step takes
    )
    built = options.load_with_progress(config)
    try:
        shapes = [(tokens, answer, 1) for tokens in prompts] + [(min(prompts), answer, n) for n in batches if n > 1]
        fitting = [shape for shape in shapes if shape[0] + shape[1] <= built.context]
        for tokens in sorted({tokens for tokens, _, _ in set(shapes) - set(fitting)}):
            too_long = f"{tokens} tokens and an answer of {answer}, the context holds {built.context}"
            if not fitting:
                raise BadConfig(f"--prompt {too_long}")
            Console(stderr=True).print(f"left out: a prompt of {too_long}")
        with Console(stderr=True).status("") as status:
            report = run_bench(built, fitting, repeats, status.update)
        _show(report, _copy_speed(built))
        if ops:
            _show_ops("decode", top_ops(built, min(prompts), answer, 1))
            _show_ops("prefill", top_ops(built, max(prompts), 1, 1))
    finally:
        built.stop()
    print(json.dumps(report.as_dict()))


def _copy_speed(built: Built) -> float | None:
    """Bytes per second through the memory that decode waits for, where one device of this process holds the model;
    measured now, as busy as the machine is."""
    names = [stage.device.name for stage in built.plan.stages]
    return probe_device(names[0], fresh=True).copy if len(names) == 1 and built.hosts is None else None


def _show(report: Report, copy: float | None) -> None:
    limit = "" if copy is None else f" of {copy / 1e9:,.0f} GB/s"
    table = Table(
        "prompt", "answer", "sequences", "prefill tok/s", "decode tok/s", "bytes/token", f"share{limit}",
        box=None, header_style="bold",
    )  # fmt: skip
    for row in report.rows:
        share = "" if copy is None else f"{100 * row.share(copy):.0f} %"
        counts = map(str, (row.prompt, row.answer, row.sequences))
        table.add_row(*counts, f"{row.prefill:,.1f}", f"{row.decode:,.1f}", show_bytes(round(row.traffic)), share)
    Console().print(f"[bold]{escape(printable(report.model))}[/bold] on {report.device}")
    show_table(table)


def _show_ops(title: str, ops: Sequence[Op]) -> None:
    table = Table(title, "calls", "ms", "share", box=None, header_style="bold")
    for op in ops:
        table.add_row(op.name[:60], str(op.calls), f"{op.milliseconds:,.2f}", f"{100 * op.share:.1f} %")
    show_table(table)
