from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from support.tiny_files import add_value
from support.vocabulary import embedded_model

WriteGguf = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return embedded_model()


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """A file written by the gguf package from plain metadata and float32 arrays."""

    def write(metadata: dict[str, Any], tensors: dict[str, np.ndarray], name: str = "model.gguf") -> Path:
        path = tmp_path / name
        writer = GGUFWriter(path, metadata.get("general.architecture", "none"))
        for key, value in metadata.items():
            if key != "general.architecture":
                add_value(writer, key, value)
        for tensor, values in tensors.items():
            writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
