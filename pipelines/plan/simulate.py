"""The attention of a mesh of any size, without the mesh: its schedule, worked out by the ring's own planner, and one tiny
attention, forward and backward, run by the ring's own code on ranks that are threads."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from pipelines.plan.shape import FP32, Shape
from workers.attention import attend
from workers.attention.emulated import emulate
from workers.attention.layout import shard
from workers.attention.plan import busiest_over_mean
from workers.mesh import MeshSpec

TOKENS = 16  # of a ring rank, in the attention that is run


class Hop(NamedTuple):
    """One step round the ring over all ranks: most and mean visible pairs, and the most rows and bytes that a rank receives."""

    distance: int
    most_pairs: int
    mean_pairs: float
    rows: int
    forward_bytes: int
    backward_bytes: int


class Simulation(NamedTuple):
    """balance: the busiest rank's pairs over the mean. critical: every hop as long as its busiest rank takes, over the mean."""

    mesh: MeshSpec
    pairs: list[int]
    balance: float
    critical: float
    hops: list[Hop]
    error: float
    gradient_error: float


def mesh_of(shape: Shape, ranks: int) -> Shape:
    """``shape`` on ``ranks`` ranks: the ring grows or shrinks, other axes stay. Raises ValueError when that does not divide."""
    mesh = shape.mesh
    others = mesh.world // mesh.ring
    if ranks < 1 or ranks % others:
        raise ValueError(
            f"--simulate {ranks} ranks are not a multiple of the mesh without its ring, which is {others}; choose a multiple of {others}"
        )
    ring = ranks // others
    settings = dataclasses.replace(shape.config.mesh, ring=ring, ulysses=mesh.ulysses, cp=None)
    return dataclasses.replace(shape, config=shape.config.model_copy(update={"mesh": settings}), mesh=dataclasses.replace(mesh, ring=ring))


def simulate(shape: Shape) -> Simulation:
    """The schedule of ``shape``'s ring on every rank, and what the tiny attention differs from one rank's by."""
    ring, row = shape.mesh.ring, shape.row(2 * shape.kv_heads // shape.mesh.ulysses * shape.model.head_dim, 1)
    plans = [shape.hops(rank) for rank in range(ring)]
    hops = []
    for distance in range(ring):
        at_once = [plan[distance] for plan in plans]
        pairs = [hop.pairs for hop in at_once]
        rows = max(sum(stop - start for start, stop in hop.received) for hop in at_once)
        hops.append(Hop(distance, max(pairs), sum(pairs) / ring, rows, rows * row * shape.element, rows * row * (shape.element + FP32)))
    of_ranks = [sum(hop.pairs for hop in plan) for plan in plans]
    critical = sum(hop.most_pairs for hop in hops) * ring / max(1, sum(of_ranks))
    return Simulation(shape.mesh, of_ranks, busiest_over_mean(of_ranks), critical, hops, *_prove(shape))


def _prove(shape: Shape) -> tuple[float, float]:
    """Largest difference of output and gradients between the ring of threads and one rank, on TOKENS tokens a rank."""
    ring, heads = shape.mesh.ring, (4, 2)
    pattern = shape.model.pattern()
    generator = torch.Generator().manual_seed(0)
    length = TOKENS * ring
    whole = [torch.randn(1, length, count, 8, generator=generator) for count in (heads[0], heads[1], heads[1])]
    grad = torch.randn(whole[0].shape, generator=generator)

    def run(mesh):
        parts = [shard(x, mesh, 1).clone().requires_grad_() for x in whole]
        out = attend(*parts, pattern, mesh=mesh, backend="reference")
        return out.detach(), torch.autograd.grad(out, parts, shard(grad, mesh, 1))

    expected_out, expected = run(None)
    found = emulate(ring, lambda mesh: (mesh, *run(mesh)), shape.mesh.layout)
    error = max((out - shard(expected_out, mesh, 1)).abs().max().item() for mesh, out, _ in found)
    gradient = max((g - shard(e, mesh, 1)).abs().max().item() for mesh, _, grads in found for g, e in zip(grads, expected))
    return error, gradient
