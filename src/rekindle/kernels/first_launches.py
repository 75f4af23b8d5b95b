"""Kernels that Triton has to compile, or to read from its cache, when they are launched for the first time.

All that requests need is launched before the first of them; what is counted afterwards, a request has waited for.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from rekindle import kernels

log = logging.getLogger(__name__)

_here = threading.local()  # kernels launched for the first time by this thread, by how they came


def watch_first_launches() -> None:
    """From now on, in this process."""
    from triton import knobs  # only beside a GPU is it installed

    knobs.compilation.listener = _note


@contextmanager
def preparing_launches() -> Iterator[None]:
    """While the block runs, a thread does what first launches would wait for: it reads Triton's own files, all 400 MB,
    whose digest is part of every kernel's key, and imports our kernels. Where that fails the launches do it."""
    with ThreadPoolExecutor(1, "rekindle-triton") as thread:
        preparing = [thread.submit(_identify_triton), thread.submit(_import_kernels)]
        yield
    for error in (each.exception() for each in preparing):
        if error is not None:
            log.debug("first launches were not prepared, and take longer", exc_info=error)


def _identify_triton() -> None:
    from triton.runtime.cache import triton_key  # which keeps what it finds

    triton_key()


def _import_kernels() -> None:
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name.endswith(".triton"):
            import_module(module.name)


@contextmanager
def counting_first_launches(counts: Counter[str]) -> Iterator[None]:
    """Those of this thread while the block runs are added: `kernels:compiled`, and `kernels:loaded` from the cache."""
    before = Counter(_counts())
    try:
        yield
    finally:
        if (now := _counts()) != before:
            counts.update(now - before)


def _counts() -> Counter[str]:
    if not hasattr(_here, "counts"):
        _here.counts = Counter[str]()
    counts: Counter[str] = _here.counts
    return counts


def _note(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: object) -> None:
    """Triton's listener, called by the thread that launches."""
    _counts()["kernels:loaded" if cache_hit else "kernels:compiled"] += 1
    if not cache_hit:
        name = metadata.get("name", "?")
        log.info("kernel %s was compiled at its first launch, in %.0f ms", name, times.total / 1e3)
