"""Attention as its definition says, in float64, with a full mask: what every fast path is compared with."""

import torch


def visible(pattern, batch: int, length: int) -> torch.Tensor:
    """bool [B, S, S]: query (row) sees key (column)."""
    apart = torch.arange(length)[:, None] - torch.arange(length)
    near = torch.ones(length, length, dtype=torch.bool)
    if pattern.window is not None:
        near &= apart.abs() < pattern.window
    if pattern.stride is not None:
        near &= apart % pattern.stride == 0
    ids = torch.zeros(batch, length, dtype=torch.int64) if pattern.documents is None else pattern.documents.expand(batch, length)
    same = ids[:, :, None] == ids[:, None, :]
    # Where the document of each position starts: its first position anywhere, also when other documents stand between.
    start = torch.stack([(row[:, None] == row).int().argmax(1) for row in ids])
    inside = torch.arange(length) - start
    near = near.expand(batch, length, length)
    if pattern.block is not None:
        block = inside // pattern.block
        near = near & (block[:, :, None] == block[:, None, :])
    mask = same & (near | (inside < pattern.sinks)[:, None, :])
    return mask & (apart >= 0) if pattern.causal else mask


def slopes(heads: int) -> torch.Tensor:
    """ALiBi's slopes as its paper gives them: a geometric sequence, and for other counts the paper's code's completion."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    first = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    other = [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * power + 1)]
    return torch.tensor((first + other[0::2])[:heads], dtype=torch.float64)


def attention(q, k, v, pattern, scale=None, memory=None):
    """[B, S, H, D] in float64; a row that sees nothing gives 0. ``memory``: keys and values [M, G, D] that all see."""
    q, k, v = (x.double() for x in (q, k, v))
    length, extra = k.shape[1], 0
    if memory is not None:
        extra = memory[0].shape[0]
        k, v = (torch.cat([m.double().expand(x.shape[0], *m.shape), x], 1) for m, x in zip(memory, (k, v)))
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    mask = visible(pattern, q.shape[0], length)[:, None, length - q.shape[1] :]
    if pattern.alibi:
        apart = (torch.arange(length)[:, None] - torch.arange(length))[length - q.shape[1] :]
        bias = -slopes(q.shape[2])[:, None, None] * apart
        scores = scores + torch.cat([bias.new_zeros(*bias.shape[:2], extra), bias], -1)
    mask = torch.cat([mask.new_ones(*mask.shape[:3], extra), mask], -1)
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights / total.clamp(min=1e-300), 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
