"""Segments of documents and their summaries: what hierarchical and top-k attention look at in place of single tokens.

A document is cut from its start into segments of a fixed size; the last one may be shorter. A segment may lie on several
ring ranks: each pools its part, the parts are sent round (they are as many times smaller as a segment is long), and every
rank merges them by log-sum-exp, so that a summary does not depend on the mesh. (On CUDA sums are in no fixed order, as in
PyTorch's index_add: equal to rounding from run to run.)

Legend: B batch, s local tokens, L local parts, M segments, N summaries of a segment, G KV heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import torch

from workers.attention.layout import Run, ring_runs
from workers.attention.tape import once
from workers.attention.transport import Ring

PARTS = 2  # tag of parts on their way (see ``transport``)


class Segment(NamedTuple):
    """Global positions [start, stop), inside the document that starts at ``document``, on the shelf that starts at ``shelf``."""

    start: int
    stop: int
    document: int
    shelf: int = 0


class Part(NamedTuple):
    """The tokens of segment ``segment`` that a rank holds: ``length`` local indices from ``offset`` on."""

    segment: int
    offset: int
    length: int


def segments_of(pattern, size: int, length: int, row: int) -> list[Segment]:
    """The segments of a batch row's documents, in order. Every document is in one piece (``Pattern.check``)."""
    spans = pattern.document_spans(row) if pattern.documents is not None else [(0, length, 0)]
    shelves = [start for start, _, _ in pattern.shelf_spans(row)] if pattern.shelves is not None else [0]
    return [
        Segment(first, min(first + size, stop), start, shelves[bisect_right(shelves, start) - 1])
        for start, stop, _ in spans
        for first in range(start, stop, size)
    ]


def parts_of(segments: list[Segment], runs: list[Run]) -> list[Part]:
    """The parts that a rank with these runs holds, in local order."""
    parts = []
    starts = [segment.start for segment in segments]
    for run in runs:
        last = run.start + run.stride * (run.length - 1)
        for index in range(bisect_right(starts, run.start) - 1, bisect_right(starts, last)):
            own = run.between(segments[index].start, segments[index].stop)
            if own is not None:
                parts.append(Part(index, own.offset, own.length))
    return parts


def runs_of_ranks(length: int, ring: Ring, layout: str) -> list[list[Run]]:
    return [ring_runs(length, ring.size, rank, layout) for rank in range(ring.size)]


def pool(x_BsGD, scores_BsNG: torch.Tensor, parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each part's tokens averaged with the weights softmax(scores): [B, L, N, G, D], and the log of the weights' sum [B, L, N, G].

    Computed in float32, or float64 for float64.
    """
    index, in_parts = _part_of_token(parts, x_BsGD.device)
    scores = scores_BsNG[:, in_parts]
    batch, _, *shape = scores.shape
    top = scores.new_full((batch, len(parts), *shape), -torch.inf)
    top = top.scatter_reduce(1, index[None, :, None, None].expand_as(scores), scores.detach(), "amax")
    weights = (scores - top[:, index]).exp()
    total = torch.zeros_like(top).index_add(1, index, weights)
    weighted = weights.unsqueeze(-1) * x_BsGD[:, in_parts].to(scores.dtype).unsqueeze(2)
    means = weighted.new_zeros(batch, len(parts), *weighted.shape[2:]).index_add(1, index, weighted)
    return means / total.unsqueeze(-1), total.log() + top


def _part_of_token(parts: list[Part], device) -> tuple[torch.Tensor, slice]:
    """The part of each local token that is in one; a rank's parts lie beside one another."""
    assert parts, "a rank holds tokens, and every token is in a segment"
    lengths = torch.tensor([part.length for part in parts], device=device)
    return torch.arange(len(parts), device=device).repeat_interleave(lengths), slice(parts[0].offset, parts[-1].offset + parts[-1].length)


def merge_parts(means_BLNGD: torch.Tensor, lse_BLNG: torch.Tensor, segment_of_part: torch.Tensor, segments: int) -> torch.Tensor:
    """The means of whole segments [B, M, N, G, D] from those of their parts."""
    batch, _, *shape = lse_BLNG.shape
    top = lse_BLNG.new_full((batch, segments, *shape), -torch.inf)
    top = top.scatter_reduce(1, segment_of_part[None, :, None, None].expand_as(lse_BLNG), lse_BLNG.detach(), "amax")
    weights = (lse_BLNG - top[:, segment_of_part]).exp()
    total = torch.zeros_like(top).index_add(1, segment_of_part, weights)
    whole = means_BLNGD.new_zeros(batch, segments, *means_BLNGD.shape[2:])
    whole = whole.index_add(1, segment_of_part, weights.unsqueeze(-1) * means_BLNGD)
    return whole / total.unsqueeze(-1)


def summaries(
    tensors_BsGD, scores_BsNG: torch.Tensor, parts: list[list[Part]], segments: int, ring: Ring, where: str = ""
) -> tuple[torch.Tensor, ...]:
    """The summaries [B, M, N, G, D] of every segment of the sequence, one for each tensor, on every rank.

    ``parts`` are those of each ring rank.

    Sends, a rank: its parts · N · G · (D of each tensor + 1) elements of the accumulators' type to each other rank, and
    in backward as many from each other rank.
    """
    sizes = [x.shape[-1] for x in tensors_BsGD]
    means, lse = pool(torch.cat(tensors_BsGD, -1), scores_BsNG, parts[ring.rank])
    packed = torch.cat((means, lse.unsqueeze(-1)), -1)
    packed = everywhere(packed, ring, [len(p) for p in parts], where)
    order = torch.tensor([part.segment for rank_parts in parts for part in rank_parts], device=packed.device)
    whole = merge_parts(packed[..., :-1], packed[..., -1], order, segments)
    return whole.split(sizes, -1)


class _Everywhere(torch.autograd.Function):
    """[B, L, …] of every rank, in the order of ranks: [B, ΣL, …]. The gradient of a rank's own is the sum of all ranks'."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, ring: Ring, lengths: list[int], where: str):
        ctx.ring, ctx.lengths, ctx.where = ring, lengths, where
        return once(_collect, own.contiguous(), ring, lengths, where)

    @staticmethod
    def backward(ctx, grad):
        ring = ctx.ring
        grads = [x.contiguous() for x in grad.split(ctx.lengths, 1)]
        total = grads[ring.rank].clone()
        exchanges = [
            ring.exchange(
                -places, grads[(ring.rank - places) % ring.size], torch.empty_like(total), PARTS, f"gradients of summaries{ctx.where}"
            )
            for places in range(1, ring.size)
        ]
        for exchange in exchanges:
            total += exchange.wait()
        return total, None, None, None


def _collect(own: torch.Tensor, ring: Ring, lengths: list[int], where: str) -> torch.Tensor:
    exchanges = []
    for places in range(1, ring.size):
        source = (ring.rank - places) % ring.size
        received = own.new_empty((own.shape[0], lengths[source], *own.shape[2:]))
        exchanges.append((source, ring.exchange(places, own, received, PARTS, f"summaries from {places} places before{where}")))
    whole: list = [None] * ring.size
    whole[ring.rank] = own
    for source, exchange in exchanges:
        whole[source] = exchange.wait()
    return torch.cat(whole, 1)


def everywhere(own_BL: torch.Tensor, ring: Ring, lengths: list[int], where: str = "") -> torch.Tensor:
    """What every rank has, [B, ΣL, …] in the order of ranks; differentiable."""
    return _Everywhere.apply(own_BL, ring, lengths, where) if ring.size > 1 else own_BL
