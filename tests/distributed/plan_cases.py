"""What the ranks of ``test_plan`` run. Imports no pipelines: processes that have Ray to import start slowly."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from tests.distributed.training_cases import window
from workers.mesh import MeshSpec
from workers.training.loop import Job, build_model, train


def held(spec: MeshSpec, job: Job) -> tuple[int, int, int]:
    """(bytes of weights, values that train) of this rank's shards, and its stage."""
    mesh = spec.build("cpu")
    parameters = [(_local(p.data), p.requires_grad) for p in build_model(job, mesh).parameters()]
    return sum(p.numel() * p.element_size() for p, _ in parameters), sum(p.numel() for p, trains in parameters if trains), mesh.pp_rank


def sent(spec: MeshSpec, job: Job) -> int:
    """Bytes that attention of this rank sends in one step."""
    mesh, context = spec.build("cpu"), job.training.context

    def windows(first: int):
        return (window(number, context, packed=False) for number in range(first + mesh.dp_rank, 99, spec.dp))

    train(job, mesh, windows if mesh.is_leader else None)
    return mesh.traffic.bytes_sent


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
