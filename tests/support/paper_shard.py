"""A stage made of paper, and a process that hosts it: `python -m support.paper_shard ENDPOINT [options]`.

Odd layers are attention layers whose rows spell the tokens, even layers are recurrent: a number that every token
changes, in order. So a state knows which tokens it has seen, and "restored equals cold" is a comparison.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from rekindle.batch import Batch
from rekindle.errors import PoolFull, SnapshotMismatch
from rekindle.shards import ShardKeys, ShardServer, Terms, load_keys, load_public, serve_forever
from rekindle.snapshots.types import TAIL, Page, Part
from rekindle.spec import PAGE, Span
from rekindle.stages.types import PageCount, PendingTokens, StageOutput

HIDDEN, VOCAB, KV_HEADS, ROW, WIDTH = 16, 32, 2, 4, 3
POOL = 40  # pages per stage

TORN = 666  # a token that raises what no stage should raise
TOO_MUCH = 667  # a token that finds no page
ENDLESS = 668  # a token whose forward does not come back


class PaperStage:
    """`hang` names verbs that do not come back; `trace`, a file that tells when one of them has begun."""

    def __init__(self, span: Span, layers: int, slots: int = 4, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        self.span = span
        self.slots = slots
        self.device = "paper"
        self.stopped = False
        self.hang: set[str] = set()
        self.trace: Path | None = None
        self._kv_dtype = kv_dtype
        self._is_last = span.stop == layers
        self.tokens: dict[int, list[int]] = {}
        self._pages: dict[int, dict[int, list[Page]]] = {}  # slot, layer: sealed pages, made once

    def _enter(self, verb: str) -> None:
        if verb in self.hang:
            assert self.trace is not None
            self.trace.write_text(verb)
            threading.Event().wait()

    def open(self, slot: int) -> None:
        self.tokens[slot] = []
        self._pages[slot] = {layer: [] for layer in self.span.layers if layer % 2}

    def close(self, slot: int) -> None:
        self.tokens.pop(slot, None)
        self._pages.pop(slot, None)

    def forward(self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None = None) -> StageOutput:
        rows, logits, scores = [], [], []
        for segment in batch.segments:
            seen = self.tokens[segment.slot]
            assert len(seen) == segment.position, f"slot stands at {len(seen)}, segment begins at {segment.position}"
            for i, token in enumerate(segment.tokens):
                self._read(token)
                seen.append(token)
                rows.append(self._state(seen).sum() + torch.arange(HIDDEN, dtype=torch.float32) / 7)
                if i >= len(segment) - segment.logit_rows:
                    logits.append(torch.sin(rows[-1].sum() * torch.arange(1, VOCAB + 1)))
                if i < segment.scored_rows:
                    scores.append(rows[-1][: 1 + 2 * segment.top])
        out = torch.stack(rows) if hidden is None else hidden * 0.5 + torch.stack(rows)
        if not self._is_last:
            return StageOutput(out, None)
        told = torch.stack(scores) if scores else None
        return StageOutput(None, torch.stack(logits) + out.sum() if logits else None, scores=told)

    def _read(self, token: int) -> None:
        if token == TORN:
            raise RuntimeError("the paper tore")
        if token == TOO_MUCH:
            raise PoolFull("no page is left for slot 0")
        if token == ENDLESS:
            self.hang.add("forward")
            self._enter("forward")

    def _state(self, seen: Sequence[int]) -> torch.Tensor:
        state = torch.zeros(2, 2, 2)
        for token in seen[-20:]:
            state = state * 0.75 + token
        return state

    def _rows(self, layer: int, seen: Sequence[int]) -> torch.Tensor:
        """[2, tokens, kv_heads, row]"""
        rows = torch.tensor(list(seen), dtype=torch.float32)[None, :, None, None].expand(2, -1, KV_HEADS, ROW)
        return (rows + layer / 16).to(self._kv_dtype).contiguous()

    def capture(self, slot: int) -> Sequence[Part]:
        self._enter("capture")
        seen = self.tokens[slot]
        parts: list[Part] = []
        for layer in self.span.layers:
            if layer % 2:
                pages = self._pages[slot][layer]
                for i in range(len(pages), len(seen) // PAGE):
                    pages.append(Page(self._rows(layer, seen[i * PAGE : (i + 1) * PAGE])))
                parts.append(Part(layer, {TAIL: self._rows(layer, seen[len(pages) * PAGE :])}, tuple(pages)))
            else:
                window = torch.tensor([0, 0, 0, *seen][-3:], dtype=torch.float32)[:, None].expand(-1, WIDTH)
                parts.append(Part(layer, {"state": self._state(seen) + layer, "window": window.contiguous()}))
        return parts

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        self._enter("restore")
        own = [part for part in parts if part.layer in self.span]
        if [part.layer for part in own] != list(self.span.layers):
            raise SnapshotMismatch(f"stage holds {self.span}, snapshot brings {[part.layer for part in own]}")
        self.open(slot)
        for part in own:
            if part.is_paged:
                rows = torch.cat([*(page.data for page in part.pages), part.tensors[TAIL]], dim=1)[0, :, 0, 0].float()
                self.tokens[slot] = [round(x) for x in (rows - part.layer / 16).tolist()]
                self._pages[slot][part.layer] = list(part.pages)
        for part in own:
            state = self._state(self.tokens[slot]) + part.layer
            if not part.is_paged and not torch.equal(part.tensors["state"], state):
                self.close(slot)
                raise SnapshotMismatch(f"layer {part.layer}: the recurrent state belongs to other tokens")

    def rewind(self, slot: int, position: int) -> None:
        del self.tokens[slot][position:]
        for pages in self._pages[slot].values():
            del pages[position // PAGE :]

    def pages(self) -> PageCount:
        used = sum(-(-len(seen) // PAGE) for seen in self.tokens.values())
        return PageCount(POOL - used, used, POOL)

    def stop(self) -> None:
        self.stopped = True


FINGERPRINT = "paper-model"


def terms(span: Span, slots: int = 4, fingerprint: str = FINGERPRINT) -> Terms:
    return Terms(fingerprint, span, "float32", "bfloat16", slots)


def paper_server(endpoint: str, stages: dict[str, PaperStage], **options: object) -> ShardServer:
    return ShardServer(
        stages,
        endpoint,
        fingerprint=FINGERPRINT,
        hidden_dtype="float32",
        kv_dtype="bfloat16",
        **options,  # type: ignore[arg-type]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--span", type=int, nargs=2, default=(0, 4))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hang", nargs="*", default=[])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--allow", type=Path, nargs="*", default=[])
    wishes = parser.parse_args()
    torch.set_num_threads(1)
    stage = PaperStage(Span(*wishes.span), wishes.layers)
    stage.hang, stage.trace = set(wishes.hang), wishes.trace
    keys = ShardKeys(load_keys(wishes.keys), frozenset(map(load_public, wishes.allow))) if wishes.keys else None
    serve_forever(paper_server(wishes.endpoint, {"paper": stage}, keys=keys))


if __name__ == "__main__":
    main()
