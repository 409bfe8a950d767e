"""Who holds which tokens of a sequence on the context axis.

Legend: S global length, s = S / cp tokens of one rank, P ring ranks, U ulysses ranks.

A ring rank's tokens are a few *runs*: arithmetic progressions of global positions, in ascending order.

- ``zigzag``: chunks r and 2P − 1 − r of 2P. Every rank has the same causal work at every hop (zhuzilin, ring-flash-attention).
- ``contiguous``: chunk r of P. What a sliding window wants: neighbours hold neighbours.
- ``striped``: positions r, r + P, r + 2P, … (Brandon et al. 2023, Striped Attention).

The U ulysses ranks of a ring rank split its tokens, in that order, into U equal parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Run(NamedTuple):
    """``length`` tokens at global positions ``start, start + stride, …``, held at local indices ``offset, offset + step, …``."""

    start: int
    stride: int
    length: int
    offset: int
    step: int = 1

    def part(self, first: int, length: int, every: int = 1) -> Run:
        """``length`` tokens of the run from its ``first`` on, or every so many of them."""
        return Run(self.start + first * self.stride, self.stride * every, length, self.offset + first * self.step, self.step * every)

    def between(self, start: int, stop: int) -> Run | None:
        """The tokens at global positions [start, stop)."""
        first = max(0, -(-(start - self.start) // self.stride))
        last = min(self.length, -(-(stop - self.start) // self.stride))
        return self.part(first, last - first) if first < last else None


def ring_runs(length: int, ring: int, rank: int, layout: str) -> list[Run]:
    """The runs of ring rank ``rank`` for a sequence of ``length`` tokens, which must divide (see ``MeshSpec.padded``)."""
    if ring == 1:
        return [Run(0, 1, length, 0)]
    if layout == "contiguous":
        size = length // ring
        return [Run(rank * size, 1, size, 0)]
    if layout == "striped":
        return [Run(rank, ring, length // ring, 0)]
    assert layout == "zigzag", layout
    size = length // (2 * ring)
    return [Run(rank * size, 1, size, 0), Run((2 * ring - 1 - rank) * size, 1, size, size)]


def positions(length: int, mesh, *, cp_rank: int | None = None) -> torch.Tensor:
    """Global positions of the tokens that a context rank holds (this one by default), int64 [s].

    Raises ValueError when ``length`` does not divide over the mesh; nothing is ever cut off.
    """
    if mesh is None:
        return torch.arange(length)
    cp_rank = mesh.cp_rank if cp_rank is None else cp_rank
    multiple = 2 * mesh.ring * mesh.ulysses
    if length % multiple:
        raise ValueError(
            f"a sequence of {length} tokens does not divide by 2 × ring × ulysses = {multiple}; "
            f"pad it to {-(-length // multiple) * multiple} (MeshSpec.padded)"
        )
    ring_rank, ulysses_rank = divmod(cp_rank, mesh.ulysses)
    runs = ring_runs(length, mesh.ring, ring_rank, mesh.layout)
    whole = torch.cat([torch.arange(r.start, r.start + r.stride * r.length, r.stride) for r in runs])
    return whole.chunk(mesh.ulysses)[ulysses_rank]


def shard(x: torch.Tensor, mesh, dim: int) -> torch.Tensor:
    """This rank's part of ``x``, which holds the whole sequence along ``dim``."""
    if mesh is None or mesh.spec.cp == 1:
        return x
    return x.index_select(dim, positions(x.shape[dim], mesh).to(x.device))


def unshard(x: torch.Tensor, mesh, dim: int) -> torch.Tensor:
    """The whole sequence from every rank's part of it along ``dim``: the inverse of ``shard``. A collective; no gradient."""
    if mesh is None or mesh.spec.cp == 1:
        return x
    local = x.detach().movedim(dim, 0).contiguous()
    ring_parts = local.new_empty((mesh.ulysses, *local.shape))
    dist.all_gather_into_tensor(ring_parts.flatten(0, 1), local, group=mesh.ulysses_group)
    parts = local.new_empty((mesh.ring, *ring_parts.shape))
    dist.all_gather_into_tensor(parts.flatten(0, 2), ring_parts.flatten(0, 1), group=mesh.ring_transport.group)
    length = x.shape[dim] * mesh.spec.cp
    order = torch.cat([positions(length, mesh, cp_rank=rank) for rank in range(mesh.spec.cp)]).to(x.device)
    whole = torch.empty((length, *local.shape[1:]), dtype=x.dtype, device=x.device)
    whole[order] = parts.flatten(0, 2)
    return whole.movedim(0, dim)
