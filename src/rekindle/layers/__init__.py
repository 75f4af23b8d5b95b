"""What the layers compute and the state they carry: one file per kind of mixer; loading a span of them."""

from rekindle.layers import attention, delta  # importing a kind registers it
from rekindle.layers.base import LayerState, MixerBlock, SlotState, block_of, register_mixer
from rekindle.layers.layer import HybridLayer
from rekindle.layers.load import load_head, load_span
from rekindle.layers.paged import PagedKv
from rekindle.layers.slot_memory import SlotMemory
from rekindle.layers.span import ModelSpan

__all__ = [
    "HybridLayer",
    "LayerState",
    "MixerBlock",
    "ModelSpan",
    "PagedKv",
    "SlotMemory",
    "SlotState",
    "attention",
    "block_of",
    "delta",
    "load_head",
    "load_span",
    "register_mixer",
]
