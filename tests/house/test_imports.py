"""The import table of docs/design.md is the law; this reads both and compares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rekindle"
NO_TORCH = {"api", "text", "placement", "config", "errors", "spec", "prompt", "batch"}


def table() -> dict[str, set[str] | None]:
    """Room -> rooms it may import; None stands for every room."""
    rows: dict[str, set[str] | None] = {}
    for line in (ROOT / "docs" / "design.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 4:
            continue
        allowed = None if cells[2] == "every room" else set(re.findall(r"`(\w+)/?`", cells[2]))
        for room in re.findall(r"`(\w+)/?`", cells[0]):
            rows[room] = allowed
    return rows


def hall() -> set[str]:
    line = next(line for line in (ROOT / "docs" / "design.md").read_text().splitlines() if "(the hall)" in line)
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


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_the_table_allows(path: Path) -> None:
    rooms, room = table(), room_of(path)
    assert room in rooms, f"{room} is not in the table of docs/design.md"
    allowed = rooms[room]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "rekindle" or len(parts) == 1 or parts[1] in hall() | {room, "__version__"}:
            continue
        assert allowed is None or parts[1] in allowed, f"{room} imports {name}; the table allows {sorted(allowed)}"


@pytest.mark.parametrize(
    "path", [p for p in modules() if room_of(p) in NO_TORCH], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_rooms_without_torch_do_not_import_it(path: Path) -> None:
    assert not any(name.split(".")[0] in {"torch", "triton"} for name in imports(path))


def test_the_table_is_read() -> None:
    assert table()["snapshots"] == set()
    assert "stages" in (table()["engine"] or set())
    assert table()["build"] is None
