"""Exact ring attention (Liu et al. 2023, Ring Attention with Blockwise Transformers), forward and backward.

Each rank keeps its queries. Keys and values go round the ring, one message a hop, the next hop in flight while the
present block is computed; partial results merge by log-sum-exp. In backward dK and dV travel one hop behind the block
they belong to and come home after the last. Only KV heads travel. Accumulators are float32 (float64 for float64).

Legend: B batch, S local tokens, H query heads, G KV heads, D head size, P ring ranks. A forward sends
(P − 1) · 2·B·S·G·D elements of the inputs' type a rank, a backward as much again plus P · 2·B·S·G·D of the accumulators'.
"""

from __future__ import annotations

import torch

from workers.attention.block import Backend
from workers.attention.layout import ring_runs
from workers.attention.merge import merge_
from workers.attention.pattern import Pattern, Run
from workers.attention.transport import Ring


class RingAttention(torch.autograd.Function):
    """``apply(q_BSHD, k_BSGD, v_BSGD, pattern, ring, layout, backend, scale) → out_BSHD``."""

    @staticmethod
    def forward(ctx, q, k, v, pattern: Pattern, ring: Ring, layout: str, backend: Backend, scale: float):
        accumulate = torch.promote_types(q.dtype, torch.float32)
        result = _Output(q, accumulate)
        runs = _runs_of_ranks(q.shape[1], k.shape[1], ring.size, layout)
        kv = (k, v)
        packed = torch.stack(kv) if ring.size > 1 else None
        for hop in range(ring.size):
            source = (ring.rank - hop) % ring.size
            arriving = ring.send(packed) if hop + 1 < ring.size else None
            for rows, tiles in _tiles(pattern, runs, ring.rank, source):
                for tile in tiles:
                    qs, ks = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
                    result.add(rows, qs, *backend.forward(q[rows, qs], kv[0][rows, ks], kv[1][rows, ks], tile.causal, scale))
            if arriving is not None:
                packed = arriving.wait()
                kv = packed.unbind()
        out, lse = result.finish()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context = (pattern, ring, layout, backend, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        pattern, ring, layout, backend, scale = ctx.context
        accumulate = torch.promote_types(q.dtype, torch.float32)
        runs = _runs_of_ranks(q.shape[1], k.shape[1], ring.size, layout)
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        dq = _Sum(q, accumulate)
        kv = (k, v)
        packed = torch.stack(kv) if ring.size > 1 else None
        returning = None
        for hop in range(ring.size):
            source = (ring.rank - hop) % ring.size
            arriving = ring.send(packed) if hop + 1 < ring.size else None
            dk, dv = _Sum(k, accumulate), _Sum(v, accumulate)
            for rows, tiles in _tiles(pattern, runs, ring.rank, source):
                for tile in tiles:
                    qs, ks = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
                    dq_tile, dk_tile, dv_tile = backend.backward(
                        grad[rows, qs], q[rows, qs], kv[0][rows, ks], kv[1][rows, ks], out[rows, qs], lse[rows, qs], tile.causal, scale
                    )
                    dq.add(rows, qs, dq_tile)
                    dk.add(rows, ks, dk_tile)
                    dv.add(rows, ks, dv_tile)
            if ring.size == 1:
                return dq.finish(q.dtype), dk.finish(k.dtype), dv.finish(v.dtype), *[None] * 5
            if returning is None:
                dkv = torch.stack((dk.finish(accumulate), dv.finish(accumulate)))
            else:
                # What the block has gathered so far was sent one hop ago and crossed while this block was computed.
                dkv = returning.wait()
                dk.add_to(dkv[0])
                dv.add_to(dkv[1])
            returning = ring.send(dkv)
            if arriving is not None:
                packed = arriving.wait()
                kv = packed.unbind()
        dk, dv = returning.wait().unbind()
        return dq.finish(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 5


def _runs_of_ranks(queries: int, keys: int, ring: int, layout: str) -> tuple[list[list[Run]], list[list[Run]]]:
    """The runs of queries and of keys on every ring rank. On one rank fewer queries than keys are the last ones."""
    if ring == 1:
        return [[Run(keys - queries, 1, queries, 0)]], [[Run(0, 1, keys, 0)]]
    runs = [ring_runs(queries * ring, ring, rank, layout) for rank in range(ring)]
    return runs, runs


def _tiles(pattern: Pattern, runs, rank: int, source: int):
    """``(rows, tiles)`` of this rank's queries against the block that came from ring rank ``source``."""
    query_runs, key_runs = runs
    return [(rows, pattern.tiles(query_runs[rank], key_runs[source], rows.start or 0)) for rows in pattern.rows]


class _Output:
    """out and lse of this rank's queries, merged tile by tile. The first tile that covers everything is kept as it is."""

    def __init__(self, q: torch.Tensor, dtype: torch.dtype):
        self.q, self.dtype, self.out, self.lse = q, dtype, None, None

    def add(self, rows: slice, queries: slice, out, lse) -> None:
        if self.out is None:
            if out.shape == self.q.shape:
                self.out, self.lse = out.to(self.dtype), lse.contiguous()
                return
            self._start()
        merge_(self.out[rows, queries], self.lse[rows, queries], out, lse)

    def finish(self):
        if self.out is None:
            self._start()
        return self.out.to(self.q.dtype), self.lse

    def _start(self):
        self.out = self.q.new_zeros(self.q.shape, dtype=self.dtype)
        self.lse = self.q.new_full(self.q.shape[:3], -torch.inf, dtype=self.dtype)


class _Sum:
    """A gradient, summed tile by tile. The first tile that covers everything is kept as it is."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype):
        self.like, self.dtype, self.total = like, dtype, None

    def add(self, rows: slice, tokens: slice, part: torch.Tensor) -> None:
        if self.total is None:
            if part.shape == self.like.shape:
                self.total = part.to(self.dtype)
                return
            self._start()
        self.total[rows, tokens] += part

    def add_to(self, total: torch.Tensor) -> None:
        if self.total is not None:
            total += self.total

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        if self.total is None:
            self._start()
        return self.total.to(dtype)

    def _start(self):
        self.total = self.like.new_zeros(self.like.shape, dtype=self.dtype)
