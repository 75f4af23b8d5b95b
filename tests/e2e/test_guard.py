"""The guard of a real server: who is let in, and what one client can learn of another."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.forked import run_rekindle

SERVE = ("--context", "2048", "--sequences", "4", "--threads", "1")
SECRET = "The password of the vault is swordfish, and nobody else may know it. " * 4
KEYS = """
[alice]
key = "alice's long secret"

[bob]
key = "bob's long secret"

[carol]
key = "carol's long secret"
"""


@pytest.fixture(scope="module")
def model(golden: Path) -> Path:
    return golden / "tiny-qwen35-Q4_K_M.gguf"


def ask(server: Any, who: str, prompt: str) -> Any:
    headers = {"Authorization": f"Bearer {who}'s long secret"}
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    response = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_nothing_is_restored_across_keys_nor_told_also_after_a_restart(
    start_server: Any, model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    cache = tmp_path / "cache"
    first_words = []
    for _ in range(2):
        server = start_server(model, *SERVE, "--api-keys", keys, "--cache-dir", cache)
        alice = ask(server, "alice", SECRET + "What is it?")
        # carol, who has asked for nothing before: of his own beginning bob would find his own state
        stranger = ask(server, "carol", SECRET + "What is it?") if first_words else ask(server, "bob", SECRET[:100])
        own = ask(server, "alice", SECRET + "What is it?")
        assert own["usage"]["prompt_tokens_details"]["cached_tokens"] == own["usage"]["prompt_tokens"]
        for answer in (alice, stranger, own):
            assert "seen" not in (answer["rekindle"]["divergence"] or {}), "what was known is never told"
        if not first_words:
            assert alice["rekindle"]["computed"] == alice["usage"]["prompt_tokens"]
        assert stranger["rekindle"]["restored"] == {"device": 0, "ram": 0, "disk": 0}
        first_words.append(alice["choices"][0]["text"])
        server.stop()
    assert first_words[0] == first_words[1]
    assert alice["rekindle"]["restored"]["disk"] > 0, "her own snapshots are hers after the restart"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_rekindle("serve", "--port", "0", *arguments)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_not_served_without_a_key_unless_the_operator_says_so(host: str, model: Path) -> None:
    done = run(model, "--host", host)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert "--insecure" in said and "--api-key" in said and "Traceback" not in said


def test_insecure_serves_them(start_server: Any, model: Path) -> None:
    server = start_server(model, *SERVE, "--host", "0.0.0.0", "--insecure")
    assert httpx.get(server.url.replace("0.0.0.0", "127.0.0.1") + "/ready", timeout=60).status_code == 200
    server.stop()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--api-key", "abc", "--api-keys", "nowhere.toml"), "exclude"),
        (("--api-keys", "nowhere.toml"), "nowhere.toml"),
        (("--max-connections", "0"), "--max-connections"),
        (("--header-timeout", "0"), "--header-timeout"),
        (("--body-timeout", "0"), "body"),
        (("--max-body", "0"), "body"),
        (("--drain", "-1"), "--drain"),
        (("--kv-type", "f99"), "--kv-type is 'f99'"),
        (("--kv-mode", "f99"), "--kv-mode is 'f99'"),
        (("--split", "f99"), "split 'f99'"),
        (("--context", "1000000"), "--context is 1,000,000"),
        (("--replicas", "2"), "--replicas is 2"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_loaded_or_logged(
    model: Path, options: tuple[str, ...], named: str
) -> None:
    done = run(model, *options)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and named in said and "Traceback" not in said
    assert "INFO" not in said
