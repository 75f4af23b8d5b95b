"""`rekindle serve`: the HTTP server."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
import uvicorn
from rich.console import Console

from rekindle.build import Built, build_app
from rekindle.cli import options
from rekindle.config import Config, parse_bytes, parse_shards
from rekindle.errors import BadConfig

log = logging.getLogger("rekindle")

PATIENCE = 3.0  # seconds after the last event for clients that neither read it nor send the rest of a request


def serve(
    model: options.ModelPath = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8080,
    devices: options.Devices = "auto",
    split: options.Split = "auto",
    context: options.Context = None,
    sequences: options.Sequences = options.SEQUENCES,
    queue: Annotated[int, typer.Option(help="Requests that may wait for a place.")] = 256,
    grid: options.Grid = None,
    dtype: options.Dtype = None,
    kv_type: options.KvType = None,
    kv_mode: options.KvMode = "exact",
    kv_policy: options.KvPolicy = "qk",
    pool: Annotated[
        int | None, typer.Option(help="Tokens of KV on every device; decided by the plan if left out.")
    ] = None,
    vram: options.Vram = None,
    ram: options.Ram = None,
    cache_ram: Annotated[str, typer.Option(help="RAM for snapshots.")] = "2GiB",
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for snapshots that survive a restart.")] = None,
    cache_disk: Annotated[str, typer.Option(help="Disk for snapshots.")] = "16GiB",
    threads: options.Threads = None,
    shard: Annotated[
        list[str],
        typer.Option(
            help="NAME=COMMAND starts a shard, such as lab='rekindle shard MODEL', and starts it again if it dies; "
            "NAME=ipc:///path or NAME=tcp://host:port is one that runs already. --devices names it behind an @."
        ),
    ] = [],  # noqa: B006
    shard_memory: Annotated[
        list[str], typer.Option(help="NAME=16GiB: what each device of the shard may use; needed for other machines.")
    ] = [],  # noqa: B006
    shard_key: Annotated[list[str], typer.Option(help="NAME=FILE: the shard's public key.")] = [],  # noqa: B006
    link_key: Annotated[Path | None, typer.Option(help="This server's key pair for links to other machines.")] = None,
    ray: Annotated[
        str | None, typer.Option(help="Put the stages on the nodes of a Ray cluster: its address, or auto.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Divide the devices among so many whole models; a request goes where its prefix is.")
    ] = 1,
    audit: Annotated[
        int, typer.Option(help="Check one in so many restores against a cold run, in idle time; 0 checks none.")
    ] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="REKINDLE_API_KEY", help="Ask clients for this key.")] = None,
    name: Annotated[str | None, typer.Option(help="Model id shown to clients.")] = None,
    normalise: Annotated[bool, typer.Option(help="Leave out lines that clients change on each call.")] = True,
    remember_turns: Annotated[bool, typer.Option(help="Keep the model's own turns in the tokens it wrote.")] = True,
    prepare_next: Annotated[bool, typer.Option(help="Prepare the next prompt's state after an answer.")] = True,
) -> None:
    """Serve a model over HTTP, in the dialects that agents speak."""
    config = Config(
        model=model,
        devices=options.names(devices),
        split=split,
        context=context,
        sequences=sequences,
        grid=grid,
        queue=queue,
        dtype=dtype,
        kv_type=kv_type,
        kv_mode=kv_mode,
        kv_policy=kv_policy,
        pool=pool,
        vram=options.sizes(vram, "--vram"),
        ram=options.size(ram, "--ram"),
        cache_ram=parse_bytes(cache_ram, "--cache-ram"),
        cache_dir=cache_dir,
        cache_disk=parse_bytes(cache_disk, "--cache-disk"),
        threads=threads,
        shards=parse_shards(shard, shard_memory, shard_key),
        link_key=link_key,
        ray=ray,
        replicas=replicas,
        audit=audit,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # while loading, what has started is stopped
    listener = _listen(host, port)
    built = options.load_with_progress(config)
    try:
        app = build_app(
            built,
            api_key=api_key,
            name=name,
            normalise=normalise,
            remember_turns=remember_turns,
            prepare_next=prepare_next,
        )
        # All that is there now stays: the collector would look through it again and again while the token loop waits.
        gc.collect()
        gc.freeze()
        address, port = listener.getsockname()[:2]
        listener.listen()  # from the greeting on, nobody is refused
        _greet(built, address, port, name or built.model.name, api_key is not None)
        _Server(uvicorn.Config(app, log_level="warning"), built, cache_dir is not None).run(sockets=[listener])
    finally:
        built.stop()


class _Server(uvicorn.Server):
    """At the first signal the answers under way end, and it stops in good order; a second ends the process at once."""

    def __init__(self, config: uvicorn.Config, built: Built, keeps_snapshots: bool) -> None:
        super().__init__(config)
        self._built = built
        self._keeps_snapshots = keeps_snapshots

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would hand each signal on once it has stopped, as the end of a process that still has to save."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        yield

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_DFL)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        written = ", snapshots are written" if self._keeps_snapshots else ""
        log.info("stopping: answers under way end here%s; Ctrl-C again leaves at once", written)
        self._built.end_requests()
        hanging_up = asyncio.create_task(self._hang_up())
        await super().shutdown(sockets)
        hanging_up.cancel()

    async def _hang_up(self) -> None:
        """A step under way may take longer than our patience with clients, which begins when they have been told."""
        await asyncio.to_thread(self._built.wait_for_end)
        await asyncio.sleep(PATIENCE)
        for connection in self.server_state.connections:
            connection.transport.abort()


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before minutes of loading, so that a taken one is said at once."""
    if not 0 <= port <= 65535:
        raise BadConfig(f"--port {port}: a port is a number up to 65535, or 0 for any that is free")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise BadConfig(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --port"
        ) from error
    return listener


def _greet(built: Built, host: str, port: int, name: str, locked: bool) -> None:
    key, header = ("THE_KEY", " -H 'authorization: Bearer THE_KEY'") if locked else ("any", "")
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    headers = f"-H 'content-type: application/json'{header}"
    out = Console(soft_wrap=True)
    out.print(f"\n[bold]Rekindle[/bold] serves [bold]{name}[/bold], context {built.context:,} tokens", highlight=False)
    out.print(f"  chat in a browser      {url}/", highlight=False)
    out.print(f"  OpenAI-style clients   OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}", highlight=False)
    out.print(
        f"  or just                curl {url}/v1/chat/completions {headers} "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'\n""",
        highlight=False,
    )
