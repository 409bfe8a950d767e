"""Forward and backward of a step's micro-batches, on one pipeline stage or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from workers.model import Decoder
from workers.parallel import pipeline
from workers.training.batch import Batch
from workers.training.loss import token_losses
from workers.training.window import IGNORE


def loss_head(batch: Batch, mesh, chunk: int) -> Callable:
    """The decoder's head in training: hidden states and weight → sum of the losses, each token's loss."""
    return partial(token_losses, targets_BS=batch.targets, tp_mesh=mesh.tp, chunk=chunk)


def forward_backward(model: Decoder, mesh, batches: Iterator[Batch], count: int, chunk: int) -> tuple[float, float]:
    """Add the gradient of the summed loss of ``count`` micro-batches to the parameters' gradients.

    Without stages one micro-batch is there at a time. ``chunk``: tokens whose logits are (``token_losses``).
    Returns this rank's share of the loss sum and of the number of targets; the shares of all ranks add up to those of the step.
    """
    head_of = partial(loss_head, mesh=mesh, chunk=chunk)
    loss_sum = targets = 0.0
    if mesh.spec.pp > 1:
        batches = list(batches)
        loss_sum = sum(loss / mesh.spec.tp for loss in pipeline.forward_backward(model, mesh, batches, head_of))
    for number, batch in enumerate(batches, 1):
        if mesh.spec.pp == 1:
            if mesh.spec.replicate > 1:
                model.set_requires_all_reduce(number == count)
            loss, _ = model(batch.tokens, batch.positions, batch.pattern, length=batch.length, head=head_of(batch))
            loss.backward()
            loss_sum += loss.item() / mesh.spec.tp
        targets += (batch.targets != IGNORE).sum().item() / mesh.spec.tp
    return loss_sum, targets if mesh.is_last_stage else 0.0
