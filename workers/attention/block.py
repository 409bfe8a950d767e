"""Attention of one tile, forward and backward, by the kernel that suits the device.

Legend: B batch, Q queries, K keys, H query heads, G KV heads (H % G == 0), D head size.

A backend has two functions. ``causal`` is only asked for squares (Q == K), where kernels agree on what it means.

- ``forward(q_BQHD, k_BKGD, v_BKGD, causal, scale) → out_BQHD, lse_BQH``; lse in float32 (float64 for float64 inputs);
- ``backward(grad_BQHD, q, k, v, out_BQHD, lse_BQH, causal, scale) → dq, dk, dv``, the gradients of this tile given the
  *whole* row's out and lse: the identity P = exp(S − lse), D = rowsum(dO · O) of FlashAttention (Dao et al. 2022)
  needs nothing else, so tiles and hops add up.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch

aten = torch.ops.aten


class Backend(NamedTuple):
    name: str
    forward: Callable
    backward: Callable


def _heads_first(*tensors):
    """[B, S, H, D] → [B, H, S, D] as views; kernels take any stride but the last."""
    return tuple(t.transpose(1, 2) for t in tensors)


def _cpu_forward(q, k, v, causal, scale):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(q, k, v), 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _cpu_backward(grad, q, k, v, out, lse, causal, scale):
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(grad, q, k, v, out, lse), 0.0, causal, scale=scale
    )
    return tuple(g.transpose(1, 2) for g in grads)


def _cuda_flash_forward(q, k, v, causal, scale):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_heads_first(q, k, v), 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _cuda_flash_backward(grad, q, k, v, out, lse, causal, scale):
    # Without dropout the random state is never read; its shape is still checked.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    grads = aten._scaled_dot_product_flash_attention_backward(
        *_heads_first(grad, q, k, v, out), lse.transpose(1, 2).contiguous(),
        None, None, q.shape[1], k.shape[1], 0.0, causal, seed, offset, scale=scale,
    )
    return tuple(g.transpose(1, 2) for g in grads)


def _reference_scores(q, k, causal, scale):
    groups = q.shape[2] // k.shape[2]
    scores_BHQK = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(groups, dim=2)) * scale
    if causal:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
        scores_BHQK = scores_BHQK.masked_fill(~visible, -torch.inf)
    return scores_BHQK


def _reference_forward(q, k, v, causal, scale):
    q32, k32, v32 = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v))
    scores_BHQK = _reference_scores(q32, k32, causal, scale)
    lse_BHQ = scores_BHQK.logsumexp(-1)
    groups = q.shape[2] // k.shape[2]
    out = torch.einsum("bhqk,bkhd->bqhd", (scores_BHQK - lse_BHQ.unsqueeze(-1)).exp(), v32.repeat_interleave(groups, dim=2))
    return out.to(q.dtype), lse_BHQ.transpose(1, 2)


def _reference_backward(grad, q, k, v, out, lse, causal, scale):
    q32, k32, v32, grad32, out32 = (t if t.dtype == torch.float64 else t.float() for t in (q, k, v, grad, out))
    groups = q.shape[2] // k.shape[2]
    weights_BHQK = (_reference_scores(q32, k32, causal, scale) - lse.transpose(1, 2).unsqueeze(-1)).exp()
    dv = torch.einsum("bhqk,bqhd->bkhd", weights_BHQK, grad32)
    dweights = torch.einsum("bqhd,bkhd->bhqk", grad32, v32.repeat_interleave(groups, dim=2))
    delta_BHQ1 = (grad32 * out32).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights_BHQK * (dweights - delta_BHQ1) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k32.repeat_interleave(groups, dim=2))
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q32)
    dk, dv = (t.unflatten(2, (k.shape[2], groups)).sum(3) for t in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


BACKENDS = {
    "cpu": Backend("cpu", _cpu_forward, _cpu_backward),
    "cuda": Backend("cuda", _cuda_flash_forward, _cuda_flash_backward),
    # The plain formula, which forms the scores of a whole tile: what the others are tested against, and the only one
    # for float32 on CUDA, where PyTorch has no flash kernel.
    "reference": Backend("reference", _reference_forward, _reference_backward),
}


def resolve(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """The backend called ``name``, or for ``auto`` the fastest one for the device, type and head size.

    Raises ValueError for a backend that cannot run there.
    """
    if name == "auto":
        if device.type == "cuda":
            flash = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
            name = "cuda" if flash else "reference"
        else:
            name = "cpu"
    if name not in BACKENDS:
        raise ValueError(f"attention.backend is {name!r}; it must be one of auto, {', '.join(BACKENDS)}")
    if name != "reference" and name != device.type:
        raise ValueError(f"attention.backend {name!r} cannot run on {device.type}; use auto or reference")
    return BACKENDS[name]
