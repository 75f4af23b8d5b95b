"""`rekindle serve`: the HTTP server."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from rich.console import Console
from rich.markup import escape
from starlette.concurrency import run_in_threadpool

from rekindle.api import ApiKeys, Guard, ModelHost, create_app
from rekindle.api.connections import IDLE_SECONDS, guarded_protocol
from rekindle.api.request_log import write_line
from rekindle.api.traces import Traces
from rekindle.build import Preset, TextOptions, check_drafter, make_sources, own_cache_folder, read_presets, shared_ram
from rekindle.cli import options
from rekindle.cli.logs import log_as
from rekindle.cli.server import Server, listen, stop_signals
from rekindle.config import Config, parse_bytes, parse_shards, printable
from rekindle.errors import BadConfig

log = logging.getLogger("rekindle")

KEY_VARIABLE = "REKINDLE_API_KEY"
# Seconds after which a thread asks for the interpreter's lock that another keeps. The threads that read weights need it
# for a moment every millisecond; later one launches steps, and every call into torch lets go of it, beside one that
# sends tokens. Python's 5 ms are three tokens long. What each turn costs: scripts/bench_interpreter.py.
TURN = 0.0001
DEFAULTS, GUARD = Config(), Guard()


def serve(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="GGUF files or Hugging Face folders; the embedded model if left out. A request's model field chooses.",
        ),
    ] = None,
    presets: Annotated[
        Path | None,
        typer.Option("--models", help="TOML file of several models, each with options (docs/operations.md)."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8080,
    devices: options.Devices = "auto",
    split: options.Split = "auto",
    context: options.Context = None,
    sequences: options.Sequences = None,
    queue: Annotated[
        int, typer.Option(help="Most requests of one name space that wait; further ones are refused.")
    ] = DEFAULTS.queue,
    grid: options.Grid = None,
    max_gap: Annotated[
        int | None,
        typer.Option(
            help="Milliseconds between two tokens of an answer while another request's prompt comes in: a target; "
            "longer while several prompts wait. If left out 16 on a GPU, 50 where a chunk of the prompt cannot pause "
            "for answers and is made shorter (several GPUs, sparse KV), 250 on CPUs and over shards, where no chunk "
            "has fewer than 64 tokens and a prompt takes at most twice its time, so that a small target may be missed."
        ),
    ] = None,
    dtype: options.Dtype = None,
    kv_type: options.KvType = None,
    kv_mode: options.KvMode = "exact",
    kv_policy: options.KvPolicy = "qk",
    live_memory: options.LiveMemory = None,
    draft: options.Draft = options.DRAFT,
    drafter: options.Drafter = None,
    pool: Annotated[
        int | None, typer.Option(help="Tokens of KV cache on every device at most; the plan decides if left out.")
    ] = None,
    vram: options.Vram = None,
    ram: options.Ram = None,
    cache_ram: options.CacheRam = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps snapshots, and so people's prompts, across restarts; if left out "
            "~/.cache/rekindle/snapshots, readable by you only."
        ),
    ] = None,
    no_cache_dir: Annotated[bool, typer.Option("--no-cache-dir", help="Keep no snapshots on disk.")] = False,
    cache_disk: Annotated[
        str | None,
        typer.Option(
            help="Disk space that snapshots of this model may take; if left out a quarter of what is free, "
            "64GiB at most."
        ),
    ] = None,
    threads: options.Threads = None,
    shard: Annotated[
        list[str],
        typer.Option(
            help="A process that hosts layers. NAME=COMMAND starts one, such as lab='rekindle shard MODEL', and "
            "restarts it if it dies; NAME=ipc:///path or NAME=tcp://host:port is one that runs already. "
            "--devices names its devices with @NAME, such as cpu@lab."
        ),
    ] = [],  # noqa: B006
    shard_memory: Annotated[
        list[str], typer.Option(help="NAME=16GiB: memory to use of each device of the shard; needed on other machines.")
    ] = [],  # noqa: B006
    shard_key: Annotated[
        list[str], typer.Option(help="NAME=FILE: the shard's public key, made by `rekindle shard keygen`.")
    ] = [],  # noqa: B006
    link_key: Annotated[
        Path | None, typer.Option(help="This server's own key pair, for links to shards on other machines.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or auto: its nodes host all layers.")
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            help="Copies of the model, each on its part of the devices; a request goes to the one that has its prefix."
        ),
    ] = 1,
    audit: Annotated[
        int,
        typer.Option(
            help="Check every n-th restored snapshot against a computation from scratch, in idle time; 0 checks none."
        ),
    ] = 0,
    api_key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="Key that clients must send.")] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="TOML file of named keys, each with a name space and limits (docs/security.md).")
    ] = None,
    insecure: Annotated[bool, typer.Option(help="Allow other machines without a key.")] = False,
    allow_host: Annotated[
        list[str],
        typer.Option(
            help="Host name under which clients reach this server, besides localhost and IP addresses; repeatable."
        ),
    ] = [],  # noqa: B006
    allow_origin: Annotated[
        list[str],
        typer.Option(
            help="Origin of web pages that may use this server, such as https://chat.example.org; repeatable."
        ),
    ] = [],  # noqa: B006
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = f"{GUARD.max_body >> 20}MiB",
    max_connections: Annotated[int, typer.Option(help="Connections at one time.")] = 512,
    header_timeout: Annotated[float, typer.Option(help="Seconds for a request's headers to arrive.")] = 15.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a request's body to arrive.")] = GUARD.body_seconds,
    drain: Annotated[
        float,
        typer.Option(
            help="Seconds that running answers get to finish after SIGTERM or SIGHUP; after Ctrl-C they get none."
        ),
    ] = 5.0,
    log_format: Annotated[
        str, typer.Option(help="How the log is written: text or json, one line per request.")
    ] = "text",
    otlp: Annotated[
        str | None,
        typer.Option(help="Send OpenTelemetry traces to this collector (OTLP over HTTP), e.g. http://localhost:4318."),
    ] = None,
    idle_unload: Annotated[
        float | None,
        typer.Option(help="Unload a model that nobody has used for this many seconds; the next request loads it."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model id shown to clients; the file's name if left out.")] = None,
    normalise: Annotated[
        bool,
        typer.Option(
            help="Remove lines of system prompts that clients change on each call: they would end every shared prefix."
        ),
    ] = True,
    remember_turns: Annotated[
        bool,
        typer.Option(
            help="When a client sends an answer back, use the token ids that the model wrote, not a new tokenization."
        ),
    ] = True,
    prepare_next: Annotated[
        bool, typer.Option(help="After an answer, prepare the state for the prompt that its client will send next.")
    ] = True,
) -> None:
    """Serve models over HTTP: OpenAI's, Anthropic's and Ollama's APIs, and a chat page."""
    log_as(log_format)
    config = Config(
        devices=options.names(devices),
        split=split,
        context=context,
        sequences=sequences,
        grid=grid,
        max_gap=max_gap,
        queue=queue,
        dtype=dtype,
        kv_type=kv_type,
        kv_mode=kv_mode,
        kv_policy=kv_policy,
        live_memory=live_memory,
        draft=draft,
        drafter=drafter,
        pool=pool,
        vram=options.sizes(vram, "--vram"),
        ram=options.size(ram, "--ram"),
        cache_ram=options.size(cache_ram, "--cache-ram"),
        cache_dir=_cache_dir(cache_dir, no_cache_dir),
        cache_disk=options.size(cache_disk, "--cache-disk"),
        threads=threads,
        shards=parse_shards(shard, shard_memory, shard_key),
        link_key=link_key,
        ray=ray,
        replicas=replicas,
        audit=audit,
    )
    guard = Guard(
        keys=_keys(api_key, api_keys),
        hosts=tuple(allow_host),
        origins=tuple(allow_origin),
        max_body=parse_bytes(max_body, "--max-body"),
        body_seconds=body_timeout,
    )
    if idle_unload is not None and idle_unload <= 0:
        raise BadConfig(f"--idle-unload {idle_unload:g}: must be above 0 seconds")
    if drain < 0:
        raise BadConfig(f"--drain {drain:g}: must be 0 or more seconds")
    os.environ.pop(KEY_VARIABLE, None)  # processes started from here do not need it
    _check_exposure(host, guard.keys, insecure)
    protocol = guarded_protocol(max_connections, header_timeout)
    for number in stop_signals():
        signal.signal(number, lambda number, frame: sys.exit(0))  # while loading; `finally` stops what has started
    sys.setswitchinterval(TURN)
    listener = listen(host, port)
    spaces = frozenset(guard.keys.namespaces if guard.keys is not None else {""})
    text = TextOptions(normalise, remember_turns, prepare_next, spaces)
    sources = make_sources(_presets(config, models or [], presets, name), text)
    served = ModelHost(sources, idle_unload)
    traces = Traces(otlp) if otlp is not None else None
    try:
        options.start_with_progress(served, sources[0])
        app = create_app(served, guard, listeners=(write_line, *([traces] if traces is not None else [])))
        asyncio.run(run_in_threadpool(int))  # imports modules that the first request would else import
        # All objects so far stay; without freeze each collection would walk through them while the token loop waits.
        gc.collect()
        gc.freeze()
        address, port = listener.getsockname()[:2]
        greet = partial(_greet, served, address, port, guard.keys is not None)
        settings = uvicorn.Config(
            app,
            log_level="warning",
            http=protocol,
            ws="none",
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
        )
        Server(settings, served, config.cache_dir is not None, drain, greet).run(sockets=[listener])
    finally:
        served.stop()
        if traces is not None:
            traces.close()


def _presets(config: Config, models: Sequence[Path], file: Path | None, name: str | None) -> list[Preset]:
    if file is not None:
        if models or name is not None:
            raise BadConfig(f"--models {file} names the models and their ids; leave out MODEL and --name")
        return read_presets(file, config)
    if name is not None and len(models) > 1:
        raise BadConfig(f"--name is for one model, there are {len(models)}; a --models file gives each its own")
    check_drafter(config, len(models))
    config = shared_ram(config, max(1, len(models)))
    paths: Sequence[Path | None] = models or [None]
    return [Preset(replace(config, model=path), name) for path in paths]


def _cache_dir(given: Path | None, none: bool) -> Path | None:
    if given is not None and none:
        raise BadConfig(f"--cache-dir {given} and --no-cache-dir exclude each other")
    return given if given is not None or none else own_cache_folder()


def _keys(api_key: str | None, api_keys: Path | None) -> ApiKeys | None:
    if api_key is not None and api_keys is not None:
        raise BadConfig("--api-key and --api-keys exclude each other: give that key a name in the file")
    if api_keys is not None:
        return ApiKeys.read(api_keys)
    return ApiKeys.single(api_key) if api_key is not None else None


def _check_exposure(host: str, keys: ApiKeys | None, insecure: bool) -> None:
    """Serving other machines needs a key, or --insecure."""
    if keys is not None or _is_loopback(host):
        return
    if insecure:
        log.warning("everybody who reaches %s may use this server: no key is asked for (--insecure)", host)
    else:
        raise BadConfig(
            f"--host {host} serves other machines, and no key is asked for: set --api-key or --api-keys, "
            "or say --insecure where everybody who reaches this address may use it"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _greet(models: ModelHost, host: str, port: int, locked: bool) -> None:
    key, header = ("THE_KEY", " -H 'authorization: Bearer THE_KEY'") if locked else ("any", "")
    host = "localhost" if ip_address(host).is_unspecified else host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    headers = f"-H 'content-type: application/json'{header}"
    out = Console(soft_wrap=True)
    first, *others = [slot.source.settings for slot in models.slots]
    shown = escape(printable(first.models[0]))
    out.print(f"\n[bold]Rekindle[/bold] serves [bold]{shown}[/bold], context {first.context:,} tokens", highlight=False)
    for other in others:
        shown = escape(printable(other.models[0]))
        out.print(f"  on demand              {shown}, context {other.context:,} tokens", highlight=False)
    out.print(f"  chat in a browser      {url}/", highlight=False)
    out.print(f"  OpenAI-style clients   OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}", highlight=False)
    out.print(
        f"  or just                curl {url}/v1/chat/completions {headers} "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'\n""",
        highlight=False,
    )
