"""What transformers says of a GGUF: its weights, decoded by the gguf package, in the library's own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import Linear

LAYER = {  # the library's name: the file's
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class Truth:
    """A GGUF of a hybrid model, dequantised to float32 and run by transformers."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._values = {t.name: np.array(dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}
        self._architecture = self._fields["general.architecture"]
        self.model = self._build()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[tokens, vocab], in one pass."""
        found: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return found

    def _number(self, key: str) -> Any:
        return self._fields.get(f"{self._architecture}.{key}")

    def _build(self) -> Any:
        import transformers

        if self._number("expert_count"):
            config: Any = transformers.Qwen3_5MoeTextConfig(**self._sizes(), **self._expert_sizes())
            model: Any = transformers.Qwen3_5MoeForCausalLM(config)
        else:
            width = self._number("feed_forward_length")
            config = transformers.Qwen3_5TextConfig(**self._sizes(), intermediate_size=width)
            model = transformers.Qwen3_5ForCausalLM(config)
        model.load_state_dict({name: torch.from_numpy(values) for name, values in self._weights()})
        return model.eval()

    def _sizes(self) -> dict[str, Any]:
        interval, head_dim = self._number("full_attention_interval"), self._number("attention.key_length")
        return dict(
            vocab_size=len(self._values["token_embd.weight"]),
            hidden_size=self._number("embedding_length"),
            num_hidden_layers=self._number("block_count"),
            num_attention_heads=self._number("attention.head_count"),
            num_key_value_heads=self._number("attention.head_count_kv"),
            head_dim=head_dim,
            linear_num_key_heads=self._number("ssm.group_count"),
            linear_num_value_heads=self._number("ssm.time_step_rank"),
            linear_key_head_dim=self._number("ssm.state_size"),
            linear_value_head_dim=self._number("ssm.inner_size") // self._number("ssm.time_step_rank"),
            linear_conv_kernel_dim=self._number("ssm.conv_kernel"),
            layer_types=[
                "full_attention" if layer % interval == interval - 1 else "linear_attention"
                for layer in range(self._number("block_count"))
            ],
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=self._number("rope.freq_base"),
                partial_rotary_factor=self._number("rope.dimension_count") / head_dim,
                mrope_section=self._number("rope.dimension_sections")[:3],
                mrope_interleaved=True,
            ),
        )

    def _expert_sizes(self) -> dict[str, Any]:
        return dict(
            num_experts=self._number("expert_count"),
            num_experts_per_tok=self._number("expert_used_count"),
            moe_intermediate_size=self._number("expert_feed_forward_length"),
            shared_expert_intermediate_size=self._number("expert_shared_feed_forward_length"),
        )

    def _weights(self) -> Iterator[tuple[str, np.ndarray]]:
        for theirs, ours in WHOLE.items():
            yield theirs, self._converted(ours, self._values[ours])
        for layer in range(self._number("block_count")):
            for theirs, ours in LAYER.items():
                if (values := self._values.get(f"blk.{layer}.{ours}")) is not None:
                    yield f"model.layers.{layer}.{theirs}", self._converted(ours, values)
            if (gate := self._values.get(f"blk.{layer}.ffn_gate_exps.weight")) is not None:
                both = np.concatenate([gate, self._values[f"blk.{layer}.ffn_up_exps.weight"]], axis=1)
                yield f"model.layers.{layer}.mlp.experts.gate_up_proj", both

    def _converted(self, name: str, values: np.ndarray) -> np.ndarray:
        """Back from what converters change: norms count from 1, decays are stored as -exp, value heads are tiled."""
        if name == "ssm_out.weight":
            return np.ascontiguousarray(self._grouped(values.T).T)
        if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
            start = 2 * self._number("ssm.group_count") * self._number("ssm.state_size")  # queries and keys
            values = np.concatenate([values[:start], self._grouped(values[start:])])
            return values[:, None] if name.startswith("ssm_conv1d") else values
        if name in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
            return self._grouped(values)
        if name == "ssm_a":
            return self._grouped(np.log(-values))
        if name == "ffn_gate_inp_shexp.weight":
            return values[None]
        return values - 1 if "norm" in name and name != "ssm_norm.weight" else values

    def _grouped(self, rows: np.ndarray) -> np.ndarray:
        """[value heads · n, …] from tiled order (head j·K + k belongs to key head k) to grouped order."""
        keys, values = self._number("ssm.group_count"), self._number("ssm.time_step_rank")
        tiled = rows.reshape(values // keys, keys, -1, *rows.shape[1:])
        return np.ascontiguousarray(tiled.swapaxes(0, 1).reshape(rows.shape))


def to_8_bits(x: Tensor, block: int = 32) -> Tensor:
    """What kernels keep that multiply integers: 8 bits, with one scale for a block of columns."""
    blocks = x.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (blocks / scale).round().mul(scale).flatten(-2)


def to_half(x: Tensor) -> Tensor:
    return x.half().float()


@contextmanager
def rounded_activations(truth: Truth, rounded: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Every matrix product of the model multiplies `rounded` inputs. Of routed experts that is gate and up only."""
    products = [m for m in truth.model.modules() if isinstance(m, Linear) or type(m).__name__.endswith("Experts")]
    hooks = [m.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:])) for m in products]
    yield
    for hook in hooks:
        hook.remove()
