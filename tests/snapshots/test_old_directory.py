"""A cache directory of an earlier version: read, restored and, but for the order of an own object, still so written.

`written_by_version_1` was written when attention and DeltaNet layers had parts of classes of their own, and a snapshot
could hold a drafter's context. It has two snapshots: of 70 tokens, from a sparse run, and of 5 with such a context.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.paper_snapshots import FINGERPRINT, same

from rekindle.layers import ModelSpan
from rekindle.snapshots import manifest
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import Page, Part, Snapshot, Stretch
from rekindle.spec import PAGE, AttentionSpec, DeltaSpec, FfnSpec, ModelSpec
from rekindle.stages import LocalStage

OLD = Path(__file__).parent / "written_by_version_1"
WHOLE, WITH_DRAFTER = "d94aa9e1d55f4c52504ae9124e60c0b1", "3d704375b610707875bb947117e0b066"
BUDGET = 1 << 20
TOKENS = (np.arange(70) * 5 % 31).astype(np.int32)

ATTENTION = AttentionSpec(heads=2, kv_heads=1, head_dim=4, rope_dim=4, rope_theta=1e4)
DELTA = DeltaSpec(key_heads=1, value_heads=2, key_dim=2, value_dim=2, conv_width=4)
MODEL = ModelSpec(
    "qwen35", "tiny", 8, 16, (DELTA, ATTENTION, DELTA, ATTENTION), FfnSpec(8), 1e-6, context=1024, tied=False
)


def values(salt: int, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape))
    return ((torch.arange(count) * 7 + salt * 13) % 97 - 48).float().div(16).view(shape)


def delta(layer: int, salt: int) -> Part:
    return Part(layer, {"state": values(salt, 2, 2, 2), "window": values(salt + 1, 3, 8)})


def attention(layer: int, salt: int) -> Part:
    tensors = {"tail": values(salt + 1, 2, 6, 1, 4), "query": values(salt + 2, 2, 2, 4)}
    return Part(layer, tensors, (Page(values(salt, 2, PAGE, 1, 4)),))


def the_snapshot() -> Snapshot:
    parts = (delta(0, 1), attention(1, 3), delta(2, 6), attention(3, 8))
    stretches = (Stretch(64, "prefill", (7,)), Stretch(70, "decode"))
    return Snapshot(TOKENS, parts, values(11, 16), 512, stretches)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "cache"))


def test_a_directory_of_the_earlier_version_is_read(folder: Path) -> None:
    store = DiskStore(folder, FINGERPRINT, BUDGET)
    assert store.bad_files == 0
    assert same(store.load(WHOLE), the_snapshot())
    store.close()


def test_its_snapshots_restore_on_a_stage(folder: Path) -> None:
    store = DiskStore(folder, FINGERPRINT, BUDGET)
    loaded = store.load(WHOLE)
    model = ModelSpan(MODEL, MODEL.whole, torch.device("cpu"), torch.float32, (), None, None)
    stage = LocalStage(model, slots=1, pages=4, kv_type="f32", kv_mode="sparse")
    stage.restore(0, loaded.position, loaded.parts)
    again = Snapshot(TOKENS, tuple(stage.capture(0)), loaded.logits, loaded.grid, loaded.stretches)
    assert same(again, the_snapshot())
    store.close()


def test_a_drafters_context_is_left_out_and_the_rest_is_read(folder: Path) -> None:
    store = DiskStore(folder, FINGERPRINT, BUDGET)
    loaded = store.load(WITH_DRAFTER)
    assert (loaded.position, loaded.namespace, loaded.logits) == (5, "alice", None)
    assert [list(part.tensors) for part in loaded.parts] == [["state", "window"], ["tail"]] * 2
    assert torch.equal(loaded.parts[2].tensors["window"], values(7, 3, 8))
    store.close()


def test_the_same_snapshot_is_still_written_in_the_same_bytes_but_kind_by_kind(tmp_path: Path) -> None:
    """The earlier version wrote all tensors of a layer, then those of the next. Either reads what the other wrote."""
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, clock=lambda: 1_700_000_000.0)
    record = store.save(the_snapshot())
    store.close()
    old = OLD / store.folder.name
    assert record.id == WHOLE
    for name in record.pages:
        assert (store.folder / "objects" / name).read_bytes() == (old / "objects" / name).read_bytes()
    now, then = (manifest.read(folder / f"manifests/{WHOLE}.json", FINGERPRINT) for folder in (store.folder, old))
    assert [(row.name, row.layer) for row in now.parts] == [
        ("state", 0), ("state", 2), ("window", 0), ("window", 2), ("tail", 1), ("tail", 3), ("query", 1), ("query", 3),
        ("logits", None),
    ]  # fmt: skip
    assert msgspec.structs.replace(now, own="", parts=(), checksum="") == msgspec.structs.replace(
        then, own="", parts=(), checksum=""
    )
    own, earlier = (
        (folder / "objects" / listed.own).read_bytes() for folder, listed in ((store.folder, now), (old, then))
    )
    ours = {(row.name, row.layer): own[row.offset : row.offset + row.bytes] for row in now.parts}
    assert ours == {(row.name, row.layer): earlier[row.offset : row.offset + row.bytes] for row in then.parts}
