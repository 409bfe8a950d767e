"""A layer that works token by token, run on tiles of the sequence (TiledMLP of Arctic Long Sequence Training, Bekman et al. 2025).

Legend: B batch, S tokens, T tokens of a tile, D model size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate


class _Tiled(torch.autograd.Function):
    """``apply(x_BSD, layer, mesh, tile, *parameters) → y_BSD``; ``layer(x_BTD)`` reads the parameters by itself.

    1. Forward runs the layer tile by tile and keeps x alone.
    2. Backward runs each tile again and takes its gradients at once, so what the layer makes inside exists for one tile only.
       Gradients of the parameters are summed in float32 (or wider).

    Under tensor parallelism (``mesh``) x is whole on every rank, and y and the gradient of x are this rank's part of a sum:
    what is sent is sent once, outside, and not for every tile. Inside a block that is recomputed forward runs twice.
    """

    @staticmethod
    def forward(ctx, x, layer, mesh, tile, *parameters):
        ctx.save_for_backward(x)
        ctx.layer, ctx.mesh, ctx.tile, ctx.parameters = layer, mesh, tile, parameters
        y = torch.empty_like(x)
        for part, out in zip(x.split(tile, 1), y.split(tile, 1)):
            out.copy_(_local(layer(_spread(part, mesh))))
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        totals = [None] * len(ctx.parameters)
        for x_BTD, grad_BTD, out_BTD in zip(*(whole.split(ctx.tile, 1) for whole in (x, grad, grad_x))):
            with torch.enable_grad():
                part = _spread(x_BTD.detach(), ctx.mesh).requires_grad_()
                y = ctx.layer(part)
                found = torch.autograd.grad(y, [part, *ctx.parameters], _spread(grad_BTD, ctx.mesh))
            out_BTD.copy_(_local(found[0]))
            for index, more in enumerate(found[1:]):
                wide = more.to(torch.promote_types(more.dtype, torch.float32))
                totals[index] = wide if totals[index] is None else totals[index].add_(wide)
            del part, y, found
        return grad_x, None, None, None, *(total.to(p.dtype) for total, p in zip(totals, ctx.parameters))


def _spread(x: torch.Tensor, mesh) -> torch.Tensor:
    return x if mesh is None else DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def in_tiles(module: torch.nn.Module, layer: Callable, tile: int, x_BSD: torch.Tensor) -> torch.Tensor:
    """``layer(x_BSD)``, ``tile`` tokens at a time; ``layer`` is the forward of ``module``.

    With a replicated DTensor the result is a DTensor whose ranks hold parts of the sum.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not isinstance(x_BSD, DTensor):
        return _Tiled.apply(x_BSD, layer, None, tile, *parameters)
    mesh = x_BSD.device_mesh
    y_BSD = _Tiled.apply(x_BSD.to_local(grad_placements=[Partial()]), layer, mesh, tile, *parameters)
    return DTensor.from_local(y_BSD, mesh, [Partial()], run_check=False)
