"""What penalties know of a sequence: how often each token stands in its answer, and whether it stands in the prompt.

One number a token, on the device of the logits, made when a draw first needs it. A token that was drawn is counted
there too, behind the draw: the next step need not wait until the host knows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rekindle.kernels.sampling import IN_PROMPT, count_tokens, on_device


class TokenCounts:
    """Of one sequence."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._length = 0  # tokens of the sequence that are in it

    def up_to(self, length: int, tokens: Sequence[int], prompt: int, like: Tensor) -> Tensor:
        """Counts int32 [vocab] of the first `length` tokens. Those of them that are not known yet were drawn last.

        prompt: tokens of the prompt; like: logits [rows, vocab]. What was counted and did not stay (a step that was
        lost) is counted anew.
        """
        counts = self._counts
        if counts is None or self._length > length:
            counts = torch.zeros(like.shape[-1], dtype=torch.int32, device=like.device)
            counts.index_fill_(0, on_device(tokens[:prompt], like.device), IN_PROMPT)
            self._length = min(prompt, length)
        missing = tokens[self._length : length]
        assert len(missing) == length - self._length, f"{length} tokens are wanted, {len(tokens)} are known"
        count_tokens(counts, missing)
        self._counts, self._length = counts, length
        return counts

    def note_drawn(self) -> None:
        """The token that was drawn behind the last ones is counted, too."""
        self._length += 1

    @property
    def tensor(self) -> Tensor | None:
        return self._counts
