"""What many tests need: files of tiny random models, stages over them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from support.environment import ON_GPU  # first: it decides how kernels run
from support.interpreter import look_once
from support.tiny_files import tiny_files
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.moe.expert_threads import Mailbox
from rekindle.layers import load_span
from rekindle.spec import Span
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

# A busy machine is no fault of the code, so no example fails by the clock; fifty examples keep the suite short.
settings.register_profile("rekindle", deadline=None, max_examples=50)
settings.load_profile("rekindle")
if not ON_GPU:
    look_once()

COMMON: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000000,
        partial_rotary_factor=0.25,
        mrope_section=[2, 1, 1],
        mrope_interleaved=True,
    ),
)
AskCpuThreads = Callable[[Mailbox, Tensor, Tensor, Sequence[int], Sequence[float]], Tensor]
DENSE: dict[str, Any] = dict(intermediate_size=96)
MOE: dict[str, Any] = dict(
    moe_intermediate_size=32, num_experts=8, shared_expert_intermediate_size=32, num_experts_per_tok=2
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, compiled, on this machine's GPU")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ON_GPU:
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu: torch sees no GPU on this machine")
        config.hook.pytest_deselected(items=[item for item in items if "gpu" not in item.keywords])
        items[:] = [item for item in items if "gpu" in item.keywords]


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """For tests that say nothing in the interpreter."""
    if not ON_GPU:
        pytest.skip("needs a GPU: ./scripts/test --gpu")
    return torch.device("cuda:0")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two test processes share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ask_cpu_threads() -> AskCpuThreads:
    """What the device does with the mailbox of CPU threads: fill it, raise `asked`, wait for `done`. For one row."""

    def ask(box: Mailbox, layer: Tensor, x: Tensor, places: Sequence[int], weights: Sequence[float]) -> Tensor:
        count = len(places)
        box.x[0].copy_(x)
        box.place[:count], box.row[:count] = torch.tensor(places, dtype=torch.int32), 0
        box.weight[:count] = torch.tensor(weights, dtype=torch.float32)
        box.head.copy_(torch.tensor([layer.data_ptr(), count, 1]))
        box.asked += 1
        done, until = box.done.numpy(), time.monotonic() + 20
        while done[0] != box.asked[0]:
            assert time.monotonic() < until, "the threads did not answer"
            os.sched_yield()
        return box.out[0].clone()

    return ask


@pytest.fixture
def only_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernels in C: activations stay float32 beside quantised weights."""
    native.library.cache_clear()
    monkeypatch.setenv(native.SWITCH, "off")
    yield
    native.library.cache_clear()


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny hybrid models as GGUF files, made once for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    return tiny_files((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny-files")


class TinyModel:
    """A random transformers model and the folder it was saved to."""

    def __init__(self, folder: Path, reference: Any) -> None:
        self.folder = folder
        self.reference = reference

    def open(self) -> WeightFile:
        return open_weights(self.folder)

    def stage(self, span: Span | None = None, slots: int = 4, pages: int = 64, **pool: Any) -> LocalStage:
        """`pool`: kv_type, host_pages, kv_mode, policy of the stage."""
        file = self.open()
        model = load_span(file, span or file.spec.whole, torch.device("cpu"), torch.float32)
        return LocalStage(model, slots=slots, pages=pages, **{"kv_type": "f32", **pool})

    @torch.inference_mode()
    def reference_logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab] from transformers, in one pass."""
        logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return logits


MakeTiny = Callable[..., TinyModel]


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """make_tiny("dense" | "moe", seed=…, **changes of the configuration); the same call gives the same model."""
    import transformers

    made: dict[str, TinyModel] = {}

    def make(kind: str, seed: int = 0, **changes: Any) -> TinyModel:
        key = f"{kind} {seed} {changes}"
        if key not in made:
            torch.manual_seed(seed)
            if kind == "dense":
                config = transformers.Qwen3_5TextConfig(**{**COMMON, **DENSE, **changes})
                model = transformers.Qwen3_5ForCausalLM(config)
            else:
                config = transformers.Qwen3_5MoeTextConfig(**{**COMMON, **MOE, **changes})
                model = transformers.Qwen3_5MoeForCausalLM(config)
            _redraw(model)
            folder = tmp_path_factory.mktemp(f"tiny-{kind}")
            model.save_pretrained(folder)
            made[key] = TinyModel(folder, model.eval())
        return made[key]

    return make


def _redraw(model: torch.nn.Module) -> None:
    """The library's initial weights make nearly flat logits, about which a test of the first token says nothing."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25 if "conv1d" in name else 0.1)
        elif "norm" in name or name.endswith(("dt_bias", "A_log")):
            torch.nn.init.normal_(parameter, mean=-2.0 if name.endswith("A_log") else 0.0, std=0.3)
