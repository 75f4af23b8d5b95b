"""What the layers compute, and loading a span of them."""

from rekindle.models.hybrid import HybridLayer
from rekindle.models.load import load_span
from rekindle.models.model import ModelSpan

__all__ = ["HybridLayer", "ModelSpan", "load_span"]
