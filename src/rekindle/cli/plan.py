"""`rekindle plan`: where everything would go, without loading anything."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Annotated

import typer

from rekindle.build import (
    RAM_SHARE,
    VRAM_SHARE,
    device_names,
    make_machine,
    open_model,
    plan_model,
    speeds,
    vram_by_name,
)
from rekindle.cli import options
from rekindle.config import Config, parse_bytes, show_bytes
from rekindle.errors import BadConfig, DoesNotFit
from rekindle.placement import Device, Machine, Plan, plan_as_json, show_plan

# Times as fast as a CPU: a card reads its memory ten times as fast as a CPU reads RAM, and there are about a tenth as
# many bytes, since a CPU keeps no quantised weights. More than the layers of any model, so that a card which holds
# all of them leaves the CPU the one it must have.
IMAGINED_GPU = 100.0


def plan(
    model: options.ModelPath = None,
    devices: options.Devices = "auto",
    split: options.Split = "auto",
    context: options.Context = None,
    sequences: options.Sequences = options.SEQUENCES,
    grid: options.Grid = None,
    kv_type: options.KvType = None,
    kv_mode: options.KvMode = "exact",
    kv_policy: options.KvPolicy = "qk",
    pool: Annotated[int | None, typer.Option(help="Tokens of KV on every device.")] = None,
    vram: options.Vram = None,
    ram: options.Ram = None,
    cache_ram: Annotated[str, typer.Option(help="RAM for snapshots.")] = "2GiB",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the plan for a model: every byte by name, why, and what stands next to it. Needs no GPU and loads nothing.

    With --vram GPUs of that size are assumed, whatever the machine has; without --devices one for each size.
    """
    names = options.names(devices)
    given = options.sizes(vram, "--vram")
    if given is not None and names == ("auto",):
        names = tuple(f"cuda:{i}" for i in range(len(given)))
    config = Config(
        model=model,
        devices=names,
        split=split,
        context=context,
        sequences=sequences,
        grid=grid,
        kv_type=kv_type,
        kv_mode=kv_mode,
        kv_policy=kv_policy,
        pool=pool,
        vram=given,
        ram=options.size(ram, "--ram"),
        cache_ram=parse_bytes(cache_ram, "--cache-ram"),
    )
    made = _plan(config)
    ram_note = f"{_percent(RAM_SHARE)} of what is free" if config.ram is None else ""
    width = shutil.get_terminal_size().columns
    print(json.dumps(plan_as_json(made)) if as_json else show_plan(made, width, ram_note))


def _plan(config: Config) -> Plan:
    machine = _machine(config)
    try:
        made = plan_model(config, open_model(config.model), machine)
    except DoesNotFit as error:
        if all(device.is_cpu for device in machine.devices):
            raise DoesNotFit(f"{error}; for a GPU give --vram") from error
        raise
    if config.vram is None:
        return made
    cards = " and ".join(
        f"about {show_bytes(int(size * VRAM_SHARE))} of an empty {show_bytes(size)} card"
        for size in dict.fromkeys(config.vram)
    )
    said = [f"serve without --vram takes {_percent(VRAM_SHARE)} of what is free: {cards}"]
    if len(made.stages) > 1 and config.split == "auto":
        assumed = f"imagined GPUs are equally fast, and {IMAGINED_GPU:.0f} times as fast as a CPU"
        said.append(f"{assumed}; serve measures real ones, and may split otherwise")
    return replace(made, reasons=(*made.reasons, *said))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _machine(config: Config) -> Machine:
    """The machine there is, or the one the user describes."""
    if config.vram is None:
        names = device_names(config.devices)
        relative = speeds(names, ()) if config.split == "auto" else None  # as `serve` divides the layers
        return make_machine(names, None, config.ram, (), relative)
    budgets = vram_by_name(config.vram, config.devices)
    machine = make_machine(["cpu"], None, config.ram)
    imagined = [
        machine.devices[0] if name == "cpu" else Device(name, _kind(name), budgets[name], IMAGINED_GPU)
        for name in config.devices
    ]
    return Machine(tuple(imagined), machine.ram)


def _kind(name: str) -> str:
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "hip") or not index.isdigit():
        raise BadConfig(f"--devices: '{name}' is no device; write cpu, cuda:0 or hip:0")
    return kind
