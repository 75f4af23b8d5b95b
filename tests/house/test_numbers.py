"""A number that the plan reserves and the runtime allocates by has one home: both import it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "rekindle"
BUFFERS = PACKAGE / "buffers.py"
OF_KINDS = ("PAGE", "Q8_BLOCK", "SUB_CHUNK")  # sizes of kinds of layers, whose home is spec/


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def defined(path: Path) -> set[str]:
    """Upper-case names that a module assigns."""
    found = set()
    for node in parsed(path).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for name in found if name.isupper()}


def readers(number: str) -> set[str]:
    """Packages whose modules import a number, or a function of the buffers that says by it how large one is."""
    functions = [node for node in parsed(BUFFERS).body if isinstance(node, ast.FunctionDef)]
    names = {number} | {function.name for function in functions if number in ast.unparse(function)}
    return {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names}
    }


@pytest.mark.parametrize("number", sorted(defined(BUFFERS)))
def test_the_plan_and_the_runtime_read_every_size_of_a_buffer(number: str) -> None:
    packages = readers(number)
    assert "placement" in packages, f"the plan does not reserve {number}"
    runtime = {"pool", "experts", "snapshots", "kernels", "stages", "engine"}
    assert packages & runtime, f"the runtime does not allocate {number}"


@pytest.mark.parametrize("number", OF_KINDS)
def test_kernels_read_the_sizes_of_a_kind(number: str) -> None:
    assert "kernels" in readers(number)


@pytest.mark.parametrize("number", sorted(defined(BUFFERS) | set(OF_KINDS)))
def test_a_shared_number_is_defined_once(number: str) -> None:
    homes = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if number in defined(path)]
    assert len(homes) == 1
    assert homes[0].startswith(("spec/", "buffers.py"))
