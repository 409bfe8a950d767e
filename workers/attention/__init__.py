"""Attention: ``attend`` is the only door to it.

Read ``pattern`` (what may see what), ``tile`` (what one kernel call covers), ``layout`` (who holds which tokens), ``plan``
(who needs what of whom), ``block`` and ``kernels`` (one tile by one kernel), ``merge`` (tiles become one softmax), ``ring``
and ``transport`` (blocks travel), in this order. ``segments``, ``hierarchical`` and ``topk`` look at summaries; ``ulysses``
spreads heads; ``emulated`` runs a ring in one process; ``tape`` keeps results for a layer that is recomputed.
"""

from __future__ import annotations

import torch

from workers.attention.block import resolve
from workers.attention.hierarchical import Hierarchy, summary_keys
from workers.attention.pattern import Pattern, alibi_slopes
from workers.attention.plan import make_plan, split_tiles
from workers.attention.ring import Call, RingAttention
from workers.attention.tape import once
from workers.attention.tile import Tile
from workers.attention.topk import TopBlocks, select
from workers.attention.transport import Ring, Traffic
from workers.attention.ulysses import gather_heads, gather_tokens, heads_of, replicate

__all__ = ["Hierarchy", "Pattern", "TopBlocks", "attend"]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, *,
    mesh=None, scale: float | None = None, backend: str = "auto",
    memory: tuple[torch.Tensor, torch.Tensor] | None = None, pool: torch.Tensor | None = None, where: str = "",
) -> torch.Tensor:  # fmt: skip
    """Exact attention of a sequence that is spread over the context axis of ``mesh``.

    Args:
        q: [B, S, H, D], this rank's queries, laid out by ``workers.attention.layout.shard``.
        k, v: [B, S, H_kv, D]; H must be a multiple of H_kv: query head i uses KV head i // (H / H_kv).
        pattern: what may see what, in global positions.
        mesh: a built mesh; None is one rank, and then q may be shorter than k: its tokens are the last ones.
        scale: factor of the scores; 1 / sqrt(D) by default.
        memory: keys and values [M, H_kv, D] that every query sees besides, the same on every rank (learnt sinks); their
            gradients are this rank's part.
        pool: [N, H_kv, D], the learnt vectors that summarise segments under a hierarchical pattern, the same on every
            rank; None is mean pooling. Its gradient is this rank's part.
        where: names the layer, should a hop arrive corrupted, and for a selection that is recomputed.

    Returns [B, S, H, D]. A query that sees no key gives 0. Raises ValueError for shapes that do not fit.
    """
    _check(q, k, v, pattern, mesh)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = resolve(backend, q.device, q.dtype, q.shape[-1], pattern.alibi)
    slopes = _slopes(q.shape[2], mesh) if pattern.alibi else None
    ring, layout, ulysses = Ring(None, Traffic()), "contiguous", 1
    if mesh is not None:
        ring, layout, ulysses = mesh.ring_transport, mesh.layout, mesh.ulysses
    if ulysses > 1:
        k, v = (replicate(x, ulysses) for x in (k, v))
        if memory is not None:
            memory = tuple(heads_of(replicate(x.unsqueeze(0), ulysses), mesh).squeeze(0) for x in memory)
        if pool is not None:
            pool = heads_of(replicate(pool, ulysses, dim=1), mesh, dim=1)
        q, k, v = (gather_tokens(x, mesh) for x in (q, k, v))
    extra = _Extra(kernel)
    if memory is not None:
        extra.add(*(x.expand(q.shape[0], *x.shape) for x in memory), [(slice(None), [Tile(0, q.shape[1], 0, memory[0].shape[0])])])
    if pattern.hierarchy is not None:
        extra.add(*summary_keys(k, v, pool, pattern, scale, ring, layout, q.shape[1], where))
    seen = pattern if pattern.top is None else once(select, q, k, pattern, ring, layout, _head_groups(mesh), where)
    plan = make_plan(seen, q.shape[1], k.shape[1], ring.size, ring.rank, layout, kernel.split)
    out = RingAttention.apply(q, k, v, *extra.tensors(), Call(plan, ring, kernel, scale, slopes, extra.tiles, where))
    return gather_heads(out, mesh) if ulysses > 1 else out


class _Extra:
    """Keys and values that this rank has whole besides the sequence's own, and the tiles of its queries against them."""

    def __init__(self, kernel):
        self._kernel = kernel
        self._keys, self._values, self._count = [], [], 0
        self.tiles = []

    def add(self, k_BMGD, v_BMGD, tiles) -> None:
        for rows, row_tiles in tiles:
            moved = [tile._replace(k_start=tile.k_start + self._count) for tile in row_tiles]
            self.tiles.append((rows, split_tiles(moved, self._kernel.split, alibi=False)))
        self._keys.append(k_BMGD)
        self._values.append(v_BMGD)
        self._count += k_BMGD.shape[1]

    def tensors(self):
        return (torch.cat(self._keys, 1), torch.cat(self._values, 1)) if self._keys else (None, None)


def _head_groups(mesh) -> list:
    """Process groups over which a token's heads are spread."""
    if mesh is None:
        return []
    groups = [mesh.ulysses_group] if mesh.ulysses > 1 else []
    return groups + ([mesh.tp.get_group()] if mesh.spec.tp > 1 else [])


def _slopes(heads: int, mesh) -> tuple[float, ...]:
    """ALiBi's slopes of the heads that this rank computes, of ``heads`` on a tensor rank."""
    if mesh is None:
        return tuple(alibi_slopes(heads))
    slopes = alibi_slopes(heads * mesh.spec.tp)[heads * mesh.tp_rank :]
    share = heads // mesh.ulysses
    return tuple(slopes[share * mesh.ulysses_rank : share * (mesh.ulysses_rank + 1)])


def _check(q, k, v, pattern, mesh):
    ulysses, cp = (mesh.ulysses, mesh.spec.cp) if mesh is not None else (1, 1)
    if q.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: want [B, S, H, D] and twice [B, S, H_kv, D]")
    if q.shape[2] % k.shape[2] or q.shape[2] % ulysses or (k.shape[2] % ulysses and ulysses % k.shape[2]):
        raise ValueError(f"{q.shape[2]} query heads and {k.shape[2]} KV heads do not divide, or not by ulysses = {ulysses}")
    if q.shape[1] != k.shape[1] and (mesh is not None or q.shape[1] > k.shape[1]):
        raise ValueError(
            f"{q.shape[1]} queries and {k.shape[1]} keys: on a mesh the numbers are equal, on one rank queries are the last keys"
        )
    pattern.check(q.shape[0], k.shape[1] * cp)
