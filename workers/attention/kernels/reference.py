"""The plain formula on any device, type and pattern, in blocks: what the others are tested against, and what computes
where no fused kernel does. Scores are formed for one block at a time.

Legend: N batch × rungs, Q queries, K keys, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import torch

from workers.attention.tile import Tile, band_tiles, row_pieces

ROWS, COLUMNS = 512, 1024


def split(tile: Tile, alibi: bool) -> list[Tile]:
    """The tile in blocks of at most ROWS × COLUMNS pairs."""
    pieces = []
    for strip in row_pieces(tile, ROWS):
        if strip.keys <= COLUMNS:
            pieces.append(strip)
            continue
        for first in range(0, strip.keys, COLUMNS):
            keys = min(COLUMNS, strip.keys - first)
            lower, upper = (None if limit is None else limit - first for limit in (strip.lower, strip.upper))
            pieces += band_tiles(strip.moved(strip.queries, keys, 0, first, lower, upper))
    return pieces


def forward(q_NQHD, k_NKGD, v_NKGD, tile: Tile, slopes, scale):
    q, k, v = (_wide(x) for x in (q_NQHD, k_NKGD, v_NKGD))
    scores_NHQK = _scores(q, k, tile, slopes, scale)
    lse_NHQ = scores_NHQK.logsumexp(-1)
    out = torch.einsum("nhqk,nkhd->nqhd", (scores_NHQK - lse_NHQ.unsqueeze(-1)).exp(), _repeat(v, q))
    return out.to(q_NQHD.dtype), lse_NHQ.transpose(1, 2)


def backward(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile: Tile, slopes, scale):
    grad, q, k, v, out = (_wide(x) for x in (grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD))
    weights_NHQK = (_scores(q, k, tile, slopes, scale) - lse_NQH.transpose(1, 2).unsqueeze(-1)).exp()
    dv = torch.einsum("nhqk,nqhd->nkhd", weights_NHQK, grad)
    dweights_NHQK = torch.einsum("nqhd,nkhd->nhqk", grad, _repeat(v, q))
    delta_NHQ1 = (grad * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores_NHQK = weights_NHQK * (dweights_NHQK - delta_NHQ1) * scale
    dq = torch.einsum("nhqk,nkhd->nqhd", dscores_NHQK, _repeat(k, q))
    dk = torch.einsum("nhqk,nqhd->nkhd", dscores_NHQK, q)
    kv_heads = k.shape[2]
    dk, dv = (x.unflatten(2, (kv_heads, -1)).sum(3) for x in (dk, dv))
    return dq.to(q_NQHD.dtype), dk.to(k_NKGD.dtype), dv.to(v_NKGD.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _repeat(kv_NKGD: torch.Tensor, q_NQHD: torch.Tensor) -> torch.Tensor:
    return kv_NKGD.repeat_interleave(q_NQHD.shape[2] // kv_NKGD.shape[2], dim=2)


def _scores(q, k, tile: Tile, slopes, scale) -> torch.Tensor:
    scores_NHQK = torch.einsum("nqhd,nkhd->nhqk", q, _repeat(k, q)) * scale
    i_Q1 = torch.arange(tile.queries, device=q.device)[:, None]
    j_K = torch.arange(tile.keys, device=q.device)
    if slopes is not None:
        apart_QK = (tile.distance + tile.stride * (i_Q1 - j_K)).to(q.dtype)
        scores_NHQK -= torch.tensor(slopes, dtype=q.dtype, device=q.device)[:, None, None] * apart_QK
    if not tile.full:
        hidden = torch.zeros(tile.queries, tile.keys, dtype=torch.bool, device=q.device)
        if tile.lower is not None:
            hidden |= j_K - i_Q1 < tile.lower
        if tile.upper is not None:
            hidden |= j_K - i_Q1 > tile.upper
        scores_NHQK.masked_fill_(hidden, -torch.inf)
    return scores_NHQK
