"""Dynamic sparse attention: a block of queries sees itself and the best few key blocks before it, exactly.

Blocks are segments of a fixed size, counted from the start of a document. A block of queries scores every earlier block
of its document by the product of a mean query and the mean key, summed over heads, and keeps the best; all heads of all
ranks share the choice. The mean query is that of the block before: the block's own mean would let its later tokens choose
what its earlier ones see. What is chosen is attended to exactly, by the same ring as any other pattern: only chosen rows
travel. The cost of a token is that of the blocks kept, besides S / block products of means.

The choice itself has no gradient. It is kept, so that a recomputation of the layer in backward makes the same one.

Besides the ring's rows a rank sends its mean queries and keys (see ``segments.summaries``), once, and to each other rank
``keep`` − 1 int32 for each of its share of the blocks.

Legend: B batch, s local tokens, M segments, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from workers.attention.layout import Run
from workers.attention.segments import Segment, everywhere, parts_of, runs_of_ranks, segments_of, summaries
from workers.attention.tile import Tile, TileSource, band_tiles, coalesce
from workers.attention.transport import Ring

SCORE_ROWS = 1024  # scores are formed for so many blocks of queries at a time


@dataclass(frozen=True)
class TopBlocks:
    """block: tokens of a block. keep: how many key blocks a block of queries sees, its own among them."""

    block: int = 128
    keep: int = 16

    def __post_init__(self):
        for name in ("block", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"top blocks: {name} is {getattr(self, name)}; it must be at least 1")


@dataclass(eq=False)
class Selection(TileSource):
    """A pattern that was chosen: for each batch row and segment the earlier segments that it sees; of its own, what is causal."""

    rows: list[slice]
    segments: list[list[Segment]]
    chosen: list[list[list[int]]]

    # What later blocks choose must not change by a bit how earlier ones are computed: tiles are joined within a block only.
    ladders = False

    def _cut(self, query_runs, key_runs, row) -> list[Tile]:
        segments, chosen = self.segments[row], self.chosen[row]
        keys_of: dict[int, list[Run]] = {}
        for index, run in _pieces(segments, key_runs):
            keys_of.setdefault(index, []).append(run)
        own, others = [], []
        for index, query in _pieces(segments, query_runs):
            for key in keys_of.get(index, ()):
                distance = query.start - key.start
                own += band_tiles(Tile(query.offset, query.length, key.offset, key.length, None, distance // query.stride))
            seen = [Tile(query.offset, query.length, key.offset, key.length) for other in chosen[index] for key in keys_of.get(other, ())]
            others += coalesce(seen, one_distance=True)
        return coalesce(own, one_distance=True) + others


def _pieces(segments: list[Segment], runs: list[Run]) -> list[tuple[int, Run]]:
    return [
        (part.segment, run.between(segments[part.segment].start, segments[part.segment].stop))
        for run in runs
        for part in parts_of(segments, [run])
    ]


@torch.no_grad()
def select(q_BsHD, k_BsGD, pattern, ring: Ring, layout: str, head_groups: list, where: str) -> Selection:
    """The selection of a whole sequence; the same on every rank.

    Args:
        q_BsHD, k_BsGD: this rank's tokens and heads.
        head_groups: process groups over which heads are spread (ulysses, tensor ranks): scores are summed over them.
        where: names the layer. During backward, that is when a layer is recomputed, its kept selection is returned; if the
            layer ran more than once with this pattern, it chooses anew, from the same numbers.
    """
    kept = pattern.kept(("selections", where), list)
    if torch._C._current_graph_task_id() != -1 and len(kept) == 1:  # in backward, and no doubt whose selection it is
        return kept[0]
    runs = runs_of_ranks(k_BsGD.shape[1] * ring.size, ring, layout)
    if q_BsHD.shape[1] != k_BsGD.shape[1]:
        raise ValueError("top chooses for whole blocks of queries: it needs as many queries as keys (no cache yet)")
    segments, chosen = [], []
    dtype = torch.promote_types(q_BsHD.dtype, torch.float32)
    groups = q_BsHD.shape[2] // k_BsGD.shape[2]
    for row in range(q_BsHD.shape[0]):
        q_sGD, k_sGD = q_BsHD[row].to(dtype).unflatten(1, (-1, groups)).mean(2), k_BsGD[row].to(dtype)

        def lay_out(row: int = row):
            found = segments_of(pattern, pattern.top.block, k_BsGD.shape[1] * ring.size, row)
            return found, [parts_of(found, rank_runs) for rank_runs in runs]

        of_row = row if pattern.documents is not None and pattern.documents.dim() == 2 else 0
        row_segments, parts = pattern.kept(("blocks", of_row, ring.size, layout, k_BsGD.shape[1]), lay_out)
        uniform = q_sGD.new_zeros((1, q_sGD.shape[0], 1, q_sGD.shape[1]))
        means = summaries((q_sGD[None], k_sGD[None]), uniform, parts, len(row_segments), ring, where)
        segments.append(row_segments)
        q_MX, k_MX = (x[0].flatten(1) for x in means)
        chosen.append(_best(q_MX.roll(1, 0), k_MX, row_segments, pattern.top.keep - 1, ring, head_groups, where))
    # A choice belongs to one sequence, whatever it is batched with.
    selection = Selection([slice(row, row + 1) for row in range(q_BsHD.shape[0])], segments, chosen)
    kept.append(selection)
    return selection


def _best(q_MX, k_MX, segments: list[Segment], keep: int, ring: Ring, head_groups, where: str) -> list[list[int]]:
    """For each segment the ``keep`` best of the earlier ones of its document, ascending. Ring ranks share the work."""
    count = len(segments)
    documents = torch.tensor([segment.document for segment in segments], device=q_MX.device)
    share = -(-count // ring.size)
    own = torch.full((1, share, max(keep, 1)), -1, dtype=torch.int32, device=q_MX.device)
    for first in range(ring.rank * share, min((ring.rank + 1) * share, count), SCORE_ROWS):
        stop = min(first + SCORE_ROWS, (ring.rank + 1) * share, count)
        scores = q_MX[first:stop] @ k_MX.T
        for group in head_groups:
            dist.all_reduce(scores, group=group)
        index = torch.arange(first, stop, device=scores.device)[:, None]
        earlier = (torch.arange(count, device=scores.device) < index) & (documents == documents[first:stop, None])
        best = scores.masked_fill(~earlier, -torch.inf).topk(min(keep, count))
        own[0, first - ring.rank * share : stop - ring.rank * share, : best.indices.shape[1]] = torch.where(
            best.values > -torch.inf, best.indices, -1
        ).int()
    table = everywhere(own, ring, [share] * ring.size, where)[0, :count].tolist()
    return [sorted(index for index in row if index >= 0) for row in table]
