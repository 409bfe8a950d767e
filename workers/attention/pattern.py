"""What may see what, as data: a pattern answers for spans of queries and keys, and never builds a mask.

A pattern cuts the block that a rank computes at one hop into *tiles*: rectangles of (query, key) pairs that are wholly
visible, and squares whose lower triangle is. Pairs that no tile covers are invisible. Kernels see tiles only, so every
backend supports every pattern, and packed documents cost what they need and no more.

Legend: B batch, S global sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from workers.attention.layout import Run


class Tile(NamedTuple):
    """Queries ``[q_start, q_stop)`` against keys ``[k_start, k_stop)``, local indices.

    ``causal``: a square in which query i sees keys ≤ i; otherwise every query sees every key.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs: the work."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which keys a query sees. The fields combine by "and".

    causal: a query sees itself and what stands before it.
    documents: the document id of every **global** position, int [S] or [B, S]; nothing is seen across documents.
    """

    causal: bool = True
    documents: torch.Tensor | None = None
    _tiles: dict = field(default_factory=dict, repr=False)
    _spans: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        if self.documents is not None and self.documents.dim() not in (1, 2):
            raise ValueError(f"documents has shape {tuple(self.documents.shape)}; it must be [S] or [B, S]")

    @property
    def rows(self) -> list[slice]:
        """Groups of batch rows that share their tiles."""
        if self.documents is None or self.documents.dim() == 1:
            return [slice(None)]
        return [slice(row, row + 1) for row in range(self.documents.shape[0])]

    def check(self, batch: int, length: int) -> None:
        """Raise ValueError unless the pattern describes ``batch`` sequences of ``length`` tokens."""
        if self.documents is None:
            return
        expected = (length,) if self.documents.dim() == 1 else (batch, length)
        if tuple(self.documents.shape) != expected:
            raise ValueError(
                f"documents has shape {tuple(self.documents.shape)}, but the sequences have {batch} × {length} global positions"
            )

    def tiles(self, query_runs: list[Run], key_runs: list[Run], row: int = 0) -> list[Tile]:
        """The tiles of queries held as ``query_runs`` against keys held as ``key_runs`` (same stride).

        An empty list means that nothing is visible: the hop need not be computed. Cached, for every layer asks the same.
        """
        key = (tuple(query_runs), tuple(key_runs), row)
        if key not in self._tiles:
            self._tiles[key] = self._cut(query_runs, key_runs, row)
        return self._tiles[key]

    def document_spans(self, row: int = 0) -> list[tuple[int, int, int]]:
        """``(start, stop, id)`` of each stretch of equal document ids among the global positions."""
        if row not in self._spans:
            ids = self.documents if self.documents.dim() == 1 else self.documents[row]
            values, counts = torch.unique_consecutive(ids.cpu(), return_counts=True)
            stops = counts.cumsum(0).tolist()
            self._spans[row] = list(zip([0, *stops[:-1]], stops, values.tolist()))
        return self._spans[row]

    def _cut(self, query_runs, key_runs, row) -> list[Tile]:
        queries, keys = self._segments(query_runs, row), self._segments(key_runs, row)
        if query_runs == key_runs:
            # A rank's tokens are in ascending order, so among its own the local order is the global one:
            # what is adjacent locally becomes one segment, and one triangle, whatever lies between.
            queries = keys = _by_local_index(queries)
        keys_of = {}
        for document, segment in keys:
            keys_of.setdefault(document, []).append(segment)
        tiles = []
        for document, segment in queries:
            for other in keys_of.get(document, ()):
                tiles += _causal_tiles(segment, other) if self.causal else [_full(segment, other)]
        return _coalesce(tiles)

    def _segments(self, runs: list[Run], row: int) -> list[tuple[int, Run]]:
        """The runs cut at document boundaries, each with its document id."""
        if self.documents is None:
            return [(0, run) for run in runs]
        segments = []
        for run in runs:
            for start, stop, document in self.document_spans(row):
                first = max(0, -(-(start - run.start) // run.stride))
                last = min(run.length, -(-(stop - run.start) // run.stride))
                if first < last:
                    segments.append((document, Run(run.start + first * run.stride, run.stride, last - first, run.offset + first)))
        return segments


def _by_local_index(segments: list[tuple[int, Run]]) -> list[tuple[int, Run]]:
    merged: list[tuple[int, Run]] = []
    for document, run in segments:
        if merged and merged[-1][0] == document and merged[-1][1].offset + merged[-1][1].length == run.offset:
            before = merged[-1][1]
            merged[-1] = (document, Run(before.offset, 1, before.length + run.length, before.offset))
        else:
            merged.append((document, Run(run.offset, 1, run.length, run.offset)))
    return merged


def _full(query: Run, key: Run) -> Tile:
    return Tile(query.offset, query.offset + query.length, key.offset, key.offset + key.length, False)


def _causal_tiles(query: Run, key: Run) -> list[Tile]:
    """Query i sees key j iff j ≤ i + lead, for runs of one stride: a full prefix, a square triangle, a full rest."""
    lead = (query.start - key.start) // query.stride
    q_start, q_stop, k_start, k_stop = query.offset, query.offset + query.length, key.offset, key.offset + key.length
    if lead < 0:
        q_start -= lead  # the first −lead queries see nothing
        lead = 0
    if q_start >= q_stop:
        return []
    prefix = min(lead, key.length)
    side = min(q_stop - q_start, key.length - prefix)
    tiles = [Tile(q_start, q_stop, k_start, k_start + prefix, False)] if prefix else []
    if side:
        tiles.append(Tile(q_start, q_start + side, k_start + prefix, k_start + prefix + side, True))
        if q_start + side < q_stop and k_start + prefix + side == k_stop:
            tiles.append(Tile(q_start + side, q_stop, k_start + prefix, k_stop, False))
    return tiles


def _coalesce(tiles: list[Tile]) -> list[Tile]:
    """Join neighbouring full tiles: fewer, larger kernel calls."""
    joined: list[Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else None
        if last and not tile.causal and not last.causal and tile[:2] == last[:2] and tile.k_start == last.k_stop:
            joined[-1] = last._replace(k_stop=tile.k_stop)
        else:
            joined.append(tile)
    tall: list[Tile] = []
    for tile in joined:
        last = tall[-1] if tall else None
        if last and not tile.causal and not last.causal and tile[2:4] == last[2:4] and tile.q_start == last.q_stop:
            tall[-1] = last._replace(q_stop=tile.q_stop)
        else:
            tall.append(tile)
    return tall
