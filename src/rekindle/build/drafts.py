"""Which drafters the settings ask for, or why there is none; a drafter's file, its bytes, and how it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rekindle.build.machine import device_of, shard_of, torch_device
from rekindle.build.model import Model
from rekindle.build.sizes import matrix_bytes
from rekindle.config import Config
from rekindle.engine.drafting import Drafts
from rekindle.layers import load_head
from rekindle.layers.embedding import load_embedding
from rekindle.speculative.context import KV_TYPE, WAITING, DrafterContext, reach_of
from rekindle.speculative.dflash import load_dflash
from rekindle.speculative.files import DrafterFile, open_drafter
from rekindle.speculative.lookup import PromptLookup
from rekindle.speculative.spec import DrafterSpec
from rekindle.speculative.width import MOST
from rekindle.stages import LocalStage, Stage
from rekindle.weights import TensorInfo, WeightFile

FEATURE_COPIES = 4  # of a chunk: outputs of the taps, their rows, those that waited together, and all taps side by side


def drafts_of(config: Config, devices: Sequence[str]) -> Drafts:
    """devices: of the stages of all replicas, by their names. A shard that was started by hand has room for blocks only
    if its command says so, and on GPUs drafting was not measured yet."""
    if config.draft == "off":
        return Drafts(off="--draft is off")
    if config.draft == "auto" and config.drafter is None and any(name != "cpu" for name in devices):
        return Drafts(off="by default only CPUs of this process draft: --draft lookup switches it on")
    model = None if config.drafter is None else "dflash"
    return Drafts(model=model, off=None) if config.draft == "dflash" else Drafts("lookup", PromptLookup, None, model)


def rewind_rows(config: Config, devices: Sequence[str]) -> int:
    """Of the longest block: the last known token and what is drafted after it."""
    drafts = drafts_of(config, devices)
    return 0 if drafts.make is None and drafts.model is None else MOST + 1


def open_drafter_of(config: Config, model: Model) -> DrafterFile | None:
    """The drafter's file, which fits the model; None where none drafts."""
    if config.drafter is None:
        return None
    file = open_drafter(config.drafter)
    file.spec.check_target(model.spec, config.drafter.name)
    return file


def drafter_device(devices: Sequence[str]) -> str:
    """Beside the head; in this process, if the head is in another. devices: of one pipeline, in order."""
    return "cpu" if shard_of(devices[-1]) else device_of(devices[-1])


@dataclass(frozen=True, slots=True)
class DrafterBytes:
    total: int  # where it lives
    context: int  # of that, what it knows of one sequence: a part of its snapshots


NO_DRAFTER = DrafterBytes(0, 0)


def drafter_bytes(
    file: DrafterFile, model: Model, devices: Sequence[str], slots: int, context: int, chunk: int, dtype: torch.dtype
) -> DrafterBytes:
    """Weights, the context of every slot, features on their way; and what of the target it cannot share."""
    spec, on_cpu = file.spec, drafter_device(devices) == "cpu"
    each = _context_bytes(spec, context)
    features = (FEATURE_COPIES * chunk + slots * WAITING) * spec.features * dtype.itemsize
    tensors = [*file.tensors.values(), *_not_shared(model.file, devices)]
    return DrafterBytes(matrix_bytes(tensors, on_cpu, dtype) + slots * each + features, each)


def _context_bytes(spec: DrafterSpec, context: int) -> int:
    """K and V of one sequence of so many tokens."""
    kept = sum(reach_of(spec, layer, context) for layer in range(len(spec.layers)))
    return kept * 2 * spec.kv_heads * spec.head_dim * KV_TYPE.itemsize


def _not_shared(target: WeightFile, devices: Sequence[str]) -> list[TensorInfo]:
    """The target's embedding and head, where a stage of another process has them."""
    head = "token_embd.weight" if target.spec.tied else "output.weight"
    ends = {"token_embd.weight": devices[0], head: devices[-1]}
    return [target.tensors[name] for name, device in ends.items() if shard_of(device)]


def load_drafter(
    file: DrafterFile, target: WeightFile, stages: Sequence[Stage], dtype: torch.dtype, context: int
) -> DrafterContext:
    """context: tokens of the longest sequence."""
    first, last = stages[0], stages[-1]
    device = torch_device(last.device if isinstance(last, LocalStage) else "cpu")
    embedding = first.model.embedding if isinstance(first, LocalStage) else load_embedding(target, device, dtype)
    head = last.model.head if isinstance(last, LocalStage) else load_head(target, device, dtype)
    assert embedding is not None and head is not None, "the first stage embeds, the last one has the head"
    model = load_dflash(file, device, dtype, embedding.rows, head.matrix, target.spec.drawable)
    slots = min(stage.slots for stage in stages)
    return DrafterContext(model, file.fingerprint(), slots, context)
