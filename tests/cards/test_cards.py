"""Cards that are not here: what each of them would be given compiles for it, and fits.

Compiled in a process of its own, since Triton's interpreter, which other tests choose, compiles nothing. The largest
forms of small models only; scripts/check_cards.py has all of them.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_cards
import pytest
from check_cards import Found, faults
from paper_gpu import CARDS, H200, Card

import rekindle

SCRIPT = Path(check_cards.__file__)
SOURCE = Path(rekindle.__file__).parent
A3090 = next(card for card in CARDS if card.arch == 86)
A7900 = next(card for card in CARDS if card.arch == "gfx1100")


def check(*options: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--workers", "2", "--quick", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)


def compile_all(file: Path) -> list[Found]:
    done = check("--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [Found(**json.loads(line)) for line in file.read_text().splitlines()]


def jit_kernels() -> set[tuple[str, str]]:
    """Module and name of every kernel that is launched."""
    kernels = set()
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("rekindle", *path.relative_to(SOURCE).with_suffix("").parts))
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        kernels |= {(module, each.name) for each in functions if each.decorator_list and each.name.endswith("_kernel")}
    return kernels


# The cards


@pytest.mark.slow
def test_every_card_can_run_every_kernel_that_it_is_given(tmp_path: Path) -> None:
    """One test, since what it asks about takes minutes to compile and tests are spread over processes."""
    found = compile_all(tmp_path / "found.jsonl")
    assert {each.arch for each in found} == {str(card.arch) for card in CARDS}
    assert not [line for card in CARDS for each in found if each.arch == str(card.arch) for line in faults(card, each)]
    assert jit_kernels() - {(each.module, each.kernel) for each in found} == set(), "each is compiled for some card"
    for card in CARDS:
        kernels = {each.kernel for each in found if each.arch == str(card.arch)}
        assert {"_attend_kernel", "_far_kernel", "_pass_kernel", "_grouped_kernel"} <= kernels, "those with tiles"


# The card that everything was measured on


def tiles(form: dict[str, Any], *names: str) -> tuple[int, ...]:
    return tuple(form[name] for name in (*names, "num_warps", "num_stages"))


def test_the_h200_keeps_the_forms_that_were_measured_on_it() -> None:
    done = check("--list", "--cards", "90", "--all")
    assert done.returncode == 0, done.stderr[-4000:]
    forms: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        _, module, kernel, form = json.loads(line)
        forms.setdefault(f"{module.removeprefix('rekindle.kernels.')}.{kernel}", []).append(form)
    attend = forms["attention.triton._attend_kernel"]
    narrow = [form for form in attend if not form["HALVES"]]
    assert {tiles(form, "TILE_ROWS", "TILE_KEYS") for form in narrow} == {
        (16, 64, 4, 3), (16, 32, 4, 7), (64, 64, 8, 2), (128, 64, 8, 2),
    }  # fmt: skip
    assert {tiles(form, "TILE_ROWS", "TILE_KEYS") for form in attend if form["HALVES"]} == {
        (16, 64, 4, 3), (16, 32, 4, 7), (64, 64, 4, 2),
    }  # fmt: skip
    assert {tiles(form, "COLUMNS") for form in forms["gated_delta.chunks._pass_kernel"]} == {(32, 4, 2), (64, 4, 2)}
    assert {tiles(form, "CHUNK") for form in forms["gated_delta.chunks._prepare_kernel"]} == {(64, 4, 1)}
    grouped = forms["moe.groups._grouped_kernel"]
    assert {tiles(form, "BN", "BM", "BB") for form in grouped if form["TYPE"] == "dense"} == {(128, 128, 2, 8, 3)}
    assert {tiles(form, "BN", "BB") for form in grouped if form["TYPE"] != "dense"} == {(64, 4, 4, 3)}
    assert all(form["PRECISION"] in ("tf32", "tf32x3") for form in attend)


# What is said of a form that a card cannot run


def test_a_kernel_that_asks_for_too_much_is_reported_with_both_numbers() -> None:
    done = check("--cards", "gfx1100", "--kernels", "_route_kernel", "--shared", "8")
    assert done.returncode == 1, done.stderr[-4000:]
    assert "_route_kernel for gfx1100 (RX 7900 XTX) asks for " in done.stdout
    assert " bytes of shared memory, the card allows 8 " in done.stdout


def test_an_unknown_card_is_refused_with_the_known_ones() -> None:
    done = check("--cards", "75")
    assert done.returncode == 1
    assert "--cards names 75; known are 80, 86" in done.stderr


FINE = Found("_attend_kernel", "", "86", {}, shared=1, registers=128, spilled=0, threads=128)


@pytest.mark.parametrize(
    ("card", "changes", "said"),
    [
        (A3090, {"shared": 107_536}, "_attend_kernel for 86 (RTX 3090) asks for 107536 bytes of shared memory, the "
         "card allows 101376"),
        (A7900, {"shared": 74_768}, "asks for 74768 bytes of shared memory, the card allows 65536"),
        (H200, {"kernel": "_norm_kernel", "shared": 50_000}, "is not among the kernels that stage tiles"),
        (A7900, {"threads": 2048}, "has 2048 threads, the card allows 1024"),
        (A3090, {"registers": 255, "threads": 512}, "has 255 registers in each of 512 threads, the card has 65536"),
        (A3090, {"spilled": 100_000}, "spills 100000 bytes of every thread"),
        (A3090, {"foreign": ("griddepcontrol",)}, "has griddepcontrol, which the card does not"),
        (A7900, {"error": "CompilationError: no tf32"}, "does not compile: CompilationError: no tf32"),
    ],
)  # fmt: skip
def test_what_a_card_cannot_run_is_said(card: Card, changes: dict[str, Any], said: str) -> None:
    assert faults(card, FINE) == []
    lines = faults(card, replace(FINE, **changes))
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    ("arch", "line", "foreign"),
    [
        (86, "griddepcontrol.wait;", ("griddepcontrol",)),
        (89, "@go cp.async.bulk.prefetch.L2.global [%rd1], %r2;", ("cp.async.bulk",)),
        (120, "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;", ("wgmma",)),
        (90, "wgmma.fence.sync.aligned; griddepcontrol.wait;", ()),
        (86, "cp.async.cg.shared.global [%r1], [%rd1], 16;", ()),
    ],
)
def test_instructions_of_other_cards_are_found(arch: int, line: str, foreign: tuple[str, ...]) -> None:
    card = next(card for card in CARDS if card.arch == arch)
    assert check_cards.foreign_to(card, SimpleNamespace(asm={"ptx": line})) == foreign


def test_assembly_of_nvidias_is_foreign_to_other_makers() -> None:
    kernel = SimpleNamespace(asm={"ttir": 'tt.elementwise_inline_asm "prefetch.global.L2 [$1];"'})
    assert check_cards.foreign_to(A7900, kernel) == ("inline assembly of NVIDIA's",)
