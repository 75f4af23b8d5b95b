"""What is compiled at its first launch is counted where it was launched, and named in the log."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from triton import knobs

from rekindle.kernels.first_launches import counting_first_launches, watch_first_launches


def compiled_here(name: str, cache_hit: bool) -> None:
    """What Triton's compiler says to its listener."""
    listener = knobs.compilation.listener
    assert listener is not None
    told = {"src": None, "metadata_group": {}, "times": SimpleNamespace(total=2_500_000)}
    listener(metadata={"name": name}, cache_hit=cache_hit, **told)  # type: ignore[arg-type]


def test_first_launches_of_a_thread_are_counted_by_how_the_kernel_came(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knobs.compilation, "listener", None)
    caplog.set_level(logging.INFO)
    watch_first_launches()
    compiled_here("before", cache_hit=False)
    counts = Counter({"kernels:compiled": 2})
    with counting_first_launches(counts):
        compiled_here("attend", cache_hit=False)
        compiled_here("norm", cache_hit=True)
        other = threading.Thread(target=compiled_here, args=("elsewhere", False))
        other.start()
        other.join()
    compiled_here("after", cache_hit=True)
    assert counts == {"kernels:compiled": 3, "kernels:loaded": 1}
    assert "kernel attend was compiled at its first launch, in 2500 ms" in caplog.text
    assert "norm" not in caplog.text, "a kernel that is known takes a millisecond"
