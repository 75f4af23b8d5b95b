"""`rekindle bench`: how fast a model runs here, and models to try it with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from rekindle.bench.ops import Op, top_ops
from rekindle.bench.speed import Report, run_bench
from rekindle.bench.synth import SHAPES, shape_totals, write_synthetic
from rekindle.build import Built
from rekindle.build.probe import probe_device
from rekindle.cli import options
from rekindle.config import Config, show_bytes
from rekindle.errors import BadConfig


class RunUnlessNamed(TyperGroup):
    """`rekindle bench MODEL` is `rekindle bench run MODEL`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["run", *args])


app = typer.Typer(
    cls=RunUnlessNamed,
    help="Speed of a model here (`run`, the default: its options are in `bench run --help`); and synthetic models.",
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


@app.command("run")
def run(
    model: options.ModelPath = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given several times.")] = None,
    answer: Annotated[int, typer.Option(help="Answer tokens.")] = 64,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; may be given several times.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs per row; the best counts.")] = 3,
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
    )
    built = options.load_with_progress(config)
    try:
        shapes = [(tokens, answer, 1) for tokens in prompts] + [(min(prompts), answer, n) for n in batches if n > 1]
        fitting = [shape for shape in shapes if shape[0] + shape[1] <= built.context]
        for tokens, _, _ in set(shapes) - set(fitting):
            Console(stderr=True).print(f"left out: {tokens} + {answer} tokens, the context holds {built.context}")
        report = run_bench(built, fitting, repeats)
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
    Console().print(f"[bold]{report.model}[/bold] on {report.device}")
    Console().print(table)


def _show_ops(title: str, ops: Sequence[Op]) -> None:
    table = Table(title, "calls", "ms", "share", box=None, header_style="bold")
    for op in ops:
        table.add_row(op.name[:60], str(op.calls), f"{op.milliseconds:,.2f}", f"{100 * op.share:.1f} %")
    Console().print(table)
