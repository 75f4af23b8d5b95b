"""Runs in a process of its own, since Triton's interpreter, which other tests choose, compiles nothing.

python compile_driver.py FOLDER       prints what was found, as JSON; TRITON_CACHE_DIR must be empty
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from paper_gpu import H200, paper_gpu
from triton import knobs
from triton.backends.compiler import GPUTarget

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.kernels.norm import add_rms_norm, rms_norm
from rekindle.stages import LocalStage
from rekindle.warmup import compiler, outline
from rekindle.warmup.compile_ahead import CompileJob
from rekindle.warmup.launches import CompileWorkers, Launch, recording
from rekindle.weights import open_weights


def other_steps(stage: LocalStage) -> Iterator[None]:
    """Numbers of rows that `run_step_shapes` leaves out."""
    for rows, position in ((3, 0), (77, 0), (300, 0), (700, 0), (33, 1000), (333, 1000)):
        if position:
            stage.forward(Batch((Segment(0, 0, (0,) * position),)), None)
        stage.forward(Batch((Segment(0, position, (0,) * rows, Wanted.LAST),)), None)
        stage.close(0)
        yield
    for block in (3, 7, 13):
        stage.forward(Batch((Segment(0, 0, (0,) * block, Wanted.ALL),), rewindable=True), None)
        stage.rewind(0, 1)
        stage.close(0)
        yield
    for rows in (3, 5, 7):
        stage.forward(Batch(tuple(Segment(slot, 0, (0,), Wanted.LAST) for slot in range(rows))), None)
        for slot in range(rows):
            stage.close(slot)
        yield


def launches_of(path: Path) -> tuple[list[Launch], list[Launch], list[Launch]]:
    """Those of all step shapes, those that only other steps need, and those that only cold experts need."""
    run_step_shapes, shapes_end = compiler.run_step_shapes, list[int]()
    launch_cold_experts, cold_begin = compiler.launch_cold_experts, list[int]()
    found = list[Launch]()

    def with_others(stage: LocalStage) -> Iterator[str]:
        yield from run_step_shapes(stage)
        yield "all"
        shapes_end.append(len(found))
        for _ in other_steps(stage):
            yield "another"

    def noting_where(*layer: Any) -> None:
        cold_begin.append(len(found))
        launch_cold_experts(*layer)

    compiler.run_step_shapes, compiler.launch_cold_experts = with_others, noting_where
    file = open_weights(path)
    span = (0, file.spec.layers)
    job = CompileJob(
        str(path), span, "cuda:0", "bfloat16", 8, "bf16", "exact", "qk", H200.target, "", 1, ((4, 0), (3, 0))
    )
    with torch.inference_mode():
        for launch in compiler.needed_launches(file, job):
            found.append(launch)
    cold = [launch for launch in found[cold_begin[0] :] if "sampling" not in launch.module]
    return found[: shapes_end[0]], found[shapes_end[0] : cold_begin[0]], cold


def missing_by_kind(path: Path) -> list[str]:
    """What all layers of a span need and the layers that stand for them do not."""
    file, needed = open_weights(path), list[set[Launch]]()
    job = CompileJob(str(path), (0, 6), "cuda:0", "bfloat16", 1, "bf16", "exact", "qk", H200.target, "", 1)
    some = outline._unlike_layers
    for layers in (lambda _, span: list(span.layers), some):
        outline._unlike_layers = layers
        with torch.inference_mode():
            needed.append(set(compiler.needed_launches(file, job)))
    return sorted(f"{launch.kernel} {launch.data}" for launch in needed[0] - needed[1])


def twins(launches: list[Launch]) -> list[str]:
    """Kernels that are there more than once, alike but for what the compiler knows of a number: 1, or whole 16s."""
    plain = Counter((launch.kernel, _without_numbers(json.loads(launch.data))) for launch in launches)
    return sorted(kernel for (kernel, _), count in plain.items() if count > 1)


def tile_of(launch: Launch) -> int:
    """Pairs that a program of the grouped kernel has at once."""
    data = json.loads(launch.data)
    names, keys = list(data["signature"]), [key[0] for key in data["constant_keys"]]
    tile: int = dict(zip((names[key] for key in keys), data["constant_vals"], strict=True))["BM"]
    return tile


def _without_numbers(data: dict[str, Any]) -> str:
    """Constants of ours are written in capitals; a number that was made one by the compiler is not."""
    names = list(data["signature"])
    keys = [key[0] for key in data["constant_keys"]]
    constants = {names[key]: value for key, value in zip(keys, data["constant_vals"], strict=True)}
    numbers = {name for name, value in constants.items() if name.islower() and value is not None}
    types = {name: "number" if name in numbers else kind for name, kind in data["signature"].items()}
    types |= {name: "number" for name, kind in types.items() if kind in ("i32", "i64")}
    kept = {name: value for name, value in constants.items() if name not in numbers}
    pointers = sorted(key[0] for key in data["attrs_keys"] if types[names[key[0]]] != "number")
    return json.dumps([types, kept, pointers, data["options"]])


def cache_hits() -> list[bool]:
    """Two norms noted; one of them compiled by a worker; both launched: which of them were found?"""
    hits = list[bool]()
    knobs.compilation.listener = lambda **seen: hits.append(seen["cache_hit"])
    with outline.DeviceWithoutMemory():
        x, weight = torch.empty(3, 256, dtype=torch.bfloat16, device="cuda:0"), torch.empty(256, device="cuda:0")
        with recording() as launches:
            rms_norm(x, weight, 1e-6)
        workers = CompileWorkers(1, GPUTarget(*H200.target))
        for launch in launches:
            workers.compile(launch).result()
        workers.stop()
        rms_norm(x, weight, 1e-6)
        add_rms_norm(x, x, weight, 1e-6)
    return hits


def main(folder: Path) -> None:
    path = write_synthetic(folder / "tiny-moe.gguf", "tiny-moe")
    with paper_gpu():
        missing = missing_by_kind(write_synthetic(folder / "tiny.gguf", "tiny"))
        needed, more, cold = launches_of(path)
        found = {
            "kernels": [launch.kernel for launch in needed],
            "distinct": len(set(needed)),
            "twins": twins(needed),
            "more": [f"{launch.kernel} {launch.data}" for launch in more],
            "cold": [launch.kernel for launch in cold],
            "cold twins": twins(cold),
            "tiles": sorted({tile_of(launch) for launch in (*needed, *cold) if launch.kernel == "_grouped_kernel"}),
            "missing": missing,
            "hits": cache_hits(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
