"""Hierarchical attention: the tokens near by, and summaries of everything before them, in one softmax.

A query sees the tokens of its window, inside its document, and a few summaries of every earlier segment that its window
does not reach: all segments of earlier documents of its shelf, and those of its own that end before the window begins. A summary is a
pair of a key and a value, the average of the segment's keys and of its values with the weights softmax_j(u · k_j · scale);
u is learnt, one vector for each summary and KV head, and u = 0 is mean pooling. Round the ring go summaries only, which
are as many times fewer than tokens as a segment is long, and the window's tail.

Legend: B batch, s local tokens, M segments, N summaries of a segment, G KV heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch

from workers.attention.layout import Run
from workers.attention.segments import Segment, parts_of, runs_of_ranks, segments_of, summaries
from workers.attention.tile import Tile
from workers.attention.transport import Ring


@dataclass(frozen=True)
class Hierarchy:
    """segment: tokens of a segment. summaries: how many a segment has. reach: how many segments back a query sees, null for all.

    With a reach the cost of a token is constant; without, it grows by ``summaries`` keys with every segment before it.
    """

    segment: int = 512
    summaries: int = 1
    reach: int | None = None

    def __post_init__(self):
        for name in ("segment", "summaries", "reach"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def summary_keys(k_BsGD, v_BsGD, pool_NGD: torch.Tensor | None, pattern, scale: float, ring: Ring, layout: str, queries: int, where: str):
    """Keys and values [B, M · N, G, D] of all summaries of the sequence, and the tiles of this rank's queries against them.

    ``pool_NGD`` are the learnt vectors u, or None for mean pooling. Rows of a batch with fewer segments are padded; no
    tile reaches the padding.
    """
    hierarchy = pattern.hierarchy
    keys = k_BsGD.shape[1]
    runs = runs_of_ranks(keys * ring.size, ring, layout)
    query_runs = runs[ring.rank] if ring.size > 1 else [Run(keys - queries, 1, queries, 0)]
    all_k, all_v, tiles = [], [], []
    for rows in pattern.rows:
        k, v = k_BsGD[rows], v_BsGD[rows]

        def lay_out(row: int = rows.start or 0):
            segments = segments_of(pattern, hierarchy.segment, keys * ring.size, row)
            parts = [parts_of(segments, rank_runs) for rank_runs in runs]
            return parts, len(segments), summary_tiles(segments, pattern.window, hierarchy, query_runs)

        parts, segments, row_tiles = pattern.kept(("summaries", rows.start, ring.rank, ring.size, layout, keys, queries), lay_out)
        whole = summaries((k, v), _scores(k, pool_NGD, hierarchy.summaries, scale), parts, segments, ring, where)
        for x, to in zip(whole, (all_k, all_v)):
            to.append(x.flatten(1, 2).to(k.dtype))
        tiles.append((rows, row_tiles))
    most = max(x.shape[1] for x in all_k)
    padded = [torch.cat([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, most - x.shape[1])) for x in parts]) for parts in (all_k, all_v)]
    return *padded, tiles


def _scores(k_BsGD: torch.Tensor, pool_NGD: torch.Tensor | None, count: int, scale: float) -> torch.Tensor:
    dtype = torch.promote_types(k_BsGD.dtype, torch.float32)
    if pool_NGD is None:
        return k_BsGD.new_zeros((*k_BsGD.shape[:2], count, k_BsGD.shape[2]), dtype=dtype)
    if pool_NGD.shape[0] != count:
        raise ValueError(f"{pool_NGD.shape[0]} pooling vectors for {count} summaries of a segment")
    return torch.einsum("bsgd,ngd->bsng", k_BsGD.to(dtype), pool_NGD.to(dtype)) * scale


def summary_tiles(segments: list[Segment], window: int, hierarchy: Hierarchy, query_runs: list[Run]) -> list[Tile]:
    """Full tiles: stretches of queries that see the same summaries."""
    stops = [segment.stop for segment in segments]
    edges = {segment.document for segment in segments}
    # Within its document a query begins to see a segment when the window has left it.
    edges |= {segment.stop + window - 1 for segment, following in zip(segments, segments[1:]) if segment.document == following.document}
    ordered = sorted(edges)
    starts, shelf_of = [segment.start for segment in segments], {segment.document: segment.shelf for segment in segments}
    documents = sorted(shelf_of)
    tiles = []
    for run in query_runs:
        last = run.start + run.stride * (run.length - 1)
        for first, stop in zip(ordered, [*ordered[1:], stops[-1]]):
            if stop <= run.start or first > last:
                continue
            own = run.between(first, stop)
            if own is None:
                continue
            document = documents[bisect_right(documents, first) - 1]
            seen = bisect_right(stops, max(document, first - window + 1))
            unseen = bisect_left(starts, shelf_of[document])  # what stands on other shelves
            if hierarchy.reach is not None:
                unseen = max(unseen, seen - hierarchy.reach)
            if seen > unseen:
                count = hierarchy.summaries
                tiles.append(Tile(own.offset, own.length, unseen * count, (seen - unseen) * count, step=own.step))
    return tiles
