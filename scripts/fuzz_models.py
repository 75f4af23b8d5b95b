"""Throw damaged and hostile model files at whoever opens them.

    python scripts/fuzz_models.py [--gguf 3000] [--hf 1000] [--seed 1]

Tiny models are written, then changed: bytes of headers and bodies, numbers, names, shapes, types, templates, whole
values. Every one goes the way of `inspect`, of `plan` and of a server's first token, in a process whose memory is
bounded. It must load or be refused with one sentence: no traceback, no crash, no hang, no escape sequence on the
terminal. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

ROOM = 1 << 30  # bytes of address space beside what an idle process has
PATIENCE = 60.0  # seconds for one file on a busy machine
TEMPLATE_SECONDS = 0.3
LONGEST = 2000  # characters of a sentence
GOAL = 1 << 30  # bytes of a process that has opened them all

# ---- tiny models


VOCAB, HIDDEN, WIDTH = 290, 32, 48
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HYBRID: dict[str, Any] = {
    "block_count": 4,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 4,
    "rope.dimension_sections": [1, 1, 0, 0],
    "rope.freq_base": 1e7,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
EXPERTS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDTH,
    "expert_shared_feed_forward_length": WIDTH,
}
PLAIN = {key: value for key, value in HYBRID.items() if not key.startswith(("ssm.", "full_", "rope.dim"))}


@dataclass
class Tiny:
    """A GGUF file before it is one."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]
    types: dict[str, GGMLQuantizationType] = field(default_factory=dict)  # F32 for all others


def alphabet() -> list[str]:
    from rekindle.bench.synth import byte_alphabet

    return byte_alphabet()


def vocabulary() -> tuple[list[str], list[int]]:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    texts = [*alphabet(), "\u0100\u0100", *(f"filler{i}" for i in range(VOCAB - 257 - len(names) - 4)), *names]
    kinds = [1] * (len(texts) - 5) + [3, 3, 3, 4, 4]
    return texts + [f"[PAD{i}]" for i in range(4)], kinds + [5] * 4


def tiny(architecture: str) -> Tiny:
    from rekindle.weights.expected import expected_model

    hybrid = architecture.startswith("qwen35")
    keys = dict(HYBRID if hybrid else PLAIN)
    keys |= EXPERTS if architecture == "qwen35moe" else {"feed_forward_length": WIDTH}
    texts, kinds = vocabulary()
    metadata: dict[str, Any] = {"general.architecture": architecture, "general.name": f"tiny {architecture}"}
    metadata |= {f"{architecture}.{key}": value for key, value in keys.items()}
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35" if hybrid else "llama-bpe",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["\u0100 \u0100"],
        "tokenizer.ggml.eos_token_id": texts.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": texts.index("<|endoftext|>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    rng = np.random.default_rng(1)
    shapes = expected_model(spec_of(metadata))
    return Tiny(metadata, {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()})


def spec_of(metadata: dict[str, Any]) -> Any:
    from rekindle.models.keys import KeysSeen
    from rekindle.weights.spec_reader import read_spec

    seen = KeysSeen(tensors=999, vocab=VOCAB, tokens=VOCAB - 4, tied=False, rope_factors=None)
    return read_spec(Path("tiny"), metadata, seen)


def write_gguf(path: Path, model: Tiny) -> None:
    writer = GGUFWriter(path, str(model.metadata.get("general.architecture")))
    for key, value in model.metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, values in model.tensors.items():
        if name in model.types:
            writer.add_tensor(name, quantize(values, model.types[name]), raw_dtype=model.types[name])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int64 if value < 0 else writer.add_uint64)(key, value)
    elif isinstance(value, float):
        writer.add_float64(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:  # the package leaves empty lists out
        writer.add_array(key, value)


def write_folder(folder: Path, dice: random.Random) -> None:
    """A Hugging Face folder with the weights of a tiny hybrid model, under its names."""
    from rekindle.models import qwen35
    from rekindle.weights.hf_names import recipes

    model = tiny("qwen35")
    made = recipes(spec_of(model.metadata), qwen35.HF, "model.", set())
    rng = np.random.default_rng(dice.randrange(9))
    shapes = {recipe.sources[0]: recipe.source_shape for recipe in made.values()}
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", {n: rng.normal(0, 0.1, s).astype("<f4") for n, s in shapes.items()})
    (folder / "config.json").write_text(json.dumps(hf_config()))
    texts, _ = vocabulary()
    named = {text: i for i, text in enumerate(texts)}
    added = [{"id": named[t], "content": t, "special": True} for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    plain = {text: i for text, i in named.items() if not text.startswith(("<|", "[PAD"))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            token | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False} for token in added
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": plain, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [named["<|im_end|>"]]}))


def hf_config() -> dict[str, Any]:
    from rekindle.models import qwen35
    from rekindle.weights.hf_config import SAME

    config = {theirs: HYBRID[ours] for theirs, ours in {**SAME, **qwen35.HF.keys}.items() if ours in HYBRID}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        **config,
        "intermediate_size": WIDTH,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": rope,
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    table, at = dict[str, Any](), 0
    for name, values in tensors.items():
        table[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(v.tobytes() for v in tensors.values()))


# ---- ways to damage them

ODD_NUMBERS = [0, 1, 2, 3, 5, 7, 48, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, -1, -(1 << 40)]
ODD_FLOATS = [0.0, -1.0, 0.5, 1e300, 1e-300, math.nan, math.inf]
ODD_TEXTS = [
    "",
    "x",
    "\x1b]0;owned\x07\x1b[2J",
    "[bold red]name[/]",
    "[/nothing]",
    "a\nb\rc",
    "\u202egnp",
    "\0",
    "x" * 70_000,
]
ODD_NAMES = [
    "blk." + "9" * 5000 + ".x",
    "",
    "blk.0.",
    "blk.99999999999999999999.x",
    "blk.0.\x1b[2J",
    "[/]",
    "v.patch_embd.weight",
    "rope_freqs.weight",
]
HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ '%1000000000d' % (messages | length) }}",
    "{{ 9 ** 99999999 }}",
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content.nothing.at.all }}",
    "{% include 'etc' %}",
    "",
    "\x1b[2J{{ raise_exception('\x1b[2J') }}",
]


def odd(dice: random.Random) -> Any:
    return dice.choice(
        [
            dice.choice(ODD_NUMBERS),
            dice.choice(ODD_FLOATS),
            dice.choice(ODD_TEXTS),
            dice.choice([True, False]),
            [dice.choice(ODD_NUMBERS[:9])] * dice.randrange(1, 9),
            [dice.choice(ODD_TEXTS)] * dice.randrange(1, 4),
        ]
    )


def change_value(model: Tiny, dice: random.Random) -> None:
    model.metadata[dice.choice(list(model.metadata))] = odd(dice)


def change_number(model: Tiny, dice: random.Random) -> None:
    keys = [key for key, value in model.metadata.items() if isinstance(value, int)]
    key = dice.choice(keys)
    model.metadata[key] = dice.choice([model.metadata[key] + dice.choice([-1, 1]), dice.choice(ODD_NUMBERS)])


def drop_value(model: Tiny, dice: random.Random) -> None:
    del model.metadata[dice.choice(list(model.metadata))]


def change_template(model: Tiny, dice: random.Random) -> None:
    model.metadata["tokenizer.chat_template"] = dice.choice(HOSTILE)


def change_vocabulary(model: Tiny, dice: random.Random) -> None:
    key = dice.choice(["tokens", "token_type", "merges"])
    values = list(model.metadata[f"tokenizer.ggml.{key}"])
    at = dice.randrange(len(values))
    match dice.randrange(3):
        case 0:
            del values[at:]
        case 1:
            values[at] = dice.choice(ODD_TEXTS) if isinstance(values[at], str) else dice.choice(ODD_NUMBERS[:8])
        case _:
            values += values[: dice.randrange(len(values)) + 1]
    model.metadata[f"tokenizer.ggml.{key}"] = values


def drop_tensor(model: Tiny, dice: random.Random) -> None:
    del model.tensors[dice.choice(list(model.tensors))]


def rename_tensor(model: Tiny, dice: random.Random) -> None:
    name = dice.choice(list(model.tensors))
    model.tensors[dice.choice([*ODD_NAMES, name + ".bias", name.replace("0", "1") + "x"])] = model.tensors.pop(name)


def reshape_tensor(model: Tiny, dice: random.Random) -> None:
    name = dice.choice(list(model.tensors))
    values = model.tensors[name]
    shapes = [(values.size,), (1, values.size), (values.size, 1), values.T.shape, (1, *values.shape)]
    model.tensors[name] = np.ascontiguousarray(values.reshape(dice.choice(shapes)))


def spoil_values(model: Tiny, dice: random.Random) -> None:
    values = model.tensors[dice.choice(list(model.tensors))]
    values.reshape(-1)[:: dice.randrange(1, 50)] = dice.choice([math.nan, math.inf, -math.inf, 1e38, 0.0])


def leave(model: Tiny, dice: random.Random) -> None:
    """What is done to its bytes is enough; some of its matrices are quantised."""
    for name, values in model.tensors.items():
        if values.ndim > 1 and values.shape[-1] % 32 == 0 and dice.random() < 0.5:
            model.types[name] = dice.choice([GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16])


MODEL_DAMAGES: Sequence[Callable[[Tiny, random.Random], None]] = (
    change_value,
    change_number,
    drop_value,
    change_template,
    change_vocabulary,
    drop_tensor,
    rename_tensor,
    reshape_tensor,
    spoil_values,
    leave,
    leave,
    leave,
)


def flip(content: bytearray, dice: random.Random) -> None:
    """Mostly in the header, which is the first third."""
    end = dice.choice([64, 2000, len(content) // 3, len(content)])
    for _ in range(dice.choice([1, 1, 2, 8, 64])):
        content[dice.randrange(min(end, len(content)))] = dice.randrange(256)


def cut(content: bytearray, dice: random.Random) -> None:
    del content[dice.randrange(len(content)) :]


def cut_out(content: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(content))
    del content[at : at + dice.choice([1, 4, 8, 100])]


def put_in(content: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(content) // 3)
    content[at:at] = dice.randbytes(dice.choice([1, 4, 8, 100]))


def lie(content: bytearray, dice: random.Random) -> None:
    """A whole number somewhere in the header becomes an odd one."""
    at = dice.randrange(8, len(content) // 3)
    number = dice.choice(ODD_NUMBERS) % (1 << 64)
    content[at : at + 8] = struct.pack("<Q", number)


def change_type(content: bytearray, dice: random.Random) -> None:
    """Of a tensor, in the table: any number that a type may have."""
    at = content.find(
        dice.choice([b"token_embd.weight", b"blk.0.attn_gate.weight", b"blk.3.attn_q.weight", b".ffn_down"])
    )
    at = content.find(struct.pack("<I", 2), max(at, 0))
    if 0 <= at < len(content) - 24:
        content[at + 20 : at + 24] = struct.pack("<I", dice.choice([*range(40), 99, 1 << 30]))


BYTE_DAMAGES: Sequence[Callable[[bytearray, random.Random], None]] = (flip, cut, cut_out, put_in, lie, change_type)


def damaged_gguf(path: Path, dice: random.Random) -> None:
    model = tiny(dice.choice(["qwen35", "qwen35moe", "llama", "qwen3"]))
    damage = dice.choice(MODEL_DAMAGES)
    damage(model, dice)
    write_gguf(path, model)
    if damage is leave:
        content = bytearray(path.read_bytes())
        dice.choice(BYTE_DAMAGES)(content, dice)
        path.write_bytes(content)


FILES = (
    *("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("model.safetensors", "model.safetensors", "model.safetensors.index.json"),
)


def damaged_folder(folder: Path, dice: random.Random) -> None:
    write_folder(folder, dice)
    name = dice.choice(FILES)
    path = folder / name
    if name.endswith("index.json"):
        table = {"weight_map": {"model.norm.weight": dice.choice(["model.safetensors", "../x", "nowhere", 3, None])}}
        path.write_text(json.dumps(dice.choice([table, {}, [], {"weight_map": odd_json(dice)}])))
    elif dice.random() < 0.25:
        content = bytearray(path.read_bytes())
        dice.choice([flip, cut, cut_out, put_in])(content, dice)
        path.write_bytes(content)
    elif name == "model.safetensors":
        lie_in_the_table(path, dice)
    else:
        path.write_text(dice.choice([damage_json, damage_json, damage_json, nest])(path.read_text(), dice))


def lie_in_the_table(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    table = damage_json(content[8 : 8 + length].decode(), dice).encode()
    path.write_bytes(struct.pack("<Q", len(table)) + table + content[8 + length :])


def odd_json(dice: random.Random) -> Any:
    return dice.choice([None, {}, [], {"a": 1}, [None], [[1]], dice.choice(HOSTILE), odd(dice)])


def damage_json(text: str, dice: random.Random) -> str:
    """One value, at any depth, becomes another or goes."""
    whole = json.loads(text)
    at = whole
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return json.dumps(odd_json(dice))
        key = dice.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and dice.random() < 0.7:
            at = at[key]
            continue
        if dice.random() < 0.2:
            del at[key]
        else:
            at[key] = odd_json(dice)
        return json.dumps(whole)


def nest(text: str, dice: random.Random) -> str:
    """Brackets within brackets, without end."""
    deep = dice.choice(["[", '{"a":']) * dice.choice([100, 100_000])
    return dice.choice([deep, '{"architectures":' + deep, text[:-1] + ', "text_config": ' + deep])


# ---- the process that opens them


def open_one(path: Path) -> None:
    """What inspect, plan and a server's first token would do."""
    import torch

    from rekindle.batch import Batch, Segment, Wanted
    from rekindle.build import StageConfig, make_machine, open_model, plan_model
    from rekindle.build.stage import load_stage
    from rekindle.cli.inspect import inspect
    from rekindle.config import Config
    from rekindle.engine.sampler import are_drawable
    from rekindle.placement import show_plan

    said = io.StringIO()
    with contextlib.redirect_stdout(said), torch.inference_mode():
        inspect(path)
        model = open_model(path)
        context = min(64, model.spec.context)
        config = Config(model=path, devices=("cpu",), context=max(2, context), sequences=1)
        print(show_plan(plan_model(config, model, make_machine(["cpu"], None, 1 << 33))))
        model.file.fingerprint()
        stage = load_stage(model.file, StageConfig("cpu", model.spec.whole, slots=1, pages=2))
        tokens = tuple(token % model.spec.drawable for token in (1, 2, 3))
        stage.open(0)
        logits = stage.forward(Batch((Segment(0, 0, tokens, Wanted.LAST),)), None).logits
        assert logits is not None, "the only stage is the last"
        are_drawable(logits)
        if model.template is not None:
            model.template.render([{"role": "user", "content": "hello"}])
    if not said.getvalue().replace("\n", "").isprintable():
        raise AssertionError(f"reached the terminal: {said.getvalue()!r}")


def judge(path: Path) -> tuple[str, str]:
    from rekindle.config import printable
    from rekindle.errors import RekindleError

    try:
        open_one(path)
    except RekindleError as error:
        sentence = printable(str(error))
        return ("refused" if len(sentence) > 0 else "empty refusal", sentence[:LONGEST])
    except BaseException:
        return "traceback", traceback.format_exc()
    return "loaded", ""


def work() -> None:
    """Judge the files that are named on stdin, one a line."""
    import torch

    import rekindle.build
    from rekindle.text import sandbox

    assert rekindle.build is not None
    torch.set_num_threads(1)
    sandbox.SECONDS = TEMPLATE_SECONDS
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for line in sys.stdin:
        outcome, why = judge(Path(line.rstrip("\n")))
        print(json.dumps([outcome, why, peak_memory()]), flush=True)


def peak_memory() -> int:
    """Bytes of this process at its largest. (ru_maxrss would also know of the process that started it.)"""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


class Worker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.peak = 0

    def judge(self, path: Path) -> tuple[str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._process.stdin.write(f"{path}\n".encode())
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            self._process.kill()
            return "hang", f"no answer in {PATIENCE:.0f} s"
        line = self._process.stdout.readline()
        if not line:
            return "crash", f"status {self._process.wait()}"
        outcome, why, self.peak = json.loads(line)
        return outcome, why

    def stop(self) -> None:
        self._process.communicate()


# ---- all of it


@dataclass
class Tally:
    outcomes: dict[str, Counter[str]]
    peak: int = 0
    failures: list[str] = field(default_factory=list)


def fuzz(gguf: int, hf: int, seed: int, keep: Path | None = None) -> Tally:
    tally = Tally({"gguf": Counter(), "hf": Counter()})
    worker = Worker()
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in (("gguf", gguf), ("hf", hf)):
            for i in range(count):
                path = Path(folder) / (f"{i}.gguf" if kind == "gguf" else f"{i}")
                (damaged_gguf if kind == "gguf" else damaged_folder)(path, random.Random(f"{seed} {kind} {i}"))
                outcome, why = worker.judge(path)
                tally.outcomes[kind][outcome] += 1
                tally.peak = max(tally.peak, worker.peak)
                if outcome not in ("loaded", "refused"):
                    tally.failures.append(f"{kind} {i}: {outcome}\n{why}")
                    if keep is not None:
                        (shutil.copytree if path.is_dir() else shutil.copy)(path, keep / f"{kind}-{path.name}")
                if outcome in ("hang", "crash"):
                    worker = Worker()
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    worker.stop()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=int, default=3000)
    parser.add_argument("--hf", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="copy files that did harm into this folder")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    wishes = parser.parse_args()
    if wishes.work:
        work()
        return
    begin = time.perf_counter()
    tally = fuzz(wishes.gguf, wishes.hf, wishes.seed, wishes.keep)
    seconds = round(time.perf_counter() - begin, 1)
    for failure in tally.failures:
        print(failure)
    for kind, outcomes in tally.outcomes.items():
        print(f"{kind}: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    print(f"at most {tally.peak / 2**20:.0f} MiB, the goal is less than {GOAL >> 20}")
    figures = {kind: dict(outcomes) for kind, outcomes in tally.outcomes.items()}
    print(json.dumps({"seed": wishes.seed, "seconds": seconds, "peak": tally.peak, **figures}))
    sys.exit(bool(tally.failures) or tally.peak >= GOAL)


if __name__ == "__main__":
    main()
