"""The layers of a block that are not attention, with backward passes that keep no more than they need.

Legend: B batch, S tokens of this rank, D model size, F feed-forward size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial


def local_part(whole: torch.Tensor) -> torch.Tensor:
    """This rank's plain tensor of a weight or an input that is replicated or sharded over the tensor axis.

    What is replicated enters a computation on each rank, so each rank's gradient is a part of the sum.
    """
    if isinstance(whole, DTensor):
        return whole.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in whole.placements])
    return whole


class _Normalize(torch.autograd.Function):
    """x / rms(x) · weight. Keeps x and one number a row, where the composite form keeps three tensors of x's size."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        scale.exact = True  # of the whole row, so never kept compressed
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        grad = grad.to(wide.dtype)
        normed = wide * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_normed = grad * weight
        mean = torch.linalg.vecdot(grad_normed, normed).unsqueeze(-1).div_(x.shape[-1])
        grad_x = grad_normed.addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019) over the last dim, computed in float32 or wider."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Normalize.apply(x, local_part(self.weight), self.eps)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up. Keeps gate and up; silu(gate) is computed again in backward."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)


class MLP(nn.Module):
    """Feed-forward layer with a SwiGLU gate (Shazeer 2020)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_SwiGLU.apply(self.gate_proj(x_BSD), self.up_proj(x_BSD)))
