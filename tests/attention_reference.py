"""Attention as its definition says, in float64, with a full mask: what every fast path is compared with."""

import torch


def visible(pattern, batch: int, length: int) -> torch.Tensor:
    """bool [B, S, S]: query (row) sees key (column)."""
    mask = torch.ones(batch, length, length, dtype=torch.bool)
    if pattern.causal:
        mask &= torch.ones(length, length, dtype=torch.bool).tril()
    if pattern.documents is not None:
        ids = pattern.documents.expand(batch, length)
        mask &= ids[:, :, None] == ids[:, None, :]
    return mask


def attention(q, k, v, pattern, scale=None):
    """[B, S, H, D] in float64; a row that sees nothing gives 0."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    mask = visible(pattern, q.shape[0], k.shape[1])[:, None, k.shape[1] - q.shape[1] :]
    weights = torch.where(mask, (scores - scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0)).exp(), 0)
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights / total.clamp(min=1e-300), 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
