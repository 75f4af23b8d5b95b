"""What a model is, in numbers. No torch: the planner and the commands read it on any machine."""

from rekindle.spec.attention import AttentionSpec
from rekindle.spec.base import PAGE, Bytes, MixerSpec, Shapes, Span
from rekindle.spec.delta import DeltaSpec
from rekindle.spec.ffn import FfnSpec
from rekindle.spec.model import ModelSpec
from rekindle.spec.snapshots import NEWEST, SnapshotBytes, snapshot_bytes

__all__ = [
    "NEWEST",
    "PAGE",
    "AttentionSpec",
    "Bytes",
    "DeltaSpec",
    "FfnSpec",
    "MixerSpec",
    "ModelSpec",
    "Shapes",
    "SnapshotBytes",
    "Span",
    "snapshot_bytes",
]
