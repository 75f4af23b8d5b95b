"""Options that several commands share, and the way from them to a Config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rekindle.api import ModelHost
from rekindle.build import RAM_SHARE, VRAM_SHARE, Built, ConfiguredModel, build_engine
from rekindle.config import Config, parse_bytes, show_bytes
from rekindle.errors import BadConfig

ModelPath = Annotated[
    Path | None, typer.Argument(help="A GGUF file or a Hugging Face folder; the embedded model if left out.")
]
Devices = Annotated[
    str,
    typer.Option(help="Devices in pipeline order: cpu, cuda:0, 'cuda:0,cpu', 'cuda:0,hip:0@SHARD', or auto."),
]
Split = Annotated[str, typer.Option(help="Layers per device: '20,20', shares '0.5,0.5', or auto, by memory and speed.")]
Context = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer together; the model's own limit if left out.")
]
Sequences = Annotated[
    int | None,
    typer.Option(
        help="Requests that run at the same time; if left out 16, or 8 or 4 where a GPU would otherwise have cold "
        "experts or, for a sequence that runs alone, no KV pool of 65,536 tokens."
    ),
]
CacheRam = Annotated[
    str | None,
    typer.Option(
        help="RAM for snapshots; if left out half of what the plan leaves, and at least two sequences' at the "
        "context limit where there is so much."
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own choice if left out.")]
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
    str | None,
    typer.Option(help="float32 or bfloat16, of activations; if left out float32 on a CPU or for float16 weights."),
]
Grid = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a prefill chunk; if left out 512 on a CPU, 2048 on a GPU, or 4096 where the plan says so."
    ),
]
KvMode = Annotated[
    str,
    typer.Option(
        help="exact: attention over the whole context; sparse: over no more than the KV pool, and the response says so."
    ),
]
LiveMemory = Annotated[
    bool | None,
    typer.Option(
        help="KV of a conversation that outgrows the pool gets the memory of slots without a sequence until one comes, "
        "and of the coldest experts until it ends. On where it can be, unless --pool fixes the pool; --no-live-memory "
        "plans a larger pool and fewer hot experts or sequences."
    ),
]
KvPolicy = Annotated[
    str, typer.Option(help="Which KV pages sparse mode attends to: qk (the likeliest to matter) or lru (the latest).")
]
KvType = Annotated[
    str | None, typer.Option(help="Type of the KV cache: f32, bf16, f16 or q8; chosen by --dtype if left out.")
]

Draft = Annotated[
    str,
    typer.Option(
        help="What proposes tokens for the model to verify, several in one step; the answer has the same tokens. "
        "lookup: what followed the last tokens when they stood in the prompt or the answer before; dflash: the model "
        "of --drafter; mtp: the next-token-prediction block of the model's own file, or of --drafter; off: nothing; "
        "auto: lookup and --drafter, or lookup and the model's own block where all stages are CPUs of this process."
    ),
]
DRAFT = Config().draft
Drafter = Annotated[
    Path | None,
    typer.Option(
        help="A drafter for this model: DFlash, a GGUF file or a folder with safetensors; or a GGUF file that holds "
        "the model's next-token-prediction block alone."
    ),
]


def size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, option)


def sizes(text: str | None, option: str) -> tuple[int, ...] | None:
    """One size, or several separated by commas."""
    try:
        return None if text is None else tuple(parse_bytes(part, option) for part in text.split(","))
    except BadConfig as error:
        raise BadConfig(f"{error}; one size is for all GPUs, 24GiB,12GiB for one each") from error


def names(devices: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in devices.split(","))


def load_with_progress(config: Config) -> Built:
    """Build the engine while bars show how far it is."""
    with _bars() as (show_weights, show_kernels):
        return build_engine(config, show_weights, show_kernels)


def start_with_progress(host: ModelHost, first: ConfiguredModel) -> None:
    """The same for the first model of a server."""
    with _bars() as (first.on_progress, first.on_kernels):
        host.start()


Show = Callable[[int, int], None]  # done, in all


@contextmanager
def _bars() -> Iterator[tuple[Show, Show]]:
    """One for the weights and, at a first start on a GPU, one for the kernels."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        weights = progress.add_task("loading", total=None, amount="")
        kernels = progress.add_task("compiling kernels, once", total=None, amount="", visible=False)

        def show_weights(done: int, total: int) -> None:
            progress.update(weights, completed=done, total=total, amount=f"{show_bytes(done)} of {show_bytes(total)}")

        def show_kernels(done: int, total: int) -> None:
            progress.update(kernels, completed=done, total=total, amount=f"{done} of {total}", visible=True)

        yield show_weights, show_kernels
