"""Options that several commands share, and the way from them to a Config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rekindle.build import RAM_SHARE, VRAM_SHARE, Built, build_engine
from rekindle.config import Config, parse_bytes, show_bytes
from rekindle.errors import BadConfig

ModelPath = Annotated[
    Path | None, typer.Argument(help="A GGUF file or a Hugging Face folder; the embedded model if left out.")
]
Devices = Annotated[
    str,
    typer.Option(help="Devices in pipeline order: cpu, cuda:0, 'cuda:0,cpu', 'cuda:0,hip:0@SHARD', or auto."),
]
Split = Annotated[str, typer.Option(help="Layers per device: '20,20', weights '0.5,0.5', or auto.")]
Context = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer together; the model's own limit if left out.")
]
Sequences = Annotated[int, typer.Option(help="Requests that run at the same time.")]
SEQUENCES = Config().sequences
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
Vram = Annotated[
    str | None,
    typer.Option(
        help="Memory to use of each GPU: 24GiB is for all of them, 24GiB,12GiB for one each; "
        f"{VRAM_SHARE:.0%} of what is free if left out."
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(
        help="RAM to use, such as 64GiB, for CPU stages, cold experts, KV beyond the pool and snapshots; "
        f"{RAM_SHARE:.0%} of what is free if left out."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="Activations: float32 (on a CPU, or for float16 weights) or bfloat16 (GPU).")
]
Grid = Annotated[int | None, typer.Option(help="Prefill chunk in tokens: 512 on a CPU, 2048 on a GPU if left out.")]
KvMode = Annotated[
    str, typer.Option(help="exact: every page counts; sparse: at most the pool, and the response says so.")
]
KvPolicy = Annotated[str, typer.Option(help="Which pages sparse mode attends: qk or lru.")]
KvType = Annotated[str | None, typer.Option(help="KV pages: f32, bf16, f16 or q8.")]


def size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, option)


def sizes(text: str | None, option: str) -> tuple[int, ...] | None:
    """One, or several with commas between."""
    try:
        return None if text is None else tuple(parse_bytes(part, option) for part in text.split(","))
    except BadConfig as error:
        raise BadConfig(f"{error}; one size is for all GPUs, 24GiB,12GiB for one each") from error


def names(devices: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in devices.split(","))


def load_with_progress(config: Config) -> Built:
    """Build the engine while bars show how far the weights are and, at a first start on a GPU, the kernels."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        weights = progress.add_task("loading", total=None, amount="")
        kernels = progress.add_task("compiling kernels, once", total=None, amount="", visible=False)

        def show_weights(done: int, total: int) -> None:
            progress.update(weights, completed=done, total=total, amount=f"{show_bytes(done)} of {show_bytes(total)}")

        def show_kernels(done: int, total: int) -> None:
            progress.update(kernels, completed=done, total=total, amount=f"{done} of {total}", visible=True)

        return build_engine(config, show_weights, show_kernels)
