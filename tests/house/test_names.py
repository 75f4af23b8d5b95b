"""A class name stands in one module; pages of the docs are wrapped and name tests that exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rekindle"
# Two sides of one border: a frame has the name of what it carries, the engine's event that of what the client gets.
ALLOWED = {"Failed", "Output"}
WIDEST = 130  # columns; tables and code are as wide as they must be


def test_the_tests_that_keep_the_laws_are_there() -> None:
    named = set(re.findall(r"`(\w+/test_\w+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]


def homes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def test_a_class_name_stands_in_one_module() -> None:
    twice = {name: modules for name, modules in homes().items() if len(modules) > 1}
    assert twice.keys() <= ALLOWED, {name: twice[name] for name in twice.keys() - ALLOWED}


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_prose_is_wrapped(path: Path) -> None:
    lines, code = list[str](), False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        if len(line) > WIDEST and not code and not line.startswith("|"):
            lines.append(f"line {number} has {len(line)} columns")
    assert not lines
