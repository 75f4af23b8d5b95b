"""What cannot be is said in one line, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.bench.synth import write_synthetic
from rekindle.build import build_engine, make_machine, open_model
from rekindle.cli.commands import app
from rekindle.cli.generate import split_arguments
from rekindle.cli.server import listen
from rekindle.config import Config, parse_shards
from rekindle.errors import BadConfig, BadModelFile


def test_a_port_that_no_machine_has_is_refused() -> None:
    with pytest.raises(BadConfig, match="--port 99999: a port is a number up to 65535"):
        listen("127.0.0.1", 99999)


def test_a_cache_folder_that_cannot_be_made_is_refused_before_the_model_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a folder")
    with pytest.raises(BadConfig, match=r"--cache-dir .*notes.txt is no folder and cannot be made"):
        build_engine(Config(model=tmp_path / "absent.gguf", cache_dir=file))


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ("cpu", "--vram is 4.0 GiB, but there is no GPU among the devices: cpu"),
        ("cuda:7", "--devices names cuda:7, this machine has . such devices"),
    ],
)
def test_vram_of_a_gpu_that_is_not_there_is_refused(devices: str, says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        make_machine([devices], [4 << 30], 8 << 30)


def test_a_plan_with_vram_needs_no_gpu_but_a_device_to_give_it_to(golden: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["plan", str(golden / "tiny-qwen35-Q4_K_M.gguf"), "--vram", "4GiB", *arguments])

    assert "cuda:0" in run().output
    assert "cuda:7" in run("--devices", "cuda:7,cpu").output
    assert "--vram is 4.0 GiB, but there is no GPU among the devices: cpu" in str(run("--devices", "cpu").exception)


@pytest.mark.parametrize("command", ["plan", "devices", "serve"])
def test_a_context_beyond_the_models_own_is_refused_with_both_named(golden: Path, command: str) -> None:
    model = golden / "tiny-qwen35-Q4_K_M.gguf"
    longest = open_model(model).spec.context
    run = CliRunner().invoke(app, [command, str(model), "--context", str(longest + 1)])
    assert f"--context is {longest + 1:,}, the model was trained for {longest:,}" in str(run.exception)


def plan_of(golden: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["plan", str(golden / "tiny-qwen35-Q4_K_M.gguf"), *arguments], env={"COLUMNS": "200"}
    )


def test_the_ram_that_a_refused_plan_names_is_enough_when_it_is_given(golden: Path) -> None:
    refused = str(plan_of(golden, "--devices", "cpu", "--ram", "2MiB").exception)
    assert "weights stay quantised" in refused
    assert refused.endswith("; for a GPU give --vram")
    least = refused.split("at least ")[1].split(" (")[0].replace(" ", "")
    assert "KV pool" in plan_of(golden, "--devices", "cpu", "--ram", least).output
    shared = str(plan_of(golden, "--devices", "cuda:0,cpu", "--vram", "4GiB", "--ram", "2MiB").exception)
    assert "RAM of 2.0 MiB is too small" in shared
    assert "for a GPU give --vram" not in shared


def test_a_plan_says_which_sizes_are_shares_of_what_is_free(golden: Path) -> None:
    said = "serve without --vram takes 92 % of what is free: about 22.1 GiB of an empty 24.0 GiB card"
    given, measured = plan_of(golden, "--vram", "24GiB", "--ram", "8GiB").output, plan_of(golden).output
    assert said in given
    assert "RAM 8.00 GiB (all that --ram says)\n" in given
    assert "GiB (75 % of what is free)\n" in measured
    assert "serve without --vram" not in measured


def test_a_split_of_imagined_devices_says_that_nobody_has_measured_them(golden: Path) -> None:
    imagined = ("--devices", "cuda:0,cpu", "--vram", "4GiB", "--ram", "8GiB")
    said = "imagined GPUs are equally fast, and 100 times as fast as a CPU"
    assert said in plan_of(golden, *imagined).output
    assert said not in plan_of(golden, *imagined, "--split", "6,2").output
    assert said not in plan_of(golden, "--vram", "4GiB", "--ram", "8GiB").output


def stages_of(golden: Path, *arguments: str) -> list[tuple[str, int, list[int]]]:
    """Device, budget and span of every stage."""
    told = json.loads(plan_of(golden, "--ram", "8GiB", "--json", *arguments).output)
    return [(stage["device"], stage["budget"] >> 30, stage["span"]) for stage in told["stages"]]


def test_an_imagined_card_that_holds_the_model_leaves_the_cpu_the_one_layer_it_must_have(golden: Path) -> None:
    found = stages_of(golden, "--devices", "cuda:0,cpu", "--vram", "4GiB")
    assert found == [("cuda:0", 4, [0, 7]), ("cpu", 8, [7, 8])]
    found = stages_of(golden, "--devices", "cuda:0,cuda:1", "--vram", "4GiB")
    assert found == [("cuda:0", 4, [0, 4]), ("cuda:1", 4, [4, 8])], "cards are equally fast"


def test_vram_is_one_size_for_all_gpus_or_one_for_each(golden: Path) -> None:
    found = stages_of(golden, "--devices", "cpu,cuda:0,hip:0", "--vram", "4GiB,2GiB")
    assert [stage[:2] for stage in found] == [("cpu", 8), ("cuda:0", 4), ("hip:0", 2)]
    found = stages_of(golden, "--vram", "4GiB,2GiB")
    assert [stage[:2] for stage in found] == [("cuda:0", 4), ("cuda:1", 2)], "as many as have a size"
    shards = parse_shards(["a=x"], [], [])
    machine = make_machine(["cuda:0@a", "cpu", "cuda:1@a"], [4 << 30, 2 << 30], 8 << 30, shards)
    assert [device.budget >> 30 for device in machine.devices] == [4, 8, 2]


def test_a_wrong_number_of_sizes_is_refused_with_both_numbers(golden: Path) -> None:
    says = "--vram gives 2 sizes, the number of GPUs is 3: cuda:0, cuda:1, cuda:2; give one for each, or one for all"
    devices = "cuda:0,cuda:1,cpu,cuda:2"
    assert says in str(plan_of(golden, "--devices", devices, "--vram", "4GiB,2GiB").exception)
    with pytest.raises(BadConfig, match=says):
        make_machine(devices.split(","), [4 << 30, 2 << 30], 8 << 30)


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_a_bad_size_among_several_is_refused_with_the_way_to_write_them(golden: Path, command: str) -> None:
    run = CliRunner().invoke(app, [command, str(golden / "tiny-qwen35-Q4_K_M.gguf"), "--vram", "24GiB,twelve"])
    assert "--vram: 'twelve' is not a size" in str(run.exception)
    assert "one size is for all GPUs, 24GiB,12GiB for one each" in str(run.exception)


def test_a_refused_plan_names_the_cpu_where_it_would_help(golden: Path) -> None:
    def with_vram(size: int, ram: str, *arguments: str) -> Any:
        return plan_of(golden, "--context", "512", "--vram", f"{size}B", "--ram", ram, *arguments)

    least = int(str(with_vram(1 << 20, "8GiB").exception).split("(")[1].split(" bytes")[0].replace(",", ""))
    assert str(with_vram(least - 1, "8GiB").exception).endswith("; with --devices cuda:0,cpu it fits")
    assert with_vram(least - 1, "8GiB", "--devices", "cuda:0,cpu").exit_code == 0
    assert "it fits" not in str(with_vram(least - 1, "1MiB").exception)


@pytest.mark.parametrize("name", ["nosuch.gguf", "nosuch.safetensors", "./nosuch", "../nosuch", "/nosuch", "~/nosuch"])
def test_a_model_that_is_not_there_is_never_taken_for_a_prompt(name: str) -> None:
    result = CliRunner().invoke(app, ["generate", name])
    assert isinstance(result.exception, BadConfig)
    assert f"there is no file {name}" in str(result.exception)


@pytest.mark.parametrize(
    "prompt", ["What does a // b do?", "Hello", "and/or", "1/2+1/3=?", "What is foo.gguf", "/ or \\ ?", "long " * 1000]
)
def test_a_single_argument_that_is_no_file_is_the_prompt_as_it_was_written(prompt: str) -> None:
    assert split_arguments(prompt, None) == (None, prompt)
    assert split_arguments("nosuch.gguf", prompt) == (Path("nosuch.gguf"), prompt)
    assert split_arguments(None, None) == (None, None)


@pytest.mark.parametrize("options", [["--temperature", "-1"], ["--top-p", "3"], ["--top-k", "-2"], ["--seed", "-1"]])
def test_draws_that_no_request_could_ask_for_are_refused(options: list[str]) -> None:
    ended = CliRunner().invoke(app, ["generate", "hello", *options])
    assert ended.exit_code == 2
    assert f"Invalid value for '{options[0]}'" in ended.output


def test_a_bench_of_nothing_that_fits_says_so(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "tiny.gguf", "tiny")
    bench = ["bench", str(path), "--context", "512", "--answer", "8", "--repeats", "1"]
    ended = CliRunner().invoke(app, [*bench, "--prompt", "600"])
    assert isinstance(ended.exception, BadConfig)
    assert str(ended.exception) == "--prompt 600 tokens and an answer of 8, the context holds 512"
    ended = CliRunner().invoke(app, [*bench, "--prompt", "600", "--prompt", "16", "--batch", "1"])
    assert ended.exit_code == 0
    assert "left out: a prompt of 600 tokens and an answer of 8, the context holds 512" in ended.stderr


def test_a_drafters_folder_is_no_model_and_the_error_says_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(BadModelFile, match="names no architecture: it is no model, or a drafter's, which goes with"):
        open_model(tmp_path)
