"""Cross entropy from hidden states, in chunks: logits of the whole sequence never exist, nor is a chunk's kept.

Gradients of a chunk are formed while its logits are there (Liger kernels, Hsu et al. 2024, do the same), so backward
costs one scaling. Under tensor parallelism each rank forms the logits of its part of the vocabulary only, and rows'
maxima, sums and target logits are reduced (Shoeybi et al. 2019).

Legend: N tokens, n tokens of a chunk, D model size, V vocabulary of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from workers.training.window import IGNORE

CHUNK_TOKENS = 1024  # the default of memory.loss_chunk, too


class _ChunkedCrossEntropy(torch.autograd.Function):
    """``apply(hidden_ND, weight_VD, targets_N, group, first_id, chunk_tokens, train) → loss sum, per-token loss_N`` (0 where ignored).

    ``train`` says whether gradients are wanted: inside ``forward`` autograd no longer tells.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, group, first_id, chunk_tokens, train):
        needs_grad = train and any(ctx.needs_input_grad[:2])
        losses = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
        grad_hidden = torch.zeros_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad and ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            target = targets[chunk]
            if not (target != IGNORE).any():
                continue
            logits = (hidden[chunk] @ weight.t()).float()
            losses[chunk] = _losses_and_gradient_(logits, target, group, first_id)
            if needs_grad:  # ``logits`` now holds its own gradient
                narrow = logits.to(hidden.dtype)
                torch.mm(narrow, weight, out=grad_hidden[chunk])
                if grad_weight is None:  # a frozen head
                    pass
                elif grad_weight.dtype == narrow.dtype:
                    grad_weight.addmm_(narrow.t(), hidden[chunk])
                else:
                    grad_weight += narrow.t() @ hidden[chunk]
                del narrow
            del logits  # before those of the next chunk are made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx, grad, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_weight = grad_weight.mul_(grad).to(ctx.weight_dtype) if grad_weight is not None else None
        return grad_hidden.mul_(grad), grad_weight, None, None, None, None, None


def _losses_and_gradient_(logits_nV, target_n, group, first_id):
    """Loss of each row; ``logits`` is overwritten with softmax − onehot, and with 0 in ignored rows."""
    valid_n = target_n != IGNORE
    local_n = target_n.long() - first_id
    here_n = valid_n & (local_n >= 0) & (local_n < logits_nV.shape[1])
    column_n1 = local_n.where(here_n, 0).unsqueeze(1)

    top_n = logits_nV.amax(dim=1)
    if group is not None:
        dist.all_reduce(top_n, op=dist.ReduceOp.MAX, group=group)
    logits_nV -= top_n.unsqueeze(1)
    picked_n = logits_nV.gather(1, column_n1).squeeze(1) * here_n
    logits_nV.exp_()
    sums_2n = torch.stack((logits_nV.sum(dim=1), picked_n))
    if group is not None:
        dist.all_reduce(sums_2n, group=group)
    total_n, picked_n = sums_2n
    logits_nV *= (valid_n / total_n).unsqueeze(1)
    logits_nV.scatter_add_(1, column_n1, -here_n.unsqueeze(1).to(logits_nV.dtype))
    return (total_n.log() - picked_n) * valid_n


def token_losses(hidden_BSD: torch.Tensor, weight_VD: torch.Tensor, targets_BS: torch.Tensor, tp_mesh=None, chunk: int = CHUNK_TOKENS):
    """Sum of the cross entropy over valid targets, and each token's loss.

    Args:
        hidden_BSD: hidden states after the last norm; under tensor parallelism this rank's share of the tokens.
        weight_VD: the head, whole or sharded by vocabulary (DTensor).
        targets_BS: the token to predict at each position, already shifted; −100 is no target.
        tp_mesh: the tensor axis, when the model is split over it.
        chunk: tokens whose logits exist at a time.

    Returns a scalar (0 when nothing is valid, never NaN) and float32 [B, S]. The scalar carries the gradient; under
    tensor parallelism it is equal on every rank of the axis and backward runs on all of them.
    """
    group, first_id = None, 0
    if isinstance(weight_VD, DTensor):
        first_id = _first_row(weight_VD)
        weight_VD = weight_VD.to_local(grad_placements=[Shard(0)])
        group = tp_mesh.get_group()
        # Every rank needs all tokens for its part of the vocabulary, and returns a part of their gradient.
        whole = DTensor.from_local(hidden_BSD, tp_mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
        hidden_BSD = whole.to_local(grad_placements=[Partial()])
    loss, losses = _ChunkedCrossEntropy.apply(
        hidden_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), group, first_id, chunk, torch.is_grad_enabled()
    )
    return loss, losses.view(targets_BS.shape)


def _first_row(weight: DTensor) -> int:
    """The id of the first vocabulary row on this rank: DTensor gives the first ranks a row more when it does not divide."""
    rows, ranks, rank = weight.shape[0], weight.device_mesh.size(), weight.device_mesh.get_local_rank()
    return min(rank * -(-rows // ranks), rows)
