"""The process that compiles ahead: `python -m rekindle.build.paper ORDER`.

Which kernels a stage needs is asked of the stage itself: its steps run once over a model that has one layer of every
kind and whose tensors on the device have no memory. Launches are noted instead of run. Prints a line per kernel:
how many are compiled, how many are known to be needed.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget

from rekindle.build.machine import torch_device
from rekindle.build.shards import DTYPES, kv_choice
from rekindle.build.warm import WarmOrder
from rekindle.experts import RoutedFfn
from rekindle.experts.rehearsal import rehearse_cold
from rekindle.kernels.compiling import Launch, Workers, recording
from rekindle.kernels.sampling import argmax, sample
from rekindle.models import load_span
from rekindle.spec import Span
from rekindle.stages import LocalStage
from rekindle.stages.rehearsal import pages_needed, rehearse
from rekindle.weights import TensorInfo, WeightFile, open_weights

_LAYER = re.compile(r"blk\.\d+\..*")


class PaperFile:
    """A model with one layer for every kind in a span, and no bytes behind its tensors."""

    def __init__(self, file: WeightFile, span: Span) -> None:
        layers = _unlike_layers(file, span)
        self.spec = replace(file.spec, mixers=tuple(file.spec.mixers[layer] for layer in layers))
        self.tensors = {name: info for name, info in file.tensors.items() if not _LAYER.fullmatch(name)}
        for place, layer in enumerate(layers):
            for part, info in _parts(file, layer).items():
                name = f"blk.{place}.{part}"
                self.tensors[name] = replace(info, name=name)
        self.path, self.metadata, self.fingerprint, self.close = file.path, file.metadata, file.fingerprint, file.close

    def raw(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        rows = prod(info.shape[:-1])
        return np.broadcast_to(np.uint8(0), (rows, info.nbytes // rows))

    def values(self, name: str) -> np.ndarray:
        return np.broadcast_to(np.float32(0), self.tensors[name].shape)


def _parts(file: WeightFile, layer: int) -> dict[str, TensorInfo]:
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): info for name, info in file.tensors.items() if name.startswith(prefix)}


def _unlike_layers(file: WeightFile, span: Span) -> list[int]:
    """The first layer of every combination of mixer, shapes and types, and the last one: nothing is read behind it."""
    kinds: dict[object, int] = {}
    for layer in span.layers:
        shapes = tuple((part, info.shape, info.type) for part, info in _parts(file, layer).items())
        kinds.setdefault((file.spec.mixers[layer], shapes, layer == span.stop - 1), layer)
    return list(kinds.values())


class DeviceWithoutMemory(FakeTensorMode):
    """Tensors on a device have shapes and no memory; those of the host are as ever, but not pinned."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        real = sum(not isinstance(tensor, FakeTensor) for tensor in tensors)
        if on_host and real == len(tensors):
            return func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        if real:
            args, kwargs = tree_map_only(torch.Tensor, self._without_memory, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _without_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)


def needed_launches(file: WeightFile, order: WarmOrder) -> Iterator[Launch]:
    """Every launch of the stage that is to be compiled, as soon as it is known."""
    paper = PaperFile(file, order.span)
    kv_type, mode, policy = order.kv
    pages, given = pages_needed(order.slots), 0
    with DeviceWithoutMemory(), recording() as launches:
        model = load_span(paper, paper.spec.whole, torch_device(order.device), DTYPES[order.dtype])
        stage = LocalStage(
            model, order.slots, pages, kv_type, 0, *kv_choice(mode, policy), record=_run_plainly, slabs=0
        )
        for _ in rehearse(stage):
            yield from list(launches)[given:]
            given = len(launches)
        for ffn, ring in product(model.routed, order.rings):
            assert isinstance(ffn, RoutedFfn), "on paper all experts are hot"
            rehearse_cold(ffn, ring, DTYPES[order.dtype])
        _draw(torch.empty(1, paper.spec.vocab, device=model.device))
    yield from list(launches)[given:]


def _run_plainly(step: Callable[[], None]) -> Callable[[], None]:
    return step


def _draw(logits: torch.Tensor) -> None:
    """The highest; the highest of a few; any."""
    argmax(logits)
    one = torch.ones(1)
    for top_k in (20, 0):
        sample(logits, one, torch.tensor([top_k]), one * 0.9, one * 0, one.double() * 0.5)


def compile_all(order: WarmOrder) -> None:
    # Before anything touches the GPU: workers are forked from this process as it is now.
    workers = Workers(order.workers, GPUTarget(*order.target))
    asked: list[Future[None]] = []
    done = 0

    def count(_: Future[None]) -> None:
        nonlocal done
        done += 1
        print(json.dumps([done, len(asked)]), flush=True)

    with torch.inference_mode():
        for launch in needed_launches(open_weights(order.model), order):
            asked.append(workers.compile(launch))
            asked[-1].add_done_callback(count)
    for future in asked:
        future.result()
    workers.stop()
    Path(order.note).write_text(json.dumps({"kernels": len(asked)}))


if __name__ == "__main__":
    # A tensor without memory has an address of nought plus its offset: all that hints of alignment need.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    compile_all(WarmOrder.from_json(sys.argv[1]))
