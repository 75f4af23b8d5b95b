"""Outside layers/, spec/ and models/ nothing asks of which kind a layer, its state, its part or its spec is."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from rekindle.layers.base import BLOCKS

PACKAGE = Path(__file__).parents[2] / "src" / "rekindle"
HOMES = {"layers", "spec", "models"}
BASES = {"MixerSpec", "MixerBlock", "LayerState"}


def classes(path: Path) -> dict[str, set[str]]:
    """Class -> names in its bases."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            bases = {name.id for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
            found[node.name] = bases
    return found


@cache
def kind_classes() -> set[str]:
    """The bases, and all that derives from them; a Part has no kinds, so nothing may ask for it either."""
    derived = {
        name: bases
        for package in HOMES
        for path in (PACKAGE / package).glob("*.py")
        for name, bases in classes(path).items()
    }
    known = set(BASES)
    while more := {name for name, bases in derived.items() if bases & known} - known:
        known |= more
    return known | {"Part", "PartEntry"}


def offences(source: str, kinds: set[str]) -> list[str]:
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(ast.parse(source)) if _asks(node, kinds)]


def _asks(node: ast.AST, kinds: set[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, asked]):
            return bool(_names(asked) & kinds)
        case ast.Compare(left=left, comparators=rights):
            sides = [left, *rights]
            types = any(isinstance(side, ast.Call) and _names(side.func) == {"type"} for side in sides)
            by_kind = any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides)
            named = {value.value for side in sides for value in ast.walk(side) if isinstance(value, ast.Constant)}
            return (types and any(_names(side) & kinds for side in sides)) or (by_kind and bool(named & BLOCKS.keys()))
        case ast.MatchClass(cls=asked):
            return bool(_names(asked) & kinds)
    return False


def _names(node: ast.AST) -> set[str]:
    plain = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return plain | {name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute)}


def others() -> list[Path]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [path for path in paths if path.relative_to(PACKAGE).parts[0] not in HOMES]


@pytest.mark.parametrize("path", others(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_asks_for_the_kind_of_a_layer(path: Path) -> None:
    assert not offences(path.read_text(), kind_classes())


def test_the_kinds_are_found() -> None:
    assert kind_classes() > {
        "AttentionSpec",
        "DeltaSpec",
        "AttentionState",
        "DeltaState",
        "AttentionBlock",
        "DeltaBlock",
    }


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(state, DeltaState)",
        "isinstance(mixer, spec.AttentionSpec | str)",
        "issubclass(block, (int, DeltaBlock))",
        "mixer.kind == 'attention'",
        "'delta' != spec.mixers[0].kind",
        "mixer.kind in ('delta', 'sum')",
        "type(state) is AttentionState",
        "match state:\n    case DeltaState(): pass",
    ],
)
def test_every_way_of_asking_is_seen(source: str) -> None:
    assert offences(source, kind_classes())


@pytest.mark.parametrize("source", ["device.kind == 'cpu'", "isinstance(stage, InProcess)", "boundary.kind == SYSTEM"])
def test_other_questions_are_not(source: str) -> None:
    assert not offences(source, kind_classes())
