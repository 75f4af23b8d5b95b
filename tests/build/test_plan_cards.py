"""`rekindle plan` of cards and shapes by name: nothing of either needs to be at hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.build import VRAM_SHARE
from rekindle.cli.commands import app

A3B = ("--shape", "qwen3.6-35b-a3b", "--context", "131072", "--ram", "64GiB")


DENSE = ("--shape", "qwen3.6-27b", "--context", "131072", "--ram", "64GiB", "--sequences", "4")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_a_shape_on_a_card_is_planned_without_a_file_and_says_that_it_is_imagined() -> None:
    plan = run(*A3B, "--card", "RTX 3090").output
    assert "RTX 3090: imagined, by its maker's figures" in plan
    assert [line.split()[0] for line in plan.splitlines() if "tok/s" in line] == [
        "empty",
        "8,192",
        "32,768",
        "65,536",
        "131,072",
    ]


def test_a_card_has_the_plan_of_as_much_vram_as_serve_takes_of_it() -> None:
    card = json.loads(run(*A3B, "--card", "RTX 3090", "--json").output)
    size = json.loads(run(*A3B, "--vram", f"{int((24 << 30) * VRAM_SHARE)}B", "--json").output)
    assert card["stages"] == size["stages"]
    assert [each["sequences"] for each in card["expected"]] == [1, 4] * 5
    assert size["expected"] == [], "nothing is known of that card's speed"
    assert any("no speed is foretold" in reason and "--card" in reason for reason in size["reasons"])
    assert any("takes 92 % of what is free" in reason for reason in size["reasons"])


def test_of_a_card_as_much_is_used_as_vram_says_and_speeds_are_foretold() -> None:
    plan = json.loads(run(*A3B, "--card", "H200", "--vram", "22.1GiB", "--json").output)
    assert plan["stages"][0]["budget"] == int(22.1 * (1 << 30))
    assert len(plan["expected"]) == 10


def test_a_plan_says_what_it_assumes_and_how_much_of_what_it_takes() -> None:
    card = run(*A3B, "--card", "RTX 3090").output
    assert "RAM 64.00 GiB (all that --ram says)" in card
    assert "of an empty card of 24.0 GiB serve takes 92 %, and so does this plan" in card
    assert card.startswith("qwen3.6-35b-a3b Q4_K_M: "), "the quantisation is named where the model is"
    assert "qwen3.6-35b-a3b stands for a file in the Q4_K_M mix" in card
    assert "all of --vram is used" in run(*A3B, "--vram", "24GiB").output


def test_a_pool_larger_than_what_fits_is_a_bound_and_the_plan_says_what_it_came_to() -> None:
    plan = json.loads(run(*DENSE, "--vram", "22GiB", "--pool", "400000", "--json").output)
    (stage,) = plan["stages"]
    said = f"pool of {stage['pool_pages'] * 64:,} tokens, the most that fits of the 400,000 asked for"
    assert any(said in reason for reason in plan["reasons"])
    assert 0 <= stage["left"] < 2 * stage["page_bytes"]
    assert "need at least" in str(run(*DENSE, "--vram", "12GiB", "--pool", "400000").exception)
    assert "is too small" in str(run(*DENSE, "--vram", "22GiB", "--pool", "640").exception)


def test_two_cards_are_two_devices() -> None:
    plan = json.loads(run(*A3B, "--card", "RTX 3090", "--card", "RTX 5090", "--json").output)
    assert [stage["device"] for stage in plan["stages"]] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--card", "RTX 3090", "--devices", "cuda:0"), "leave out --devices"),
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


def test_no_card_has_more_memory_than_it_has() -> None:
    refused = run(*A3B, "--card", "RTX 3090", "--vram", "80GiB")
    assert "80.0 GiB, and the card RTX 3090 has 24.0 GiB" in str(refused.exception)
