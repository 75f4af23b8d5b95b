"""Random next-token-prediction (MTP) blocks, in a model's folder and in GGUF files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rekindle.weights import open_weights
from rekindle.weights.expected import NEXTN_NORM, expected_nextn
from rekindle.weights.hf_names import LAYER_NAMES, NEXTN_NAMES


def random_block(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """For the model in `folder`, by canonical names inside the block; float32. Attention is sharp, so that what the
    block guesses hangs on its context."""
    spec, dice = open_weights(folder).spec, torch.Generator().manual_seed(seed)
    shapes = {name.split(".", 2)[2]: shape for name, shape in expected_nextn(spec).items()}
    weights = {}
    for name, shape in {**shapes, NEXTN_NORM: (spec.hidden,)}.items():
        drawn = 0.3 * torch.randn(shape, generator=dice)
        weights[name] = drawn + 1.0 if "norm" in name else drawn
    weights["attn_q_norm.weight"] *= 3
    weights["attn_output.weight"] *= 3
    return weights


def folder_with_block(source: Path, target: Path, seed: int = 0) -> Path:
    """A copy of a model's folder with a block behind its layers."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    tensors = load_file(target / "model.safetensors")
    for name, tensor in random_block(source, seed).items():
        tensors[f"mtp.{_theirs(name)}"] = (tensor - 1 if "norm" in name else tensor).contiguous()
    save_file(_stacked(tensors), target / "model.safetensors")
    return target


ROUTED = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate",
    "ffn_up_exps.weight": "mlp.experts.up",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}


def _theirs(name: str) -> str:
    if name in NEXTN_NAMES:
        return NEXTN_NAMES[name]
    return f"layers.0.{ROUTED.get(name) or LAYER_NAMES[name]}"


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up of the experts in one tensor, as checkpoints have them."""
    below = "mtp.layers.0.mlp."
    if f"{below}experts.gate" in tensors:
        both = tensors.pop(f"{below}experts.gate"), tensors.pop(f"{below}experts.up")
        tensors[f"{below}experts.gate_up_proj"] = torch.cat(both, dim=1)
        tensors[f"{below}shared_expert_gate.weight"] = tensors[f"{below}shared_expert_gate.weight"][None]
    return tensors
