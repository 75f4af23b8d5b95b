"""The launches of a layer with cold experts, over a layer whose experts are all on the device: the kernels are the same
wherever the weights lie. To be called while launches are noted: run, they would read addresses that do not exist."""

from __future__ import annotations

import torch

from rekindle.buffers import staged_experts
from rekindle.experts.packed import SlotPairs
from rekindle.experts.planes import make_parts, make_pieces
from rekindle.experts.residency import Residency
from rekindle.experts.routed import RoutedFfn
from rekindle.kernels.moe.cold import ColdAnswer, Missing

ADDRESS = 1 << 40  # of host memory; kernels are specialised on its alignment only


def launch_cold_experts(ffn: RoutedFfn, kept: int, lendable: int, dtype: torch.dtype) -> None:
    """Of the layer's expert cache: slots that follow the routing, and slots that can be lent. One row, and every power
    of two of rows that the cache admits at once; with and without the CPU's share, which is decided by a measurement
    when the weights are there. And the rows of a chunk, whose experts come through the staging area: as many as need
    each form of the grouped kernel, but not so many that experts are expanded first: chunks of the usual grid have
    fewer."""
    from rekindle.experts import triton as kernels
    from rekindle.kernels.moe.groups import PAIRS_TILES
    from rekindle.kernels.moe.triton import moe_missing, takes_missing

    stacks = ffn.gate, ffn.up, ffn.down
    if any(stack.packed is None for stack in stacks):
        return
    router = ffn.router
    assert isinstance(router, torch.Tensor), "experts in planes are on a GPU, and their router with them"
    (experts, hidden), device = router.shape, router.device
    residency = Residency([], kept + lendable, experts, device, range(lendable))
    one, places = (torch.zeros(size, dtype=torch.int32, device=device) for size in (1, experts))
    mailbox = one, ADDRESS, one, *(ADDRESS,) * 6, one, one
    answer = ColdAnswer(one, one, one, torch.empty(hidden, device=device), ADDRESS, ADDRESS, ADDRESS)
    parts, h = make_parts(stacks, stacks, device), torch.empty(1, hidden, dtype=dtype, device=device)
    if parts is not None and takes_missing(h, *stacks, ffn.shared):
        for request, reply in ((None, None), (mailbox, answer)):
            slots, sources, weights = kernels.route_row(h, router, ffn.used, residency, places, places, request)
            moe_missing(h, slots, weights, *stacks, ffn.shared, Missing(sources, parts, reply))
    rows = 1
    while rows * ffn.used <= kept:
        h, ids = h[:1].expand(rows, hidden).contiguous(), torch.zeros(rows, ffn.used, dtype=torch.int32, device=device)
        for takes in (None, one):
            slots, _ = kernels.admit(residency, ids, places, takes)
        kernels.ask(mailbox, places, h, ids, slots, torch.empty(ids.shape, device=device))
        kernels.collect(answer, h)
        rows *= 2
    pieces = make_pieces(stacks, stacks, 0, device)
    kernels.fetch(pieces, residency.owner, places)
    kernels.fetch_aside(pieces, places[: staged_experts(experts)], places)
    for needed in (None, places):
        kernels.list_missing(residency, needed, places, places)
    kernels.exchange(pieces, 0, 0)
    for pairs in PAIRS_TILES:
        rows = pairs * experts // (2 * ffn.used)
        h, slots = h[:1].expand(rows, hidden), torch.zeros(rows, ffn.used, dtype=torch.int32, device=device)
        weights = torch.empty(slots.shape, device=device)
        SlotPairs(h, slots, weights, experts, experts, ffn.gate.rows).run(stacks, 0)
