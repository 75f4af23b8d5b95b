"""Vocabularies to test with: one in Qwen3.5's layout, SmolLM2's, and a small llama-3-like one made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vocabulary import byte_letters, embedded_model, metadata_of, qwen_vocabulary

from rekindle.text import ChatTemplate, Tokenizer

LLAMA3_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


@pytest.fixture(scope="session")
def golden_metadata() -> dict[str, Any]:
    return qwen_vocabulary()


@pytest.fixture(scope="session")
def golden(golden_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(golden_metadata)


@pytest.fixture(scope="session")
def qwen(golden_metadata: dict[str, Any], golden: Tokenizer) -> ChatTemplate:
    return ChatTemplate.from_gguf(golden_metadata, golden)


@pytest.fixture(scope="session")
def smol_file() -> Path:
    return embedded_model()


@pytest.fixture(scope="session")
def smol_metadata(smol_file: Path) -> dict[str, Any]:
    return metadata_of(smol_file)


@pytest.fixture(scope="session")
def smol(smol_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smol_metadata)


def small_metadata(pre: str, special: list[tuple[str, int]], words: tuple[str, ...] = ()) -> dict[str, Any]:
    """A vocabulary of all bytes, some words without merges, and special tokens (text, GGUF type)."""
    tokens = [*byte_letters(), "ab", *words]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(text for text, _ in special)],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [kind for _, kind in special],
        "tokenizer.ggml.merges": ["a b"],
    }


@pytest.fixture(scope="session")
def llama_metadata() -> dict[str, Any]:
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
    metadata = small_metadata("llama-bpe", [(name, 3) for name in names], words=("123", "hello"))
    size = len(metadata["tokenizer.ggml.tokens"])
    ends = {"bos_token_id": size - 5, "eos_token_id": size - 2, "add_bos_token": True}
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in ends.items()}


@pytest.fixture(scope="session")
def llama(llama_metadata: dict[str, Any]) -> ChatTemplate:
    return ChatTemplate(LLAMA3_TEMPLATE, Tokenizer.from_gguf(llama_metadata))
