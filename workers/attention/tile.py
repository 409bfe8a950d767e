"""A tile: the (query, key) pairs that one kernel call covers, as a rectangle, a band in it, and a ladder of its copies.

Legend: B batch, S local tokens, R rungs, Q queries and K keys of one rung.

- *rectangle*: ``queries`` × ``keys``, local indices from ``q_start`` and ``k_start`` on, ``step`` apart.
- *band*: query i sees key j iff ``lower ≤ j − i ≤ upper``, counted inside the rectangle; None is no limit. (None, 0) on a
  square is the causal triangle; (1 − w, 0) a sliding window of w; (None, None) everything.
- *ladder*: ``rungs`` copies, each ``shift`` local indices further in queries and in keys. The squares on a diagonal are
  one ladder; so are the blocks of a sliding window. A kernel takes a ladder as a batch: one call.

A tile also knows how far its tokens are apart in the sequence (ALiBi asks): query i and key j stand
``distance + stride · (i − j)`` positions apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

from workers.attention.layout import Run


class Tile(NamedTuple):
    """See the top of the file. Indices count tokens of a rank's shard (queries) and of the block at hand (keys)."""

    q_start: int
    queries: int
    k_start: int
    keys: int
    lower: int | None = None
    upper: int | None = None
    step: int = 1
    rungs: int = 1
    shift: int = 0
    distance: int = 0
    stride: int = 1

    @property
    def full(self) -> bool:
        return self.lower is None and self.upper is None

    @property
    def causal(self) -> bool:
        """A square whose lower triangle is visible."""
        return self.lower is None and self.upper == 0 and self.queries == self.keys

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs: the work."""
        return self.rungs * visible_pairs(self.queries, self.keys, self.lower, self.upper)

    @property
    def k_span(self) -> tuple[int, int]:
        """Local indices [start, stop) that hold all keys."""
        return self.k_start, self.k_start + self.shift * (self.rungs - 1) + self.step * (self.keys - 1) + 1

    def q_of(self, x_BS: torch.Tensor) -> torch.Tensor:
        """The queries' part of a tensor [B, S, …], a view [B, R, Q, …]. Rungs never share a query."""
        return self._view(x_BS, self.q_start, self.queries)

    def k_of(self, x_BS: torch.Tensor) -> torch.Tensor:
        """The keys' part of a tensor [B, S, …], a view [B, R, K, …]; rungs may share keys, so it is for reading only."""
        return self._view(x_BS, self.k_start, self.keys)

    def add_keys_(self, total_BS: torch.Tensor, part_BRK: torch.Tensor) -> None:
        """Add what was computed for the keys to a tensor [B, S, …], in place, where rungs share keys as well."""
        # Rungs that are not interleaved share keys when they are longer than their distance: add by such lengths.
        size = self.keys if self.rungs == 1 or self.shift < self.step else min(self.keys, self.shift // self.step)
        for first in range(0, self.keys, size):
            part = part_BRK[:, :, first : first + size]
            self._view(total_BS, self.k_start + first * self.step, part.shape[2]).add_(part)

    def _view(self, x: torch.Tensor, start: int, size: int) -> torch.Tensor:
        batch, token, *rest = x.stride()
        shape = (x.shape[0], self.rungs, size, *x.shape[2:])
        return x.as_strided(shape, (batch, self.shift * token, self.step * token, *rest), x.storage_offset() + start * token)

    def moved(self, queries: int, keys: int, q_by: int, k_by: int, lower: int | None, upper: int | None) -> Tile:
        """A piece of this tile: ``queries`` × ``keys`` from (q_by, k_by) on, with a band of its own. Rungs are kept."""
        return self._replace(
            q_start=self.q_start + q_by * self.step, queries=queries, k_start=self.k_start + k_by * self.step, keys=keys,
            lower=lower, upper=upper, distance=self.distance + self.stride * (q_by - k_by),
        )  # fmt: skip


class TileSource:
    """What ``plan`` asks of that which says what is seen: a ``Pattern``, or the ``Selection`` of a top-k layer.

    ``rows`` are the groups of batch rows that share their tiles; ``alibi`` whether kernels add its bias; ``ladders``
    whether equal tiles may be computed together.
    """

    rows: list[slice]
    alibi: bool = False
    ladders = True

    def tiles(self, query_runs: list[Run], key_runs: list[Run], row: int = 0) -> list[Tile]:
        """The tiles of queries held as ``query_runs`` against keys held as ``key_runs`` (same stride).

        Every visible pair lies in exactly one tile; every query of a tile sees a key of it. Cached: a source is made
        once a step, and a pattern is used by every layer.
        """
        return self.kept((tuple(query_runs), tuple(key_runs), row), lambda: self._cut(query_runs, key_runs, row))

    def kept(self, key: tuple, make: Callable):
        """``make()``, once for every key: what is worked out from a source is kept with it (and not with a changed copy)."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @cached_property
    def _kept(self) -> dict:
        return {}

    def _cut(self, query_runs: list[Run], key_runs: list[Run], row: int) -> list[Tile]:
        raise NotImplementedError


def visible_pairs(queries: int, keys: int, lower: int | None, upper: int | None) -> int:
    """Pairs with ``lower ≤ j − i ≤ upper``, j < keys, for the queries i of a rectangle. Every query must see a key."""
    stop = queries * keys if upper is None else _sum_of_smaller(queries, upper + 1, keys)
    if lower is None:
        return stop
    # Keys before the band: max(0, i + lower) for query i, which is i + lower − min(0, i + lower).
    return stop - (queries * (queries - 1) // 2 + queries * lower - _sum_of_smaller(queries, lower, 0))


def _sum_of_smaller(count: int, first: int, limit: int) -> int:
    """Σ min(first + i, limit) for i in 0 … count − 1."""
    below = min(max(limit - first, 0), count)
    return below * (below - 1) // 2 + below * first + (count - below) * limit


def band_tiles(whole: Tile) -> list[Tile]:
    """The tiles of a rectangle with any band, which may leave it: cut to what is visible, full parts and squares apart.

    Every query of a tile that comes back sees a key.
    """
    lower, upper = whole.lower, whole.upper
    if lower is not None and upper is not None and lower > upper:
        return []  # a window shorter than the distance of a striped rank's tokens can fall between them
    first = 0 if upper is None else max(0, -upper)
    last = whole.queries if lower is None else min(whole.queries, whole.keys - lower)
    if first >= last:
        return []
    k_first = 0 if lower is None else max(0, first + lower)
    k_last = whole.keys if upper is None else min(whole.keys, last + upper)
    if k_first >= k_last:
        return []
    queries, keys = last - first, k_last - k_first
    lower = None if lower is None or lower + first - k_first <= 1 - queries else lower + first - k_first
    upper = None if upper is None or upper + first - k_first >= keys - 1 else upper + first - k_first
    tile = whole.moved(queries, keys, first, k_first, lower, upper)
    if lower is not None or upper is None:
        return [tile]
    tiles = []
    if upper > 0:  # keys that every query sees
        tiles.append(tile.moved(queries, upper, 0, 0, None, None))
    side = keys - upper
    tiles.append(tile.moved(side, side, 0, upper, None, 0 if side > 1 else None))
    if side < queries:
        tiles.append(tile.moved(queries - side, side, side, upper, None, None))
    return tiles


def coalesce(tiles: list[Tile], one_distance: bool) -> list[Tile]:
    """Fewer, larger kernel calls: neighbouring full tiles become one, and equal tiles along a diagonal a ladder.

    ``one_distance``: the pattern does not ask how far tokens are apart, so tiles from different runs may join.
    """
    if one_distance:
        for join in (_join_keys, _join_queries):
            joined: list[Tile] = []
            for tile in tiles:
                both = join(joined[-1], tile) if joined else None
                if both is not None:
                    joined[-1] = both
                else:
                    joined.append(tile)
            tiles = joined
    return _ladders(tiles)


def _join_keys(a: Tile, b: Tile) -> Tile | None:
    if _plain(a) and _plain(b) and a[:2] == b[:2] and b.k_start == a.k_start + a.keys:
        return a._replace(keys=a.keys + b.keys)
    return None


def _join_queries(a: Tile, b: Tile) -> Tile | None:
    if _plain(a) and _plain(b) and a[2:4] == b[2:4] and b.q_start == a.q_start + a.queries:
        return a._replace(queries=a.queries + b.queries)
    return None


def _plain(tile: Tile) -> bool:
    return tile.full and tile.step == 1 and tile.rungs == 1


def _ladders(tiles: list[Tile]) -> list[Tile]:
    """Equal tiles whose starts differ by one shift, the same in queries and keys."""
    ladders: dict[tuple, list[Tile]] = {}
    for tile in tiles:
        kin = ladders.setdefault((tile._replace(q_start=0, k_start=0), tile.q_start - tile.k_start), [])
        if kin and tile.rungs == 1:
            last = kin[-1]
            shift = tile.q_start - (last.q_start + last.shift * (last.rungs - 1))
            # Rungs must not share queries: either they follow one another, or they interleave (steps of a strided pattern).
            apart = shift >= tile.queries if tile.step == 1 else 0 < shift and last.rungs * shift < tile.step
            if apart and (last.rungs == 1 or shift == last.shift):
                kin[-1] = last._replace(rungs=last.rungs + 1, shift=shift)
                continue
        kin.append(tile)
    return [tile for kin in ladders.values() for tile in kin]


def square_pieces(tile: Tile, side: int) -> list[Tile]:
    """A causal square as small causal squares on its diagonal and full blocks below it, whose size doubles.

    A kernel computes a full block at its best speed, while in a causal square it also computes much of what it then
    discards; here only the squares of ``side`` on the diagonal pay that. Each size is one ladder.
    """
    n = tile.queries
    if n <= side:
        return [tile]
    pieces = _rung_or_rungs(tile, side, side, [(start, start) for start in range(0, n - side + 1, side)], 0)
    if n % side:
        rest, start = n % side, n - n % side
        pieces.append(tile.moved(rest, rest, start, start, None, 0))
    size = side
    while size < n:
        starts = [(start, start - size) for start in range(size, n, 2 * size)]
        if n - starts[-1][0] < size:
            start = starts.pop()[0]
            pieces.append(tile.moved(n - start, size, start, start - size, None, None))
        if starts:
            pieces += _rung_or_rungs(tile, size, size, starts, None)
        size *= 2
    return pieces


def row_pieces(tile: Tile, rows: int) -> list[Tile]:
    """A tile with any band as strips of ``rows`` queries against the keys they reach. Strips that are alike are one ladder."""
    pieces: list[Tile] = []
    strips: list[tuple[int, int]] = []
    width = 0
    for start in range(0, tile.queries, rows):
        stop = min(start + rows, tile.queries)
        first = 0 if tile.lower is None else max(0, start + tile.lower)
        last = tile.keys if tile.upper is None else min(tile.keys, stop + tile.upper)
        whole = tile.lower is not None and tile.upper is not None and stop - start == rows
        if whole and start + tile.lower >= 0 and stop + tile.upper <= tile.keys:
            strips.append((start, first))
            width = last - first
            continue
        pieces += band_tiles(
            tile.moved(stop - start, last - first, start, first, _plus(tile.lower, start - first), _plus(tile.upper, start - first))
        )
    if strips:
        pieces += _rung_or_rungs(tile, rows, width, strips, tile.upper + strips[0][0] - strips[0][1], lower=0)
    return pieces


def full_middle(strip: Tile) -> list[Tile]:
    """A strip with a band, much wider than high, as the keys that all its queries see, and the triangles on either side."""
    first = 0 if strip.lower is None else max(0, strip.queries - 1 + strip.lower)
    last = strip.keys if strip.upper is None else min(strip.keys, strip.upper + 1)
    if strip.full or last - first < 2 * strip.queries:
        return [strip]
    sides = [(0, first), (last, strip.keys)]
    pieces = [strip.moved(strip.queries, last - first, 0, first, None, None)]
    for start, stop in sides:
        if start < stop:
            pieces += band_tiles(strip.moved(strip.queries, stop - start, 0, start, _plus(strip.lower, -start), _plus(strip.upper, -start)))
    return pieces


def _plus(limit: int | None, by: int) -> int | None:
    return None if limit is None else limit + by


def _rung_or_rungs(
    tile: Tile, queries: int, keys: int, starts: list[tuple[int, int]], upper: int | None, lower: int | None = None
) -> list[Tile]:
    """Equal pieces of a tile: one ladder, unless the tile is a ladder already."""
    if tile.rungs > 1 or len(starts) == 1:
        return [tile.moved(queries, keys, *start, lower, upper) for start in starts]
    shift = (starts[1][0] - starts[0][0]) * tile.step
    return [tile.moved(queries, keys, *starts[0], lower, upper)._replace(rungs=len(starts), shift=shift)]


def split_ladder(tile: Tile, tokens: int) -> list[Tile]:
    """The ladder in parts whose rungs hold at most ``tokens`` keys or queries together (a rung is never cut)."""
    most = max(1, tokens // max(tile.queries, tile.keys))
    return [
        tile._replace(
            q_start=tile.q_start + first * tile.shift, k_start=tile.k_start + first * tile.shift, rungs=min(most, tile.rungs - first)
        )
        for first in range(0, tile.rungs, most)
    ]
