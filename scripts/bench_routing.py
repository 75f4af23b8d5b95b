"""How often an expert that is asked for is on the device: the expert cache beside the best fixed set and plain LRU.

    python scripts/bench_routing.py MODEL TOKENS.npy [--conversations 12] [--tokens-each 512] [--places 4,6,8,10,12]

Runs an MoE model on the CPU over conversations (rows of token ids), notes what its routers choose, and replays the
choices token by token, as decode asks for them, through

    fixed    the experts that all conversations together use most: no fixed set is better, and none is known before
    lru      places that hold whatever was used last
    plan     hot experts and the expert cache in the shares that a plan gives, with swaps by the decayed counts
    quarter  the same with a larger cache: as many slots as a quarter of the experts

with the classes that serve uses. Every layer has the same number of places. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from rekindle.batch import Batch, Segment
from rekindle.build import open_weights_of
from rekindle.experts import RoutingCounts, routed
from rekindle.experts.counts import LayerCounter
from rekindle.experts.residency import Residency
from rekindle.experts.swaps import choose_swaps
from rekindle.layers import load_span
from rekindle.placement import Wishes
from rekindle.placement.allocate import hot_of
from rekindle.spec import PAGE
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile

CPU = torch.device("cpu")
Trace = np.ndarray  # int [tokens, used]: the experts of one layer


def choices(file: WeightFile, conversations: Sequence[Sequence[int]]) -> list[Trace]:
    """By layer, over all conversations one after another."""
    seen, route = list[np.ndarray](), routed.route

    def noting(h: torch.Tensor, router: torch.Tensor, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = route(h, router, used)
        seen.append(ids.numpy().copy())
        return ids, weights

    routed.route = noting  # type: ignore[assignment]
    longest = max(map(len, conversations))
    stage = LocalStage(load_span(file, file.spec.whole, CPU, torch.float32), 1, -(-longest // PAGE), "f32")
    for tokens in conversations:
        stage.open(0)
        stage.forward(Batch((Segment(0, 0, tuple(tokens)),)), None)
    routed.route = route
    layers = file.spec.layers
    return [np.concatenate(seen[layer::layers]) for layer in range(layers)]


def fixed(trace: Trace, places: int, experts: int, used: int) -> float:
    counts = np.bincount(trace.flatten(), minlength=experts)
    return float(np.sort(counts)[::-1][:places].sum() / counts.sum())


def lru(trace: Trace, places: int, experts: int, used: int) -> float:
    held, hits = OrderedDict[int, None](), 0
    for row in trace.tolist():
        hits += sum(expert in held for expert in row)
        for expert in row:
            held[expert] = None
            held.move_to_end(expert)
        while len(held) > places:
            held.popitem(last=False)
    return hits / trace.size


def planned(cache_share: float) -> Callable[[Trace, int, int, int], float]:
    """Hot experts, an expert cache with that share of a layer's experts, and swaps."""

    def run(trace: Trace, places: int, experts: int, used: int) -> float:
        hot = hot_of(places, experts, used, cache_share)
        residency = Residency(range(hot), places - hot, experts, CPU)
        counter = LayerCounter(RoutingCounts(1, experts), 0, CPU)
        hits = 0
        for row in torch.from_numpy(trace).int()[:, None]:
            hits += int((residency.slots_of(row) >= 0).sum())
            if residency.cache_slots >= used:
                residency.admit(row, counter.tally)
            else:
                counter.note(row)
                if residency.cache_slots:
                    residency.finish_loading(residency.make_room(row))
            if counter.poll(1):
                for goes, comes in choose_swaps(counter.row, residency.hot):
                    residency.swap(goes, comes)
        return hits / trace.size

    return run


WAYS = {"fixed": fixed, "lru": lru, "plan": planned(Wishes(1).expert_cache_share), "quarter": planned(1 / 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path, help="int [conversations, tokens]")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--tokens-each", type=int, default=512)
    parser.add_argument("--places", default="4,6,8,10,12")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = open_weights_of(options.model)
    rows = np.load(options.tokens)[: options.conversations, : options.tokens_each].astype(np.int64)
    traces, ffn = choices(file, rows.tolist()), file.spec.ffn
    found: dict[str, dict[int, float]] = {name: {} for name in WAYS}
    for places in map(int, options.places.split(",")):
        for name, way in WAYS.items():
            rates = [way(trace, places, ffn.experts, ffn.used) for trace in traces]
            found[name][places] = round(float(np.mean(rates)), 4)
        print(f"{places} of {ffn.experts} places:", {name: hits[places] for name, hits in found.items()}, flush=True)
    print(json.dumps({"tokens": len(traces[0]), "layers": len(traces), "hits": found}))


if __name__ == "__main__":
    main()
