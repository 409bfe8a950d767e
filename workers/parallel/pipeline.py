"""Pipeline parallelism: blocks split over stages, micro-batches in flight between them (Huang et al. 2019, GPipe;
Narayanan et al. 2019, PipeDream: one forward, one backward), on ``torch.distributed.pipelining``.

A stage is the decoder without the layers that other stages have: the first embeds, the last has the norm, the head and
the loss. Only hidden states and their gradients travel. Positions, targets and patterns are given to all stages, since the
leader of a data-parallel group hands every rank of the group its part of the batch.

Legend: B sequences of a micro-batch, s tokens of a context rank, D model size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

TIED = "embed_tokens.weight"


class Elsewhere(nn.Module):
    """Stands for a layer of another stage, and passes on what it gets.

    On the last stage of a model with tied embeddings it holds the embedding's weight, for the head to share: each of the
    two stages has the parameter under its one name, so it starts, is saved and is moved by the optimizer alike in both.
    """

    def __init__(self, weight: nn.Parameter | None = None):
        super().__init__()
        self.register_parameter("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def keep_stage(model: nn.Module, mesh) -> None:
    """Take out of a decoder on the meta device what other stages have, in place; one stage keeps all of it.

    Blocks are spread as evenly as they divide, later stages getting the odd ones. Parameters keep the names that they have in
    the whole model, so initial values and checkpoints do not depend on the number of stages.
    """
    count, stage, stages = model.config.layers, mesh.pp_rank, mesh.spec.pp
    for layer in range(count):
        if not stage * count // stages <= layer < (stage + 1) * count // stages:
            delattr(model.layers, str(layer))
    if stage > 0:
        tied = model.config.tie_embeddings and mesh.is_last_stage
        model.embed_tokens, model.sinusoids = Elsewhere(model.embed_tokens.weight if tied else None), None
    if not mesh.is_last_stage:
        model.norm, model.lm_head = Elsewhere(), Elsewhere()


class _Part(nn.Module):
    """A stage as a schedule calls it: with what travels, and the number of the micro-batch that says the rest."""

    def __init__(self, model, mesh, batches: Sequence, head_of: Callable):
        super().__init__()
        self.model, self.last = model, mesh.is_last_stage
        self.batches, self.head_of = batches, head_of

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        batch = self.batches[number.item()]
        if not self.last:
            return self.model(x, batch.positions, batch.pattern, length=batch.length, head=_hidden)
        loss, _ = self.model(x, batch.positions, batch.pattern, length=batch.length, head=self.head_of(batch))
        return loss


class _Stage(PipelineStage):
    """torch's stage, but for two things.

    It hides the decoder's FSDP from torch, which would keep whole weights and whole gradients from a step's first micro-batch
    to its last: here every backward reduces into the sharded gradient, as it does without stages. And it has buffers for
    as many hidden states as are in flight, where torch has one for each micro-batch of the step.
    """

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
        self.submod.model.set_requires_all_reduce(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _setup_forward_recv_info(self, num_microbatches, has_backward):
        super()._setup_forward_recv_info(min(num_microbatches, self.num_stages), has_backward)
        self.args_recv_info = _in_turn(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches):
        super()._setup_backward_recv_info(1)
        self.chunks, self.grad_recv_info = num_microbatches, _in_turn(self.grad_recv_info, num_microbatches)


def _in_turn(buffers: dict, count: int) -> dict:
    return {number: buffers[number % len(buffers)] for number in range(count)}


def forward_backward(model, mesh, batches: Sequence, head_of: Callable) -> list[float]:
    """A step's micro-batches, all of one shape, through all stages and back; gradients add up as without stages.

    Args:
        batches: what ``workers.training.batch.receive`` gave, on every stage.
        head_of: ``head_of(batch)`` → ``head(hidden, weight)`` → (loss to run backward from, anything).

    Returns the micro-batches' losses on the last stage, and nothing on the others. One forward, one backward in turn, so a stage
    keeps activations of at most ``pp`` micro-batches; of fewer micro-batches than stages all go forward, then all back.
    """
    tokens, hidden = batches[0].tokens.to("meta"), _hidden_like(model, mesh, batches[0], "meta").requires_grad_()
    stage = _Stage(
        _Part(model, mesh, batches, head_of), mesh.pp_rank, mesh.spec.pp, mesh.device, group=mesh.pp_group,
        input_args=tokens if mesh.pp_rank == 0 else hidden,
        output_args=torch.empty((), device="meta", requires_grad=True) if mesh.is_last_stage else hidden,
    )  # fmt: skip
    schedule_of = Schedule1F1B if len(batches) >= mesh.spec.pp else ScheduleGPipe
    schedule = schedule_of(stage, len(batches), loss_fn=lambda loss, _: loss, scale_grads=False)
    numbers, losses = torch.arange(len(batches)), []
    inputs = [torch.cat([batch.tokens for batch in batches])] if mesh.pp_rank == 0 else []
    schedule.step(*inputs, target=numbers, number=numbers, losses=losses, return_outputs=False)
    _sum_tied_gradient(model, mesh)
    return [loss.item() for loss in losses]


def forward(model, mesh, batch, head: Callable):
    """What ``head`` gives for one batch after the last stage, on the ranks of that stage; None on the others. No gradient travels."""
    x = batch.tokens
    if mesh.pp_rank > 0:
        x = _hidden_like(model, mesh, batch, mesh.device)
        dist.recv(x, group=mesh.pp_group, group_src=mesh.pp_rank - 1)
    result = model(x, batch.positions, batch.pattern, length=batch.length, head=head if mesh.is_last_stage else _hidden)
    if mesh.is_last_stage:
        return result
    dist.send(result.contiguous(), group=mesh.pp_group, group_dst=mesh.pp_rank + 1)


def held_twice(model, mesh) -> tuple[str, ...]:
    """Names of parameters that two stages hold: each has the whole gradient, which the norm counts once."""
    return (TIED,) if model.config.tie_embeddings and mesh.spec.pp > 1 else ()


def _sum_tied_gradient(model, mesh) -> None:
    """First and last stage each have a part of the gradient of a tied embedding; both get the sum, bit for bit the same.

    One that an adapter leaves frozen has none.
    """
    other = mesh.spec.pp - 1 - mesh.pp_rank
    if not held_twice(model, mesh) or {mesh.pp_rank, other} != {0, mesh.spec.pp - 1} or not model.embed_tokens.weight.requires_grad:
        return
    gradient = model.embed_tokens.weight.grad
    ours = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    theirs = torch.empty_like(ours)
    ends = [dist.P2POp(op, x, group=mesh.pp_group, group_peer=other) for op, x in ((dist.isend, ours), (dist.irecv, theirs))]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    ours += theirs


def _hidden(hidden_BsD: torch.Tensor, _) -> torch.Tensor:
    return hidden_BsD


def _hidden_like(model, mesh, batch, device) -> torch.Tensor:
    """Room for what travels: under tensor parallelism a rank's share of the tokens."""
    rows, length = batch.tokens.shape
    return torch.empty(rows, length // mesh.spec.tp, model.config.dim, dtype=model.activation_dtype, device=device)
