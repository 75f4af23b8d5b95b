"""A model without memory: one layer of every kind, whose tensors on the device have shapes only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rekindle.spec import Span
from rekindle.weights import TensorInfo, WeightFile

_LAYER = re.compile(r"blk\.\d+\..*")


class OutlineFile:
    """A weight file with one layer of every kind in a span; its tensors are zeros that take no memory."""

    def __init__(self, file: WeightFile, span: Span) -> None:
        layers = _unlike_layers(file, span)
        self.spec = replace(file.spec, mixers=tuple(file.spec.mixers[layer] for layer in layers))
        self.tensors = {name: info for name, info in file.tensors.items() if not _LAYER.fullmatch(name)}
        for place, layer in enumerate(layers):
            for part, info in _parts(file, layer).items():
                name = f"blk.{place}.{part}"
                self.tensors[name] = replace(info, name=name)
        self.path, self.metadata, self.files = file.path, file.metadata, file.files
        self.fingerprint, self.close = file.fingerprint, file.close

    def raw(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        rows = prod(info.shape[:-1])
        return np.broadcast_to(np.uint8(0), (rows, info.nbytes // rows))

    def unread(self, name: str) -> np.ndarray:
        return self.raw(name)

    def values(self, name: str) -> np.ndarray:
        return np.broadcast_to(np.float32(0), self.tensors[name].shape)


def _parts(file: WeightFile, layer: int) -> dict[str, TensorInfo]:
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): info for name, info in file.tensors.items() if name.startswith(prefix)}


def _unlike_layers(file: WeightFile, span: Span) -> list[int]:
    """The first layer of every combination of mixer, shapes and types. The last layer counts as a kind of its own: it
    prefetches nothing, since no layer follows."""
    kinds: dict[object, int] = {}
    for layer in span.layers:
        shapes = tuple((part, info.shape, info.type) for part, info in _parts(file, layer).items())
        kinds.setdefault((file.spec.mixers[layer], shapes, layer == span.stop - 1), layer)
    return list(kinds.values())


class DeviceWithoutMemory(FakeTensorMode):
    """Inside it, tensors on a device have shapes and no memory; those of the host are real, but not pinned."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        real = sum(not isinstance(tensor, FakeTensor) for tensor in tensors)
        if on_host and real == len(tensors):
            if func in (torch.ops.aten.pin_memory.default, torch.ops.aten._pin_memory.default):
                return args[0]
            return func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        if real:
            args, kwargs = tree_map_only(torch.Tensor, self._without_memory, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _without_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)
