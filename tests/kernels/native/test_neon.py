"""Code for NEON, run by an emulator where a cross compiler and qemu are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.lanes import laid, stored

from rekindle.kernels import native
from rekindle.kernels.attention import naive as naive_attention
from rekindle.kernels.matmul import cpu, multiply
from rekindle.kernels.native.build import FLAGS, FOLDER, LEVELS

COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
OUTS, ROWS = 37, 17

pytestmark = pytest.mark.skipif(
    not (COMPILER and EMULATOR and native.library()), reason="needs aarch64-linux-gnu-gcc and qemu-aarch64"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("neon") / "program"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    sources = [Path(__file__).with_name("cross_driver.c"), *sorted(FOLDER.glob("*.c"))]
    command = [COMPILER, "-static", *flags, *LEVELS["neon"][0], "-o", path, *sources, "-lm"]
    subprocess.run([str(part) for part in command], check=True)
    return path


def run(program: Path, kind: int, numbers: list[int], *arrays: np.ndarray) -> np.ndarray:
    case = b"".join(np.ascontiguousarray(part).tobytes() for part in (np.array([kind, *numbers], np.int64), *arrays))
    done = subprocess.run([str(EMULATOR), str(program)], input=case, capture_output=True, check=True, timeout=120)
    return np.frombuffer(done.stdout, np.float32)


@pytest.mark.parametrize("type", cpu.TYPES)
def test_products_in_neon_have_the_bits_of_this_machine(type: str, program: Path) -> None:
    columns = 512
    raw, values = stored(type, OUTS, columns)
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0))
    number = int(gguf.GGMLQuantizationType[type])
    said = run(program, 0, [number, OUTS, columns, raw.shape[1], ROWS], raw, x.numpy())
    have, together, alone = np.split(said, [OUTS * columns, OUTS * columns + ROWS * OUTS])
    assert np.array_equal(have, values.numpy().ravel())
    assert np.array_equal(together, alone)
    assert np.array_equal(together, multiply(x, laid(type, OUTS, columns)[0]).numpy().ravel())


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "place", "rows"), [(6, 2, 40, 1010, 19), (3, 1, 64, 0, 5)])
def test_attention_in_neon_gives_a_row_the_same_bits_alone(
    heads: int, kv_heads: int, dim: int, place: int, rows: int, program: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    pages = -(-(place + rows) // 64)
    kv, q = (
        torch.randn(pages, 2, 64, kv_heads, dim, generator=generator),
        torch.randn(rows, heads, dim, generator=generator),
    )
    together, alone = np.split(run(program, 1, [heads, kv_heads, dim, place, rows], kv.numpy(), q.numpy()), 2)
    want = naive_attention._attend_rows(q, kv, torch.arange(pages), place, 0.2)
    assert np.array_equal(together, alone)
    np.testing.assert_allclose(together, want.numpy().ravel(), atol=2e-5, rtol=1e-4)
