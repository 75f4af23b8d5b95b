"""A presets file gives each model its options, and a wrong one is refused with its place."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.build import Preset, TextOptions, make_sources, read_presets
from rekindle.cli.commands import app
from rekindle.config import Config
from rekindle.errors import BadConfig, BadModelFile

COMMON = Config(sequences=3, cache_ram=900 << 20)


def presets(folder: Path, text: str) -> list[Preset]:
    path = folder / "models.toml"
    path.write_text(text)
    return read_presets(path, COMMON)


def test_a_model_has_its_own_options_and_the_command_lines_for_the_rest(tmp_path: Path) -> None:
    first, second = presets(
        tmp_path,
        """
        [models.coder]
        file = "a.gguf"
        aliases = ["claude-sonnet-4-5"]
        context = 4096
        vram = "20GiB,10GiB"
        kv-type = "q8"
        draft = "dflash"
        drafter = "drafter.gguf"
        temperature = 0.6
        top-k = 20

        [models."small one"]
        file = "/models/b.gguf"
        cache-ram = "1GiB"
        """,
    )
    assert (first.name, first.aliases) == ("coder", ("claude-sonnet-4-5",))
    assert first.defaults == (("temperature", 0.6), ("top_k", 20.0))
    config = first.config
    assert (config.model, config.context, config.kv_type) == (tmp_path / "a.gguf", 4096, "q8")
    assert (config.drafter, second.config.drafter) == (tmp_path / "drafter.gguf", None)
    assert config.vram == (20 << 30, 10 << 30)
    assert (config.sequences, second.config.sequences) == (3, 3)
    assert (config.cache_ram, second.config.cache_ram) == (450 << 20, 1 << 30), "the RAM for snapshots is shared"
    assert second.config.model == Path("/models/b.gguf")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no model"),
        ("[models]", "names no model"),
        ("models = 3", "names no model"),
        ("[model.a]\nfile = 'x'", r"unknown model; models stand in tables \[models.NAME\]"),
        ("[models.a]\ncontext = 3", "a has no file"),
        ("[models.a]\nfile = 3", "a.file must be a string, got 3"),
        ("[models.a]\nfile = 'x'\nconext = 3", "a has an unknown key conext; known: file, aliases, devices"),
        ("[models.a]\nfile = 'x'\ncontext = true", "a.context must be a whole number, got True"),
        ("[models.a]\nfile = 'x'\ncontext = 1", "--context is 1"),
        ("[models.a]\nfile = 'x'\nram = '3'", "a.ram: '3' has no unit"),
        ("[models.a]\nfile = 'x'\naliases = 'b'", "aliases must be a list of strings"),
        ("[models.a]\nfile = 'x'\ntemperature = 'warm'", "a.temperature must be a number"),
        ("[models.a]\nfile = 'x'\nmax-tokens = inf", "a.max-tokens must be a whole number, got inf"),
        ("[models.a]\nfile = 'x'\nmax-tokens = 1.9", "a.max-tokens must be a whole number, got 1.9"),
        ("[models.a]\nfile = 'x'\ntop-k = 1.5", "a.top-k must be a whole number, got 1.5"),
        ("[models.a]\nfile = 'x'\ndrafter = 3", "a.drafter must be a string, got 3"),
        ("[models.a\n", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        presets(tmp_path, text)


def test_one_drafter_for_several_models_is_refused(tmp_path: Path) -> None:
    path, common = tmp_path / "models.toml", replace(COMMON, drafter=Path("d.gguf"))
    path.write_text("[models.a]\nfile = 'x'\n[models.b]\nfile = 'y'\n")
    says = "--drafter d.gguf drafts for one model, there are 2; give each its own in a --models file"
    with pytest.raises(BadConfig, match=says):
        read_presets(path, common)
    run = CliRunner().invoke(app, ["serve", "x.gguf", "y.gguf", "--drafter", "d.gguf", "--no-cache-dir"])
    assert says in str(run.exception)
    path.write_text("[models.a]\nfile = 'x'\n")
    assert read_presets(path, common)[0].config.drafter == Path("d.gguf")


def test_clients_learn_nothing_of_folders_in_settings(golden: Path, tmp_path: Path) -> None:
    config = Config(model=golden / "tiny-qwen35-Q4_K_M.gguf", devices=("cpu",), cache_dir=tmp_path / "file")
    (tmp_path / "file").write_text("not a folder")
    (source,) = make_sources([Preset(config, "a")], TextOptions())
    with pytest.raises(BadConfig, match="--cache-dir") as refused:
        source.load([])
    assert source.reason(refused.value) == (
        "a setting of the server keeps it from being loaded; the server's log has the details"
    )


def test_two_models_of_one_name_and_defaults_out_of_range_are_refused(golden: Path) -> None:
    config = Config(model=golden / "tiny-qwen35-Q4_K_M.gguf", devices=("cpu",))
    with pytest.raises(BadConfig, match="two models have the name a"):
        make_sources([Preset(config, "a"), Preset(config, "b", ("a",))], TextOptions())
    (source,) = make_sources([Preset(config, "a", defaults=(("top_p", 3.0),))], TextOptions())
    with pytest.raises(BadConfig, match="top_p: must be"):
        assert source.settings


def test_a_folders_own_recommendation_is_its_card(make_tiny: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(make_tiny("dense").folder, folder)
    config = Config(model=folder, devices=("cpu",))

    def temperature(text: str) -> float:
        (folder / "generation_config.json").write_text(text)
        (source,) = make_sources([Preset(config)], TextOptions())
        return source.settings.card.sampling.temperature

    assert temperature('{"temperature": 0.31, "top_k": 5, "eos_token_id": 3}') == 0.31
    assert temperature('{"temperature": 0.31, "do_sample": false}') == 0.7
    with pytest.raises(BadModelFile, match="generation_config"):
        temperature("{")


@pytest.mark.parametrize(("template", "temperature"), [("{{ messages }}", 0.7), ("{{ messages }}<think></think>", 0.6)])
def test_a_model_whose_template_never_thinks_has_the_defaults_for_that(
    make_tiny: Any, tmp_path: Path, template: str, temperature: float
) -> None:
    folder = tmp_path / "Qwen3-Coder-30B-A3B"
    shutil.copytree(make_tiny("dense").folder, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    (source,) = make_sources([Preset(Config(model=folder, devices=("cpu",)))], TextOptions())
    card = source.settings.card
    assert (card.of(thinks=True).temperature, card.of(thinks=False).temperature) == (temperature, 0.7)
