"""PyTorch's own CUDA kernels: flash attention for half types, memory-efficient attention for float32.

Legend: N batch × rungs, Q queries, K keys, H query heads, G KV heads, D head size.

Both are called below ``scaled_dot_product_attention``, whose wrappers would hide lse. What they want, read in torch 2.13:

- flash takes fewer KV heads than query heads, and any stride but in the last dimension; gradients' out and dO it copies
  itself where it must, lse it reads as a contiguous [N, H, Q].
- efficient wants as many KV heads as query heads; its mask type 1 is the causal one from the *top left*, which on squares
  is the only one; its backward reads ``out`` as a contiguous tensor without asking, and lse padded to whole blocks of 32.
"""

from __future__ import annotations

import torch

from workers.attention.kernels import reference
from workers.attention.tile import Tile, band_tiles

aten = torch.ops.aten


def flash_split(tile: Tile, alibi: bool) -> list[Tile]:
    """The tile as tiles whose bands flash attention's window can say.

    Its kernels replace a right limit of ``keys`` or more, and a missing one beside a left limit, by ``keys``. In a band
    that is much higher than wide that hides visible keys from the first queries, or shows them too many. Such a band is cut
    into the queries that its lower limit does not reach and the others, whose band is no higher than wide.
    """
    if tile.lower is None or _reach(tile) <= tile.keys:
        return [tile]
    rows = 1 - tile.lower
    upper = None if tile.upper is None else tile.upper + rows
    free = tile.moved(rows, tile.keys, 0, 0, None, tile.upper)
    bound = tile.moved(tile.queries - rows, tile.keys, rows, 0, tile.lower + rows, upper)
    return band_tiles(free) + band_tiles(bound)


def _reach(tile: Tile) -> int:
    """How far right of flash attention's diagonal keys are visible."""
    last = tile.keys - 1 if tile.upper is None else tile.upper
    return last - (tile.keys - tile.queries)


def flash_window(tile: Tile) -> tuple[int, int]:
    """The band as (left, right) of flash attention, which counts from the diagonal that ends in the last query and key; −1 is no limit.

    Neither is ever negative otherwise: a tile's last query sees a key and its last key is seen (``band_tiles``).
    """
    corner = tile.keys - tile.queries
    return -1 if tile.lower is None else corner - tile.lower, -1 if tile.upper is None else tile.upper - corner


def flash_forward(q_NQHD, k_NKGD, v_NKGD, tile: Tile, slopes, scale):
    out, lse_NHQ, *_ = aten._flash_attention_forward(
        q_NQHD, k_NKGD, v_NKGD, None, None, tile.queries, tile.keys, 0.0, tile.causal, False, scale=scale, **_window(tile)
    )
    return out, lse_NHQ.transpose(1, 2)


def flash_backward(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile: Tile, slopes, scale):
    # Without dropout the random state is never read, but it must be tensors of this type.
    state = torch.empty(2, dtype=torch.uint64, device=q_NQHD.device)
    unused = torch.empty((), dtype=torch.uint64, device=q_NQHD.device)
    return aten._flash_attention_backward(
        grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH.transpose(1, 2).contiguous(),
        None, None, tile.queries, tile.keys, 0.0, tile.causal, state, unused, scale=scale, **_window(tile),
    )  # fmt: skip


def _window(tile: Tile) -> dict[str, int | None]:
    left, right = (-1, -1) if tile.causal else flash_window(tile)
    return {"window_size_left": None if left < 0 else left, "window_size_right": None if right < 0 else right}


def efficient_split(tile: Tile, alibi: bool) -> list[Tile]:
    """Full tiles and causal squares go to the kernel; other bands and biases to the plain formula, in its blocks."""
    return [tile] if _fused(tile, alibi or None) else reference.split(tile, alibi)


def efficient_forward(q_NQHD, k_NKGD, v_NKGD, tile: Tile, slopes, scale):
    if not _fused(tile, slopes):
        return reference.forward(q_NQHD, k_NKGD, v_NKGD, tile, slopes, scale)
    k_NKHD, v_NKHD = _repeat(k_NKGD, q_NQHD), _repeat(v_NKGD, q_NQHD)
    out, lse_NHQ, *_ = aten._efficient_attention_forward(
        q_NQHD, k_NKHD, v_NKHD, None, None, None, None, None, 0.0, int(tile.causal), True, scale=scale
    )
    return out, lse_NHQ[..., : tile.queries].transpose(1, 2)  # the kernel pads lse


def efficient_backward(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile: Tile, slopes, scale):
    if not _fused(tile, slopes):
        return reference.backward(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile, slopes, scale)
    k_NKHD, v_NKHD = _repeat(k_NKGD, q_NQHD), _repeat(v_NKGD, q_NQHD)
    padded = lse_NQH.new_full((lse_NQH.shape[0], lse_NQH.shape[2], -(-tile.queries // 32) * 32), torch.inf)
    padded[..., : tile.queries] = lse_NQH.transpose(1, 2)
    seed = offset = torch.empty((), dtype=torch.int64, device=q_NQHD.device)  # read for dropout only
    # ``out`` may be some rows of a larger tensor, or every n-th: the kernel would read past them.
    dq, dk, dv, _ = aten._efficient_attention_backward(
        grad_NQHD, q_NQHD, k_NKHD, v_NKHD, None, out_NQHD.contiguous(), None, None, tile.queries, tile.keys, padded, 0.0,
        seed, offset, int(tile.causal), False, scale=scale,
    )  # fmt: skip
    kv_heads = k_NKGD.shape[2]
    return dq, *(x.unflatten(2, (kv_heads, -1)).sum(3) for x in (dk, dv))


def _fused(tile: Tile, slopes) -> bool:
    return slopes is None and (tile.full or tile.causal)


def _repeat(kv_NKGD: torch.Tensor, q_NQHD: torch.Tensor) -> torch.Tensor:
    groups = q_NQHD.shape[2] // kv_NKGD.shape[2]
    return kv_NKGD if groups == 1 else kv_NKGD.repeat_interleave(groups, dim=2)
