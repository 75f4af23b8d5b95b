"""How often each expert was chosen, per layer: decayed, saved, read by the next start's placement."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from pathlib import Path

import numpy as np
import torch

log = logging.getLogger("rekindle.experts")

HALF_LIFE = 16_384  # rows after which a choice counts half
ROUND = 256  # rows between two looks at a layer's tally
SAVE_EVERY = 60.0  # seconds
MOST_HEADER = 1 << 12  # bytes in front of the numbers in the file


class RoutingCounts:
    """[layers, experts], float64. Stages of one process write their own rows."""

    def __init__(self, layers: int, experts: int) -> None:
        self.values = np.zeros((layers, experts))

    @property
    def is_empty(self) -> bool:
        return not self.values.any()

    def add(self, layer: int, tally: np.ndarray, rows: int) -> None:
        """`tally` [experts] are the choices of the last `rows` rows."""
        self.values[layer] = self.values[layer] * 0.5 ** (rows / HALF_LIFE) + tally

    def for_placement(self) -> list[list[float]] | None:
        """None while nothing is known; a layer that was never counted takes the average, so that it loses nothing."""
        if self.is_empty:
            return None
        rows: list[list[float]] = self.values.tolist()
        counted = [sum(row) for row in rows if any(row)]
        average = sum(counted) / len(counted) / self.values.shape[1]
        return [row if any(row) else [average] * len(row) for row in rows]


class CountsFile:
    """The counts of one model beside the cache: `routing-<fingerprint>.npy`, there whole or not at all.

    A file that cannot be read means a start without counts: it is logged, and written anew.
    """

    def __init__(self, folder: Path, fingerprint: str, layers: int, experts: int) -> None:
        self.path = folder / f"routing-{fingerprint[:32]}.npy"
        self.counts = RoutingCounts(layers, experts)
        self._load()
        self._saved = self.counts.values.copy()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def _load(self) -> None:
        try:
            values = self._read()
        except FileNotFoundError:
            return
        except (OSError, ValueError, EOFError, MemoryError) as error:
            log.warning("routing counts %s cannot be read (%s); starting without them", self.path, error)
            return
        want = self.counts.values.shape
        if values.shape != want or values.dtype != np.float64 or not np.isfinite(values).all() or (values < 0).any():
            log.warning("routing counts %s hold %s %s, expected %s float64 of at least 0; starting without them",
                        self.path, values.shape, values.dtype, want)  # fmt: skip
            return
        self.counts.values[:] = values

    def _read(self) -> np.ndarray:
        """Of a regular file of about the right size; a link is not followed and a FIFO not waited for."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.counts.values.nbytes + MOST_HEADER:
                raise ValueError(f"no plain file of about {self.counts.values.nbytes} bytes")
            values: np.ndarray = np.load(file, allow_pickle=False)
            return values

    def save(self) -> None:
        values = self.counts.values.copy()
        if np.array_equal(values, self._saved):
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                np.save(file, values, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        self._saved = values

    def start(self) -> CountsFile:
        """Save every SAVE_EVERY seconds, on a thread."""
        self._thread = threading.Thread(target=self._run, name="routing counts", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._save_or_log()

    def _run(self) -> None:
        while not self._stopped.wait(SAVE_EVERY):
            self._save_or_log()

    def _save_or_log(self) -> None:
        try:
            self.save()
        except OSError as error:
            log.warning("routing counts were not saved: %s", error)


class LayerCounter:
    """Tallies the choices of one layer on its device, and adds them to the counts every ROUND rows, without waiting."""

    def __init__(self, counts: RoutingCounts, layer: int, device: torch.device) -> None:
        self.counts = counts
        self.layer = layer
        experts = counts.values.shape[1]
        is_gpu = device.type == "cuda"
        self.tally = torch.zeros(experts, dtype=torch.int32, device=device)
        self._host = torch.zeros(experts, dtype=torch.int32, pin_memory=is_gpu)
        self._copied = torch.cuda.Event() if is_gpu else None
        self._rows = 0  # since the last hand-over
        self._rows_on_the_way = 0
        # Layers look at their tallies in turn, so that no step has all of their copies and swaps.
        self._passed = layer * ROUND // len(counts.values)
        self._is_due = False

    @property
    def row(self) -> np.ndarray:
        """The layer's decayed counts, a view."""
        row: np.ndarray = self.counts.values[self.layer]
        return row

    def forget(self) -> None:
        """Begin anew."""
        self.row.fill(0)
        self.tally.zero_()
        self._rows = self._rows_on_the_way = 0

    def note(self, ids: torch.Tensor) -> None:
        """Part of the forward, also of a recorded one."""
        flat = ids.flatten()
        self.tally.index_add_(0, flat, torch.ones_like(flat))

    def poll(self, rows: int) -> bool:
        """Between forwards: `rows` more rows have passed. True when the counts have just been brought up to date."""
        self._rows += rows
        rounds, self._passed = (self._passed + rows) // ROUND, (self._passed + rows) % ROUND
        self._is_due |= rounds > 0
        if self._rows_on_the_way:
            if self._copied is not None and not self._copied.query():
                return False
            self.counts.add(self.layer, self._host.numpy().astype(np.float64), self._rows_on_the_way)
            self._rows_on_the_way = 0
            return True
        if self._is_due:
            self._host.copy_(self.tally, non_blocking=True)
            self.tally.zero_()
            if self._copied is not None:
                self._copied.record()
            self._rows_on_the_way, self._rows, self._is_due = self._rows, 0, False
        return False
