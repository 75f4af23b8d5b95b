"""Hugging Face folders: the same names, values and spec as a GGUF of the same model.

Truth: tiny random transformers models; expectations are written with indices, not with the code's reshapes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.unread import read_in_pieces
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rekindle.errors import BadModelFile
from rekindle.weights import WeightFile, open_weights

KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6


def hybrid_config(value_heads: int = 4, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_parameters": rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
        **more,
    }


def redraw(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.06)
    return model


def dense_model(value_heads: int = 4) -> Any:
    return redraw(Qwen3_5ForCausalLM(Qwen3_5TextConfig(intermediate_size=24, **hybrid_config(value_heads))))


def moe_model() -> Any:
    sizes = {"moe_intermediate_size": 5, "num_experts": 3, "shared_expert_intermediate_size": 7}
    return redraw(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(num_experts_per_tok=2, **sizes, **hybrid_config())))


def state(model: Any) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}


def saved(model: Any, folder: Path, **options: Any) -> WeightFile:
    model.save_pretrained(folder, **options)
    return open_weights(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, change: Any) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# ---- qwen3.5


def test_spec_of_a_hybrid_folder(tmp_path: Path) -> None:
    spec = saved(dense_model(), tmp_path).spec
    assert (spec.architecture, spec.hidden, spec.vocab, spec.context, spec.tied) == ("qwen35", 16, 40, 512, False)
    assert [mixer.kind for mixer in spec.mixers] == ["delta", "delta", "delta", "attention"]
    assert (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim) == (4, 2, 16)
    assert (spec.attention.rope_dim, spec.attention.rope_theta) == (4, 1e7)
    assert (spec.attention.qk_norm, spec.attention.gated) == (True, True)
    assert spec.delta is not None
    assert (spec.delta.key_heads, spec.delta.value_heads, spec.delta.key_dim, spec.delta.value_dim) == (2, 4, 4, 6)
    assert spec.ffn.width == 24


def test_norms_hold_the_factor_itself_except_the_gated_one(tmp_path: Path) -> None:
    model = dense_model()
    file, truth = saved(model, tmp_path), state(model)
    for ours, theirs in {
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.post_attention_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.3.attn_q_norm.weight": "model.layers.3.self_attn.q_norm.weight",
        "blk.3.attn_k_norm.weight": "model.layers.3.self_attn.k_norm.weight",
    }.items():
        np.testing.assert_array_equal(file.values(ours), truth[theirs] + np.float32(1))
    np.testing.assert_array_equal(file.values("blk.0.ssm_norm.weight"), truth["model.layers.0.linear_attn.norm.weight"])


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_value_heads_go_from_grouped_to_tiled_order_everywhere(ratio: int, tmp_path: Path) -> None:
    heads = KEY_HEADS * ratio
    model = dense_model(value_heads=heads)
    file, truth = saved(model, tmp_path), state(model)
    at = "model.layers.1.linear_attn."
    ours = {name: file.values(f"blk.1.{name}") for name in ("attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight")}
    qk = 2 * KEY_HEADS * KEY_DIM
    np.testing.assert_array_equal(ours["attn_qkv.weight"][:qk], truth[at + "in_proj_qkv.weight"][:qk])
    np.testing.assert_array_equal(ours["ssm_conv1d.weight"][:qk], truth[at + "conv1d.weight"][:qk, 0])
    for tiled in range(heads):
        key_head, turn = tiled % KEY_HEADS, tiled // KEY_HEADS
        grouped = key_head * ratio + turn
        assert file.values("blk.1.ssm_a")[tiled] == -np.exp(truth[at + "A_log"][grouped])
        assert file.values("blk.1.ssm_dt.bias")[tiled] == truth[at + "dt_bias"][grouped]
        for name, theirs in (("ssm_alpha.weight", "in_proj_a.weight"), ("ssm_beta.weight", "in_proj_b.weight")):
            np.testing.assert_array_equal(file.values(f"blk.1.{name}")[tiled], truth[at + theirs][grouped])
        for i in range(VALUE_DIM):
            new, old = tiled * VALUE_DIM + i, grouped * VALUE_DIM + i
            np.testing.assert_array_equal(ours["attn_gate.weight"][new], truth[at + "in_proj_z.weight"][old])
            np.testing.assert_array_equal(ours["attn_qkv.weight"][qk + new], truth[at + "in_proj_qkv.weight"][qk + old])
            np.testing.assert_array_equal(ours["ssm_conv1d.weight"][qk + new], truth[at + "conv1d.weight"][qk + old, 0])
            np.testing.assert_array_equal(
                file.values("blk.1.ssm_out.weight")[:, new], truth[at + "out_proj.weight"][:, old]
            )


def test_plain_matrices_are_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    model = dense_model()
    file, truth = saved(model, tmp_path), state(model)
    for ours, theirs in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.2.ffn_down.weight": "model.layers.2.mlp.down_proj.weight",
        "blk.3.attn_q.weight": "model.layers.3.self_attn.q_proj.weight",
        "blk.3.attn_output.weight": "model.layers.3.self_attn.o_proj.weight",
    }.items():
        np.testing.assert_array_equal(file.values(ours), truth[theirs])
        assert file.raw(ours).shape[0] == file.tensors[ours].shape[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_type_gives_its_own_values_and_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = dense_model().to(dtype)
    file, truth = saved(model, tmp_path), state(model)
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert file.tensors["blk.0.ffn_up.weight"].type == name
    np.testing.assert_array_equal(file.values("blk.0.ffn_up.weight"), truth["model.layers.0.mlp.up_proj.weight"])
    out = model.state_dict()["model.layers.0.linear_attn.out_proj.weight"].view(torch.uint8).numpy()
    assert file.raw("blk.0.ssm_out.weight").shape == out.shape
    assert sorted(file.raw("blk.0.ssm_out.weight").tobytes()) == sorted(out.tobytes())
    # computed tensors are float32 whatever was stored
    assert file.tensors["blk.0.attn_norm.weight"].type == "F32"
    for tensor, info in file.tensors.items():
        assert file.raw(tensor).nbytes == info.nbytes
        np.testing.assert_array_equal(read_in_pieces(file.unread(tensor)), file.raw(tensor))
        assert file.values(tensor).shape == info.shape


def check_experts(file: WeightFile, truth: dict[str, np.ndarray]) -> None:
    at = "model.layers.2.mlp."
    both = truth[at + "experts.gate_up_proj"]
    np.testing.assert_array_equal(file.values("blk.2.ffn_gate_exps.weight"), both[:, :5])
    np.testing.assert_array_equal(file.values("blk.2.ffn_up_exps.weight"), both[:, 5:])
    np.testing.assert_array_equal(file.values("blk.2.ffn_down_exps.weight"), truth[at + "experts.down_proj"])
    np.testing.assert_array_equal(file.values("blk.2.ffn_gate_inp.weight"), truth[at + "gate.weight"])
    np.testing.assert_array_equal(
        file.values("blk.2.ffn_gate_inp_shexp.weight"), truth[at + "shared_expert_gate.weight"][0]
    )
    np.testing.assert_array_equal(
        file.values("blk.2.ffn_down_shexp.weight"), truth[at + "shared_expert.down_proj.weight"]
    )


def test_experts_saved_one_by_one(tmp_path: Path) -> None:
    model = moe_model()
    file = saved(model, tmp_path)
    assert (file.spec.ffn.experts, file.spec.ffn.used, file.spec.ffn.expert_width, file.spec.ffn.shared_width) == (
        3,
        2,
        5,
        7,
    )
    check_experts(file, state(model))


def test_experts_saved_fused(tmp_path: Path) -> None:
    model = moe_model()
    model.save_pretrained(tmp_path)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    check_experts(open_weights(tmp_path), state(model))


def test_a_model_with_vision_opens_as_its_text_model(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen3_5Config(text_config={"intermediate_size": 24, **hybrid_config()}, vision_config=vision)
    model = redraw(Qwen3_5ForConditionalGeneration(config))
    file, truth = saved(model, tmp_path), state(model)
    assert file.spec.architecture == "qwen35"
    np.testing.assert_array_equal(
        file.values("blk.0.ffn_up.weight"), truth["model.language_model.layers.0.mlp.up_proj.weight"]
    )
    assert file.spec.mixers[3].kind == "attention"


def test_next_token_blocks_are_counted_and_left_alone(tmp_path: Path) -> None:
    dense_model().save_pretrained(tmp_path)
    edit_config(tmp_path, mtp_num_hidden_layers=1)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2, 2)}))
    assert open_weights(tmp_path).spec.nextn == 1


def test_several_files_with_an_index(tmp_path: Path) -> None:
    model = dense_model()
    one = saved(model, tmp_path / "one")
    many = saved(model, tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert one.tensors == many.tensors
    for name in one.tensors:
        np.testing.assert_array_equal(one.values(name), many.values(name))
    assert one.fingerprint() == many.fingerprint()


# ---- plain attention models


def llama_model(**more: Any) -> Any:
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    return redraw(LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes, **more)))


def test_llama_rows_and_norms_are_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    model = llama_model()
    file, truth = saved(model, tmp_path), state(model)
    assert (file.spec.architecture, file.spec.attention.head_dim, file.spec.attention.rope_dim) == ("llama", 16, 16)
    np.testing.assert_array_equal(file.values("blk.1.attn_q.weight"), truth["model.layers.1.self_attn.q_proj.weight"])
    np.testing.assert_array_equal(
        file.values("blk.1.ffn_norm.weight"), truth["model.layers.1.post_attention_layernorm.weight"]
    )


def test_llama3_rope_scaling_divides_the_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    model = llama_model(rope_parameters=rope)
    factors = saved(model, tmp_path).spec.attention.rope_factors
    plain = 5000.0 ** (-np.arange(8) / 8)
    assert factors is not None
    assert len({round(f, 3) for f in factors}) > 2, "the case must have a blended frequency"
    np.testing.assert_allclose(plain / np.array(factors), model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)


def test_older_configs_spread_their_rope_settings(tmp_path: Path) -> None:
    llama_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_parameters": None, "rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = open_weights(tmp_path).spec.attention
    assert (attention.rope_theta, attention.rope_factors) == (777.0, (2.0,) * 8)


def test_tied_llama_has_no_output_matrix(tmp_path: Path) -> None:
    file = saved(llama_model(tie_word_embeddings=True), tmp_path)
    assert file.spec.tied
    assert "output.weight" not in file.tensors


def test_qwen3_has_plain_norms_on_queries_and_keys(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 12}
    model = redraw(Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **sizes)))
    file, truth = saved(model, tmp_path), state(model)
    assert (file.spec.architecture, file.spec.attention.head_dim, file.spec.attention.rope_dim) == ("qwen3", 12, 12)
    assert file.spec.attention.qk_norm
    assert not file.spec.attention.gated
    np.testing.assert_array_equal(
        file.values("blk.0.attn_q_norm.weight"), truth["model.layers.0.self_attn.q_norm.weight"]
    )


# ---- refusals


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(BadModelFile, match=r"'MambaForCausalLM'.*LlamaForCausalLM"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8'"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"linear_num_value_heads": 3}, "3 value heads are no multiple of 2 key heads"),
        ({"hidden_size": None}, "embedding_length is missing"),
        ({"intermediate_size": 25}, r"gate_proj.weight has the shape (24, 16), expected (25, 16)"),
    ],
)
def test_configs_we_cannot_follow_are_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    dense_model().save_pretrained(tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(BadModelFile) as error:
        open_weights(tmp_path)
    assert sentence in str(error.value)


def test_sliding_attention_is_refused_in_plain_models_too(tmp_path: Path) -> None:
    llama_model().save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(BadModelFile, match="'sliding_attention'; known here are full_attention"):
        open_weights(tmp_path)


def test_a_missing_and_a_surplus_tensor_are_named(tmp_path: Path) -> None:
    dense_model().save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.ones(24)}))
    with pytest.raises(BadModelFile, match=r"layers\.0\.mlp\.up_proj\.bias is not one"):
        open_weights(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.0.linear_attn.A_log"))
    with pytest.raises(BadModelFile, match=r"no tensor model\.layers\.0\.linear_attn\.A_log"):
        open_weights(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_one_clear_error(share: float, tmp_path: Path) -> None:
    dense_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: math.floor(len(content) * share)])
    with pytest.raises(BadModelFile, match=r"model\.safetensors"):
        open_weights(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    dense_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadModelFile, match=r"no \.safetensors file"):
        open_weights(tmp_path)
