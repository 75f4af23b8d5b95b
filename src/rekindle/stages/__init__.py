"""A span of layers on a device, and the pipeline of such stages."""

from rekindle.stages.local import LocalStage
from rekindle.stages.pipeline import Pipeline
from rekindle.stages.types import PageCount, Stage, StageOutput

__all__ = ["LocalStage", "PageCount", "Pipeline", "Stage", "StageOutput"]
