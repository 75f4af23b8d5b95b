from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paper_hall import Hall


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    hall = Hall(tmp_path)
    yield hall
    hall.close()
