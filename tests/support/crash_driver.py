"""Saves snapshots and dies by SIGKILL at a chosen file operation: python -m support.crash_driver BASE OPERATION...

For each operation number a child saves a chain into BASE/<number>, notes every finished save in the file `acked`, and
kills itself when it is about to do that operation.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.snapshots.disk import DiskStore
from support.paper_snapshots import FINGERPRINT, PaperModel

LENGTHS = (40, 100, 130, 200, 260)


def chain() -> list[list[int]]:
    return [[(i * 7) % 50 for i in range(n)] for n in LENGTHS]


def die_at(operation: int) -> None:
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == operation:
                if real is real_write:  # half a write is the nastiest moment of all
                    real_write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return real(*args, **kwargs)

        return call

    real_write = os.write
    for name in ("write", "fsync", "rename", "open", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def run(folder: Path, operation: int) -> None:
    folder.mkdir()
    acked = os.open(folder / "acked", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = DiskStore(folder / "store", FINGERPRINT, 1 << 30)
    model, write = PaperModel(), os.write
    die_at(operation)
    for tokens in chain():
        record = store.save(model.snapshot(tokens))
        write(acked, f"{record.id}\n".encode())
    write(acked, f"-{record.id}\n".encode())  # from here on it may be gone
    store.remove(record.id)
    write(acked, b"-end\n")


if __name__ == "__main__":
    base = Path(sys.argv[1])
    for number in map(int, sys.argv[2:]):
        child = os.fork()
        if child == 0:
            run(base / str(number), number)
            os._exit(0)
        os.waitpid(child, 0)
