"""`rekindle plan`: where everything would go, without loading anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
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
    plan_numbers,
    rates,
    speeds,
    vram_by_name,
)
from rekindle.cli import options
from rekindle.config import Config, show_bytes, snapshot_folder
from rekindle.errors import BadConfig, DoesNotFit
from rekindle.placement import Device, Machine, Plan, card_named, plan_as_json, shape_named, show_plan
from rekindle.placement.cards import GpuCard

# Times as fast as a CPU: a card reads its memory ten times as fast as a CPU reads RAM, and there are about a tenth as
# many bytes, since a CPU keeps no quantised weights. More than the layers of any model, so that a card which holds
# all of them leaves the CPU the one it must have.
IMAGINED_GPU = 100.0


def plan(
    model: options.ModelPath = None,
    devices: options.Devices = "auto",
    split: options.Split = "auto",
    context: options.Context = None,
    sequences: options.Sequences = None,
    grid: options.Grid = None,
    kv_type: options.KvType = None,
    kv_mode: options.KvMode = "exact",
    kv_policy: options.KvPolicy = "qk",
    live_memory: options.LiveMemory = False,
    draft: options.Draft = options.DRAFT,
    drafter: options.Drafter = None,
    pool: Annotated[int | None, typer.Option(help="Tokens of KV on every device.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a file: qwen3.6-27b or qwen3.6-35b-a3b in the usual Q4_K_M mix.")
    ] = None,
    card: Annotated[
        list[str], typer.Option(help='A card by name, such as "RTX 3090", by its maker\'s figures; once per card.')
    ] = [],  # noqa: B006
    vram: options.Vram = None,
    ram: options.Ram = None,
    cache_ram: options.CacheRam = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the plan for a model: every byte by name, how fast decode is expected to be, why, and what stands next to
    it. Needs no GPU and loads nothing.

    With --vram GPUs of that size are assumed, whatever the machine has; without --devices one for each size. With
    --card they are empty cards of that name, of which serve would take 92 %.
    """
    names = options.names(devices)
    given = options.sizes(vram, "--vram")
    cards = [card_named(name) for name in card]
    if cards and (given is not None or names != ("auto",)):
        raise BadConfig("--card says which devices there are and how large; leave out --vram and --devices")
    if shape is not None and model is not None:
        raise BadConfig(f"--shape {shape} stands for a file, and {model} is one; leave one out")
    if cards:
        names = tuple(f"{its.kind}:{i}" for i, its in enumerate(cards))
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
        live_memory=live_memory,
        draft=draft,
        drafter=drafter,
        pool=pool,
        vram=given,
        ram=options.size(ram, "--ram"),
        cache_ram=options.size(cache_ram, "--cache-ram"),
        cache_dir=snapshot_folder(),  # whose routing counts `serve` reads too; nothing is written
    )
    made = _plan(config, cards, shape)
    ram_note = f"{_percent(RAM_SHARE)} of what is free" if config.ram is None else ""
    width = shutil.get_terminal_size().columns
    print(json.dumps(plan_as_json(made)) if as_json else show_plan(made, width, ram_note))


def _plan(config: Config, cards: Sequence[GpuCard], shape: str | None) -> Plan:
    machine = _of_cards(config, cards) if cards else _machine(config)
    try:
        if shape is None:
            made = plan_model(config, open_model(config.model), machine)
        else:
            if config.drafter is not None:
                raise BadConfig(f"--drafter {config.drafter} is compared with the model's file, and --shape has none")
            made = plan_numbers(config, *shape_named(shape), machine, kv_type=config.kv_type or "bf16")
    except DoesNotFit as error:
        if all(device.is_cpu for device in machine.devices):
            raise DoesNotFit(f"{error}; for a GPU give --vram") from error
        raise
    if cards:
        known = " and ".join(dict.fromkeys(card.name for card in cards))
        note = f"{known}: imagined, by its maker's figures; the speeds are what an H200's kernels reach of such figures"
        return replace(made, reasons=(*made.reasons, note))
    if config.vram is None:
        return made
    empty = " and ".join(
        f"about {show_bytes(int(size * VRAM_SHARE))} of an empty {show_bytes(size)} card"
        for size in dict.fromkeys(config.vram)
    )
    said = [f"serve without --vram takes {_percent(VRAM_SHARE)} of what is free: {empty}"]
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
        machine = make_machine(names, None, config.ram, (), relative)
        known = rates(names)
        return replace(machine, devices=tuple(replace(each, rates=known.get(each.name)) for each in machine.devices))
    budgets = vram_by_name(config.vram, config.devices)
    machine = make_machine(["cpu"], None, config.ram)
    imagined = [
        machine.devices[0] if name == "cpu" else Device(name, _kind(name), budgets[name], IMAGINED_GPU)
        for name in config.devices
    ]
    return Machine(tuple(imagined), machine.ram)


def _of_cards(config: Config, cards: Sequence[GpuCard]) -> Machine:
    """Empty ones, beside the RAM of this machine or the one that was given."""
    ram, fastest = make_machine(["cpu"], None, config.ram).ram, max(card.speed for card in cards)
    return Machine(
        tuple(
            Device(name, its.kind, int(its.bytes * VRAM_SHARE), IMAGINED_GPU * its.speed / fastest, rates=its.rates)
            for name, its in zip(config.devices, cards, strict=True)
        ),
        ram,
    )


def _kind(name: str) -> str:
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "hip") or not index.isdigit():
        raise BadConfig(f"--devices: '{name}' is no device; write cpu, cuda:0 or hip:0")
    return kind
