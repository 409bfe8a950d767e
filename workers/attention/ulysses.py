"""All-to-all over heads (DeepSpeed-Ulysses, Jacobs et al. 2023): tokens are gathered, heads are spread, and back.

Legend: B batch, S local tokens, H heads, D head size, U ulysses ranks.

Bytes sent by a rank for a tensor, and again for its gradient: (U − 1) / U of its B·S·H·D elements; KV heads that are
repeated (``replicate``) count as often as they are sent.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from workers.attention.tape import once
from workers.attention.transport import Traffic


class _Exchange(torch.autograd.Function):
    """``gather``: [B, S, H, D] → [B, U·S, H/U, D]; otherwise the way back. Each is the other's gradient."""

    @staticmethod
    def forward(ctx, x, group, gather: bool, traffic: Traffic):
        ctx.group, ctx.gather, ctx.traffic = group, gather, traffic
        return once(_exchange, x, group, gather, traffic)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.group, not ctx.gather, ctx.traffic), None, None, None


def _exchange(x: torch.Tensor, group, gather: bool, traffic: Traffic) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    split_dim, cat_dim = (2, 1) if gather else (1, 2)
    outgoing = torch.stack(x.chunk(ranks, dim=split_dim))
    incoming = torch.empty_like(outgoing)
    traffic.count(outgoing[1:])  # one part stays here
    traffic.wait([dist.all_to_all_single(incoming, outgoing, group=group, async_op=True)], x.device)
    return torch.cat(incoming.unbind(), dim=cat_dim)


def gather_tokens(x_BSHD: torch.Tensor, mesh) -> torch.Tensor:
    """Every token of the ulysses group for this rank's share of the heads."""
    return _Exchange.apply(x_BSHD, mesh.ulysses_group, True, mesh.traffic)


def gather_heads(x_BSHD: torch.Tensor, mesh) -> torch.Tensor:
    """Every head for this rank's share of the tokens."""
    return _Exchange.apply(x_BSHD, mesh.ulysses_group, False, mesh.traffic)


def replicate(kv_BSGD: torch.Tensor, ranks: int, dim: int = 2) -> torch.Tensor:
    """KV heads (along ``dim``) repeated until every ulysses rank has one of its own; as they are when there are enough.

    Query heads [r · H / U, (r + 1) · H / U) then share KV head r · G / U, as they did before.
    """
    heads = kv_BSGD.shape[dim]
    return kv_BSGD if heads >= ranks else kv_BSGD.repeat_interleave(ranks // heads, dim=dim)


def heads_of(x_BSHD: torch.Tensor, mesh, dim: int = 2) -> torch.Tensor:
    """This ulysses rank's share of the heads (along ``dim``) of a tensor that every rank has whole."""
    return x_BSHD.chunk(mesh.ulysses, dim=dim)[mesh.ulysses_rank]
