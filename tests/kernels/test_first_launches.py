"""What is compiled at its first launch is counted where it was launched, and named in the log."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from triton import knobs
from triton.runtime import cache

from rekindle.kernels.first_launches import counting_first_launches, preparing_launches, watch_first_launches


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


def test_triton_is_identified_while_the_weights_load_and_before_the_first_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading, identified = threading.Event(), threading.Event()

    def key() -> str:
        assert loading.wait(60), "the weights wait for it"
        identified.set()
        return "key"

    monkeypatch.setattr(cache, "triton_key", key)
    with preparing_launches():
        loading.set()
    assert identified.is_set()


def test_a_triton_that_cannot_be_identified_ahead_stops_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache, "triton_key")
    with preparing_launches():
        pass


def test_what_is_identified_ahead_is_what_the_key_of_a_kernel_asks_for() -> None:
    cache.triton_key.cache_clear()
    with preparing_launches():
        pass
    found = cache.triton_key.cache_info()
    assert cache.get_cache_key.__globals__["triton_key"] is cache.triton_key
    assert (found.misses, found.currsize) == (1, 1)


def test_kernels_are_imported_before_the_first_launch() -> None:
    code = (
        "import sys; from rekindle.kernels import first_launches as module;"
        "module._identify_triton = lambda: None\n"
        "with module.preparing_launches(): pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith('rekindle.kernels.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    parts = ("attention", "conv", "gated_delta", "matmul", "moe", "norm", "paging", "rope", "sampling")
    assert {f"rekindle.kernels.{part}.triton" for part in parts} <= set(done.stdout.split())
