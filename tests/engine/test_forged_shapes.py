"""A snapshot on disk that is whole and signed, but of other shapes than the layers have: a miss, never an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.snapshot_lab import Answer, Lab, random_tokens, wait_until

from rekindle.prompt import Prompt
from rekindle.snapshots import manifest

SHAPES = {
    "state": lambda shape: (shape[0] * shape[1], shape[2]),
    "window": lambda shape: shape[::-1],
}
NAMES = {"state": "other", "window": "tensor"}


def forge(path: Path, tensor: str, **changes: Any) -> None:
    """Change every row of that name; offsets, bytes and the checksum stay right."""
    listed = manifest.read(path, None)
    parts = tuple(msgspec.structs.replace(row, **changes) if row.name == tensor else row for row in listed.parts)
    path.write_bytes(manifest.encode(msgspec.structs.replace(listed, parts=parts)))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("what", ["shape", "name", "dtype"])
def test_a_snapshot_that_a_layer_refuses_is_set_aside_and_computed_again(
    make_tiny: Any, tmp_path: Path, name: str, what: str
) -> None:
    lab, prompt = Lab(make_tiny("dense")), Prompt(random_tokens(150, 4))
    first = lab.engine(tmp_path)
    expected = Answer(first, prompt).tokens
    first.stop()
    manifests = list(tmp_path.glob("*/manifests/*.json"))
    assert manifests
    for path in manifests:
        row = next(row for row in manifest.read(path, None).parts if row.name == name)
        new = {"shape": SHAPES[name](row.shape), "name": NAMES[name], "dtype": "int32"}[what]
        forge(path, name, **{what: new})
    engine = lab.engine(tmp_path)
    again = Answer(engine, prompt)
    assert again.tokens == expected
    assert again.finished.cache.restored == 0
    wait_until(lambda: engine.prefixes.stats().quarantined >= 1)
    assert list(tmp_path.glob("*/aside/*.reason"))
    engine.stop()
