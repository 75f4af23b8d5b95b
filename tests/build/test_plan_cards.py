"""`rekindle plan` of cards and shapes by name: nothing of either needs to be at hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.build import VRAM_SHARE
from rekindle.cli.commands import app

A3B = ("--shape", "qwen3.6-35b-a3b", "--context", "131072", "--ram", "64GiB")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_a_shape_on_a_card_is_planned_without_a_file_and_says_that_it_is_imagined() -> None:
    plan = run(*A3B, "--card", "RTX 3090").output
    assert "RTX 3090: imagined, by its maker's figures" in plan
    assert [line.split()[0] for line in plan.splitlines() if "tok/s" in line] == [
        "empty",
        "32,768",
        "65,536",
        "131,072",
    ]


def test_a_card_has_the_plan_of_as_much_vram_as_serve_takes_of_it() -> None:
    card = json.loads(run(*A3B, "--card", "RTX 3090", "--json").output)
    size = json.loads(run(*A3B, "--vram", f"{int((24 << 30) * VRAM_SHARE)}B", "--json").output)
    assert card["stages"] == size["stages"]
    assert [each["sequences"] for each in card["expected"]] == [1, 4] * 4
    assert size["expected"] == [], "nothing is known of that card's speed"
    assert any("takes 92 % of what is free" in reason for reason in size["reasons"])


def test_two_cards_are_two_devices() -> None:
    plan = json.loads(run(*A3B, "--card", "RTX 3090", "--card", "RTX 5090", "--json").output)
    assert [stage["device"] for stage in plan["stages"]] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--card", "RTX 3090", "--vram", "24GiB"), "leave out --vram and --devices"),
        (("--shape", "qwen9", "--card", "RTX 3090"), "'qwen9' is not known; known are qwen3.6-27b, qwen3.6-35b-a3b"),
        (("FILE.gguf", "--shape", "qwen3.6-27b"), "leave one out"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: tuple[str, ...], says: str) -> None:
    assert says in str(run(*arguments).exception)


def test_a_shape_is_planned_with_the_type_of_kv_that_is_asked_for() -> None:
    size, half = (
        json.loads(run(*A3B, "--vram", "22GiB", "--kv-type", kind, "--json").output) for kind in ("bf16", "q8")
    )
    assert half["stages"] != size["stages"]
    assert "known types are" in str(run(*A3B, "--vram", "22GiB", "--kv-type", "q4").exception)


def test_a_drafter_needs_a_file_to_be_compared_with() -> None:
    assert "--shape has none" in str(run(*A3B, "--vram", "22GiB", "--drafter", "nowhere").exception)
