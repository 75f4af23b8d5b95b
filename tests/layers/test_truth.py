"""Our logits against transformers' on random weights, as folders and as GGUF files in several mixes of types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_files import FILES
from support.truth import Truth, rounded_activations, to_8_bits, to_half

from rekindle.batch import Batch, Segment, Wanted
from rekindle.build import embedded_model
from rekindle.layers import load_span
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "value heads = key heads": dict(linear_num_value_heads=2),
    "three value heads per key head": dict(linear_num_value_heads=6, hidden_size=48),
    "tied": dict(tie_word_embeddings=True),
    "five layers": dict(num_hidden_layers=5),
    "seven layers, every third is attention": dict(
        num_hidden_layers=7,
        layer_types=[("full_attention" if i % 3 == 2 else "linear_attention") for i in range(7)],
    ),
    "value dim differs from key dim": dict(linear_key_head_dim=16, linear_value_head_dim=32),
    "one kv head": dict(num_key_value_heads=1),
}


def run(stage: LocalStage, tokens: list[int], edges: list[int]) -> torch.Tensor:
    """Logits of every token, with segments that end at the given edges."""
    stage.open(0)
    rows = []
    for start, stop in zip([0, *edges[:-1]], edges, strict=True):
        output = stage.forward(Batch((Segment(0, start, tuple(tokens[start:stop]), Wanted.ALL),)), None)
        assert output.logits is not None
        rows.append(output.logits)
    return torch.cat(rows)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.replace(" ", "-"))
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logits_equal_transformers_in_prefill_and_token_by_token(make_tiny: Any, kind: str, shape: str) -> None:
    tiny = make_tiny(kind, **SHAPES[shape])
    stage = tiny.stage()
    tokens = np.random.default_rng(1).integers(0, 320, 150).tolist()
    truth = tiny.reference_logits(tokens)
    whole = run(stage, tokens, [len(tokens)])
    steps = run(stage, tokens, [70, *range(71, len(tokens) + 1)])
    assert (whole - truth).abs().max() < 1e-4
    assert (steps - truth).abs().max() < 1e-4
    assert truth.std() > 0.3, "flat logits would make this test say nothing"


def case_logprobs(stage: LocalStage, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """After the prompt, and after every token of the answer but the last."""
    edges = [*range(256, len(prompt), 256), *range(len(prompt), len(prompt) + len(answer))]
    return torch.log_softmax(run(stage, prompt + answer, edges)[len(prompt) - 1 :], dim=-1)


def stage_over(path: Path) -> LocalStage:
    file = open_weights(path)
    model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32)
    model = replace(model, spec=replace(model.spec, tokens=0))  # the truth is over every row of the head
    return LocalStage(model, slots=1, pages=16, kv_type="f32")


def cases(lengths: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Random prompts of these lengths, and 12 tokens that follow."""
    rng = np.random.default_rng(3)
    for length in lengths:
        yield rng.integers(0, 2000, length).tolist(), rng.integers(0, 2000, 12).tolist()


@pytest.mark.parametrize("name", FILES)
def test_log_probabilities_of_a_file_equal_transformers_where_torch_computes(
    golden: Path, name: str, only_torch: None
) -> None:
    stage, truth = stage_over(golden / name), Truth(golden / name)
    for prompt, answer in cases((1, 7, 64, 65, 300)):
        exact = truth.logits(prompt + answer)[len(prompt) - 1 : -1]
        assert exact.std() > 0.3, "flat logits would make this test say nothing"
        assert (case_logprobs(stage, prompt, answer) - exact.log_softmax(-1)).abs().max() < 1e-3


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_c_are_ten_times_nearer_to_the_truth_than_kernels_that_round_to_8_bits(
    golden: Path, name: str
) -> None:
    """A file of float16 has no such kernels; its peer rounds activations to float16."""
    stage, truth = stage_over(golden / name), Truth(golden / name)
    assert stage.model.head is not None and stage.model.head.matrix.lanes is not None
    ours, theirs = Distance(), Distance()
    for prompt, answer in cases((1, 7, 65, 200)):
        exact = truth.logits(prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)
        with rounded_activations(truth, to_half if "f16" in name else to_8_bits):
            rounded = truth.logits(prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)
        ours.take(exact, case_logprobs(stage, prompt, answer))
        theirs.take(exact, rounded)
    assert ours.mean <= theirs.mean / 10
    assert ours.firsts >= theirs.firsts


class Distance:
    """Of log-probabilities from the truth; and how often the likeliest token is the same."""

    def __init__(self) -> None:
        self.errors, self.firsts = list[float](), 0

    def take(self, truth: torch.Tensor, said: torch.Tensor) -> None:
        self.errors += (truth - said).abs().mean(-1).tolist()
        self.firsts += int((truth.argmax(-1) == said.argmax(-1)).sum())

    @property
    def mean(self) -> float:
        return sum(self.errors) / len(self.errors)


def test_embedded_model_equals_a_dequantised_transformers_llama(only_torch: None) -> None:
    file = open_weights(embedded_model())
    reference = transformers_llama(file)
    model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32)
    stage = LocalStage(model, slots=1, pages=4, kv_type="f32")
    tokens = np.random.default_rng(2).integers(0, file.spec.vocab, 40).tolist()
    with torch.inference_mode():
        truth = reference(torch.tensor([tokens])).logits[0]
    assert (run(stage, tokens, [30, 31, 40]) - truth).abs().max() < 1e-3


def transformers_llama(file: WeightFile) -> Any:
    """The same weights in the library's class; its names and the file's side by side."""
    import transformers

    spec = file.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn.width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.attention.heads,
        num_key_value_heads=spec.attention.kv_heads,
        rms_norm_eps=spec.eps,
        rope_parameters=dict(rope_type="default", rope_theta=spec.attention.rope_theta),
        tie_word_embeddings=True,
    )
    layer_names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for i in range(spec.layers):
        names |= {f"model.layers.{i}.{a}.weight": f"blk.{i}.{b}.weight" for a, b in layer_names.items()}
    model = transformers.LlamaForCausalLM(config)
    values = {theirs: torch.from_numpy(file.values(ours)) for theirs, ours in names.items()}
    missing = model.load_state_dict(values, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing
    model.tie_weights()
    return model.eval()
