"""`rekindle shard`: host stages for a server in another process or on another machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer.core import TyperGroup

from rekindle.build import StageOrder, choose_types, host_shard, keygen, open_weights_of
from rekindle.cli import options
from rekindle.errors import BadConfig
from rekindle.spec import Span


class _HostsByDefault(TyperGroup):
    """`rekindle shard MODEL …` is `rekindle shard host MODEL …`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in (*self.commands, "--help"):
            args = ["host", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_HostsByDefault, help="Host stages for a server, or make keys for its links.")


@app.command()
def host(
    model: options.ModelPath = None,
    span: Annotated[list[str], typer.Option(help="Layers START:STOP of a stage; once per stage.")] = [],  # noqa: B006
    device: Annotated[list[str], typer.Option(help="Its device: cpu, cuda:0, hip:0.")] = [],  # noqa: B006
    pages: Annotated[list[int], typer.Option(help="Pages of KV (64 tokens each) on the device.")] = [],  # noqa: B006
    host_pages: Annotated[list[int], typer.Option(help="Pages more that RAM may hold.")] = [],  # noqa: B006
    slabs: Annotated[list[int], typer.Option(help="Pinned RAM (16 MiB each) kept for captures.")] = [],  # noqa: B006
    experts: Annotated[list[str], typer.Option(help="Which experts are on the device, as JSON.")] = [],  # noqa: B006
    listen: Annotated[str, typer.Option(help="ipc:///path, or tcp://host:port, which needs keys.")] = "",
    slots: Annotated[int, typer.Option(help="Sequences that run at the same time.")] = 16,
    kv_type: options.KvType = None,
    kv_mode: options.KvMode = "exact",
    kv_policy: options.KvPolicy = "qk",
    rewind_rows: Annotated[int, typer.Option(help="Rows of the longest block to verify.")] = 0,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    key: Annotated[Path | None, typer.Option(help="This shard's key pair.")] = None,
    allow: Annotated[list[Path], typer.Option(help="Public key of a head that may connect.")] = [],  # noqa: B006
) -> None:
    """Host stages until told to stop. Each --span needs a --device and --pages, in the same order.

    A server that starts the shard itself (rekindle serve --shard NAME='rekindle shard MODEL') adds all of this.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not listen:
        raise BadConfig("--listen is missing; give ipc:///path or tcp://host:port")
    _check_counts(len(span), device, pages, host_pages, slabs, experts)
    if dtype is None or kv_type is None:
        dtype, kv_type = choose_types(open_weights_of(model), device, dtype, kv_type)
    orders = []
    for i, text in enumerate(span):
        known = json.loads(experts[i]) if experts else None
        orders.append(
            StageOrder(
                device[i],
                _span(text),
                slots,
                pages[i],
                host_pages[i] if host_pages else 0,
                kv_type,
                kv_mode,
                kv_policy,
                dtype,
                tuple(map(tuple, known["hot"])) if known else None,
                tuple(known["ring"]) if known else (),
                rewind_rows,
                *slabs[i : i + 1],
            )
        )
    host_shard(model, orders, listen, key, allow)


@app.command("keygen")
def make_keys(path: Annotated[Path, typer.Argument(help="The secret goes here, the public key to PATH.pub.")]) -> None:
    """Make a key pair for links that leave the host: one for each shard, one for each head."""
    if path.exists():
        raise BadConfig(f"{path} exists already; a key is never overwritten")
    keygen(path)
    print(f"{path} is the secret; give {path}.pub to the other end")


def _check_counts(stages: int, device: list[str], *others: list[int] | list[str]) -> None:
    if not stages:
        raise BadConfig("--span is missing; give START:STOP once per stage")
    if len(set(device)) < len(device):
        raise BadConfig(f"--device names {', '.join(device)}: a shard hosts one stage per device")
    pages, *optional = others
    if len(device) != stages or len(pages) != stages or any(len(given) not in (0, stages) for given in optional):
        raise BadConfig(f"{stages} --span, {len(device)} --device and {len(pages)} --pages: give each once per stage")


def _span(text: str) -> Span:
    start, _, stop = text.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise BadConfig(f"--span: '{text}' is no span; write START:STOP, for instance 10:20")
    return Span(int(start), int(stop))
