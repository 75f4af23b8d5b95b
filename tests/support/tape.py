"""What a CUDA graph does, on a CPU: operations and launches are noted with the memory they use, and run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

HOST_ASKS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal")


class Tape(TorchDispatchMode):
    """Notes what runs while it is entered. Python that ran meanwhile does not run again, and may not look at values."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []
        self._launching = mock.patch.object(InterpretedFunction, "run", self._launcher())

    def __enter__(self) -> Any:
        self._launching.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._launching.stop()

    def replay(self) -> None:
        for step in self._steps:
            step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not func.overloadpacket.__name__.startswith(HOST_ASKS), f"the host asks: {func}"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)

        def again() -> None:
            for kept, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)

        if not func.is_view:
            self._steps.append(again)
        return out

    def _launcher(self) -> Callable[..., None]:
        launch, steps = InterpretedFunction.run, self._steps

        def run(kernel: Any, *args: Any, **options: Any) -> None:
            def again() -> None:
                with _disable_current_modes():
                    launch(kernel, *args, **options)

            steps.append(again)
            again()

        return run


def record_on_tape(step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
    """As a stage's recorder."""
    (warm or step)()
    with Tape() as tape:
        step()
    return tape.replay
