"""How many kernels torch would launch: operations that are no views."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = ("alias", "as_strided", "detach", "empty", "narrow", "select", "slice", "split", "unbind", "view", "unsqueeze")


class Launches(TorchDispatchMode):
    """Counts, while it is entered, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    @property
    def total(self) -> int:
        return self.counts.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not name.startswith(VIEWS):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
