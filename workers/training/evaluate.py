"""Loss on held-out windows, in all and by position: how much a longer context helps shows as a falling curve."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from workers.parallel import pipeline
from workers.training.batch import receive
from workers.training.loss import CHUNK_TOKENS
from workers.training.passes import loss_head
from workers.training.window import IGNORE, Window


def position_edges(context: int) -> list[int]:
    """Bucket edges 0, 64, 128, 256, … up to ``context``."""
    edges = [0]
    width = 64
    while width < context:
        edges.append(width)
        width *= 2
    return [*edges, context]


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    mesh,
    context: int,
    windows: Iterator[Window] | None,
    count: int,
    loss_chunk: int = CHUNK_TOKENS,
    alone: bool = False,
) -> dict:
    """Held-out loss of ``count`` windows per data-parallel group. A collective.

    ``windows`` yields them on the group's leader and is None elsewhere. A target's position is the number of tokens of
    its own document before it in the window, so a bucket says how the loss falls as context grows (with positions that go on
    through the window it is its place there).

    ``alone`` scores the same targets without what stands before their own part (paper of a shelf, file of a repository).

    Returns ``loss`` (nats a target), ``targets`` and ``loss_by_position``: dicts of start, stop, loss, targets. Where documents
    have several parts also ``later_loss`` and ``later_targets``: of the parts that have others before them in their window.
    """
    edges = position_edges(context)
    boundaries = torch.tensor(edges[1:-1], device=mesh.device)
    totals = torch.zeros(2, len(edges), dtype=torch.float64, device=mesh.device)  # the last column: of later parts
    for _ in range(count):
        batch = receive([next(windows)] if windows is not None else None, mesh, context, model.config.pattern, alone)
        result = pipeline.forward(model, mesh, batch, loss_head(batch, mesh, loss_chunk))
        if not mesh.is_last_stage:
            continue
        _, losses = result
        valid = batch.targets != IGNORE
        bucket = torch.bucketize(batch.positions[valid], boundaries, right=True)
        totals[0].scatter_add_(0, bucket, losses[valid].double())
        totals[1].scatter_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
        later = valid & (batch.part > 0)
        totals[:, -1] += torch.stack([losses[later].double().sum(), later.sum()])
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # it keeps whole weights for a backward that never comes; a step or a checkpoint would find them stale
    totals /= mesh.spec.tp  # every tensor rank counted the same tokens
    dist.all_reduce(totals)
    later_loss, later_targets = totals[:, -1].tolist()
    totals = totals[:, :-1]
    loss, targets = totals.sum(1).tolist()
    curve = [
        {"start": start, "stop": stop, "loss": s / n, "targets": int(n)}
        for start, stop, s, n in zip(edges, edges[1:], *totals.tolist())
        if n
    ]
    later = {"later_loss": later_loss / later_targets, "later_targets": int(later_targets)} if later_targets else {}
    return {"loss": loss / targets if targets else 0.0, "targets": int(targets), **later, "loss_by_position": curve}
