"""Who needs what of whom: the hops of ring attention for one rank, worked out from the pattern before anything is sent.

Hop h brings keys and values from the ring rank h places before, straight from their owner, and of these only the rows
that some query of this rank sees. For a dense pattern that is the bytes of the classic ring; for a sliding window it is
the window's tail from one neighbour; for packed documents it is the documents that straddle ranks; of a strided pattern
the rows between those needed travel as well. A hop that no query needs does not take place. Both ends of a hop work out
the same answer, so nothing is negotiated.

Legend: P ring ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.attention.layout import Run, ring_runs
from workers.attention.pattern import Pattern
from workers.attention.tile import Tile, TileSource, coalesce, split_ladder

RUNG_TOKENS = 16_384  # a ladder may copy its keys into a batch: at most so many at a time


@dataclass(frozen=True)
class Hop:
    """One step round the ring, seen from one rank.

    distance: this rank computes with the block of ring rank ``rank − distance``, and sends its own to ``rank + distance``.
    tiles: (batch rows, tiles), keys counted among the ``received`` rows.
    received, sent: local ranges [start, stop) of the owner's tokens, ascending and apart; none for distance 0.
    rows: how many groups of batch rows there are, those without tiles included.
    """

    distance: int
    tiles: list[tuple[slice, list[Tile]]]
    received: list[tuple[int, int]]
    sent: list[tuple[int, int]]
    rows: int = 1

    @property
    def pairs(self) -> int:
        """Visible pairs computed at this hop, a batch row."""
        return sum(tile.pairs for _, tiles in self.tiles for tile in tiles) // self.rows


def make_plan(
    pattern: TileSource, queries: int, keys: int, ring: int, rank: int, layout: str, split: Callable[[Tile, bool], list[Tile]]
) -> list[Hop]:
    """The hops of ring rank ``rank`` that holds ``queries`` queries and ``keys`` keys, one a distance.

    Those that do nothing stay in the list, so that all ranks start their messages in one order.

    ``split`` cuts a tile into what the backend computes well. Plans are kept with their pattern.
    """
    return pattern.kept(
        ("plan", queries, keys, ring, rank, layout, split), lambda: _make_plan(pattern, queries, keys, ring, rank, layout, split)
    )


def _make_plan(pattern: TileSource, queries: int, keys: int, ring: int, rank: int, layout: str, split) -> list[Hop]:
    if ring == 1:  # fewer queries than keys are the last ones
        query_runs, key_runs = [[Run(keys - queries, 1, queries, 0)]], [[Run(0, 1, keys, 0)]]
    else:
        query_runs = key_runs = [ring_runs(queries * ring, ring, r, layout) for r in range(ring)]

    def between(queries_of: int, keys_of: int) -> list[tuple[slice, list[Tile]]]:
        return [(rows, pattern.tiles(query_runs[queries_of], key_runs[keys_of], rows.start or 0)) for rows in pattern.rows]

    hops = []
    for distance in range(ring):
        source, target = (rank - distance) % ring, (rank + distance) % ring
        tiles, received, sent = between(rank, source), [], []
        if distance:
            # Rung by rung, for what lies between rungs need not travel.
            tiles = [(rows, _rungs(row_tiles)) for rows, row_tiles in tiles]
            received = needed_ranges(tiles)
            sent = needed_ranges([(rows, _rungs(row_tiles)) for rows, row_tiles in between(target, rank)])
            tiles = [(rows, [_among(tile, received) for tile in row_tiles]) for rows, row_tiles in tiles]
        fine = [(rows, split_tiles(row_tiles, split, pattern.alibi, pattern.ladders)) for rows, row_tiles in tiles if row_tiles]
        hops.append(Hop(distance, fine, received, sent, len(pattern.rows)))
    return hops


def split_tiles(tiles: list[Tile], split: Callable[[Tile, bool], list[Tile]], alibi: bool, ladders: bool = True) -> list[Tile]:
    """The tiles in the pieces that a backend computes well; equal ones in ladders, if ``ladders``."""
    pieces = [piece for tile in tiles for piece in split(tile, alibi)]
    return [part for piece in (coalesce(pieces, one_distance=False) if ladders else pieces) for part in split_ladder(piece, RUNG_TOKENS)]


def _rungs(tiles: list[Tile]) -> list[Tile]:
    return [rung._replace(shift=0) for tile in tiles for rung in split_ladder(tile, 0)]


def needed_ranges(tiles: list[tuple[slice, list[Tile]]]) -> list[tuple[int, int]]:
    """The union of the tiles' key ranges as disjoint ranges, ascending."""
    spans = sorted({tile.k_span for _, row_tiles in tiles for tile in row_tiles})
    union: list[tuple[int, int]] = []
    for start, stop in spans:
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


def _among(tile: Tile, ranges: list[tuple[int, int]]) -> Tile:
    """The tile with its keys counted among the rows of ``ranges`` alone."""
    before = 0
    for start, stop in ranges:
        if start <= tile.k_start < stop:
            return tile._replace(k_start=before + tile.k_start - start)
        before += stop - start
    raise AssertionError(f"{tile} is outside {ranges}")


def work(pattern: Pattern, length: int, ring: int, layout: str) -> list[int]:
    """Visible pairs that each ring rank computes, a batch row: what balance is measured by."""
    runs = [ring_runs(length, ring, rank, layout) for rank in range(ring)]
    return [
        sum(t.pairs for key_runs in runs for rows in pattern.rows for t in pattern.tiles(own, key_runs, rows.start or 0))
        // len(pattern.rows)
        for own in runs
    ]


def imbalance(pattern: Pattern, length: int, ring: int, layout: str) -> float:
    """The busiest rank's work over the mean: 1 is perfect balance. Summaries are left out."""
    return busiest_over_mean(work(pattern, length, ring, layout))


def busiest_over_mean(work_of_ranks: list[int]) -> float:
    return max(work_of_ranks) * len(work_of_ranks) / max(1, sum(work_of_ranks))
