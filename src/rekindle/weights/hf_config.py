"""A Hugging Face config.json in the words of GGUF metadata, so that one reader checks both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rekindle.errors import BadModelFile

ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}

# config key → GGUF key below the architecture
_SAME = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_RECURRENT = {"linear_attention": True, "full_attention": False}


def metadata_of(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """GGUF keys of the text model. `path` is the folder, for error messages and as the model's name."""
    names = config.get("architectures") or [None]
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        raise BadModelFile(f"{path} has the architecture {names[0]!r}; known are {', '.join(ARCHITECTURES)}")
    hybrid = architecture.startswith("qwen35")
    text = config.get("text_config", config)
    _refuse(path, config | text)  # the text model decides where both speak
    _refuse_layers(path, text, set(_RECURRENT) if hybrid else {"full_attention"})
    keys = {gguf: text[key] for key, gguf in _SAME.items() if text.get(key) is not None}
    if hybrid:
        keys |= _hybrid(text, keys)
    keys |= _rope(text, keys, 0.25 if hybrid else 1.0)
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture, "general.name": path.resolve().name, **named}


def is_tied(config: dict[str, Any]) -> bool:
    text = config.get("text_config", config)
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def rope_factors(path: Path, config: dict[str, Any]) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies for rope_type llama3.

    Wavelengths below context / high_freq_factor stay, those above context / low_freq_factor are stretched by `factor`,
    between them the frequency is blended.
    """
    text = config.get("text_config", config)
    rope = _rope_settings(text)
    if _rope_kind(rope) != "llama3":
        return None
    try:
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        theta, factor = float(rope["rope_theta"]), float(rope["factor"])
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        context = float(rope["original_max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadModelFile(f"{path}: config.json has rope_type llama3 without a usable {error}") from error

    def divisor(j: int) -> float:
        turns = context / (2 * math.pi * theta ** (2 * j / head_dim))  # of this frequency within the old context
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        return 1.0 / ((1 - blend) / factor + blend)

    return tuple(divisor(j) for j in range(head_dim // 2))


def _refuse(path: Path, config: dict[str, Any]) -> None:
    """What would change answers if we read past it."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise BadModelFile(f"{path}: config.json has quantization_config {method!r}; only plain weights can be read")
    for key, expected in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }.items():
        if config.get(key, expected) != expected:
            raise BadModelFile(f"{path}: config.json has {key} {config[key]!r}, only {expected!r} is supported")


def _refuse_layers(path: Path, text: dict[str, Any], known: set[str]) -> None:
    if unknown := set(text.get("layer_types") or ()) - known:
        raise BadModelFile(f"{path}: layer_types has {min(unknown)!r}; known here are {', '.join(sorted(known))}")


def _hybrid(text: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"full_attention_interval": text.get("full_attention_interval", 4)}
    if "ssm.time_step_rank" in keys and "linear_value_head_dim" in text:
        found["ssm.inner_size"] = keys["ssm.time_step_rank"] * text["linear_value_head_dim"]
    if text.get("layer_types"):
        found["attention.recurrent_layers"] = [_RECURRENT[kind] for kind in text["layer_types"]]
    return found


def _rope(text: dict[str, Any], keys: dict[str, Any], rotated_share: float) -> dict[str, Any]:
    rope = _rope_settings(text)
    head_dim = keys.get("attention.key_length")
    if head_dim is None:
        head_dim = keys.get("embedding_length", 0) // max(1, keys.get("attention.head_count", 1))
    found: dict[str, Any] = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", rotated_share))
    if "rope_theta" in rope:
        found["rope.freq_base"] = rope["rope_theta"]
    if (kind := _rope_kind(rope)) not in ("default", "llama3"):
        found["rope.scaling.type"] = kind
        found["rope.scaling.factor"] = rope.get("factor")
    return found


def _rope_settings(text: dict[str, Any]) -> dict[str, Any]:
    """Newer configs keep all of it in rope_parameters, older ones spread it."""
    spread = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if text.get(key) is not None}
    return {**spread, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}


def _rope_kind(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return "default" if kind == "mrope" else str(kind)  # for text the three axes agree
