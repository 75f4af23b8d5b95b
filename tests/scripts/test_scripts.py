"""Every script starts, in its smallest form. Times and speeds that benches print here mean nothing."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from starlette.routing import Route
from support.scripts import SCRIPTS, result_of, run_script

from rekindle.api import Guard, ModelHost, create_app
from rekindle.bench.recorded import CHAT, read_session
from rekindle.bench.synth import write_synthetic

TESTS = Path(__file__).parents[1]
ELSEWHERE = {  # scripts that other tests start, or import whole
    "check": "scripts/test_shell.py",
    "check_cards.py": "cards/test_cards.py",
    "fuzz_models.py": "weights/test_fuzz.py",
    "paper_gpu.py": "cards/test_cards.py",
    "serve": "scripts/test_shell.py",
    "setup.sh": "scripts/test_shell.py",
    "soak_kill.py": "e2e/test_restart.py",
    "soak_shards.py": "shards/test_recovery.py",
    "test": "scripts/test_shell.py",
    "gpu/check_graphs.py": "gpu/test_checks.py",
    "gpu/check_pool.py": "gpu/test_checks.py",
    "gpu/check_snapshots.py": "gpu/test_checks.py",
    "gpu/check_truth.py": "gpu/test_checks.py",
    "gpu/timeline.py": "scripts/test_scripts.py",
}


def test_every_script_is_started_by_a_test() -> None:
    files = {str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    here = set(re.findall(r'"((?:gpu/)?\w+\.py)"', Path(__file__).read_text()))
    assert files <= here | set(ELSEWHERE), "these are started by no test"
    for name, test in ELSEWHERE.items():
        assert re.search(rf"\b{Path(name).stem}\b", (TESTS / test).read_text()), f"{test} does not know {name}"


# Trials


def test_damaged_bodies_get_an_answer_or_a_refusal_on_every_route_of_the_app() -> None:
    told = result_of("fuzz_bodies.py", "--bodies", "30")
    routes = [route for route in create_app(ModelHost([]), Guard()).routes if isinstance(route, Route)]
    taking = {route.path for route in routes if "POST" in (route.methods or ())}
    assert told["faults"] == 0 and set(told["answers"]) == taking | {"other routes"}


def test_answers_of_a_random_model_are_valid_by_random_schemas() -> None:
    told = result_of("check_grammars.py", "--schemas", "40")
    assert told["valid"] >= 38 and not told.get("invalid") and not told.get("failed")


def test_the_cost_of_a_grammar_is_measured() -> None:
    told = result_of("bench_grammar.py", "--tokens", "3000", "--answers", "1")
    assert told["vocabulary"] == 3000 and all(told[name]["tokens"] > 0 for name in ("schema", "any object", "20 tools"))


def test_damaged_cache_directories_give_no_fault_and_no_wrong_byte() -> None:
    found = result_of("fuzz_stores.py", "--directories", "8", "--seed", "7")
    assert found["faults"] == 0
    assert found["peak_mib"] < 1024


def test_damaged_frames_are_read_or_refused() -> None:
    found = result_of("fuzz_frames.py", "--frames", "300", "--seed", "7")
    assert found["read"] + found["refused"] == 300


def test_a_crowd_of_two_keys_leaves_nothing_behind_and_shares_nothing() -> None:
    told = result_of("soak_clients.py", "--clients", "8", "--seconds", "6")
    assert told["answers"] > 0 and told["left"] > 0 and told["restored"] > 0
    assert (told["across"], told["faults"]) == (0, 0)


def test_a_store_whose_writer_is_killed_holds_what_was_saved() -> None:
    told = result_of("soak_store.py", "--kills", "3", "--seed", "1")
    assert (told["kills"], told["faults"]) == (3, 0)


# Sessions


class Echo(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


def test_a_session_is_passed_on_and_written_down_without_its_words(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Where is the secret treasure of 1999?"}]
    tool = {"type": "function", "function": {"name": "dig", "description": "Digs secretly.", "parameters": {}}}
    call = {"id": "c1", "type": "function", "function": {"name": "dig", "arguments": '{"name": "treasure"}'}}
    more = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    more += [{"role": "tool", "tool_call_id": "c1", "content": "<system-reminder>No secret here.</system-reminder>"}]
    bodies = [{"model": "m", "user": "treasurer", "messages": each, "tools": [tool]} for each in (said, [*said, *more])]
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, out = f"http://127.0.0.1:{server.server_port}", tmp_path / "session.jsonl"
        command = [sys.executable, str(SCRIPTS / "record_session.py"), "--url", url, "--port", "0", "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
            assert recorder.stdout is not None
            address = recorder.stdout.readline().strip()
            for body in bodies:
                request = urllib.request.Request(f"{address}{CHAT}", json.dumps(body).encode())
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.loads(answer.read()) == body, "both ways"
            recorder.terminate()
        server.shutdown()
    first, second = read_session(out)
    assert second.body["messages"][:1] == first.body["messages"] and len(second.body["messages"]) == 3
    assert "1999?" in first.body["messages"][0]["content"]
    assert list(json.loads(second.body["messages"][1]["tool_calls"][0]["function"]["arguments"])) == ["name"]
    assert second.body["messages"][2]["content"].startswith("<system-reminder>")
    assert first.body["tools"][0]["function"]["name"] == "dig"
    assert not re.search("secret|treasur|where", out.read_text(), re.IGNORECASE)


# Benches


def test_the_index_and_a_load_are_measured() -> None:
    told = result_of("bench_index.py", "--megabytes", "4", "--populations", "20")
    assert told["load"] and told["chain"]["ratio"] >= 1 and len(told["index"]) == 1


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_link_is_measured(transport: str) -> None:
    told = result_of("bench_link.py", "--steps", "20", *(["--tcp"] if transport == "tcp" else []))
    assert told["transport"] == transport and told["median_us"] > 0


def test_a_split_is_measured() -> None:
    told = result_of("bench_split.py", "--prompt", "128", "--answer", "4", "--repeats", "1")
    assert told


def test_prompt_lookup_is_measured_beside_plain_decode() -> None:
    told = result_of("bench_lookup.py", "--answer", "24", "--rounds", "1", "--threads", "1", misses_goal=True)
    assert told["tokens"] > 24 and told["proposed"] >= told["accepted"] > 0


def test_what_a_token_costs_a_servers_threads_is_measured(golden: Path) -> None:
    model = golden / "tiny-qwen35-Q4_K_M.gguf"
    told = result_of("bench_threads.py", model, "--streams", "2", "--answer", "8", "--rounds", "1")
    assert len(told["rounds"]) == 1 and told["rounds"][0]["tokens_per_second"] > 0


def test_how_threads_share_the_interpreter_is_measured() -> None:
    told = result_of("bench_interpreter.py", "--seconds", "0.05", "--readers", "2")
    assert [row["readers"] for row in told["rows"]] == [2] * 4
    assert all(row["p99_ms"] >= row["p50_ms"] > 0 for row in told["rows"])


def test_what_points_inside_a_prompt_cost_is_measured(golden: Path) -> None:
    small = ["--prompt", "1100", "--rounds", "1", "--threads", "1"]
    told = result_of("bench_lattice.py", golden / "tiny-qwen35-Q4_K_M.gguf", *small, misses_goal=True)
    assert told["ratio"] > 0 and told["cpu_ratio"] > 0 and told["points"] == 2


def test_hit_rates_of_the_expert_cache_are_measured_from_real_choices(golden: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(5).integers(0, 400, (2, 24)))
    told = result_of("bench_routing.py", golden / "tiny-qwen35moe-Q4_K_M.gguf", tmp_path / "rows.npy", "--places", "6")
    assert told["tokens"] == 48
    rates = {name: hits["6"] for name, hits in told["hits"].items()}
    assert all(0 < rate < 1 for rate in rates.values()), rates


def test_writes_beside_decode_are_measured(golden: Path) -> None:
    small = ["--prompt", "64", "--slice", "2", "--pairs", "20", "--threads", "1"]
    told = result_of("bench_write_behind.py", golden / "tiny-qwen35-Q4_K_M.gguf", *small, misses_goal=True)
    assert told["ratio"] > 0 and told["saves"] > 0


def test_the_smallest_comparison_runs_beside_a_peer(tmp_path: Path) -> None:
    """The real one where it is installed, else one of paper that answers at once."""
    small = ["--prompt", "24", "--answer", "3", "--rounds", "1", "--rest", "1", "--threads", "1", "--verify"]
    peers = () if importlib.util.find_spec("xllamacpp") else (TESTS / "support" / "peers",)
    shape = ["--shape", "tiny-moe", "--folder", str(tmp_path), "--cpu-time"]
    told = result_of("bench_peers.py", *shape, *small, paths=peers)
    assert told["model"] == "tiny-moe"
    speeds = [told[name][work] for name in ("rekindle", "llama.cpp") for work in ("prefill", "decode")]
    assert all(speed > 0 for one in speeds for speed in one)
    assert told["rekindle"]["awake"] < 0.5, "a side that waits for its turn sleeps"
    assert told["verify"] > 0 and told["share"] > 0


def test_rekindle_is_measured_alone_where_there_is_no_peer(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('not here')")
    small = ["--prompt", "24", "--answer", "3", "--rounds", "1", "--rest", "0", "--threads", "1"]
    told = result_of("bench_peers.py", "--shape", "tiny", "--folder", tmp_path, *small, paths=(tmp_path,))
    assert "llama.cpp" not in told and told["rekindle"]["prefill"][0] > 0 < told["rekindle"]["decode"][0]


# Benches of a GPU


@pytest.mark.parametrize(
    "name",
    [
        "gpu/bench_experts.py",
        "gpu/bench_model.py",
        "gpu/bench_moe.py",
        "gpu/bench_serve.py",
        "gpu/bench_split.py",
        "gpu/bench_start.py",
    ],
)
def test_benches_that_need_a_gpu_know_their_arguments(name: str) -> None:
    """All that can be tried without a GPU: what they import is there."""
    assert run_script(name, "--help")[0].startswith("usage:")


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_drafting_is_measured_at_scripted_acceptance(tmp_path: Path, shape: str) -> None:
    sizes = ("--tokens", "40", "--prompt", "70", "--accept", "0", "3", "--rounds", "1", "--folder", str(tmp_path))
    told = result_of("gpu/bench_dflash.py", "--shape", shape, "--device", "cpu", *sizes)
    assert set(told) == {"shape", "rounds", "cold", "disk"}
    for where in ("cold", "disk"):
        assert told[where]["plain"]["speed"] > 0
        never, often = told[where]["0"], told[where]["3"]
        assert never["per_step"] == 1 and 1.5 < often["per_step"] <= 3
        assert often["restored"] == (70 if where == "disk" else 0)


def test_the_cost_of_a_schema_is_measured_beside_plain_answers(tmp_path: Path) -> None:
    """The smallest form, on a CPU."""
    small = ["--shape", "tiny", "--folder", str(tmp_path), "--context", "512", "--sequences", "4", "--vocab", "400"]
    small += ["--grammar", "--streams", "1,3", "--answer", "24", "--rounds", "1"]
    lines = run_script("gpu/bench_serve.py", *small, "--serve", "--threads 1 --draft off", OUT=str(tmp_path))
    assert [int(line.split("|")[0]) for line in lines[-3:-1]] == [1, 3]
    assert all(row["plain"][0] > 0 and row["grammar"][0] > 0 for row in json.loads(lines[-1]))


def test_what_a_server_did_while_a_client_waited_is_told(tmp_path: Path) -> None:
    small = ["--shape", "tiny", "--folder", str(tmp_path), "--context", "1024", "--sequences", "4", "--vocab", "400"]
    small += ["--only", "new", "--timeline", "--serve", "--threads 1 --draft off"]
    lines = run_script("gpu/bench_serve.py", *small, OUT=str(tmp_path))
    waits = [line for line in lines if re.search(r"prompt 512, (first token|gap behind event \d+): ", line)]
    assert len(waits) == 2
    first = lines[lines.index(waits[0]) + 1 : lines.index(waits[1])]
    assert any("engine" in line and "LocalStage.forward" in line for line in first), first


def test_memory_that_is_traded_is_measured(tmp_path: Path) -> None:
    told = run_script("gpu/bench_trade.py", "--device", "cpu", "--folder", tmp_path, OUT=str(tmp_path))
    assert json.loads((tmp_path / "bench_trade.json").read_text())["rows"][0]["mix"] > 0
    assert any("a conversation that grows, then a short one" in line for line in told)


def test_memory_that_is_shared_live_is_measured_through_http(tmp_path: Path) -> None:
    """The smallest form, on a CPU: three of its seven parts, one of each kind."""
    parts = "held,defaults-dense-own,mix"
    small = ["--device", "cpu", "--folder", str(tmp_path), "--only", parts]
    told = run_script("gpu/bench_live.py", *small, misses_goal=True, OUT=str(tmp_path))
    found = json.loads((tmp_path / "bench_live.json").read_text())
    rows = {row["what"].partition(": ")[2] or "mix": row for row in found["rows"]}
    assert rows["500 again"]["met"] and rows["tokens restored in 3 turns"]["met"] and rows["kernels amid it"]["met"]
    assert rows["mix"]["figure"].startswith("traded ")
    assert told[-1] == "missed: nothing. Left out: nothing"


def test_a_step_is_taken_apart_by_kernel(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "tiny-moe.gguf", "tiny-moe")
    small = ["--shapes", "tiny-moe", "--device", "cpu", "--folder", str(tmp_path)]
    lines = run_script("gpu/bench_few_rows.py", "--steps", *small)
    assert [line.split(":")[0] for line in lines[-3:]] == ["1 rows", "2 rows", "8 rows"]


def test_every_product_of_a_step_is_timed_with_few_rows() -> None:
    """What can be tried without a GPU: which launches there are, and their forms."""
    lines = run_script("gpu/bench_few_rows.py", "--list", "--rows", "8", "--only", "27B")
    counts = [int(line.partition(" × ")[2].partition(":")[0]) for line in lines]
    assert sum(counts) == 48 + 16 + 3 * 64 + 1  # inputs, then out, gate and up, down, and the head
    assert all("old, house, lie" in line for line in lines)


@pytest.mark.parametrize("name", ["gpu/bench_matmul.py", "gpu/bench_mixers.py"])
def test_benches_of_kernels_import_what_they_use(name: str) -> None:
    assert "main" in runpy.run_path(str(SCRIPTS / name), run_name="imported")
