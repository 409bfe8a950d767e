"""PyTorch's fused CPU kernel.

Legend: N batch × rungs, Q queries, K keys, H query heads, G KV heads, D head size.

What it is good at was measured: a full block of 256 or more queries runs at the speed of matrix products; a causal
square costs about twice a full block's time a visible pair, and blocks of 64 queries twice too. So causal squares are
cut into small squares and full blocks, and bands into strips; of a wide strip only the ends are masked. A mask has at
most 12 · SQUARE · SQUARE elements, with ALiBi for each head.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

import torch

from workers.attention.tile import Tile, full_middle, row_pieces, square_pieces

aten = torch.ops.aten
SQUARE = 256
STRIP = 128


def heads_first(x_BSHD: torch.Tensor) -> torch.Tensor:
    """Each head's tokens beside one another in memory: the forward kernel is some 15 % faster on it."""
    return x_BSHD.transpose(1, 2).contiguous().transpose(1, 2)


def split(tile: Tile, alibi: bool) -> list[Tile]:
    """The tile in pieces that the kernel computes well."""
    if tile.full:
        return [tile]
    if tile.causal:
        return square_pieces(tile, SQUARE)
    width = tile.keys if tile.lower is None or tile.upper is None else tile.upper - tile.lower + 1
    if width >= 8 * SQUARE and not alibi:  # a wide window: strips high enough to be fast, masks at their ends only
        pieces = [piece for strip in row_pieces(tile, 2 * SQUARE) for piece in full_middle(strip)]
        return [part for piece in pieces for part in (square_pieces(piece, SQUARE) if piece.causal else [piece])]
    strips = row_pieces(tile, STRIP if tile.keys >= 2 * STRIP else STRIP // 2)
    return [piece for strip in strips for piece in (full_middle(strip) if strip.keys >= 8 * STRIP else [strip])]


def forward(q_NQHD, k_NKGD, v_NKGD, tile: Tile, slopes, scale):
    mask, shift_1QH = _bias(tile, slopes, q_NQHD.dtype)
    with _without_denormals(slopes is not None):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q_NQHD, k_NKGD, v_NKGD), 0.0, tile.causal and mask is None, attn_mask=mask, scale=scale
        )
    lse_NQH = lse.transpose(1, 2)
    return out.transpose(1, 2), lse_NQH if shift_1QH is None else lse_NQH + shift_1QH


def backward(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile: Tile, slopes, scale):
    mask, shift_1QH = _bias(tile, slopes, q_NQHD.dtype)
    if shift_1QH is not None:
        lse_NQH = lse_NQH - shift_1QH
    with _without_denormals(slopes is not None):
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH), 0.0, tile.causal and mask is None,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
    return tuple(g.transpose(1, 2) for g in grads)


def _heads_first(*tensors):
    """[N, S, H, …] → [N, H, S, …] as views; the kernel takes any stride but the last."""
    return tuple(t.transpose(1, 2) for t in tensors)


@contextlib.contextmanager
def _without_denormals(wanted: bool):
    """Take numbers below 1e-38 for 0 on this thread: ALiBi's far weights are full of them, and products of them crawl."""
    if not wanted or (torch.tensor(1e-40) * 1).item() == 0:
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _bias(tile: Tile, slopes: tuple[float, ...] | None, dtype: torch.dtype):
    """What is added to the scores, broadcastable to [N, H, Q, K] or None, and what that leaves to add to lse.

    In a full tile ALiBi's bias −slope · (i − j) is a part of the key and a part of the query. The query's part does not
    change the softmax: it is added to lse afterwards, and the key's is a row that all queries share.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    if slopes is None:
        mask = None if tile.full or tile.causal else _band(tile.queries, tile.keys, tile.lower, tile.upper, dtype)
        return mask, None
    if not tile.full:
        return _biased_band(*tile[1:2], *tile[3:6], tile.distance, tile.stride, slopes, dtype), None
    slopes_H = torch.tensor(slopes, dtype=dtype)
    to_last_K = tile.stride * torch.arange(tile.keys - 1, -1, -1, dtype=dtype)
    from_last_Q = tile.distance + tile.stride * (torch.arange(tile.queries, dtype=dtype) - (tile.keys - 1))
    return -(slopes_H[:, None, None] * to_last_K).unsqueeze(0), -(slopes_H * from_last_Q[:, None]).unsqueeze(0)


@lru_cache(maxsize=64)
def _band(queries: int, keys: int, lower: int | None, upper: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[1, 1, Q, K]: 0 inside the band, −inf outside."""
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if lower is not None:
        visible = visible.triu(lower)
    if upper is not None:
        visible = visible.tril(upper)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(~visible, -torch.inf)[None, None]


@lru_cache(maxsize=8)
def _biased_band(queries: int, keys: int, lower, upper, distance: int, stride: int, slopes, dtype) -> torch.Tensor:
    """[1, H, Q, K]: −slope · distance of query and key inside the band, −inf outside."""
    apart_QK = distance + stride * (torch.arange(queries, dtype=dtype)[:, None] - torch.arange(keys, dtype=dtype))
    bias_HQK = -torch.tensor(slopes, dtype=dtype)[:, None, None] * apart_QK
    return bias_HQK.unsqueeze(0) + _band(queries, keys, lower, upper, dtype)
