"""Rotary position embedding (Su et al. 2021, RoFormer), in the half-rotation form of Llama checkpoints.

Legend: B batch, S tokens of this rank, H heads, D head size.
"""

from __future__ import annotations

import torch


def rotary_table(positions_BS: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, S, 1, D / 2] of the angles, float32.

    Positions are integers and **global**: never the index inside a rank's shard. The product is formed in float64 and
    reduced by whole turns before it becomes float32, so that positions of ten millions keep their accuracy.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_BS.device) / head_dim)
    angles = torch.remainder(positions_BS.double().unsqueeze(-1) * inverse, 2 * torch.pi).float()
    return angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)


class _Rotate(torch.autograd.Function):
    """(a, b) → (a cos − b sin, b cos + a sin) for the halves of the head; the gradient turns back. Keeps no copy of x."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out


def rotate(x_BSHD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``x`` turned by the angles of ``rotary_table``; computed in float32, returned in the type of ``x``."""
    cos, sin = table
    return _Rotate.apply(x_BSHD.float(), cos, sin).to(x_BSHD.dtype)
