"""What a model's file calls itself and its parts, on the terminal of whoever looks at it. Real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from support.forked import run_rekindle

EVIL = "evil\x1b]0;owned\x07\x1b[2J\u202e[bold red]name[/bold red][/nothing]\r"
SPELT = "evil\\x1b]0;owned\\x07\\x1b[2J\\u202e[bold red]name[/bold red][/nothing]\\r"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_rekindle(*arguments, COLUMNS="300", NO_COLOR="1")


def check_harmless(found: subprocess.CompletedProcess[str]) -> str:
    said = found.stdout + found.stderr
    assert "Traceback" not in said
    assert said.replace("\n", "").isprintable(), repr(said)
    return said


@pytest.fixture
def evil(golden: Path, tmp_path: Path) -> Path:
    """The golden model under another name, with one tensor more."""
    reader, path = GGUFReader(golden / "tiny-qwen35-Q4_K_M.gguf"), tmp_path / "[bold]evil\x1b[2J.gguf"
    writer = GGUFWriter(path, "qwen35")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value = EVIL if key == "general.name" else field.contents()
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("command", [("inspect",), ("plan",), ("devices",)])
def test_commands_spell_out_what_a_file_calls_itself(command: tuple[str, ...], evil: Path) -> None:
    found = run(*command, evil)
    assert found.returncode == 0, found.stderr
    said = check_harmless(found)
    assert command[0] == "devices" or SPELT in said


def test_an_error_spells_out_the_tensor_that_it_names(evil: Path) -> None:
    content = evil.read_bytes()
    name = b"blk.0.attn_norm.weight"
    evil.write_bytes(content.replace(name, b"blk.0.\x1b[2J[/]" + b"x" * (len(name) - 13)))
    found = run("inspect", evil)
    assert found.returncode == 1
    assert len(check_harmless(found).splitlines()) == 1


def test_the_greeting_and_the_log_spell_out_the_name(evil: Path, start_server: Any) -> None:
    server = start_server(evil, "--context", "256", "--sequences", "1", "--threads", "1")
    server.stop()
    server.finish_reading()
    said = "".join(server.output)
    assert said.replace("\n", "").isprintable(), repr(said)
    assert "serves [bold]evil\\x1b[2J," in said


def test_a_cache_folder_spells_out_what_its_files_say(evil: Path, tmp_path: Path, start_server: Any) -> None:
    cache = tmp_path / "cache"
    server = start_server(evil, "--context", "256", "--sequences", "1", "--threads", "1", "--cache-dir", cache)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", body).status_code == 200
    server.stop()
    about = next(cache.glob("*/about.json"))
    about.write_text(json.dumps(json.loads(about.read_text()) | {"model": EVIL}))
    listed = run("cache", "list", "--cache-dir", cache)
    assert "of which nothing says what model" in check_harmless(listed), "words that no terminal should show are none"
    id = json.loads(run("cache", "list", "--cache-dir", cache, "--json").stdout)[0]["id"]
    check_harmless(run("cache", "show", id, "--cache-dir", cache))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"architectures": ' + "[" * 100_000, "\x1b[2J", ""])
def test_a_config_that_is_no_config_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    found = run("inspect", tmp_path)
    assert found.returncode == 1
    assert len(check_harmless(found).splitlines()) == 1
