"""Audits find a snapshot that is not what a cold run gives, and leave right ones alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.snapshot_lab import Answer, Lab, random_tokens, wait_until

from rekindle.engine.audit import Audit, Auditor
from rekindle.engine.engine import Engine
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import Part, Snapshot, Stretch


@pytest.fixture(scope="module", params=["dense", "moe"])
def lab(request: Any, make_tiny: Any) -> Lab:
    return Lab(make_tiny(request.param))


def conversation(engine: Engine, turns: int, seed: int = 1) -> tuple[int, ...]:
    """Each turn restores what the last one left behind, prefill and decode."""
    tokens: tuple[int, ...] = ()
    for turn in range(turns):
        tokens = (*tokens, *random_tokens(90, seed + turn))
        answer = Answer(engine, Prompt(tokens, (Boundary(len(tokens) - 50, BoundaryKind.MESSAGE),)))
        tokens = (*tokens, *answer.tokens)
    return tokens


def test_right_snapshots_pass_whether_born_in_prefill_or_in_decode(lab: Lab) -> None:
    engine = lab.engine(audit=1)
    shared = random_tokens(100, 5)
    Answer(engine, Prompt((*shared, *random_tokens(30, 6)), (Boundary(100, BoundaryKind.SYSTEM),))).finished  # noqa: B018
    prefill = Answer(engine, Prompt((*shared, *random_tokens(30, 7)), (Boundary(100, BoundaryKind.SYSTEM),)))
    assert prefill.finished.cache.restored == 100
    wait_until(lambda: engine.status().audits == 1)
    before = engine.status()
    conversation(engine, 2, seed=20)
    wait_until(lambda: engine.status().audits == 2)
    status = engine.status()
    assert status.audit_mismatches == status.cache.quarantined == 0
    assert status.computed_tokens == before.computed_tokens + 90 + 91, "an audit is nobody's prompt"
    assert status.pages.used == 0
    engine.stop()


def test_tensors_of_a_part_are_compared_by_name_in_whatever_order_they_come(tmp_path: Path) -> None:
    """Layers whose states differ in shape and whose windows do not: files hold like beside like."""
    states = torch.randn(2, 8, 8), torch.randn(2, 4, 4)
    parts = tuple(Part(layer, {"state": state, "window": torch.randn(3, 5)}) for layer, state in enumerate(states))
    taken = Snapshot(np.arange(20, dtype=np.int32), parts, torch.randn(16), 512, (Stretch(20, "prefill"),))
    store = DiskStore(tmp_path, "f" * 64, 1 << 30)
    loaded = store.load(store.save(taken).id)
    store.close()
    auditor = Auditor(PrefixCache(local_tiers(1 << 20)), 1, on_cpu=True)
    auditor.judge(Audit(None, loaded), taken)
    assert auditor.mismatches == 0
    loaded.parts[1].tensors["window"][0, 0] += 1
    auditor.judge(Audit(None, loaded), taken)
    assert auditor.mismatches == 1


def published(engine: Engine, position: int) -> Snapshot:
    """The snapshot at that position, once it is there: an answer's comes a moment after its last event."""

    def found() -> list[Snapshot]:
        at_hand = (engine.prefixes.at_hand(e) for e in engine.prefixes.entries() if e.position == position)
        return [snapshot for snapshot in at_hand if snapshot is not None]

    wait_until(lambda: bool(found()))
    return found()[0]


def tampered(part: Part) -> torch.Tensor:
    first = next(iter(part.tensors.values()))  # the recurrent state, or the tail
    return first if first.numel() else part.pages[0].data


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_snapshot_altered_in_ram_is_set_aside_with_one_log_line(
    lab: Lab, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = lab.engine(audit=1)
    prompt = random_tokens(150, 3)
    Answer(engine, Prompt(prompt)).finished  # noqa: B018
    tampered(published(engine, 150).parts[layer]).view(-1)[7] += 0.01
    with caplog.at_level(logging.INFO, "rekindle"):
        wrong = Answer(engine, Prompt((*prompt, 5)))
        assert wrong.finished.cache.restored == 150
        wait_until(lambda: engine.status().audits == 1)
    status = engine.status()
    assert status.audit_mismatches == status.cache.quarantined == 1
    lines = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
    assert len(lines) == 1
    assert f"layer {layer}" in lines[0]
    again = Answer(engine, Prompt((*prompt, 6)))
    assert again.finished.cache.restored < 150, "never used again"
    engine.stop()


def test_a_snapshot_born_in_decode_and_altered_is_beyond_its_bound_too(lab: Lab) -> None:
    engine = lab.engine(audit=1)
    prompt = random_tokens(100, 4)
    tokens = (*prompt, *Answer(engine, Prompt(prompt), max_tokens=6).tokens)
    state = tampered(published(engine, 105).parts[0])
    state += 0.01 * torch.randn(state.shape)
    assert Answer(engine, Prompt((*tokens, 9))).finished.cache.restored == 105
    wait_until(lambda: engine.status().audits == 1)
    assert engine.status().audit_mismatches == 1
    engine.stop()


def test_one_in_n_restores_is_audited(lab: Lab) -> None:
    engine = lab.engine(audit=3)
    prompt = random_tokens(80, 8)
    for i in range(7):
        Answer(engine, Prompt((*prompt, i)), max_tokens=1).finished  # noqa: B018
        Answer(engine, Prompt(prompt), max_tokens=1).finished  # noqa: B018
    restores = sum(engine.status().cache.hits.values())
    wait_until(lambda: engine.status().audits == restores // 3)
    assert engine.status().audit_mismatches == 0
    engine.stop()


def test_what_an_earlier_process_left_is_audited_with_the_bound_and_kept(lab: Lab, tmp_path: Path) -> None:
    engine = lab.engine(tmp_path)
    tokens = conversation(engine, 2)
    engine.stop()
    engine = lab.engine(tmp_path, audit=1)
    again = Answer(engine, Prompt((*tokens, 3, 4)))
    assert again.finished.cache.restored_from["disk"] == len(tokens) - 1
    wait_until(lambda: engine.status().audits == 1)
    assert engine.status().audit_mismatches == 0
    engine.stop()


def test_a_restored_request_is_not_held_up_by_an_audit(lab: Lab) -> None:
    """One slot: the audit of the first restore gives it up to whoever comes."""
    engine = lab.engine(audit=1, slots=1)
    prompt = random_tokens(1200, 9)
    plain = Answer(engine, Prompt(prompt)).tokens
    assert Answer(engine, Prompt(prompt)).tokens == plain
    assert Answer(engine, Prompt(random_tokens(40, 10)), max_tokens=3).finished.completion_tokens == 3
    engine.stop()
