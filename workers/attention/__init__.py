"""Attention: ``attend`` is the only door to it.

Read ``pattern`` (what may see what), ``layout`` (who holds which tokens), ``block`` (one tile by one kernel),
``merge`` (tiles become one softmax) and ``ring`` (blocks travel), in this order.
"""

from __future__ import annotations

import torch

from workers.attention.block import resolve
from workers.attention.pattern import Pattern
from workers.attention.ring import RingAttention
from workers.attention.transport import Ring, Traffic
from workers.attention.ulysses import gather_heads, gather_tokens

__all__ = ["Pattern", "attend"]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, *, mesh=None, scale: float | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Exact attention of a sequence that is spread over the context axis of ``mesh``.

    Args:
        q: [B, S, H, D], this rank's queries, laid out by ``workers.attention.layout.shard``.
        k, v: [B, S, H_kv, D]; H must be a multiple of H_kv: query head i uses KV head i // (H / H_kv).
        pattern: what may see what, in global positions.
        mesh: a built mesh; None is one rank, and then q may be shorter than k: its tokens are the last ones.
        scale: factor of the scores; 1 / sqrt(D) by default.

    Returns [B, S, H, D]. A query that sees no key gives 0. Raises ValueError for shapes that do not fit.
    """
    _check(q, k, v, pattern, mesh)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = resolve(backend, q.device, q.dtype, q.shape[-1])
    if mesh is None:
        return RingAttention.apply(q, k, v, pattern, Ring(None, Traffic()), "contiguous", kernel, scale)
    if mesh.ulysses > 1:
        q, k, v = (gather_tokens(x, mesh.ulysses_group) for x in (q, k, v))
    out = RingAttention.apply(q, k, v, pattern, mesh.ring_transport, mesh.layout, kernel, scale)
    return gather_heads(out, mesh.ulysses_group) if mesh.ulysses > 1 else out


def _check(q, k, v, pattern, mesh):
    ulysses, cp = (mesh.ulysses, mesh.spec.cp) if mesh is not None else (1, 1)
    if q.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: want [B, S, H, D] and twice [B, S, H_kv, D]")
    if q.shape[2] % k.shape[2] or k.shape[2] % ulysses:
        raise ValueError(f"{q.shape[2]} query heads and {k.shape[2]} KV heads do not divide, or not by ulysses = {ulysses}")
    if q.shape[1] != k.shape[1] and (mesh is not None or q.shape[1] > k.shape[1]):
        raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys: on a mesh the numbers are equal, on one rank queries are the last keys")
    pattern.check(q.shape[0], k.shape[1] * cp)
