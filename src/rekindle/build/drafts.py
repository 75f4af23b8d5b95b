"""Which drafters the settings ask for, or why there is none; a drafter's file, its bytes, and how it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rekindle.buffers import captures_in_flight
from rekindle.build.machine import device_of, shard_of, torch_device
from rekindle.build.model import Model
from rekindle.build.sizes import matrix_bytes
from rekindle.config import Config
from rekindle.engine.drafting import Drafts
from rekindle.errors import BadConfig, BadModelFile
from rekindle.layers import load_head
from rekindle.layers.embedding import load_embedding
from rekindle.spec.base import F32
from rekindle.speculative.context import WAITING, DrafterContext, context_bytes, layers_read
from rekindle.speculative.dflash import load_dflash
from rekindle.speculative.files import DrafterFile, open_drafter
from rekindle.speculative.lookup import PromptLookup
from rekindle.speculative.mtp import load_mtp
from rekindle.speculative.mtp_context import MtpContext
from rekindle.speculative.mtp_file import MtpFile, is_mtp, open_companion, why_no_mtp
from rekindle.speculative.width import MOST
from rekindle.stages import LocalStage, Stage
from rekindle.stages.graphs import GraphRecorder
from rekindle.weights import TensorInfo, WeightFile

log = logging.getLogger("rekindle.build")

# Of a chunk: outputs of the taps, in a recorded step twice, their rows, those that waited together, and all taps side
# by side.
FEATURE_COPIES = 5


DraftWeights = DrafterFile | MtpFile


def drafts_of(config: Config, devices: Sequence[str], drafter: DraftWeights | None) -> Drafts:
    """devices: of the stages of all replicas, by their names; drafter: what `open_drafter_of` gave."""
    if off := _why_off(config, devices):
        return Drafts(off=off)
    model = None if drafter is None else drafter.kind
    alone = config.draft in ("dflash", "mtp")
    return Drafts(model=model, off=None) if alone else Drafts("lookup", PromptLookup, None, model)


def _why_off(config: Config, devices: Sequence[str]) -> str | None:
    """A shard that was started by hand has room for blocks only if its command says so, and on GPUs that room is device
    memory, which KV or experts would have."""
    if config.draft == "off":
        return "--draft is off"
    if config.draft == "auto" and config.drafter is None and any(name != "cpu" for name in devices):
        return "by default only CPUs of this process draft: --draft lookup switches it on"
    return None


def rewind_rows(config: Config, devices: Sequence[str]) -> int:
    """Of the longest block: the last known token and what is drafted after it."""
    return 0 if _why_off(config, devices) else MOST + 1


def open_drafter_of(config: Config, model: Model, devices: Sequence[str]) -> DraftWeights | None:
    """The drafter that the settings name, or the block that the model's own file brings; None where none drafts."""
    if _why_off(config, devices) or config.draft == "lookup":
        return None
    if config.drafter is not None:
        return _open_named(config, config.drafter, model)
    missing = why_no_mtp(model.file)
    if missing is not None and config.draft == "mtp":
        raise BadConfig(f"--draft mtp: {missing}; --drafter FILE names a companion file")
    if missing is not None:
        return None
    try:
        return MtpFile(model.file)
    except BadModelFile as error:
        if config.draft == "mtp":
            raise
        log.warning("%s; the model is served without its block for next-token prediction", error)
        return None


def _open_named(config: Config, path: Path, model: Model) -> DraftWeights:
    kind = "mtp" if is_mtp(path) else "dflash"
    if config.draft not in ("auto", kind):
        raise BadConfig(f"--draft is {config.draft}, and --drafter {path} is one for --draft {kind}")
    if kind == "mtp":
        return open_companion(path, model.file)
    file = open_drafter(path)
    file.spec.check_target(model.spec, path.name)
    return file


def drafter_device(devices: Sequence[str]) -> str:
    """Beside the head; in this process, if the head is in another. devices: of one pipeline, in order."""
    return "cpu" if shard_of(devices[-1]) else device_of(devices[-1])


@dataclass(frozen=True, slots=True)
class DrafterBytes:
    total: int  # where it lives
    context: int  # of that, what it knows of one sequence: a part of its snapshots
    taps: tuple[int, ...] = ()  # layers that it reads


NO_DRAFTER = DrafterBytes(0, 0)


def drafter_bytes(
    file: DraftWeights, model: Model, devices: Sequence[str], slots: int, context: int, chunk: int, dtype: torch.dtype
) -> DrafterBytes:
    """Weights, the context of every slot, features on their way; and what of the target it cannot share."""
    spec, on_cpu = file.spec, drafter_device(devices) == "cpu"
    each = context_bytes(spec, context) + (F32 * spec.hidden if isinstance(file, MtpFile) else 0)
    features = (FEATURE_COPIES * chunk + slots * WAITING) * spec.features * dtype.itemsize
    tensors = [*file.tensors.values(), *_not_shared(model.file, devices)]
    if not on_cpu:  # captures on their way, each copied twice; and a slot for padding in a recorded pass
        slots += 2 * captures_in_flight(chunk) + (not isinstance(file, MtpFile))
    return DrafterBytes(matrix_bytes(tensors, on_cpu, dtype) + slots * each + features, each, layers_read(spec))


def _not_shared(target: WeightFile, devices: Sequence[str]) -> list[TensorInfo]:
    """The target's embedding and head, where a stage of another process has them."""
    head = "token_embd.weight" if target.spec.tied else "output.weight"
    ends = {"token_embd.weight": devices[0], head: devices[-1]}
    return [target.tensors[name] for name, device in ends.items() if shard_of(device)]


def load_drafter(
    file: DraftWeights, target: WeightFile, stages: Sequence[Stage], dtype: torch.dtype, context: int
) -> DrafterContext | MtpContext:
    """context: tokens of the longest sequence."""
    first, last = stages[0], stages[-1]
    device = torch_device(last.device if isinstance(last, LocalStage) else "cpu")
    head = last.model.head if isinstance(last, LocalStage) else load_head(target, device, dtype)
    assert head is not None, "the last stage has the head"
    if isinstance(first, LocalStage):
        embedding = first.model.embedding
    else:
        embedding = load_embedding(target, device, dtype, head.matrix)
    assert embedding is not None, "the first stage embeds"
    slots, drawable = min(stage.slots for stage in stages), target.spec.drawable
    # With several stages the drafter's captures run beside those of the last one, which uses its copies without a lock.
    copies = last.pool.copies if isinstance(last, LocalStage) and first is last and device.type == "cuda" else None
    if isinstance(file, MtpFile):
        block = load_mtp(file, device, dtype, embedding.rows, head.matrix, head.norm, drawable)
        return MtpContext(block, file.fingerprint(), slots, context, copies=copies)
    model = load_dflash(file, device, dtype, embedding.rows, head.matrix, drawable)
    # What is recorded must not leave the device, as rows of an embedding elsewhere would.
    record = GraphRecorder(device) if device.type == "cuda" and embedding.device == device else None
    drafter = DrafterContext(model, file.fingerprint(), slots, context, copies=copies, record=record)
    drafter.make_ready()
    return drafter
