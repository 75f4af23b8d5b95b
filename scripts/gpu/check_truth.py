"""How far the GPU path is from the truth: golden log-probabilities by quantisation, and perplexity of a real model.

    PYTHONPATH=src python3 scripts/gpu/check_truth.py --golden FOLDER [--only PART,PART] [--model FILE --text FILE]

The folder holds models and two files of cases: exact.json, by transformers on the dequantised weights, and
llamacpp.json, by a peer that rounds activations. Models are run as a server runs them (prompt in chunks, then token by
token through recorded steps, in the types that a server would choose) and stand beside the peer's distance from the
same truth; --only takes those with one of the parts in their names. All at once, since most of the time goes into
compiling. The perplexity of --model on --text is taken on the GPU and on the CPU (the float32 definition). A short
table comes last; exit code 1: further from the truth than the peer, or more than 0.5 % of perplexity lost. With
--device cpu the kernels in C are checked instead, which tries this script itself.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.build import StageConfig, choose_types, open_model
from rekindle.build.stage import load_stage
from rekindle.stages import LocalStage
from rekindle.weights import open_weights

Top = list[list[float]]  # the ten most likely: id, log-probability


def make_stage(path: Path, device: str, pages: int) -> LocalStage:
    file = open_weights(path)
    dtype, kv_type = choose_types(file, [device])
    return load_stage(file, StageConfig(device, file.spec.whole, 1, pages, kv_type=kv_type, dtype=dtype))


def log_probabilities(stage: LocalStage, tokens: list[int], edges: list[int]) -> torch.Tensor:
    """[tokens, vocab] on the CPU, with segments that end at the given edges."""
    stage.open(0)
    rows = []
    for start, stop in zip([0, *edges[:-1]], edges, strict=True):
        output = stage.forward(Batch((Segment(0, start, tuple(tokens[start:stop]), Wanted.ALL),)), None)
        assert output.logits is not None, "the only stage is the last"
        rows.append(output.logits.float().log_softmax(-1).cpu())
    return torch.cat(rows)


def ten_most_likely(path: Path, cases: list[dict[str, list]], device: str) -> list[dict[str, list[Top]]]:
    """What the device says where the cases say what is true."""
    stage = make_stage(path, device, 16)
    stage.model = replace(stage.model, spec=replace(stage.model.spec, tokens=0))  # the cases are over every row
    said = []
    for case in cases:
        prompt, answer = case["prompt"], case["tokens"]
        edges = [*range(256, len(prompt), 256), *range(len(prompt), len(prompt) + len(answer))]
        rows = log_probabilities(stage, prompt + answer, edges)[len(prompt) - 1 :]
        values, ids = rows.topk(10)
        said.append({"top": torch.stack([ids.double(), values.double()], -1).tolist()})
    return said


def distance(exact: list[dict[str, list]], other: list[dict[str, list]]) -> tuple[float, float]:
    """Mean |Δ log p| over the tokens that both name, and the share of steps with the same first one."""
    distances, same, steps = list[float](), 0, 0
    for truth, said in zip(exact, other, strict=True):
        for top, mine in zip(truth["top"], said["top"], strict=True):
            values = {int(id): value for id, value in mine}
            distances += [abs(values[int(id)] - value) for id, value in top if int(id) in values]
            same += int(top[0][0]) == int(mine[0][0])
            steps += 1
    return sum(distances) / len(distances), same / steps


def check_golden(folder: Path, parts: list[str], device: str) -> tuple[list[str], bool]:
    """A line for every file, and whether none is further from the truth than the peer."""
    exact, peer = (json.loads((folder / name).read_text()) for name in ("exact.json", "llamacpp.json"))
    wanted = [name for name in exact if any(part in name for part in parts)]
    names = [name for name in wanted if (folder / name).exists()]
    lines, good = [f"{name:28s} is not here" for name in wanted if name not in names], True
    with ProcessPoolExecutor(max(1, len(names)), multiprocessing.get_context("spawn")) as pool:
        said = {name: pool.submit(ten_most_likely, folder / name, exact[name], device) for name in names}
        for name in names:
            ours, theirs = distance(exact[name], said[name].result()), distance(exact[name], peer[name])
            good &= ours[0] <= theirs[0]
            lines.append(
                f"{name:28s} distance {ours[0]:.5f}, same first {ours[1]:.2f}; "
                f"the peer {theirs[0]:.5f}, {theirs[1]:.2f}"
            )
            print(lines[-1], flush=True)
    return lines, good


def perplexity(path: Path, tokens: list[int], device: str) -> float:
    stage = make_stage(path, device, len(tokens) // 64 + 2)
    edges = [*range(512, len(tokens), 512), len(tokens)]
    rows = log_probabilities(stage, tokens, edges)[:-1]
    return math.exp(-float(rows.gather(1, torch.tensor(tokens[1:])[:, None]).mean()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    lines, good = check_golden(options.golden, options.only.split(","), options.device)
    if options.model is not None:
        tokens = open_model(options.model).tokenizer.encode(options.text.read_text())[: options.tokens]
        gpu, cpu = perplexity(options.model, tokens, options.device), perplexity(options.model, tokens, "cpu")
        good &= abs(gpu / cpu - 1) <= 0.005
        lines.append(
            f"perplexity over {len(tokens)} tokens: GPU {gpu:.4f}, float32 {cpu:.4f}, {100 * (gpu / cpu - 1):+.3f} %"
        )
    print("\n".join(["", *lines]))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
