"""Recorded steps on a CPU: kernel calls, noted once and made again, have the bits of the steps they stand for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_files import FILES, write_tied

from rekindle.batch import Batch, Segment, Wanted
from rekindle.kernels import native
from rekindle.kernels.native.program import Arena, Tape, timing_kernels
from rekindle.kernels.norm import add, rms_norm
from rekindle.layers import load_span
from rekindle.layers.embedding import DeviceEmbedding, HostEmbedding, load_embedding
from rekindle.spec import Span
from rekindle.stages import LocalStage
from rekindle.stages.cpu_steps import MOST_ROWS
from rekindle.weights import open_weights

TOKENS = [(7 * i * i + 3) % 320 for i in range(512)]
LENGTHS = (70, 62, 9)  # of three sequences; the second comes to a page's end

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler")


def pair(make_tiny: Any, kind: str) -> tuple[LocalStage, LocalStage]:
    """A stage that records and one that does not, three prompts in each."""
    both = tuple(make_tiny(kind).stage(slots=3, pages=32) for _ in range(2))
    both[1]._cpu_steps = None
    for stage in both:
        for slot, length in enumerate(LENGTHS):
            stage.forward(Batch((Segment(slot, 0, tuple(TOKENS[:length]), Wanted.LAST),)), None)
    return both


def run_both(both: tuple[LocalStage, LocalStage], *segments: Segment, rewindable: bool = False) -> None:
    """The recording one with memory that holds no number: what a step reads, it has written."""
    steps = both[0]._cpu_steps
    assert steps is not None
    for memory in steps._arena._blocks.values():
        memory[:] = 255
    have, want = (stage.forward(Batch(segments, rewindable), None).logits for stage in both)
    assert have is not None and want is not None
    assert torch.equal(have, want)


def block(slot: int, position: int, rows: int) -> Segment:
    return Segment(slot, position, tuple(TOKENS[position : position + rows]), Wanted.ALL)


def states(stage: LocalStage) -> list[torch.Tensor]:
    slots = range(len(LENGTHS))
    return [t for state in stage._state.layers.values() for slot in slots for t in state.cleared(slot)]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_recorded_step_has_the_bits_of_one_that_is_not_recorded(make_tiny: Any, kind: str) -> None:
    both = pair(make_tiny, kind)
    for step in range(4):
        run_both(both, *(block(slot, length + step, 1) for slot, length in enumerate(LENGTHS)))
    at = [length + 4 for length in LENGTHS]
    for rows in (3, 3, MOST_ROWS, 3, MOST_ROWS):  # more room to go back into is made on the way
        run_both(both, block(1, at[1], rows), rewindable=True)
        for stage in both:
            stage.rewind(1, at[1] + 2)
        at[1] += 2
        run_both(both, block(1, at[1], 1))
        at[1] += 1
    assert all(torch.equal(a, b) for a, b in zip(*map(states, both), strict=True))
    assert [stage.work()["step:recorded"] for stage in both] == [14, 0]


def test_a_step_whose_kernels_are_timed_has_the_same_bits_and_names_each(make_tiny: Any) -> None:
    both = pair(make_tiny, "moe")
    run_both(both, block(0, LENGTHS[0], 1))
    program = both[0]._cpu_steps
    with timing_kernels() as times:
        both[0].forward(Batch((block(0, LENGTHS[0] + 1, 1),)), None)
        recorded = {name: len(each) for name, each in times.items()}
        times.clear()
        both[1].forward(Batch((block(0, LENGTHS[0] + 1, 1),)), None)
        assert recorded == {name: len(each) for name, each in times.items()}
    assert program is not None and {"multiply_all", "moe", "delta_run", "attention_run"} <= recorded.keys()
    run_both(both, block(0, LENGTHS[0] + 2, 1))
    assert all(torch.equal(a, b) for a, b in zip(*map(states, both), strict=True))
    assert not times.keys() - recorded.keys() and both[0].work()["step:recorded"] == 3


@pytest.mark.parametrize("name", FILES)
def test_decode_verify_and_prefill_give_every_token_the_same_bits(golden: Path, name: str) -> None:
    """Whatever rows come together: so a run with drafts has the tokens of the run without, at a near tie too."""
    file = open_weights(golden / name)
    model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32)
    runs = {1: (1,), 16: (16,), "many": (150,), "mixed": (3, 1, 33, 2, 7, 64)}
    stage = LocalStage(model, slots=len(runs), pages=32, kv_type="f16")
    logits = {}
    for slot, (label, sizes) in enumerate(runs.items()):
        stage.open(slot)
        rows, position = [], 0
        for size in itertools.cycle(sizes):
            if position >= 150:
                break
            segment = Segment(slot, position, tuple(TOKENS[position : min(position + size, 150)]), Wanted.ALL)
            rows.append(stage.forward(Batch((segment,), rewindable=size < 17), None).logits)
            position += size
        logits[label] = torch.cat([row for row in rows if row is not None])
    assert all(torch.equal(one, logits[1]) for one in logits.values())
    parts = [[t for part in stage.capture(slot) for t in part.tensors.values()] for slot in range(len(runs))]
    assert all(torch.equal(a, b) for part in parts for a, b in zip(part, parts[0], strict=True))


@pytest.mark.parametrize("name", FILES)
def test_a_tied_model_looks_tokens_up_in_its_head_and_its_steps_are_recorded(tmp_path: Path, name: str) -> None:
    """With the bits of one that keeps the stored rows beside it."""
    file = open_weights(write_tied(tmp_path / name, name))
    cpu = torch.device("cpu")
    model = load_span(file, file.spec.whole, cpu, torch.float32)
    assert isinstance(model.embedding, DeviceEmbedding) and model.head is not None
    assert model.embedding.table is model.head.matrix
    stored = load_embedding(file, cpu, torch.float32)
    assert isinstance(stored, HostEmbedding)
    models = (model, replace(model, embedding=stored))
    both = tuple(LocalStage(each, slots=3, pages=32, kv_type="f16") for each in models)
    both[1]._cpu_steps = None
    for stage in both:
        stage.open(0)
    run_both(both, block(0, 0, 40))
    for step in range(4):
        run_both(both, block(0, 40 + step, 1))
    run_both(both, Segment(0, 44, (0, file.spec.vocab - 1, 0), Wanted.ALL))
    assert [stage.work()["step:recorded"] for stage in both] == [5, 0]


def test_a_stage_with_one_end_of_a_tied_model_has_what_that_end_needs(tmp_path: Path) -> None:
    file, cpu = open_weights(write_tied(tmp_path / "tied.gguf", "tiny-qwen35-Q4_K_M.gguf")), torch.device("cpu")
    first, last = (load_span(file, span, cpu, torch.float32) for span in (Span(0, 2), Span(2, file.spec.layers)))
    assert isinstance(first.embedding, HostEmbedding) and first.head is None
    assert last.embedding is None and last.head is not None


def test_steps_whose_rows_want_no_logits_or_are_many_are_not_recorded(make_tiny: Any) -> None:
    stage, _ = pair(make_tiny, "dense")
    stage.forward(Batch((Segment(0, LENGTHS[0], (1, 2, 3), Wanted.LAST),)), None)
    stage.forward(Batch((block(1, LENGTHS[1], MOST_ROWS + 1),)), None)
    assert stage.work()["step:recorded"] == 0


def test_a_tape_notes_kernels_and_looks_and_refuses_what_torch_computes() -> None:
    x, weight, library = torch.randn(4, 8), torch.randn(8), native.library()
    with torch.inference_mode(), Tape(library, Arena()) as tape:
        out = rms_norm(x, weight, 1e-6)
        total = add(out.view(2, 16).view(4, 8)[:, :], x)
    assert tape.refused is None and tape.program is not None
    x.copy_(torch.randn(4, 8))
    tape.program.run()
    assert torch.equal(total, add(rms_norm(x, weight, 1e-6), x))
    for compute in (lambda: x + 1, lambda: x.add_(1), lambda: x[0, 0].item(), lambda: x.t().contiguous(), x.double):
        with torch.inference_mode(), Tape(library, Arena()) as tape:
            compute()
        assert tape.refused is not None and tape.program is None


def test_an_arena_gives_memory_again_once_no_tensor_looks_into_it() -> None:
    arena = Arena()
    first = arena.empty((3, 5), torch.float32)
    view, place = first.view(5, 3)[1:], first.data_ptr()
    del first
    assert arena.empty((3, 5), torch.float32).data_ptr() != place, "a view is still there"
    del view
    assert arena.empty((4, 4), torch.float32).data_ptr() == place
    held = arena.empty((4, 4), torch.float32)
    loose = arena.let_go(held)
    place = held.data_ptr()
    del held
    assert loose.data_ptr() == place == arena.empty((4, 4), torch.float32).data_ptr()


def test_rows_that_numpy_makes_are_never_recorded() -> None:
    """Of types that no kernel reads: a recorded step would read the first step's rows for ever."""
    raw = np.random.default_rng(1).integers(0, 255, (4, 110), dtype=np.uint8)  # Q3_K: 256 values
    embedding = HostEmbedding(raw, "Q3_K", 256, torch.device("cpu"), torch.float32)
    with torch.inference_mode(), Tape(native.library(), Arena()) as tape:
        rms_norm(embedding.rows(torch.tensor([2])), torch.ones(256), 1e-6)
    assert tape.refused is not None
