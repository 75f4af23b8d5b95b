"""`rekindle plan`: where everything would go, without loading anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
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
from rekindle.placement.shapes import NAMES, USUAL_MIX

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
    live_memory: options.LiveMemory = None,
    draft: options.Draft = options.DRAFT,
    drafter: options.Drafter = None,
    pool: Annotated[int | None, typer.Option(help="Tokens of KV on every device at most.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(help=f"Instead of a file: {' or '.join(NAMES)} in the usual {USUAL_MIX} mix."),
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
    --card they are empty cards of that name, of which serve would take 92 %, or as much as --vram says.
    """
    names = options.names(devices)
    given = options.sizes(vram, "--vram")
    cards = [card_named(name) for name in card]
    if cards and names != ("auto",):
        raise BadConfig("--card says which devices there are; leave out --devices")
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
    free = f"{_percent(RAM_SHARE)} of what is free" + (" on this machine; --ram plans for another" if cards else "")
    ram_note = free if config.ram is None else "all that --ram says"
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
        if cards and config.ram is None:
            here = f"RAM is {_percent(RAM_SHARE)} of what is free on this machine; --ram plans for another"
            raise DoesNotFit(f"{error}; {here}") from error
        raise
    return replace(made, reasons=(*made.reasons, *_assumptions(config, cards, shape, made)))


def _assumptions(config: Config, cards: Sequence[GpuCard], shape: str | None, made: Plan) -> Iterator[str]:
    """What a plan takes for granted of a file or a machine that is not at hand."""
    if shape is not None:
        yield f"{shape} stands for a file in the {USUAL_MIX} mix; real ones differ by a few per cent"
    if cards:
        known = " and ".join(dict.fromkeys(card.name for card in cards))
        yield f"{known}: imagined, by its maker's figures; the speeds are what an H200's kernels reach of such figures"
    share = _percent(VRAM_SHARE)
    sizes = dict.fromkeys(config.vram or (card.bytes for card in cards))
    if config.vram is None and cards:
        empty = " and ".join(map(show_bytes, sizes))
        yield f"of an empty card of {empty} serve takes {share}, and so does this plan; --vram says otherwise"
    if config.vram is None or cards:
        return
    taken = (f"about {show_bytes(int(size * VRAM_SHARE))} of an empty {show_bytes(size)} card" for size in sizes)
    yield f"all of --vram is used; serve without --vram takes {share} of what is free: {' and '.join(taken)}"
    if any(device.rates is None and not device.is_cpu for device in made.machine.devices):
        yield "no speed is foretold: of a GPU that is not here only its memory is known; --card names one"
    if len(made.stages) > 1 and config.split == "auto":
        assumed = f"imagined GPUs are equally fast, and {IMAGINED_GPU:.0f} times as fast as a CPU"
        yield f"{assumed}; serve measures real ones, and may split otherwise"


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
    known = rates(config.devices)  # of GPUs that are here, whatever is to be used of them
    imagined = [
        machine.devices[0]
        if name == "cpu"
        else Device(name, _kind(name), budgets[name], IMAGINED_GPU, rates=known.get(name))
        for name in config.devices
    ]
    return Machine(tuple(imagined), machine.ram)


def _of_cards(config: Config, cards: Sequence[GpuCard]) -> Machine:
    """Empty ones, or as much of them as --vram says, beside the RAM of this machine or the one that was given."""
    given = vram_by_name(config.vram, config.devices)
    for name, its in zip(config.devices, cards, strict=True):
        if given.get(name, 0) > its.bytes:
            raise BadConfig(
                f"--vram gives {name} {show_bytes(given[name])}, and the card {its.name} has {show_bytes(its.bytes)}"
            )
    ram, fastest = make_machine(["cpu"], None, config.ram).ram, max(card.speed for card in cards)
    return Machine(
        tuple(
            Device(
                name,
                its.kind,
                given.get(name, int(its.bytes * VRAM_SHARE)),
                IMAGINED_GPU * its.speed / fastest,
                rates=its.rates,
            )
            for name, its in zip(config.devices, cards, strict=True)
        ),
        ram,
    )


def _kind(name: str) -> str:
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "hip") or not index.isdigit():
        raise BadConfig(f"--devices: '{name}' is no device; write cpu, cuda:0 or hip:0")
    return kind
