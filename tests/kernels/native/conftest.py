"""Every instruction set of this machine in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.kernels import native


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    native.library.cache_clear()
    monkeypatch.setenv(native.SWITCH, request.param)
    yield request.param
    native.library.cache_clear()
