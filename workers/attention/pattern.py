"""What may see what, as data: a pattern answers for spans of queries and keys, and never builds a mask.

A pattern cuts the block that a rank computes at one hop into *tiles* (see ``tile``): rectangles with a diagonal band, all
visible pairs in exactly one tile each. Pairs that no tile covers are invisible: a block without tiles is empty, and is
neither computed nor sent. Kernels see tiles only, so every backend supports every pattern.

Legend: B batch, S global sequence length.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import torch

from workers.attention.hierarchical import Hierarchy
from workers.attention.layout import Run
from workers.attention.tile import Tile, TileSource, band_tiles, coalesce
from workers.attention.topk import TopBlocks


@dataclass(frozen=True)
class Stretch:
    """Part of a run that no boundary crosses. Only stretches of one ``kin`` see each other."""

    kin: tuple
    run: Run
    sinks: bool = False


@dataclass(frozen=True, eq=False)
class Pattern(TileSource):
    """Which keys a query sees. The fields combine by "and", but that sinks are seen whatever window, block or stride say.

    causal: a query sees itself and what stands before it.
    window: a query sees itself and the window − 1 positions before it (and as many after it, when not causal).
    documents: the document id of every **global** position, int [S] or [B, S]; nothing is seen across documents.
    sinks: the first positions of every document are visible to all of its later queries (Xiao et al. 2023, StreamingLLM).
    block: a query sees only its own block of so many positions, counted from the start of its document.
    stride: a query sees the keys whose distance is a multiple of it (Child et al. 2019, Sparse Transformers); with a
        window this is the dilated window of Longformer (Beltagy et al. 2020).
    alibi: −slope · distance is added to the scores (Press et al. 2022; see ``alibi_slopes``).
    hierarchy: besides its window a query sees summaries of the segments before (see ``hierarchical``).
    shelves: the shelf of every global position, shaped as ``documents``: of other shelves a query sees no summary either. Without
        it all documents stand on one.
    top: a query sees its own block and the best few before it, by their summaries (see ``topk``).
    """

    causal: bool = True
    window: int | None = None
    documents: torch.Tensor | None = None
    sinks: int = 0
    block: int | None = None
    stride: int | None = None
    alibi: bool = False
    hierarchy: Hierarchy | None = None
    top: TopBlocks | None = None
    shelves: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("window", "block", "stride"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, or null for none")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must not be negative")
        if self.sinks and not self.sparse:
            raise ValueError(f"sinks = {self.sinks} need a window, a block or a stride: without one every earlier token is visible already")
        if self.block is not None and self.window is not None:
            raise ValueError(
                f"block = {self.block} and window = {self.window} do not combine: choose the one that bounds what a query sees"
            )
        if self.block is not None and self.stride is not None:
            raise ValueError(
                f"block = {self.block} and stride = {self.stride} do not combine: choose the one that bounds what a query sees"
            )
        if self.alibi and not self.causal:
            raise ValueError("alibi and causal = False do not combine: its bias is defined for keys before the query")
        if self.hierarchy is not None and (self.window is None or self.stride is not None or self.alibi or not self.causal):
            raise ValueError("hierarchy needs a causal window, and does not combine with stride or alibi: a summary has no one position")
        if self.top is not None and (self.sparse or self.sinks or self.alibi or not self.causal):
            raise ValueError("top combines with documents alone: it chooses by itself what of the past a query sees")
        if self.shelves is not None and (self.hierarchy is None or self.documents is None or self.shelves.shape != self.documents.shape):
            raise ValueError(
                "shelves hold the documents whose summaries a hierarchy shows: they need a hierarchy, and documents of the same shape"
            )
        if self.documents is not None and self.documents.dim() not in (1, 2):
            raise ValueError(f"documents has shape {tuple(self.documents.shape)}; it must be [S] or [B, S]")

    @property
    def sparse(self) -> bool:
        """Whether a query leaves out keys of its own document that the causal order would show it."""
        return self.window is not None or self.block is not None or self.stride is not None

    @property
    def best_layout(self) -> str:
        """The layout of least work and traffic: short reach wants neighbours beside each other, long reach wants balance."""
        if self.hierarchy is not None and self.hierarchy.reach is None:
            return "zigzag"  # a later query sees more summaries
        if self.window is not None or self.block is not None or self.top is not None or not self.causal:
            return "contiguous"
        return "zigzag"

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
        if self.hierarchy is not None or self.top is not None:
            for rows in self.rows:
                ids = [document for _, _, document in self.document_spans(rows.start or 0)]
                if len(ids) > len(set(ids)):
                    raise ValueError("a document id comes back after another document: hierarchy and top want every document in one piece")
                if self.shelves is not None:
                    edges = {start for start, _, _ in self.document_spans(rows.start or 0)}
                    shelves = self.shelf_spans(rows.start or 0)
                    if len({shelf for _, _, shelf in shelves}) < len(shelves) or not {start for start, _, _ in shelves} <= edges:
                        raise ValueError(
                            "a shelf's documents must be whole and beside one another: a shelf comes back, or changes inside a document"
                        )

    def document_spans(self, row: int) -> list[tuple[int, int, int]]:
        """(start, stop, id) of each stretch of equal document ids among the global positions."""
        return self._spans("documents", row)

    def shelf_spans(self, row: int) -> list[tuple[int, int, int]]:
        """(start, stop, id) of each shelf."""
        return self._spans("shelves", row)

    def _spans(self, name: str, row: int) -> list[tuple[int, int, int]]:
        ids = getattr(self, name)

        def spans():
            values, counts = torch.unique_consecutive((ids if ids.dim() == 1 else ids[row]).cpu(), return_counts=True)
            stops = counts.cumsum(0).tolist()
            return list(zip([0, *stops[:-1]], stops, values.tolist()))

        return self.kept((name, row if ids.dim() == 2 else 0), spans)

    def _cut(self, query_runs, key_runs, row) -> list[Tile]:
        positionless = not (self.sparse or self.alibi)
        queries, keys = self._stretches(query_runs, row), self._stretches(key_runs, row)
        if positionless and query_runs == key_runs:
            # A rank's tokens are in ascending order, so among its own the local order is the global one:
            # what is adjacent locally becomes one stretch, and one triangle, whatever lies between.
            queries = keys = _by_local_index(queries)
        tiles = self._pairs(queries, keys, seen_as_sinks=False)
        if self.sinks:
            tiles += self._pairs(self._stretches(query_runs, row, whole_documents=True), keys, seen_as_sinks=True)
        return coalesce(tiles, one_distance=not self.alibi)

    def _pairs(self, queries: list[Stretch], keys: list[Stretch], seen_as_sinks: bool) -> list[Tile]:
        """Tiles of queries and keys of one kin: sinks for every query of their document, the others as the fields say."""
        keys_of: dict[tuple, list[Run]] = {}
        for stretch in keys:
            if stretch.sinks == seen_as_sinks:
                keys_of.setdefault(stretch.kin[:1] if seen_as_sinks else stretch.kin, []).append(stretch.run)
        bounded = self.window is not None and not seen_as_sinks
        least = 0 if self.causal else 1 - self.window if bounded else None
        most = self.window - 1 if bounded else None
        stride = 1 if seen_as_sinks else self.stride or 1
        tiles = []
        for stretch in queries:
            for key_run in keys_of.get(stretch.kin, ()):
                tiles += _residues(stretch.run, key_run, least, most, stride) if stride > 1 else _tiles(stretch.run, key_run, least, most)
        return tiles

    def _stretches(self, runs: list[Run], row: int, whole_documents: bool = False) -> list[Stretch]:
        """The runs cut at document boundaries, and unless ``whole_documents`` at blocks and after the sinks as well."""
        return self.kept(("stretches", tuple(runs), row, whole_documents), lambda: self._cut_runs(runs, row, whole_documents))

    def _cut_runs(self, runs: list[Run], row: int, whole_documents: bool) -> list[Stretch]:
        spans = self.document_spans(row) if self.documents is not None else [(0, max(r.start + r.stride * r.length for r in runs), 0)]
        starts = self.kept(("starts", row), lambda: {document: start for start, _, document in reversed(spans)})
        stops = [stop for _, stop, _ in spans]
        stretches = []
        for run in runs:
            last = run.start + run.stride * (run.length - 1)
            for start, stop, document in spans[bisect_right(stops, run.start) : bisect_right(stops, last) + 1]:
                part = run.between(start, stop)
                if part is not None:
                    stretches += [Stretch((document,), part)] if whole_documents else self._cut_stretch(part, document, starts[document])
        return stretches

    def _cut_stretch(self, run: Run, document: int, document_start: int) -> list[Stretch]:
        stretches = []
        sinks_stop = document_start + self.sinks
        last = run.start + run.stride * (run.length - 1)
        if self.block is None:
            blocks = [((document,), run)]
        else:
            first_block, last_block = ((position - document_start) // self.block for position in (run.start, last))
            edges = [(b, document_start + b * self.block) for b in range(first_block, last_block + 1)]
            blocks = [((document, b), run.between(edge, edge + self.block)) for b, edge in edges]
        for kin, part in blocks:
            if part is None:
                continue
            sinks = part.between(part.start, sinks_stop) if part.start < sinks_stop else None
            if sinks is not None:
                stretches.append(Stretch(kin, sinks, sinks=True))
                part = part.part(sinks.length, part.length - sinks.length)
            if part.length:
                stretches.append(Stretch(kin, part))
        return stretches


def _by_local_index(stretches: list[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for stretch in stretches:
        run = stretch.run
        before = merged[-1].run if merged and merged[-1].kin == stretch.kin else None
        if before is not None and before.offset + before.length == run.offset:
            merged[-1] = Stretch(stretch.kin, Run(before.offset, 1, before.length + run.length, before.offset))
        else:
            merged.append(Stretch(stretch.kin, Run(run.offset, 1, run.length, run.offset)))
    return merged


def _tiles(query: Run, key: Run, least: int | None, most: int | None) -> list[Tile]:
    """Tiles of the pairs whose distance (query position − key position) is between ``least`` and ``most``."""
    assert (query.stride, query.step) == (key.stride, key.step), "runs of one mesh have one stride"
    distance, stride = query.start - key.start, query.stride
    upper = None if least is None else (distance - least) // stride
    lower = None if most is None else -((most - distance) // stride)
    return band_tiles(
        Tile(query.offset, query.length, key.offset, key.length, lower, upper, step=query.step, distance=distance, stride=stride)
    )


def _residues(query: Run, key: Run, least: int | None, most: int | None, stride: int) -> list[Tile]:
    """``_tiles`` of the pairs whose distance is a multiple of ``stride``: each class of queries meets one class of keys."""
    every = stride // math.gcd(stride, query.stride)
    classes = {key.part(first, 1).start % stride: first for first in range(min(every, key.length))}
    tiles = []
    for first in range(min(every, query.length)):
        other = classes.get(query.part(first, 1).start % stride)
        if other is not None:
            own = (query.part(first, -(-(query.length - first) // every), every), key.part(other, -(-(key.length - other) // every), every))
            tiles += _tiles(*own, least, most)
    return tiles


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of Press et al. 2022: 2^(−8 i / n) for n heads, a power of two; otherwise those of the next smaller
    power of two, and every other one of the next larger."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (heads - power), 2)]
