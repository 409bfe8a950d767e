"""Exact ring attention (Liu et al. 2023, Ring Attention with Blockwise Transformers), forward and backward.

Each rank keeps its queries; keys and values come to it hop by hop (``plan`` says which rows of them), the next hop in
flight while the present one is computed, and partial results merge by log-sum-exp. In backward the gradients of a hop's
keys and values go home, where they are summed, while the next hop is computed. Only KV heads travel, and only what some
query of the receiver sees. Accumulators are float32 (float64 for float64).

Legend: B batch, S local tokens, M extra keys, H query heads, G KV heads, D head size, P ring ranks.

Bytes sent by a rank, with n rows of its own block that the other ranks need, counted for each of them (dense: n =
(P − 1) · S), and m rows that it needs of theirs (dense: as many): forward 2·B·n·G·D elements of the inputs' type; backward
as much again, and 2·B·m·G·D elements of the accumulators' for the gradients that go home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from workers.attention.block import Backend, last_dense
from workers.attention.merge import merge_
from workers.attention.plan import Hop
from workers.attention.tape import once
from workers.attention.tile import Tile
from workers.attention.transport import Ring

KEYS, HOME = 0, 1  # tags: keys and values on their way, their gradients on the way back


@dataclass(frozen=True)
class Call:
    """What one attention computes besides its tensors.

    extra_tiles: (batch rows, tiles) of the queries against the extra keys, which every rank has whole.
    slopes: ALiBi's, one a query head of this rank. where: names the layer in the message about a corrupted hop.
    """

    plan: list[Hop]
    ring: Ring
    backend: Backend
    scale: float
    slopes: tuple[float, ...] | None = None
    extra_tiles: list[tuple[slice, list[Tile]]] = field(default_factory=list)
    where: str = ""


class RingAttention(torch.autograd.Function):
    """``apply(q_BSHD, k_BSGD, v_BSGD, extra_k_BMGD, extra_v_BMGD, call) → out_BSHD``; the extra keys may be None."""

    @staticmethod
    def forward(ctx, q, k, v, extra_k, extra_v, call: Call):
        # A single query reads its keys once: putting them in order first would cost as much.
        arrange = call.backend.arrange if q.shape[1] > 1 else last_dense
        q, k, v, extra_k, extra_v = (arrange(x) if x is not None else None for x in (q, k, v, extra_k, extra_v))
        out, lse = once(ring_forward, q, k, v, extra_k, extra_v, call)
        ctx.save_for_backward(q, k, v, extra_k, extra_v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, grad):
        return *ring_backward(grad if grad.stride(-1) == 1 else grad.contiguous(), *ctx.saved_tensors, ctx.call), None


def ring_forward(q, k, v, extra_k, extra_v, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, S, H, D] in the type of q and lse [B, S, H] in the accumulators'."""
    result, plain = _Output(q), replace(call, slopes=None)
    for hop, (hop_k, hop_v) in _travel(k, v, call, "forward"):
        with call.ring.traffic.computing(q.device):
            for rows, tiles in call.extra_tiles if hop.distance == 0 else ():
                for tile in tiles:
                    result.add(rows, tile, *_forward(tile, q[rows], extra_k[rows], extra_v[rows], plain))
            for rows, tiles in hop.tiles:
                for tile in tiles:
                    result.add(rows, tile, *_forward(tile, q[rows], hop_k[rows], hop_v[rows], call))
    return result.finish()


def ring_backward(grad, q, k, v, extra_k, extra_v, out, lse, call: Call) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv and the gradients of the extra keys and values (None where there are none)."""
    dq, own, extra = _Sum(q), (_Sum(k), _Sum(v)), (_Sum(extra_k), _Sum(extra_v)) if extra_k is not None else ()

    def add(rows, tiles, keys, values, dk: _Sum, dv: _Sum, call: Call):
        for tile in tiles:
            of_queries = (tile.q_of(x[rows]).flatten(0, 1) for x in (grad, q, out, lse))
            parts = _backward(tile, *of_queries, keys[rows], values[rows], call)
            call.ring.traffic.scores += tile.pairs * q[rows].shape[0] * q.shape[2]
            dq.add_queries(rows, tile, parts[0])
            dk.add_keys(rows, tile, parts[1])
            dv.add_keys(rows, tile, parts[2])

    plain = replace(call, slopes=None)
    returning, home = None, None
    for hop, (hop_k, hop_v) in _travel(k, v, call, "backward"):
        sums = own if hop.distance == 0 else (_Sum(hop_k), _Sum(hop_v)) if hop.received else None
        with call.ring.traffic.computing(q.device):
            for rows, tiles in call.extra_tiles if hop.distance == 0 else ():
                add(rows, tiles, extra_k, extra_v, *extra, plain)
            for rows, tiles in hop.tiles:
                add(rows, tiles, hop_k, hop_v, *sums, call)
        if returning is not None:
            home = _add_home(*returning, own)
        if hop.distance:
            sent = torch.stack([x.finish(x.dtype).transpose(1, 2) for x in sums]) if sums else None
            label = f"hop {hop.distance} of the gradients{call.where}"
            returning = hop, call.ring.exchange(-hop.distance, sent, _like(k, hop.sent, own[0].dtype, home), HOME, label)
    if returning is not None:
        _add_home(*returning, own)
    grads = zip((dq, *own, *extra), (q, k, v, extra_k, extra_v))
    grads = [total.finish(x.dtype) for total, x in grads]
    return *grads, *[None] * (5 - len(grads))


def _travel(k, v, call: Call, direction: str) -> Iterator[tuple[Hop, tuple]]:
    """Each hop with the keys and values that it brought. The next hop's are on their way meanwhile, into the buffer of the one
    before: two are enough for a ring of any size."""
    packed: dict[tuple, torch.Tensor] = {}

    def start(hop: Hop, used: torch.Tensor | None):
        key = tuple(hop.sent)
        if key and key not in packed:
            packed.clear()
            packed[key] = torch.stack([_rows(x, hop.sent).transpose(1, 2) for x in (k, v)])
        label = f"hop {hop.distance} of the {direction}{call.where}"
        return call.ring.exchange(hop.distance, packed.get(key), _like(k, hop.received, k.dtype, used), KEYS, label)

    arriving, used = None, None
    for index, hop in enumerate(call.plan):
        arrived = arriving.wait() if arriving is not None else None
        following = call.plan[index + 1] if index + 1 < len(call.plan) else None
        arriving = start(following, used) if following is not None else None
        yield hop, (k, v) if hop.distance == 0 else (None, None) if arrived is None else arrived.transpose(2, 3).unbind()
        used = arrived


def _rows(x_BSGD: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
    parts = [x_BSGD[:, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _like(k_BSGD: torch.Tensor, ranges: list[tuple[int, int]], dtype: torch.dtype, used: torch.Tensor | None) -> torch.Tensor | None:
    """A buffer [2, B, G, n, D] for keys and values of the n rows in ``ranges``, ``used`` again if it fits; None for none."""
    rows = sum(stop - start for start, stop in ranges)
    batch, _, heads, size = k_BSGD.shape
    shape = (2, batch, heads, rows, size)
    if used is not None and used.shape == shape:
        return used
    return k_BSGD.new_empty(shape, dtype=dtype) if rows else None


def _add_home(hop: Hop, exchange, own: tuple[_Sum, _Sum]) -> torch.Tensor | None:
    """Add what the rank ``hop.distance`` places on has computed for this rank's keys and values. Returns the buffer it came in."""
    received = exchange.wait()
    if received is None:
        return None
    for total, part in zip(own, received.transpose(2, 3).unbind()):
        first = 0
        for start, stop in hop.sent:
            total.add_range(start, stop, part[:, first : first + stop - start])
            first += stop - start
    return received


def _forward(tile: Tile, q, k, v, call: Call):
    queries, keys, values = (x.flatten(0, 1) for x in (tile.q_of(q), tile.k_of(k), tile.k_of(v)))
    return call.backend.forward(queries, keys, values, tile, call.slopes, call.scale)


def _backward(tile: Tile, grad, q, out, lse, k, v, call: Call):
    keys, values = (tile.k_of(x).flatten(0, 1) for x in (k, v))
    return call.backend.backward(grad, q, keys, values, out, lse, tile, call.slopes, call.scale)


def _covers(tile: Tile, size: int, part: torch.Tensor, whole_BSHD: torch.Tensor) -> bool:
    """Whether a part of ``tile``, with ``size`` tokens a rung, holds every token of every batch row exactly once."""
    consecutive = tile.step == 1 and (tile.rungs == 1 or tile.shift == size)
    return consecutive and part.shape[0] == whole_BSHD.shape[0] * tile.rungs and size * tile.rungs == whole_BSHD.shape[1]


def _in_a_row(tile: Tile, part: torch.Tensor) -> torch.Tensor:
    return part if tile.rungs == 1 else part.unflatten(0, (-1, tile.rungs)).flatten(1, 2)


class _Output:
    """out and lse of this rank's queries, merged tile by tile. A first tile that covers everything is kept as it is."""

    def __init__(self, q: torch.Tensor):
        self.q, self.dtype, self.out, self.lse = q, torch.promote_types(q.dtype, torch.float32), None, None

    def add(self, rows: slice, tile: Tile, out_NQHD: torch.Tensor, lse_NQH: torch.Tensor) -> None:
        if self.out is None:
            if _covers(tile, tile.queries, out_NQHD, self.q):
                self.out, self.lse = _in_a_row(tile, out_NQHD).to(self.dtype), _in_a_row(tile, lse_NQH).contiguous()
                return
            self._start()
        out, lse = tile.q_of(self.out[rows]), tile.q_of(self.lse[rows])
        merge_(out, lse, out_NQHD.unflatten(0, out.shape[:2]), lse_NQH.unflatten(0, lse.shape[:2]))

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.out is None:
            self._start()
        self.lse.exact = True  # every weight of a row is exp(score − lse): where tensors are kept compressed, this one is not
        return self.out.to(self.q.dtype), self.lse

    def _start(self):
        self.out = self.q.new_zeros(self.q.shape, dtype=self.dtype)
        self.lse = self.q.new_full(self.q.shape[:3], -torch.inf, dtype=self.dtype)


class _Sum:
    """A gradient, summed tile by tile. A first tile that covers everything is kept as it is."""

    def __init__(self, like: torch.Tensor):
        self.like, self.dtype, self.total = like, torch.promote_types(like.dtype, torch.float32), None

    def add_queries(self, rows: slice, tile: Tile, part_NQHD: torch.Tensor) -> None:
        if not self._keep(tile, tile.queries, part_NQHD):
            view = tile.q_of(self.total[rows])
            view += part_NQHD.unflatten(0, view.shape[:2])

    def add_keys(self, rows: slice, tile: Tile, part_NKGD: torch.Tensor) -> None:
        if not self._keep(tile, tile.keys, part_NKGD):
            tile.add_keys_(self.total[rows], part_NKGD.unflatten(0, (-1, tile.rungs)))

    def add_range(self, start: int, stop: int, part: torch.Tensor) -> None:
        if self.total is None:
            self._start()
        self.total[:, start:stop] += part

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        if self.total is None:
            self._start()
        return self.total.to(dtype)

    def _keep(self, tile: Tile, size: int, part: torch.Tensor) -> bool:
        if self.total is None:
            if _covers(tile, size, part, self.like):
                self.total = _in_a_row(tile, part).to(self.dtype)
                return True
            self._start()
        return False

    def _start(self):
        self.total = self.like.new_zeros(self.like.shape, dtype=self.dtype)
