"""A real model, one half of it in a shard: same bits as the whole on one stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.paper_hall import QUICK

from rekindle.batch import Batch, Segment, Wanted
from rekindle.shards import RemoteStage, ShardServer, Terms
from rekindle.snapshots.types import Part
from rekindle.spec import PAGE, Span
from rekindle.stages import Pipeline

TOKENS = np.random.default_rng(3).integers(0, 320, 400).tolist()
MIDDLE = Span(3, 6)


@pytest.fixture(params=["dense", "moe"])
def pipelines(request: Any, make_tiny: Any, tmp_path: Path) -> Iterator[tuple[Pipeline, Pipeline]]:
    """The whole model on one stage, and in three of which the middle one is a shard."""
    tiny = make_tiny(request.param)
    whole = tiny.open().spec.whole
    shard = ShardServer(
        {"middle": tiny.stage(MIDDLE)},
        f"ipc://{tmp_path}/shard",
        fingerprint="tiny",
        hidden_dtype="float32",
        kv_dtype="float32",
    )
    shard.start()
    remote = RemoteStage(
        shard.endpoint, "middle", Terms("tiny", MIDDLE, "float32", "float32", slots=4), deadlines=QUICK
    )
    split = Pipeline([tiny.stage(Span(0, MIDDLE.start)), remote, tiny.stage(Span(MIDDLE.stop, whole.stop))])
    yield Pipeline([tiny.stage()]), split
    split.stop()
    shard.stop()


def feed(pipeline: Pipeline, slot: int, start: int, stop: int, rewindable: bool = False) -> torch.Tensor:
    batch = Batch((Segment(slot, start, tuple(TOKENS[start:stop]), Wanted.ALL),), rewindable)
    logits = pipeline.forward(batch).result().logits
    assert logits is not None
    return logits


def story(pipeline: Pipeline) -> tuple[list[torch.Tensor], list[tuple[Part, ...]]]:
    """Prefill, decode, a block of which some rows are taken back, snapshots, a restore into another slot."""
    pipeline.open(0)
    logits = [feed(pipeline, 0, 0, 150), feed(pipeline, 0, 150, 151)]
    logits.append(feed(pipeline, 0, 151, 159, rewindable=True))
    pipeline.rewind(0, 154)
    first = pipeline.capture(0).result()
    logits.append(feed(pipeline, 0, 154, 300))
    second = pipeline.capture(0).result()
    pipeline.open(2)
    pipeline.restore(2, 154, first)
    logits.append(feed(pipeline, 2, 154, 300))
    third = pipeline.capture(2).result()
    pipeline.close(0)
    pipeline.close(2)
    return logits, [first, second, third]


def test_a_split_with_a_remote_shard_answers_bit_for_bit(pipelines: tuple[Pipeline, Pipeline]) -> None:
    (here, whole), (there, split) = (story(pipeline) for pipeline in pipelines)
    assert all(map(torch.equal, here, there))
    assert torch.equal(there[-1], there[-2])  # restored equals never stopped
    for a, b in zip(whole, split, strict=True):
        assert all(map(torch.equal, tensors(a), tensors(b)))
    assert all(stage.pages().used == 0 for pipeline in pipelines for stage in pipeline.stages)


def test_every_stage_settles_a_block_that_nobody_did(pipelines: tuple[Pipeline, Pipeline]) -> None:
    """All of it was accepted: the next forward, another block or a capture comes without a rewind."""
    for pipeline in pipelines:
        for slot in (0, 1):
            pipeline.open(slot)
            feed(pipeline, slot, 0, 60)
        for at, stop, blocks in ((60, 68, True), (68, 71, True), (71, 72, False), (72, 80, True)):
            rows = [feed(pipeline, 1, row, row + 1) for row in range(at, stop)]
            assert torch.equal(feed(pipeline, 0, at, stop, rewindable=blocks), torch.cat(rows))
        a, b = (tensors(pipeline.capture(slot).result()) for slot in (0, 1))
        assert all(map(torch.equal, a, b))


def test_a_snapshot_of_a_split_restores_on_one_stage_and_back(pipelines: tuple[Pipeline, Pipeline]) -> None:
    one, split = pipelines
    for giver, taker in ((split, one), (one, split)):
        giver.open(0)
        feed(giver, 0, 0, 200)
        taker.open(1)
        taker.restore(1, 200, giver.capture(0).result())
        assert torch.equal(feed(giver, 0, 200, 230), feed(taker, 1, 200, 230))
        giver.close(0)
        taker.close(1)


def test_a_chain_of_snapshots_of_a_split_shares_its_pages(pipelines: tuple[Pipeline, Pipeline]) -> None:
    _, split = pipelines
    split.open(0)
    feed(split, 0, 0, 2 * PAGE)
    first = split.capture(0).result()
    feed(split, 0, 2 * PAGE, 3 * PAGE + 1)
    second = split.capture(0).result()
    split.open(1)
    split.restore(1, 2 * PAGE, first)
    third = split.capture(1).result()
    for a, b, c in zip(first, second, third, strict=True):
        if a.is_paged:
            assert all(x is y is z for x, y, z in zip(a.pages, b.pages[:2], c.pages, strict=True))


def tensors(parts: tuple[Part, ...]) -> list[torch.Tensor]:
    result: list[torch.Tensor] = []
    for part in parts:
        result += [*(page.data for page in part.pages), *part.tensors.values()]
    return result
