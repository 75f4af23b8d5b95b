"""Model cards: how a model is meant to be sampled where a request says nothing.

What the user of the server sets wins over what the model's file says, and that over the table, which has what the
publishers' own cards recommend (read in November 2026). A model that no one has said anything about gets `CAUTIOUS`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rekindle.engine.types import Sampling

log = logging.getLogger("rekindle.api")

# Temperature 1 over the whole vocabulary lets small models ramble without end.
CAUTIOUS = Sampling(temperature=0.7, top_p=0.95, min_p=0.05)

# Keys of GGUF files that recommend a sampler, with the field of `Sampling` and its range.
FILE_KEYS = {
    "general.sampling.temp": ("temperature", 0.0, 2.0),
    "general.sampling.top_p": ("top_p", 1e-6, 1.0),
    "general.sampling.top_k": ("top_k", 0, 1 << 20),
    "general.sampling.min_p": ("min_p", 0.0, 1.0),
    "general.sampling.penalty_repeat": ("repetition_penalty", 0.01, 10.0),
}
RANGES = {field: (low, high) for field, low, high in FILE_KEYS.values()} | {"presence_penalty": (-2.0, 2.0)}


@dataclass(frozen=True, slots=True)
class ModelCard:
    sampling: Sampling = CAUTIOUS
    direct: Sampling | None = None  # for answers without thinking, where that is another
    max_tokens: int | None = None  # of an answer whose request names no limit; None: what the context leaves
    origin: str = "the server's own, for the model has no card"

    def of(self, thinks: bool) -> Sampling:
        return self.sampling if thinks or self.direct is None else self.direct

    def words(self) -> str:
        """For the log."""
        direct = "" if self.direct is None else f"; without thinking {show(self.direct)}"
        limit = "" if self.max_tokens is None else f"; at most {self.max_tokens:,} tokens"
        return f"{show(self.sampling)}{direct}{limit} ({self.origin})"


_QWEN_DIRECT = Sampling(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5)
_QWEN = ModelCard(Sampling(temperature=1.0, top_p=0.95, top_k=20), _QWEN_DIRECT, 32768)

# By what a model's name contains, the first that fits.
TABLE: tuple[tuple[str, ModelCard], ...] = (
    (r"qwen[- ]?3[._]8", replace(_QWEN, origin="the card of Qwen3.8")),
    (r"qwen[- ]?3[._]6", replace(_QWEN, origin="the card of Qwen3.6")),
    # Its card has 0.6 for code and 1.0 with a presence penalty for the rest; its own configuration has 0.6.
    (
        r"qwen[- ]?3[._]5",
        replace(_QWEN, sampling=Sampling(temperature=0.6, top_p=0.95, top_k=20), origin="the card of Qwen3.5"),
    ),
    (
        r"qwen[- ]?3(?![._\d])",
        ModelCard(
            Sampling(temperature=0.6, top_p=0.95, top_k=20),
            Sampling(temperature=0.7, top_p=0.8, top_k=20),
            32768,
            "the card of Qwen3",
        ),
    ),
    # Drawn as its card says, most answers to a simple question lose their way: "The" is hardly likelier than "L'".
    (r"smollm[- ]?2[- ]135m", ModelCard(Sampling(temperature=0.0), origin="the server's own, for a model this small")),
    (r"smollm[- ]?2", ModelCard(Sampling(temperature=0.2, top_p=0.9), origin="the card of SmolLM2")),
)


def card_of(
    metadata: Mapping[str, Any], names: Iterable[str], given: Mapping[str, float] | None = None, thinks: bool = True
) -> ModelCard:
    """metadata: of the file; names: of the model and of what it was made from; given: by the server's user.
    thinks: whether it can; of one that cannot, such as Qwen3-Coder, the only values are those without thinking."""
    known = next((card for pattern, card in TABLE for name in names if re.search(pattern, name.lower())), ModelCard())
    if not thinks and known.direct is not None:
        known = replace(known, sampling=known.direct, direct=None)
    card = _changed(known, _from_file(metadata), "the model's file")
    return _changed(card, given or {}, "the presets file", direct=True)


def names_in(metadata: Mapping[str, Any]) -> list[str]:
    """What a GGUF file calls its model, and the one that it was made from."""
    keys = ("general.name", "general.basename", "general.base_model.0.name")
    return [name for key in keys if isinstance(name := metadata.get(key), str)]


def _from_file(metadata: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, (field, low, high) in FILE_KEYS.items():
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, int | float) and math.isfinite(value) and low <= value <= high:
            found[field] = round(float(value), 6)  # the file has 32-bit numbers
        else:
            log.warning("the model's file recommends %s = %r, which is outside %g to %g", key, value, low, high)
    return found


def _changed(card: ModelCard, values: Mapping[str, float], by: str, direct: bool = False) -> ModelCard:
    """direct: the values hold without thinking too; a file means the way in which the model answers by itself."""
    if not values:
        return card
    fields: dict[str, Any] = {name: int(value) if name == "top_k" else value for name, value in values.items()}
    limit = fields.pop("max_tokens", card.max_tokens)
    # The values of a card belong together, the server's own min_p does not belong to a file's temperature.
    base = card.sampling if card.sampling is not CAUTIOUS or direct else replace(CAUTIOUS, min_p=0.0)
    other = card.direct and (replace(card.direct, **fields) if direct else card.direct)
    origin = f"{', '.join(sorted(values))} from {by}, else {card.origin}"
    limit = None if limit is None else int(limit)
    return replace(card, sampling=replace(base, **fields), direct=other, max_tokens=limit, origin=origin)


def show(sampling: Sampling) -> str:
    """Say "temperature 0.6, top_p 0.95, top_k 20": what differs from drawing by the model's own probabilities."""
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in values_of(sampling).items())


def values_of(sampling: Sampling) -> dict[str, float]:
    plain = Sampling()
    names = ("temperature", *(name for name in RANGES if name != "temperature"))
    return {
        name: getattr(sampling, name)
        for name in names
        if name == "temperature" or getattr(sampling, name) != getattr(plain, name)
    }
