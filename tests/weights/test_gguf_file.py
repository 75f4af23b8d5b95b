"""GGUF files: what is read, how it is checked, and that damage is always one clear sentence."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.errors import BadModelFile
from rekindle.spec import ModelSpec
from rekindle.weights import open_weights
from rekindle.weights.expected import expected_model
from rekindle.weights.gguf_header import Strings, read_part

WriteGguf = Callable[..., Path]

QWEN35: dict[str, Any] = {
    "general.architecture": "qwen35",
    "general.name": "paper",
    "qwen35.block_count": 4,
    "qwen35.context_length": 128,
    "qwen35.embedding_length": 8,
    "qwen35.feed_forward_length": 12,
    "qwen35.attention.head_count": 4,
    "qwen35.attention.head_count_kv": 2,
    "qwen35.attention.key_length": 6,
    "qwen35.attention.value_length": 6,
    "qwen35.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen35.rope.dimension_count": 4,
    "qwen35.rope.dimension_sections": [1, 1, 0, 0],
    "qwen35.rope.freq_base": 1e7,
    "qwen35.full_attention_interval": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 3,
    "qwen35.ssm.group_count": 2,
    "qwen35.ssm.time_step_rank": 4,
    "qwen35.ssm.inner_size": 20,
}
LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 24,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


def moe_metadata() -> dict[str, Any]:
    keys = {key.replace("qwen35.", "qwen35moe."): value for key, value in QWEN35.items()}
    keys |= {"general.architecture": "qwen35moe", "qwen35moe.expert_count": 5, "qwen35moe.expert_used_count": 2}
    return keys | {"qwen35moe.expert_feed_forward_length": 7, "qwen35moe.expert_shared_feed_forward_length": 9}


def qwen35_shapes() -> dict[str, tuple[int, ...]]:
    """Written out by hand from the numbers above, so that the code's own table is checked too."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (10, 8),
        "output.weight": (10, 8),
        "output_norm.weight": (8,),
    }
    for layer in range(4):
        at = f"blk.{layer}."
        shapes |= {at + "attn_norm.weight": (8,), at + "post_attention_norm.weight": (8,)}
        shapes |= {at + "ffn_gate.weight": (12, 8), at + "ffn_up.weight": (12, 8), at + "ffn_down.weight": (8, 12)}
        if layer == 3:
            shapes |= {at + "attn_q.weight": (48, 8), at + "attn_k.weight": (12, 8), at + "attn_v.weight": (12, 8)}
            shapes |= {
                at + "attn_output.weight": (8, 24),
                at + "attn_q_norm.weight": (6,),
                at + "attn_k_norm.weight": (6,),
            }
        else:
            shapes |= {
                at + "attn_qkv.weight": (32, 8),
                at + "attn_gate.weight": (20, 8),
                at + "ssm_conv1d.weight": (32, 4),
            }
            shapes |= {at + "ssm_a": (4,), at + "ssm_dt.bias": (4,), at + "ssm_norm.weight": (5,)}
            shapes |= {at + "ssm_alpha.weight": (4, 8), at + "ssm_beta.weight": (4, 8), at + "ssm_out.weight": (8, 20)}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def llama_tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (10, 24), "output_norm.weight": (24,)}
    for layer in range(2):
        at = f"blk.{layer}."
        shapes |= {at + "attn_norm.weight": (24,), at + "ffn_norm.weight": (24,)}
        shapes |= {at + "attn_q.weight": (24, 24), at + "attn_k.weight": (8, 24), at + "attn_v.weight": (8, 24)}
        shapes |= {
            at + "attn_output.weight": (24, 24),
            at + "ffn_gate.weight": (16, 24),
            at + "ffn_up.weight": (16, 24),
        }
        shapes |= {at + "ffn_down.weight": (24, 16)}
    return random_tensors(shapes)


# ---- what is read


def test_every_tensor_of_the_golden_files_equals_the_gguf_packages_decoding(golden: Path) -> None:
    for path in sorted(golden.glob("*.gguf")):
        file = open_weights(path)
        for tensor in GGUFReader(path).tensors:
            expected = dequantize(tensor.data, tensor.tensor_type)
            info = file.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert (info.type, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
            np.testing.assert_array_equal(file.values(tensor.name), expected.reshape(info.shape))
            assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_golden_metadata_equal_the_gguf_packages_reading(golden: Path) -> None:
    path = golden / "tiny-qwen35-Q4_K_M.gguf"
    ours = open_weights(path).metadata
    theirs = {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    assert {key: list(value) if isinstance(value, Strings) else value for key, value in ours.items()} == theirs


def test_strings_of_an_array_are_read_when_they_are_asked_for(write_gguf: WriteGguf) -> None:
    path = write_gguf(QWEN35 | {"tokenizer.ggml.tokens": ["a", "öl", "", "tea"]}, random_tensors(qwen35_shapes()))
    tokens = read_part(path).metadata["tokenizer.ggml.tokens"]
    assert (len(tokens), list(tokens), tokens[1], tokens[-2:]) == (4, ["a", "öl", "", "tea"], "öl", ["", "tea"])
    path.write_bytes(path.read_bytes().replace("öl".encode(), b"\xff\xfel"))
    tokens = read_part(path).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 4
    with pytest.raises(BadModelFile, match=r"tokenizer\.ggml\.tokens holds text that is not UTF-8"):
        list(tokens)


def test_golden_spec_says_what_the_model_was_made_with(golden: Path) -> None:
    spec = open_weights(golden / "tiny-qwen35moe-Q4_K_M.gguf").spec
    assert (spec.architecture, spec.hidden, spec.vocab, spec.context, spec.tied) == (
        "qwen35moe",
        256,
        2048,
        4096,
        False,
    )
    assert [mixer.kind for mixer in spec.mixers] == ["delta", "delta", "delta", "attention"] * 2
    assert (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim, spec.attention.rope_dim) == (
        4,
        2,
        64,
        16,
    )
    assert (spec.attention.rope_theta, spec.attention.qk_norm, spec.attention.gated) == (1e7, True, True)
    assert spec.delta is not None
    assert (spec.delta.key_heads, spec.delta.value_heads, spec.delta.key_dim, spec.delta.value_dim) == (4, 8, 32, 32)
    assert (spec.ffn.experts, spec.ffn.used, spec.ffn.expert_width, spec.ffn.shared_width) == (16, 4, 64, 64)


def test_raw_bytes_are_the_readers_own(golden: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path))
    file = open_weights(path)
    rows = file.raw("token_embd.weight")
    assert rows.shape == (2048, 144)
    assert rows.dtype == np.uint8
    before = rows.copy()
    path.write_bytes(bytes(path.stat().st_size))
    file.close()
    np.testing.assert_array_equal(rows, before)


def test_hand_written_shapes_open(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes())
    file = open_weights(write_gguf(QWEN35, tensors))
    assert file.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(file.values(name), values)
    assert expected_model(file.spec) == qwen35_shapes()


@pytest.mark.parametrize("type", [t for t in GGML_QUANT_SIZES if t in gguf.quants._type_traits], ids=lambda t: t.name)
def test_every_type_the_gguf_package_decodes_is_decoded(type: GGMLQuantizationType, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in LLAMA.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, 256 if key.endswith("feed_forward_length") else value)
    block, size = GGML_QUANT_SIZES[type]
    stored = np.random.default_rng(0).integers(0, 60, (24, 256 // block * size), dtype=np.uint8)
    for name, values in llama_tensors().items():
        if name.endswith("ffn_down.weight"):
            writer.add_tensor(name, stored, raw_dtype=type)
        else:
            wide = np.ones((256, 24), np.float32) if "ffn_gate" in name or "ffn_up" in name else values
            writer.add_tensor(name, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_weights(tmp_path / "m.gguf")
    np.testing.assert_array_equal(file.values("blk.0.ffn_down.weight"), dequantize(stored, type).reshape(24, 256))


# ---- llama


def test_smollm2_query_and_key_rows_come_back_in_halves(smollm2: Path) -> None:
    file = open_weights(smollm2)
    stored = {tensor.name: tensor for tensor in GGUFReader(smollm2).tensors}
    for name, heads in (("blk.0.attn_q.weight", 9), ("blk.29.attn_k.weight", 3)):
        interleaved = dequantize(stored[name].data, stored[name].tensor_type)
        ours = file.values(name)
        for head in range(heads):
            for pair in range(32):
                for member in range(2):
                    np.testing.assert_array_equal(
                        ours[head * 64 + member * 32 + pair], interleaved[head * 64 + 2 * pair + member]
                    )


def test_smollm2_is_tied_and_its_other_tensors_are_untouched(smollm2: Path) -> None:
    file = open_weights(smollm2)
    spec = file.spec
    assert spec.tied
    assert "output.weight" not in file.tensors
    assert (spec.layers, spec.hidden, spec.vocab, spec.attention.head_dim, spec.attention.rope_dim) == (
        30,
        576,
        49152,
        64,
        64,
    )
    assert not spec.attention.qk_norm
    tensor = next(t for t in GGUFReader(smollm2).tensors if t.name == "blk.3.attn_v.weight")
    assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_attention_scores_do_not_depend_on_the_row_order(write_gguf: WriteGguf) -> None:
    """Rotating neighbours of the stored rows gives the scores that rotating halves of our rows gives."""
    tensors = llama_tensors()
    file = open_weights(write_gguf(LLAMA, tensors))
    x = np.random.default_rng(5).normal(size=(2, 24))
    angles = 3.0 * 10000.0 ** (-np.arange(4) / 4)
    turn = np.exp(1j * angles)  # a rotary pair as one complex number

    def neighbours(row: np.ndarray) -> np.ndarray:
        return row.reshape(-1, 4, 2) @ np.array([1, 1j]) * turn

    def halves(row: np.ndarray) -> np.ndarray:
        return np.einsum("hsj,s->hj", row.reshape(-1, 2, 4), np.array([1, 1j])) * turn

    q, k = "blk.0.attn_q.weight", "blk.0.attn_k.weight"
    stored = neighbours(tensors[q] @ x[0]) @ neighbours(tensors[k] @ x[1]).conj().T
    ours = halves(file.values(q) @ x[0]) @ halves(file.values(k) @ x[1]).conj().T
    np.testing.assert_allclose(ours.real, stored.real, rtol=1e-5)


def test_rope_freqs_become_rotary_factors(write_gguf: WriteGguf) -> None:
    tensors = llama_tensors() | {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    assert open_weights(write_gguf(LLAMA, tensors)).spec.attention.rope_factors == (1.0, 2.0, 4.0, 8.0)


def test_linear_rope_scaling_divides_every_frequency(write_gguf: WriteGguf) -> None:
    metadata = LLAMA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert open_weights(write_gguf(metadata, llama_tensors())).spec.attention.rope_factors == (4.0,) * 4


def test_a_bias_that_we_would_not_use_is_refused(write_gguf: WriteGguf) -> None:
    tensors = llama_tensors() | {"blk.1.attn_q.bias": np.zeros(24, np.float32)}
    with pytest.raises(BadModelFile, match=r"blk\.1\.attn_q\.bias"):
        open_weights(write_gguf(LLAMA, tensors))


# ---- hybrid details


def moe_tensors(fused: bool) -> dict[str, np.ndarray]:
    shapes = {name: shape for name, shape in qwen35_shapes().items() if ".ffn_" not in name}
    for layer in range(4):
        at = f"blk.{layer}.ffn_"
        shapes |= {
            at + "gate_inp.weight": (5, 8),
            at + "gate_inp_shexp.weight": (8,),
            at + "down_exps.weight": (5, 8, 7),
        }
        shapes |= {at + "gate_shexp.weight": (9, 8), at + "up_shexp.weight": (9, 8), at + "down_shexp.weight": (8, 9)}
        if fused:
            shapes |= {at + "gate_up_exps.weight": (5, 14, 8)}
        else:
            shapes |= {at + "gate_exps.weight": (5, 7, 8), at + "up_exps.weight": (5, 7, 8)}
    return random_tensors(shapes)


def test_fused_experts_are_shown_as_gate_and_up(write_gguf: WriteGguf) -> None:
    tensors = moe_tensors(fused=True)
    file = open_weights(write_gguf(moe_metadata(), tensors))
    assert "blk.2.ffn_gate_up_exps.weight" not in file.tensors
    assert file.tensors["blk.2.ffn_up_exps.weight"].nbytes == 5 * 7 * 8 * 4
    assert file.raw("blk.2.ffn_gate_exps.weight").shape == (35, 32)
    both = tensors["blk.2.ffn_gate_up_exps.weight"]
    np.testing.assert_array_equal(file.values("blk.2.ffn_gate_exps.weight"), both[:, :7])
    np.testing.assert_array_equal(file.values("blk.2.ffn_up_exps.weight"), both[:, 7:])


def test_separate_experts_open_with_the_same_spec_as_fused_ones(write_gguf: WriteGguf) -> None:
    fused = open_weights(write_gguf(moe_metadata(), moe_tensors(fused=True), "a.gguf"))
    apart = open_weights(write_gguf(moe_metadata(), moe_tensors(fused=False), "b.gguf"))
    assert fused.spec == apart.spec
    assert {n: t.shape for n, t in fused.tensors.items()} == {n: t.shape for n, t in apart.tensors.items()}


def test_recurrent_layers_win_over_the_interval(write_gguf: WriteGguf) -> None:
    """A list that puts attention first: then blk.0 is the attention layer."""
    moved = {"blk.0.": "blk.3.", "blk.3.": "blk.0."}
    tensors = {moved.get(name[:6], name[:6]) + name[6:]: t for name, t in random_tensors(qwen35_shapes()).items()}
    metadata = QWEN35 | {"qwen35.attention.recurrent_layers": [False, True, True, True]}
    spec = open_weights(write_gguf(metadata, tensors)).spec
    assert [mixer.kind for mixer in spec.mixers] == ["attention", "delta", "delta", "delta"]


def test_next_token_blocks_are_counted_and_left_alone(write_gguf: WriteGguf) -> None:
    extra = {
        "blk.4.nextn.eh_proj.weight": np.ones((8, 16), np.float32),
        "blk.4.attn_q.weight": np.ones((3, 3), np.float32),
    }
    metadata = QWEN35 | {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    file = open_weights(write_gguf(metadata, random_tensors(qwen35_shapes()) | extra))
    assert (file.spec.layers, file.spec.nextn) == (4, 1)
    assert file.spec.mixers[3].kind == "attention"


def test_the_vocabulary_is_as_large_as_the_embedding(write_gguf: WriteGguf) -> None:
    metadata = QWEN35 | {"tokenizer.ggml.tokens": ["a", "b"]}
    assert open_weights(write_gguf(metadata, random_tensors(qwen35_shapes()))).spec.vocab == 10


# ---- refusals


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ssm.inner_size": 21}, "inner_size 21 is no multiple of time_step_rank 4"),
        ({"ssm.group_count": 3}, "4 value heads are no multiple of 3 key heads"),
        ({"attention.value_length": 5}, "key_length is 6, value_length 5"),
        ({"rope.dimension_sections": [0, 0, 0, 0]}, "rotate 0 of 6"),
        ({"rope.dimension_sections": [2, 2, 0, 0]}, "rotate 8 of 6"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"rope.dimension_count": 3}, "rope.dimension_count is 3"),
        ({"attention.head_count": 0}, "attention.head_count is 0"),
        ({"attention.head_count_kv": 3}, "4 heads are no multiple of 3 KV heads"),
        ({"embedding_length": 0}, "embedding_length is 0"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0"),
        ({"block_count": 2_000_000_000}, "block_count is 2000000000, but there are only"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers is 4 of block_count 4"),
        ({"attention.recurrent_layers": [True, False]}, "recurrent_layers names 2 layers, the model has 4"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"ssm.conv_kernel": None}, "ssm.conv_kernel is missing"),
        ({"attention.head_count": "four"}, "attention.head_count is 'four'"),
    ],
)
def test_inconsistent_hyperparameters_are_refused(change: dict[str, Any], sentence: str, write_gguf: WriteGguf) -> None:
    metadata = QWEN35 | {f"qwen35.{key}": value for key, value in change.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path = write_gguf(metadata, random_tensors(qwen35_shapes()))
    with pytest.raises(BadModelFile) as error:
        open_weights(path)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ({"expert_used_count": 6}, "expert_used_count is 6 of 5 experts"),
    ],
)
def test_routers_we_do_not_compute_are_refused(change: dict[str, Any], sentence: str, write_gguf: WriteGguf) -> None:
    metadata = moe_metadata() | {f"qwen35moe.{key}": value for key, value in change.items()}
    with pytest.raises(BadModelFile, match=sentence):
        open_weights(write_gguf(metadata, moe_tensors(fused=False)))


def test_unknown_architecture_is_named_with_the_known_ones(write_gguf: WriteGguf) -> None:
    path = write_gguf({"general.architecture": "mamba"}, {"token_embd.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(BadModelFile, match=r"'mamba'.*qwen35, qwen35moe, llama, qwen3"):
        open_weights(path)


def test_a_missing_tensor_is_named(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes())
    del tensors["blk.3.attn_k.weight"]
    with pytest.raises(BadModelFile, match=r"no tensor blk\.3\.attn_k\.weight.*\(12, 8\)"):
        open_weights(write_gguf(QWEN35, tensors))


def test_a_wrong_shape_is_named_with_both_sides(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes() | {"blk.3.attn_q.weight": (24, 8)})
    with pytest.raises(BadModelFile, match=r"blk\.3\.attn_q\.weight has the shape \(24, 8\), expected \(48, 8\)"):
        open_weights(write_gguf(QWEN35, tensors))


def test_scale_tensors_are_refused(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes()) | {"blk.0.ffn_up.scale": np.ones(1, np.float32)}
    with pytest.raises(BadModelFile, match=r"blk\.0\.ffn_up\.scale.*NVFP4"):
        open_weights(write_gguf(QWEN35, tensors))


def test_a_type_nobody_decodes_is_refused(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes()) | {"output_norm.weight": np.ones(8, np.int32)}
    with pytest.raises(BadModelFile, match=r"output_norm\.weight has type I32"):
        open_weights(write_gguf(QWEN35, tensors))


def test_an_unknown_name_is_refused(golden: Path) -> None:
    with pytest.raises(BadModelFile, match=r"no tensor blk\.99\.nothing"):
        open_weights(golden / "tiny-qwen35-f16.gguf").values("blk.99.nothing")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 something else", b"GGUF" + struct.pack(">IQQ", 3, 1, 1)])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match="GGUF"):
        open_weights(path)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="does not exist"):
        open_weights(tmp_path / "nothing.gguf")


# ---- damage


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), header=st.booleans())
def test_a_truncated_file_is_always_one_clear_error(share: float, header: bool, golden: Path, tmp_path: Path) -> None:
    whole = (golden / "tiny-qwen35-Q4_K_M.gguf").read_bytes()
    reach = 120_000 if header else len(whole) - 32  # the last tensor may be followed by padding
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(share * reach)])
    with pytest.raises(BadModelFile):
        open_weights(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 4000), value=st.sampled_from([0, 1, 0x7F, 0xFF]), width=st.sampled_from([1, 4, 8]))
def test_overwritten_header_bytes_never_crash(at: int, value: int, width: int, write_gguf: WriteGguf) -> None:
    """Lies about counts, lengths and kinds end in a model or in a BadModelFile, not in a huge allocation."""
    path = write_gguf(QWEN35 | {"tokenizer.ggml.tokens": ["a", "bc"]}, random_tensors(qwen35_shapes()))
    content = bytearray(path.read_bytes())
    content[at : at + width] = bytes([value]) * width
    path.write_bytes(content)
    try:
        file = open_weights(path)
    except BadModelFile:
        return
    assert isinstance(file.spec, ModelSpec)


def pair(key: str, kind: int, body: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + body


@pytest.mark.parametrize(
    ("counts", "body"),
    [
        ((2**62, 0), b""),
        ((0, 2**62), b""),
        ((0, 1), pair("t", 9, struct.pack("<IQ", 8, 2**61))),
        ((0, 1), pair("t", 9, struct.pack("<IQ", 12, 2**61))),
        ((0, 1), pair("t", 8, struct.pack("<Q", 2**63))),
        ((0, 1), pair("t", 9, struct.pack("<IQ", 9, 1))),
        ((0, 1), pair("t", 77, b"")),
        ((0, 1), pair("t", 8, struct.pack("<Q", 2) + b"\xff\xfe")),
    ],
)
def test_lying_counts_are_refused_before_anything_is_allocated(
    counts: tuple[int, int], body: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
    with pytest.raises(BadModelFile, match=r"lie\.gguf"):
        read_part(path)


# ---- split files


def split(write_gguf: WriteGguf, tensors: dict[str, np.ndarray], promised: int | None = None) -> Path:
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
    total = len(tensors) if promised is None else promised
    first = QWEN35 | {"split.count": 3, "split.no": 0, "split.tensors.count": total}
    path = write_gguf(first, parts[0], "m-00001-of-00003.gguf")
    for i in (1, 2):
        write_gguf({"split.count": 3, "split.no": i}, parts[i], f"m-0000{i + 1}-of-00003.gguf")
    return path


def test_a_split_file_equals_the_whole_one(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes())
    whole, parts = open_weights(write_gguf(QWEN35, tensors)), open_weights(split(write_gguf, tensors))
    assert whole.spec == replace(parts.spec)
    for name in tensors:
        np.testing.assert_array_equal(whole.values(name), parts.values(name))
    assert whole.fingerprint() == parts.fingerprint()


def test_a_missing_part_is_named(write_gguf: WriteGguf) -> None:
    path = split(write_gguf, random_tensors(qwen35_shapes()))
    path.with_name("m-00003-of-00003.gguf").unlink()
    with pytest.raises(BadModelFile, match="m-00003-of-00003"):
        open_weights(path)


def test_a_later_part_points_to_the_first(write_gguf: WriteGguf) -> None:
    path = split(write_gguf, random_tensors(qwen35_shapes()))
    with pytest.raises(BadModelFile, match="part 2 of 3; open the first"):
        open_weights(path.with_name("m-00002-of-00003.gguf"))


def test_parts_that_do_not_add_up_are_refused(write_gguf: WriteGguf) -> None:
    with pytest.raises(BadModelFile, match="the first part promises 99"):
        open_weights(split(write_gguf, random_tensors(qwen35_shapes()), promised=99))


# ---- good files in every shape that converters give them


def gated_by(gate: tuple[int, ...]) -> dict[str, np.ndarray]:
    """`gate`: the shape of the shared expert's gate, row-major."""
    tensors = moe_tensors(fused=False)
    return {name: t.reshape(gate) if name.endswith("gate_inp_shexp.weight") else t for name, t in tensors.items()}


@pytest.mark.parametrize("gate", [(8,), (1, 8), (1, 1, 8)])
def test_shapes_are_compared_as_ggml_does(gate: tuple[int, ...], write_gguf: WriteGguf) -> None:
    tensors = gated_by(gate)
    file = open_weights(write_gguf(moe_metadata(), tensors))
    name = "blk.0.ffn_gate_inp_shexp.weight"
    assert file.tensors[name].shape == (8,)
    np.testing.assert_array_equal(file.values(name), tensors[name].reshape(8))


def test_another_shape_of_as_many_values_is_still_refused(write_gguf: WriteGguf) -> None:
    with pytest.raises(BadModelFile, match=r"ffn_gate_inp_shexp.weight has the shape \(8, 1\), expected \(8,\)"):
        open_weights(write_gguf(moe_metadata(), gated_by((8, 1))))


def hybrid_tensors(mixers: str) -> dict[str, np.ndarray]:
    """A layer per letter: d is DeltaNet, a attention."""
    shapes = {name: shape for name, shape in qwen35_shapes().items() if not name.startswith("blk.")}
    source = {"d": "blk.0.", "a": "blk.3."}
    for layer, letter in enumerate(mixers):
        for name, shape in qwen35_shapes().items():
            if name.startswith(source[letter]):
                shapes[f"blk.{layer}.{name.removeprefix(source[letter])}"] = shape
    return random_tensors(shapes)


@pytest.mark.parametrize(
    ("keys", "mixers"),
    [
        ({"full_attention_interval": None}, "dddad"),  # no multiple, and nothing is said
        ({"full_attention_interval": 3}, "ddadda"),
        ({"full_attention_interval": 3}, "ddad"),
        ({"attention.recurrent_layers": [True, False, False, True]}, "daad"),
        ({"attention.recurrent_layers": [True, False, True], "nextn_predict_layers": 1}, "da"),  # one of the MTP block
        ({"attention.recurrent_layers": [True, False], "nextn_predict_layers": 1}, "da"),
        ({"nextn_predict_layers": 1}, "ddda"),
    ],
)
def test_layers_are_what_the_file_says_and_every_fourth_else(
    keys: dict[str, Any], mixers: str, write_gguf: WriteGguf
) -> None:
    blocks = len(mixers) + keys.get("nextn_predict_layers", 0)
    metadata = QWEN35 | {f"qwen35.{key}": value for key, value in keys.items()} | {"qwen35.block_count": blocks}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    spec = open_weights(write_gguf(metadata, hybrid_tensors(mixers))).spec
    assert "".join(mixer.kind[0] for mixer in spec.mixers) == mixers


def test_layer_kinds_that_are_no_list_of_flags_are_refused(write_gguf: WriteGguf) -> None:
    metadata = QWEN35 | {"qwen35.attention.recurrent_layers": [3, 0, 1, 1]}
    with pytest.raises(BadModelFile, match="no list of true and false"):
        open_weights(write_gguf(metadata, random_tensors(qwen35_shapes())))


def with_type(path: Path, name: str, number: int) -> Path:
    """The same file, where the tensor's entry in the table has another type number."""
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at + 4 + 8 * dimensions, number)
    path.write_bytes(content)
    return path


def test_a_tensor_that_nobody_uses_may_have_any_type(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes() | {"v.patch_embd.weight": (6, 8)})
    path = with_type(write_gguf(QWEN35, tensors), "v.patch_embd.weight", 999)
    file = open_weights(path)
    assert file.tensors["v.patch_embd.weight"].type == "number 999"
    np.testing.assert_array_equal(file.values("output.weight"), tensors["output.weight"])
    assert file.fingerprint() == open_weights(path).fingerprint()


def test_a_tensor_of_an_unknown_type_that_is_used_is_named(write_gguf: WriteGguf) -> None:
    path = with_type(write_gguf(QWEN35, random_tensors(qwen35_shapes())), "output.weight", 999)
    with pytest.raises(BadModelFile, match=r"output.weight has type number 999, which cannot be decoded"):
        open_weights(path)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "clip", "clip.has_vision_encoder": 1}, r"a projector for images \(mmproj\)"),
        ({"general.architecture": "qwen35", "general.type": "mmproj"}, r"a projector for images \(mmproj\)"),
        ({"general.architecture": "llama", "general.type": "adapter"}, r"an adapter \(LoRA\)"),
        (QWEN35, r"holds only next-token-prediction \(MTP\) layers"),
    ],
)
def test_files_that_are_no_model_are_named_as_what_they_are(
    metadata: dict[str, Any], said: str, write_gguf: WriteGguf
) -> None:
    tensors = random_tensors({"blk.64.nextn.eh_proj.weight": (8, 16)})
    with pytest.raises(BadModelFile, match=said):
        open_weights(write_gguf(metadata, tensors))


def test_a_folder_around_a_gguf_file_says_so(write_gguf: WriteGguf, tmp_path: Path) -> None:
    write_gguf(QWEN35, random_tensors(qwen35_shapes()))
    with pytest.raises(BadModelFile, match=r"a folder with model\.gguf and without a config\.json; name that file"):
        open_weights(tmp_path)


def test_rotary_factors_are_checked_before_they_are_decoded(write_gguf: WriteGguf) -> None:
    tensors = random_tensors(qwen35_shapes()) | {"rope_freqs.weight": np.ones((1, 1 << 20), np.float32)}
    with pytest.raises(BadModelFile, match=r"rope_freqs.weight has the shape \(1, 1048576\), more than any head"):
        open_weights(write_gguf(QWEN35, tensors))


def test_a_display_name_reaches_people_without_escape_sequences(write_gguf: WriteGguf) -> None:
    metadata = QWEN35 | {"general.name": "evil\x1b]0;owned\x07\n\u202egnp[bold]" + "x" * 1000}
    name = open_weights(write_gguf(metadata, random_tensors(qwen35_shapes()))).spec.name
    assert name.startswith("evil\\x1b]0;owned\\x07\\n\\u202egnp[bold]")
    assert name.isprintable() and len(name) == 200


def test_rows_behind_the_last_token_are_known(write_gguf: WriteGguf) -> None:
    """By the length of the list, and by the unused entries that fill it up."""
    for kinds, drawable in ((None, 7), ([1] * 7, 7), ([1, 5, 1, 1, 5, 5, 5], 4)):
        metadata = QWEN35 | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(7)]}
        metadata |= {} if kinds is None else {"tokenizer.ggml.token_type": kinds}
        spec = open_weights(write_gguf(metadata, random_tensors(qwen35_shapes()))).spec
        assert (spec.vocab, spec.drawable) == (10, drawable)
