"""`rekindle bench`: how fast a model runs here."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rekindle.bench.speed import run_bench
from rekindle.cli import options
from rekindle.config import Config


def bench(
    model: options.ModelPath = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given several times.")] = None,
    answer: Annotated[int, typer.Option(help="Answer tokens.")] = 64,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; may be given several times.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs per row; the best counts.")] = 3,
    devices: options.Devices = "auto",
    split: options.Split = "auto",
    context: options.Context = None,
    grid: options.Grid = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
) -> None:
    """Measure prefill and decode: a table for people, then one line of JSON."""
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
    finally:
        built.stop()
    table = Table("prompt", "answer", "sequences", "prefill tok/s", "decode tok/s", box=None, header_style="bold")
    for row in report.rows:
        table.add_row(*map(str, (row.prompt, row.answer, row.sequences, f"{row.prefill:,.1f}", f"{row.decode:,.1f}")))
    Console().print(f"[bold]{report.model}[/bold] on {report.device}")
    Console().print(table)
    print(json.dumps(report.as_dict()))
