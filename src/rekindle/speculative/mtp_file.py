"""The next-token-prediction (MTP) block of a model as a drafter: what it is in numbers, and where its weights lie.

The block stands behind the layers of the model's own file, or in a companion file beside it. No torch: the planner
reads it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rekindle.errors import BadModelFile
from rekindle.spec import AttentionSpec, FfnSpec
from rekindle.weights import TensorInfo, WeightFile
from rekindle.weights.expected import NEXTN_EMBEDDING, NEXTN_HEAD, NEXTN_JOIN, expected_nextn, optional_nextn
from rekindle.weights.gguf_file import CompanionFile, is_companion, same_shape
from rekindle.weights.stored import require_decodable

LONGEST = 6  # tokens of a block: each costs a pass, and is guessed from guesses


@dataclass(frozen=True, slots=True)
class MtpSpec:
    hidden: int
    attention: AttentionSpec
    ffn: FfnSpec
    eps: float
    layer: int  # number of the block: as many layers has the target

    @property
    def taps(self) -> tuple[int, ...]:
        """The output of the last layer; what the target's final norm makes of it is read."""
        return (self.layer - 1,)

    @property
    def features(self) -> int:
        """Values of one position's features."""
        return self.hidden

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,)

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def block(self) -> int:
        return 1 + LONGEST


class MtpFile:
    """The block in a file, checked against the target's numbers."""

    kind = "mtp"

    def __init__(self, file: WeightFile) -> None:
        """file: the target's own, or a companion with the target's numbers."""
        spec = file.spec
        self.file = file
        self.spec = MtpSpec(spec.hidden, spec.attention, spec.ffn, spec.eps, spec.layers)
        needed, more = expected_nextn(spec), optional_nextn(spec)
        shapes = needed | {name: shape for name, shape in more.items() if name in file.tensors}
        self.tensors: Mapping[str, TensorInfo] = {name: _shaped(file, name, shape) for name, shape in shapes.items()}

    @property
    def path(self) -> Path:
        return self.file.path

    def name(self, part: str) -> str:
        """The full name of one of the block's tensors."""
        return f"blk.{self.spec.layer}.{part}"

    def has(self, part: str) -> bool:
        return self.name(part) in self.tensors

    @property
    def embeds(self) -> bool:
        return self.has(NEXTN_EMBEDDING)

    @property
    def has_head(self) -> bool:
        return self.has(NEXTN_HEAD)

    def raw(self, part: str) -> np.ndarray:
        return self.file.raw(self.name(part))

    def values(self, part: str) -> np.ndarray:
        """float32 in the tensor's shape."""
        return self.file.values(self.name(part)).reshape(self.tensors[self.name(part)].shape)

    def fingerprint(self) -> str:
        return self.file.fingerprint()


def why_no_mtp(target: WeightFile) -> str | None:
    """Why a model's own file has no block to draft with, in words."""
    spec = target.spec
    if spec.nextn != 1:
        return f"{target.path} has {spec.nextn} next-token-prediction blocks, expected one"
    if f"blk.{spec.layers}.{NEXTN_JOIN}" not in target.tensors:
        return f"{target.path} speaks of a next-token-prediction block and does not hold all of it"
    return None


def open_companion(path: Path, target: WeightFile) -> MtpFile:
    return MtpFile(CompanionFile(path, target.spec, target.metadata))


def is_mtp(path: Path) -> bool:
    """Whether a drafter's file is a companion with such a block."""
    return path.is_file() and is_companion(path)


def _shaped(file: WeightFile, name: str, shape: tuple[int, ...]) -> TensorInfo:
    info = file.tensors.get(name)
    if info is None:
        raise BadModelFile(
            f"{file.path} has no tensor {name}, which the next-token-prediction block of {file.spec.name} needs"
        )
    if not same_shape(info.shape, shape):
        raise BadModelFile(f"{file.path}: tensor {name} is {info.shape}, {file.spec.name} asks for {shape}")
    require_decodable(str(file.path), info)
    return TensorInfo(name, shape, info.type, info.nbytes)
