"""`rekindle shard`: host stages for a server in another process or on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer.core import TyperGroup

from rekindle.buffers import STOCK
from rekindle.build import StageConfig, choose_types, host_shard, keygen, open_weights_of, set_threads
from rekindle.cli import options
from rekindle.errors import BadConfig
from rekindle.spec import Span


class _Experts(msgspec.Struct):
    hot: tuple[tuple[int, ...], ...]
    cache_slots: tuple[int, ...]
    lendable: tuple[int, ...] = ()


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
    host_pages: Annotated[list[int], typer.Option(help="More pages, in RAM.")] = [],  # noqa: B006
    slabs: Annotated[list[int], typer.Option(help="Slabs of pinned RAM (16 MiB each) kept for snapshots.")] = [],  # noqa: B006
    slot_pages: Annotated[
        list[int], typer.Option(help="Pages of KV in the memory of a slot while no sequence is in it; 0: none.")
    ] = [],  # noqa: B006
    experts: Annotated[list[str], typer.Option(help="Which experts are on the device, as JSON.")] = [],  # noqa: B006
    listen: Annotated[str, typer.Option(help="ipc:///path, or tcp://host:port, between hosts with keys.")] = "",
    slots: Annotated[int, typer.Option(help="Sequences that run at the same time.")] = 16,
    kv_type: options.KvType = None,
    kv_mode: options.KvMode = "exact",
    kv_policy: options.KvPolicy = "qk",
    attended: Annotated[
        int, typer.Option(help="With --kv-mode sparse: pages that a token attends, as at all stages; 0: its --pages.")
    ] = 0,
    rewind_rows: Annotated[int, typer.Option(help="Tokens of the longest draft to verify.")] = 0,
    chunk: Annotated[int, typer.Option(help="Most tokens of a prefill chunk.")] = 0,
    table_width: Annotated[
        int,
        typer.Option(help="KV pages of a sequence at the context limit; needed to record steps at the start."),
    ] = 0,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    key: Annotated[Path | None, typer.Option(help="This shard's key pair; needs --allow.")] = None,
    allow: Annotated[
        list[Path], typer.Option(help="Public key of a server that may connect; repeatable. No other may.")
    ] = [],  # noqa: B006
) -> None:
    """Host stages until a signal stops the process. Each --span needs a --device and --pages, in the same order.

    A server that starts the shard itself (rekindle serve --shard NAME='rekindle shard MODEL') adds all of this.
    """
    if threads is not None:
        set_threads(threads)
    if not listen:
        raise BadConfig("--listen is missing; give ipc:///path or tcp://host:port")
    _check_counts(len(span), device, pages, host_pages, slabs, slot_pages, experts)
    if dtype is None or kv_type is None:
        dtype, kv_type = choose_types(open_weights_of(model), device, dtype, kv_type)
    configs = []
    for i, text in enumerate(span):
        known = _experts(experts[i]) if experts else None
        configs.append(
            StageConfig(
                device=device[i],
                span=_span(text),
                slots=slots,
                pages=pages[i],
                host_pages=host_pages[i] if host_pages else 0,
                kv_type=kv_type,
                kv_mode=kv_mode,
                kv_policy=kv_policy,
                attended=attended,
                dtype=dtype,
                hot=known.hot if known else None,
                cache_slots=known.cache_slots if known else (),
                lendable=known.lendable if known else (),
                slot_pages=slot_pages[i] if slot_pages else 0,
                rewind_rows=rewind_rows,
                slabs=slabs[i] if slabs else STOCK,
                chunk=chunk,
                table_width=table_width,
            )
        )
    host_shard(model, configs, listen, key, allow)


@app.command("keygen")
def make_keys(path: Annotated[Path, typer.Argument(help="The secret goes here, the public key to PATH.pub.")]) -> None:
    """Make a key pair for links between machines: one for each shard, one for each server."""
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


def _experts(text: str) -> _Experts | None:
    """Hot experts and slots of the expert cache per layer, as a server writes them; null: all are on the device."""
    try:
        return msgspec.json.decode(text, type=_Experts | None)
    except msgspec.MsgspecError as error:
        raise BadConfig(f"--experts: '{text[:80]}' does not say which experts are hot: {error}") from error


def _span(text: str) -> Span:
    start, _, stop = text.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise BadConfig(f"--span: '{text}' is no span; write START:STOP, for instance 10:20")
    return Span(int(start), int(stop))
