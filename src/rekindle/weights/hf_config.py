"""A Hugging Face config.json in the words of GGUF metadata, so that one reader checks both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rekindle.errors import BadModelFile
from rekindle.models.base import HfConfig, HfFormat
from rekindle.models.registry import hf_format_of

# config key → GGUF key below the architecture; a family may have more (`HfFormat.keys`)
SAME = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
MOST_VALUES = 1 << 16  # of a head
LONGEST_WAVE = 1e30  # tokens; longer ones turn as little


def read_format(path: Path, config: dict[str, Any]) -> tuple[str, HfFormat]:
    """Architecture and format. `path` is the folder, for error messages."""
    names = config.get("architectures")
    return hf_format_of(names[0] if isinstance(names, list) and names else names, str(path))


def metadata_of(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """GGUF keys of the text model. `path` is the folder, for error messages and as the model's name."""
    architecture, hf = read_format(path, config)
    text = text_config(path, config)
    _refuse(HfConfig(path, {**config, **text.values}))  # the text model decides where both speak
    _refuse_layers(text, set(hf.layer_types))
    keys = {gguf: text.number(key) for key, gguf in {**SAME, **hf.keys}.items() if text.values.get(key) is not None}
    keys |= hf.more_keys(text, keys)
    keys |= _rope(text, keys, hf.rotated_share)
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture, "general.name": path.resolve().name, **named}


def text_config(path: Path, config: dict[str, Any]) -> HfConfig:
    """Of the language model, where the folder holds more than that."""
    whole = HfConfig(path, config)
    return HfConfig(path, whole.object("text_config")) if "text_config" in config else whole


def is_tied(path: Path, config: dict[str, Any]) -> bool:
    text = text_config(path, config).values
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def rope_factors(path: Path, config: dict[str, Any]) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies for rope_type llama3.

    Wavelengths below context / high_freq_factor stay, those above context / low_freq_factor are stretched by `factor`,
    between them the frequency is blended.
    """
    text = text_config(path, config)
    rope = _rope_settings(text)
    if _rope_kind(rope) != "llama3":
        return None
    try:
        head_dim = text.values.get("head_dim") or text.values["hidden_size"] // text.values["num_attention_heads"]
        theta, factor = float(rope["rope_theta"]), float(rope["factor"])
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        context = float(rope["original_max_position_embeddings"])
        sensible = 1 <= head_dim <= MOST_VALUES and min(theta, factor, context) > 0 and low < high
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadModelFile(f"{path}: config.json has rope_type llama3 without a usable {error}") from error
    if not sensible:
        raise BadModelFile(
            f"{path}: config.json has rope_type llama3 with head_dim {head_dim}, rope_theta {theta}, factor {factor}, "
            f"original context {context} and wavelengths from {low} to {high}, which give no frequencies"
        )

    def divisor(j: int) -> float:
        wave = 2 * math.pi * min(theta ** (2 * j / head_dim), LONGEST_WAVE)
        turns = context / wave  # of this frequency within the old context
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        return 1.0 / ((1 - blend) / factor + blend)

    return tuple(divisor(j) for j in range(head_dim // 2))


def _refuse(config: HfConfig) -> None:
    """What would change answers if we read past it."""
    if config.values.get("quantization_config"):
        method = config.object("quantization_config").get("quant_method")
        raise BadModelFile(
            f"{config.path}: config.json has quantization_config {method!r}; only plain weights can be read"
        )
    for key, expected in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }.items():
        if config.values.get(key, expected) != expected:
            found = config.values[key]
            raise BadModelFile(f"{config.path}: config.json has {key} {found!r}, only {expected!r} is supported")


def _refuse_layers(text: HfConfig, known: set[str]) -> None:
    kinds = text.values.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise BadModelFile(f"{text.path}: config.json has layer_types {kinds!r}, expected a list of names")
    if unknown := set(kinds) - known:
        raise BadModelFile(f"{text.path}: layer_types has {min(unknown)!r}; known here are {', '.join(sorted(known))}")


def _rope(text: HfConfig, keys: dict[str, Any], rotated_share: float) -> dict[str, Any]:
    rope = {"partial_rotary_factor": rotated_share} | _rope_settings(text)
    head_dim = keys.get("attention.key_length")
    if head_dim is None:
        head_dim = keys.get("embedding_length", 0) // max(1, keys.get("attention.head_count", 1))
    found: dict[str, Any] = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    found["rope.dimension_count"] = int(head_dim * HfConfig(text.path, rope).number("partial_rotary_factor"))
    if "rope_theta" in rope:
        found["rope.freq_base"] = rope["rope_theta"]
    if (kind := _rope_kind(rope)) not in ("default", "llama3"):
        found["rope.scaling.type"] = kind
        found["rope.scaling.factor"] = rope.get("factor")
    return found


def _rope_settings(text: HfConfig) -> dict[str, Any]:
    """Newer configs keep all of it in rope_parameters, older ones spread it."""
    values = text.values
    spread = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if values.get(key) is not None}
    return {**spread, **text.object("rope_scaling"), **text.object("rope_parameters")}


def _rope_kind(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return "default" if kind == "mrope" else str(kind)  # for text the three axes agree
