"""Files of llama.cpp's tools: what the tests make for themselves may not drift away from them.

exact.json: file name → cases with `prompt`, `tokens` that follow, and `top`: the ten likeliest (id, log-probability) of
each step, by transformers on the dequantised weights. llamacpp.json: the same by llama.cpp's CPU kernels, which round
activations to 8 bits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_files import FILES
from support.truth import Truth
from support.vocabulary import TEMPLATE, metadata_of

from rekindle.batch import Batch, Segment, Wanted
from rekindle.layers import load_span
from rekindle.stages import LocalStage
from rekindle.text import ChatTemplate, Tokenizer
from rekindle.weights import open_weights


def read_cases(folder: Path, which: str, name: str) -> list[Any]:
    found: list[Any] = json.loads((folder / f"{which}.json").read_text())[name]
    return found


def stage_over(path: Path) -> LocalStage:
    file = open_weights(path)
    model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32)
    model = replace(model, spec=replace(model.spec, tokens=0))  # the cases are over every row of the head
    return LocalStage(model, slots=1, pages=16, kv_type="f32")


def logprobs(stage: LocalStage, case: Any) -> torch.Tensor:
    """After the prompt, and after every token that follows but the last."""
    tokens, start, rows = [*case["prompt"], *case["tokens"]], 0, []
    edges = [*range(256, len(case["prompt"]), 256), *range(len(case["prompt"]), len(tokens))]
    stage.open(0)
    for stop in edges:
        output = stage.forward(Batch((Segment(0, start, tuple(tokens[start:stop]), Wanted.ALL),)), None)
        assert output.logits is not None
        rows.append(output.logits)
        start = stop
    return torch.cat(rows)[len(case["prompt"]) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("name", FILES)
def test_log_probabilities_equal_the_golden_ones_where_torch_computes(
    outside: Path, name: str, only_torch: None
) -> None:
    stage = stage_over(outside / name)
    for case in read_cases(outside, "exact", name):
        for row, top in zip(logprobs(stage, case), case["top"], strict=True):
            ids, values = zip(*top, strict=True)
            assert (row[list(ids)] - torch.tensor(values)).abs().max() < 1e-3


@pytest.mark.parametrize("name", FILES)
def test_the_truth_that_tests_make_is_the_golden_one(outside: Path, name: str) -> None:
    truth = Truth(outside / name)
    for case in read_cases(outside, "exact", name)[:4]:
        rows = truth.logits([*case["prompt"], *case["tokens"]])[len(case["prompt"]) - 1 : -1].log_softmax(-1)
        for row, top in zip(rows, case["top"], strict=True):
            ids, values = zip(*top, strict=True)
            assert (row[list(ids)] - torch.tensor(values)).abs().max() < 1e-4


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_c_are_no_further_from_the_truth_than_llama_cpp_is(outside: Path, name: str) -> None:
    """Of llama.cpp only the ten likeliest tokens of a step are known."""
    stage = stage_over(outside / name)
    assert stage.model.head is not None and stage.model.head.matrix.lanes is not None
    ours, theirs = Distance(), Distance()
    for case, peer in zip(*(read_cases(outside, which, name) for which in ("exact", "llamacpp")), strict=True):
        for row, truth, told in zip(logprobs(stage, case), case["top"], peer["top"], strict=True):
            values, ids = row.topk(len(truth))
            ours.take(truth, list(zip(ids.tolist(), values.tolist(), strict=True)))
            theirs.take(truth, told)
    assert ours.mean <= theirs.mean / 10
    assert ours.firsts >= theirs.firsts
    assert len(ours.errors) >= len(theirs.errors)


class Distance:
    """Of log-probabilities from the truth, where both lists name a token; and how often the first is the same."""

    def __init__(self) -> None:
        self.errors, self.firsts = list[float](), 0

    def take(self, truth: list[Any], told: list[Any]) -> None:
        known = dict(told)
        self.errors += [abs(known[token] - value) for token, value in truth if token in known]
        self.firsts += truth[0][0] == told[0][0]

    @property
    def mean(self) -> float:
        return sum(self.errors) / len(self.errors)


def test_the_template_of_the_tests_writes_what_the_real_one_writes(outside: Path) -> None:
    """Where there are no tools: what introduces them are the template's own words."""
    tokenizer = Tokenizer.from_gguf(metadata := metadata_of(outside / "tiny-qwen35-f16.gguf"))
    ours, real = ChatTemplate(TEMPLATE, tokenizer), ChatTemplate.from_gguf(metadata, tokenizer)
    call = {"function": {"name": "read", "arguments": {"path": "a.py", "lines": [1, "é"], "deep": {"a": None}, "n": 2}}}
    conversation = [
        {"role": "system", "content": "You help. "},
        {"role": "user", "content": "Read a.py"},
        {"role": "assistant", "content": "", "reasoning_content": "I should read it.", "tool_calls": [call, call]},
        {"role": "tool", "content": "print('<div>')\n"},
        {"role": "tool", "content": "2 < 3"},
        {"role": "assistant", "content": "<think>\nclear now\n</think>\n\nIt prints a div.", "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
    ]
    for length in range(2, len(conversation) + 1):
        messages: list[Any] = conversation[:length]
        variants: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"add_generation_prompt": False}]
        for options in variants:
            assert ours.render_text(messages, **options) == real.render_text(messages, **options)
