"""The import table of docs/architecture.md is the law; this reads both and compares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rekindle"
NO_TORCH = {
    "api",
    "text",
    "placement",
    "models",
    "config",
    "errors",
    "spec",
    "buffers",
    "prompt",
    "batch",
    "workers",
    "hurry",
    "grammar",
}


def table() -> dict[str, set[str] | None]:
    """Package -> packages it may import; None stands for every package."""
    rows: dict[str, set[str] | None] = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 4:
            continue
        allowed = None if cells[2] == "every package" else set(re.findall(r"`(\w+)/?`", cells[2]))
        for package in re.findall(r"`(\w+)/?`", cells[0]):
            rows[package] = allowed
    return rows


def common() -> set[str]:
    line = next(line for line in (ROOT / "docs" / "architecture.md").read_text().splitlines() if "(common)" in line)
    return set(re.findall(r"`(\w+)`", line.split("|")[1]))


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, at any depth of the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "rekindle"}
    return names


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_package_imports_only_what_the_table_allows(path: Path) -> None:
    packages, package = table(), package_of(path)
    assert package in packages, f"{package} is not in the table of docs/architecture.md"
    allowed = packages[package]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "rekindle" or len(parts) == 1 or parts[1] in common() | {package, "__version__"}:
            continue
        assert allowed is None or parts[1] in allowed, f"{package} imports {name}; the table allows {sorted(allowed)}"


@pytest.mark.parametrize(
    "path", [p for p in modules() if package_of(p) in NO_TORCH], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_packages_without_torch_do_not_import_it(path: Path) -> None:
    assert not any(name.split(".")[0] in {"torch", "triton"} for name in imports(path))


def test_the_table_is_read() -> None:
    assert table()["snapshots"] == set()
    assert "stages" in (table()["engine"] or set())
    assert table()["build"] is None


def test_no_two_packages_import_each_other() -> None:
    pairs = {
        (package_of(path), name.split(".")[1])
        for path in modules()
        for name in imports(path)
        if name.startswith("rekindle.") and name.split(".")[1] != package_of(path)
    }
    assert not {(a, b) for a, b in pairs if (b, a) in pairs}
