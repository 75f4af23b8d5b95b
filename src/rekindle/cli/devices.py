"""`rekindle devices`: what this machine has, how fast it is, and what a model would get where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from rekindle.build import available_ram, device_names, make_machine, open_model, plan_model, probe_device, speeds
from rekindle.cli import options
from rekindle.cli.tables import show_table
from rekindle.config import Config, printable, show_bytes
from rekindle.errors import DoesNotFit


def devices(
    model: Annotated[Path | None, typer.Argument(help="Show what this model would get where.")] = None,
    context: options.Context = None,
    sequences: options.Sequences = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again instead of reading the last result.")] = False,
) -> None:
    """List the devices that --devices can name, their memory and their measured speed.

    The speeds are kept in the user's cache folder; --split auto divides the layers by them.
    """
    out = Console()
    names = _all_devices()
    table = Table("device", "is", "memory free", "of", "copies", "link", "multiplies", box=None, pad_edge=False)
    for name in names:
        found = probe_device(name, fresh)
        free, total = _memory(name)
        table.add_row(
            name,
            _describe(name),
            show_bytes(free),
            show_bytes(total),
            f"{found.copy / 1e9:.1f} GB/s",
            f"{found.link / 1e9:.1f} GB/s" if found.link else "",
            f"{found.matrix / 1e12:.3f} TFLOP/s",
        )
    show_table(table)
    if model is not None:
        config = Config(model=model, context=context, sequences=sequences)
        _show_spans(out, device_names(["auto"]), config)
        if len(names) > 1:  # and with the CPU's help
            _show_spans(out, names, config)


def _show_spans(out: Console, names: list[str], config: Config) -> None:
    out.print(f"\n--devices {','.join(names)}", highlight=False)
    try:
        plan = plan_model(config, open_model(config.model), make_machine(names, None, None, (), speeds(names, ())))
    except DoesNotFit as error:
        out.print(f"  does not fit: {printable(str(error))}", highlight=False, markup=False)
        return
    for stage in plan.stages:
        size = f"{show_bytes(stage.total)} of {show_bytes(stage.device.budget)}"
        cold = f", {stage.cold} experts cold" if stage.cold else ""
        line = f"  {stage.device.name}: layers {stage.span}, {size}, KV pool of {stage.pool_tokens:,} tokens{cold}"
        out.print(line, highlight=False, soft_wrap=True)


def _all_devices() -> list[str]:
    gpus = [name for name in device_names(["auto"]) if name != "cpu"]
    return [*gpus, "cpu"]


def _describe(name: str) -> str:
    if name == "cpu":
        return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(int(name.partition(":")[2]))


def _memory(name: str) -> tuple[int, int]:
    """Free and all, in bytes."""
    if name == "cpu":
        return available_ram(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.mem_get_info(int(name.partition(":")[2]))
