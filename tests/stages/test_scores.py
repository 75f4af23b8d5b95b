"""Log-probabilities of a prompt's own tokens: those of all logits, found without having them all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.engine.sampler import logprobs_of
from rekindle.engine.types import TokenLogprob
from rekindle.layers import load_span
from rekindle.layers.span import ModelSpan
from rekindle.stages import LocalStage
from rekindle.stages.portions import portions_of
from rekindle.stages.scores import LEFT_BY_LAYERS, LOGIT_BYTES

TOKENS = tuple(np.random.default_rng(11).integers(0, 320, 200).tolist())
ASKED = (Segment(0, 0, TOKENS[:90], Wanted.SCORED, top=3), Segment(1, 0, TOKENS[:5], Wanted.LAST),
         Segment(2, 0, TOKENS[90:130], Wanted.SCORED, top=1))  # fmt: skip


def likeliest(told: list[TokenLogprob], field: int) -> list[list[float]]:
    """Ids (0) or log-probabilities (1)."""
    return [[pair[field] for pair in row.top] for row in told]


@pytest.fixture
def stage(make_tiny: Any) -> LocalStage:
    made: LocalStage = make_tiny("dense").stage(slots=3, pages=32)
    return made


def test_scores_are_those_of_all_logits_and_the_last_row_comes_whole(stage: LocalStage) -> None:
    output = stage.forward(Batch(ASKED), None)
    assert output.logits is not None
    assert output.scores is not None
    assert output.logits.shape[0] == 3
    assert output.scores.shape == (89 + 39, 1 + 2 * 3)
    for segment, row, scores in zip(ASKED[::2], (0, 2), output.scores.split([89, 39]), strict=True):
        stage.open(segment.slot)
        every = Segment(segment.slot, 0, segment.tokens, Wanted.ALL)
        logits = stage.forward(Batch((every,)), None).logits
        assert logits is not None
        torch.testing.assert_close(output.logits[row], logits[-1])
        truth = logits[:-1].log_softmax(-1)
        behind = torch.tensor(segment.tokens[1:])[:, None]
        torch.testing.assert_close(scores[:, 0], truth.gather(1, behind)[:, 0], atol=1e-5, rtol=0)
        best = truth.topk(segment.top)
        told = logprobs_of(scores, segment.tokens[1:], segment.top)
        torch.testing.assert_close(torch.tensor(likeliest(told, 1)), best.values, atol=1e-5, rtol=0)
        assert likeliest(told, 0) == best.indices.tolist()


def test_a_batch_that_runs_in_turns_tells_everyone_as_many_as_they_asked_for(make_tiny: Any) -> None:
    """The first three want three, one and none of the likeliest, and their pages do not fit the pool at once."""
    asked = [Segment(slot, 0, TOKENS[:130], Wanted.SCORED, top) for slot, top in enumerate((3, 1, 0))]
    told = []
    for pool in ({"pages": 6, "host_pages": 60}, {"pages": 64}):
        stage = make_tiny("dense").stage(slots=3, **pool)
        assert (len(portions_of(Batch(tuple(asked)), stage._paged)) > 1) == ("host_pages" in pool)
        scores = stage.forward(Batch(tuple(asked)), None).scores
        parts = zip(asked, scores.split(129), strict=True)
        told.append([logprobs_of(part, segment.tokens[1:], segment.top) for segment, part in parts])
    for turns, whole, count in zip(*told, (3, 1, 0), strict=True):
        assert {len(row.top) for row in turns} == {count}
        assert likeliest(turns, 0) == likeliest(whole, 0)
        assert [row.logprob for row in turns] == pytest.approx([row.logprob for row in whole], abs=1e-4)


def test_no_more_logits_are_there_at_once_than_fit_where_the_layers_were(
    stage: LocalStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, passed = ModelSpan.leave, list[int]()

    def note(model: ModelSpan, x: torch.Tensor) -> torch.Tensor:
        passed.append(len(x))
        return leave(model, x)

    monkeypatch.setattr(ModelSpan, "leave", note)
    stage.forward(Batch(ASKED), None)
    spec, rows = stage.model.spec, sum(map(len, ASKED))
    free = LEFT_BY_LAYERS * rows * spec.hidden * torch.float32.itemsize
    assert max(passed) * spec.vocab * LOGIT_BYTES <= free
    assert sum(passed) == 89 + 39 + 3, "every row once, in pieces; the whole rows last"
    assert passed[-1] == 3
    assert len(passed) > 3


@pytest.mark.parametrize("recorded", [False, True])
def test_rows_of_the_head_without_a_token_are_in_no_logits_and_in_no_scores(
    recorded: bool, make_tiny: Any, only_torch: None
) -> None:
    """They have the highest logits of all, as random rows of a real file may."""
    file = make_tiny("dense").open()
    model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32)
    assert model.head is not None
    model.head.matrix.values[300:] = 100 * model.head.matrix.values[:20]
    whole = LocalStage(model, 1, 4, "f32").forward(Batch((Segment(0, 0, TOKENS[:9], Wanted.ALL),)), None).logits
    assert whole is not None
    assert (whole.argmax(-1) >= 300).any(), "else this test says nothing"
    padded = replace(model, spec=replace(model.spec, tokens=300))
    stage = LocalStage(padded, 2, 8, "f32", record=(lambda step, warm=None: step) if recorded else None)
    few = [token % 300 for token in TOKENS[:40]]
    output = stage.forward(Batch((Segment(1, 0, tuple(few), Wanted.SCORED, top=5),)), None)
    step = stage.forward(Batch((Segment(1, 40, (7,), Wanted.LAST),)), None)
    assert output.logits is not None and output.scores is not None and step.logits is not None
    assert output.logits.shape[1] == step.logits.shape[1] == 300
    assert max(max(row) for row in likeliest(logprobs_of(output.scores, few[1:], 5), 0)) < 300
