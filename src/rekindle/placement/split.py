"""Layers to devices: contiguous spans that tile the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rekindle.errors import BadConfig
from rekindle.placement.units import plural
from rekindle.spec import Span

AUTO = "auto"


def split_layers(layers: int, weights: Sequence[float]) -> tuple[Span, ...]:
    """One span per weight, as long as its share of the weights; each at least one layer.

    40 layers, (0.5, 0.5) -> [0, 20) [20, 40)
    """
    _check_devices(layers, len(weights))
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise BadConfig(f"split weight {weight} among {_join(weights)} must be a finite number above 0")
    largest = max(weights)  # shares are taken of the largest first, so that no sum overflows
    shares = [weight / largest for weight in weights]
    ends: list[int] = []
    for i in range(len(shares)):
        wanted = math.floor(sum(shares[: i + 1]) / sum(shares) * layers + 0.5)
        least = (ends[-1] if ends else 0) + 1
        most = layers - (len(shares) - 1 - i)  # a layer for each device still to come
        ends.append(min(max(wanted, least), most))
    ends[-1] = layers
    return _spans(ends)


def spans_from_counts(layers: int, counts: Sequence[int]) -> tuple[Span, ...]:
    """One span per explicit layer count."""
    _check_devices(layers, len(counts))
    for count in counts:
        if count <= 0:
            raise BadConfig(f"layer count {count} among {_join(counts)} must be above 0")
    if sum(counts) != layers:
        raise BadConfig(
            f"layer counts {_join(counts)} sum to {sum(counts)}, the model has {layers} layers "
            f"(weights are written with a point, such as {','.join(f'{count}.0' for count in counts)})"
        )
    return _spans([sum(counts[: i + 1]) for i in range(len(counts))])


def spans_from_wish(split: Sequence[float], devices: int, layers: int) -> tuple[Span, ...]:
    """Ints are layer counts, anything else is weights."""
    if len(split) != devices:
        raise BadConfig(f"--split {_join(split)} is for {plural(len(split), 'device')}, --devices names {devices}")
    counts = [part for part in split if isinstance(part, int)]
    return spans_from_counts(layers, counts) if len(counts) == len(split) else split_layers(layers, split)


def best_spans(layers: int, speeds: Sequence[float], cost: Callable[[int, Span], tuple[int, int]]) -> tuple[Span, ...]:
    """One span per device: the least sum of first costs, then of second ones; then the fastest slowest stage.

    best[stop] is the best way to put layers [0, stop) on the devices so far. Each rank is a sum or a maximum over
    the stages, so the best way to a longer piece goes through a best way to a shorter one.
    """
    best: dict[int, tuple[tuple[int, int, float], tuple[Span, ...]]] = {0: ((0, 0, 0.0), ())}
    for i, speed in enumerate(speeds):

        def join(rank: tuple[int, int, float], span: Span, i: int = i, speed: float = speed) -> tuple[int, int, float]:
            first, second = cost(i, span)
            return rank[0] + first, rank[1] + second, max(rank[2], len(span) / speed)

        to_come = len(speeds) - 1 - i
        stops = range(i + 1, layers - to_come + 1) if to_come else (layers,)
        best = {
            stop: min(
                (
                    (join(rank, Span(start, stop)), (*spans, Span(start, stop)))
                    for start, (rank, spans) in best.items()
                    if start < stop
                ),
                key=lambda way: way[0],
            )
            for stop in stops
        }
    return best[layers][1]


def can_tile(layers: int, devices: int, fits: Callable[[int, Span], bool]) -> bool:
    """Whether the devices can share the layers, each at least one. What fits a span fits every part of it."""
    stops = {0}  # where the devices so far may end
    for i in range(devices):
        last, reached, stop = layers - (devices - 1 - i), set[int](), 0
        for start in sorted(stops):
            stop = max(stop, start)  # whatever an earlier start reaches a later one does
            while stop < last and fits(i, Span(start, stop + 1)):
                stop += 1
            reached.update(range(start + 1, stop + 1))
        stops = reached
    return layers in stops


def parse_split(text: str, devices: int, layers: int) -> tuple[float, ...] | None:
    """'0.5,0.5' weights, '20,20' layer counts, 'auto' None; checked, so that Wishes.split can take it as it is."""
    if text.strip().lower() == AUTO:
        _check_devices(layers, devices)
        return None
    split = tuple(_number(part.strip(), text) for part in text.split(","))
    spans_from_wish(split, devices, layers)
    return split


def _number(part: str, text: str) -> float:
    try:
        return int(part) if part.isascii() and part.isdecimal() else float(part)
    except ValueError:
        raise BadConfig(f"split {text!r} has the part {part!r}, which is neither a number nor 'auto'") from None


def _check_devices(layers: int, devices: int) -> None:
    if devices < 1:
        raise BadConfig(f"a split needs at least 1 device, {devices} were given for {layers} layers")
    if devices > layers:
        raise BadConfig(f"{devices} devices cannot share {layers} layers, each needs at least one")


def _spans(ends: Sequence[int]) -> tuple[Span, ...]:
    return tuple(Span(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True))


def _join(parts: Sequence[float]) -> str:
    return ",".join(map(str, parts))
