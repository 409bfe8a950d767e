"""FlashAttention 2, 3 and 4 (Dao 2023; Shah et al. 2024; github.com/Dao-AILab/flash-attention) behind one interface.

Legend: N batch × rungs, Q queries, K keys, H query heads, G KV heads, D head size.

The three are separate packages whose inner functions, which alone give lse and take it back, are called differently:

- 2: ``flash_attn.flash_attn_interface`` from version 2.7 on, Ampere and later;
- 3: ``flash_attn_interface`` as built since November 2025 (3.0.0), Hopper;
- 4: ``flash_attn.cute.interface`` of the package ``flash-attn-4``, Hopper and Blackwell.

All know a window that counts from the diagonal ending in the last query and the last key (``cuda.flash_window``).

ALiBi is 2's alone. A causal call there adds slope · j to a score, whose size grows with the sequence until float32 has no
digits left for the rest; every other call adds −slope · |i + K − Q − j|. So no call here is called causal: a window of
K − 1 to the left and 0 to the right shows the same keys. On one side of the diagonal the absolute value is linear, as
ALiBi is, and what remains to the tile's true distances is a constant that goes into lse. Pairs on the other side want the
slope's sign turned. So ``split2`` cuts a tile that lies on both sides in two along the diagonal. A tile much higher than
wide would fall into many strips: it is left to the plain formula.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from workers.attention.kernels import reference
from workers.attention.kernels.cuda import flash_split, flash_window
from workers.attention.tile import Tile, row_pieces

MOST_STRIPS = 16

# generation: (a module that only it has, its distribution, the oldest version). The wheels of FlashAttention 2 hold early
# files of 4, and builds of 3 have no agreed name: for 4 the distribution decides, for 3 the module.
PACKAGES = {
    2: ("flash_attn_2_cuda", "flash-attn", (2, 7)),
    3: ("flash_attn_interface", None, ()),
    4: ("flash_attn", "flash-attn-4", (4,)),
}


@cache
def installed(generation: int) -> bool:
    """Whether FlashAttention ``generation`` is there and new enough. Nothing is imported: that would load its kernels."""
    module, distribution, oldest = PACKAGES[generation]
    if find_spec(module) is None:
        return False
    try:
        found = version(distribution) if distribution else ""
    except PackageNotFoundError:
        return False
    return tuple(int(number) for number in re.findall(r"\d+", found)) >= oldest


def split2(tile: Tile, alibi: bool) -> list[Tile]:
    """Bands that the window can say, with ALiBi each on one side of the diagonal (see the top of the file)."""
    pieces = flash_split(tile, alibi)
    return [part for piece in pieces for part in _sides(piece)] if alibi else pieces


def forward2(q_NQHD, k_NKGD, v_NKGD, tile: Tile, slopes, scale):
    from flash_attn import flash_attn_interface

    if slopes is not None and not _side(tile):
        return reference.forward(q_NQHD, k_NKGD, v_NKGD, tile, slopes, scale)
    out, lse_NHQ, *_ = flash_attn_interface._flash_attn_forward(
        q_NQHD, k_NKGD, v_NKGD, dropout_p=0.0, softmax_scale=scale, return_softmax=False, **_arguments2(tile, slopes, q_NQHD.device)
    )
    lse_NQH = lse_NHQ.transpose(1, 2)
    return out, lse_NQH if slopes is None else lse_NQH + _lse_shift(tile, slopes, q_NQHD.device)


def backward2(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile: Tile, slopes, scale):
    from flash_attn import flash_attn_interface

    if slopes is not None and not _side(tile):
        return reference.backward(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile, slopes, scale)
    if slopes is not None:
        lse_NQH = lse_NQH - _lse_shift(tile, slopes, q_NQHD.device)
    grads = [x.new_empty(x.shape) for x in (q_NQHD, k_NKGD, v_NKGD)]
    flash_attn_interface._flash_attn_backward(
        grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, _heads_first(lse_NQH), *grads, dropout_p=0.0, softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_arguments2(tile, slopes, q_NQHD.device),
    )  # fmt: skip
    return tuple(grads)


def forward3(q_NQHD, k_NKGD, v_NKGD, tile: Tile, slopes, scale):
    import flash_attn_interface

    causal, left, right = _limits(tile)
    out, lse_NHQ, *_ = flash_attn_interface._flash_attn_forward(
        q_NQHD, k_NKGD, v_NKGD, softmax_scale=scale, causal=causal, window_size_left=left, window_size_right=right
    )
    return out, lse_NHQ.transpose(1, 2)


def backward3(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile: Tile, slopes, scale):
    import flash_attn_interface

    causal, left, right = _limits(tile)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_NQHD, k_NKGD, v_NKGD))
    flash_attn_interface._flash_attn_backward(
        grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, _heads_first(lse_NQH), dq=dq, dk=dk, dv=dv, softmax_scale=scale,
        is_causal=causal, window_size_left=left, window_size_right=right, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq, dk, dv


def forward4(q_NQHD, k_NKGD, v_NKGD, tile: Tile, slopes, scale):
    from flash_attn.cute import interface

    out, lse_NHQ, *_ = interface._flash_attn_fwd(q_NQHD, k_NKGD, v_NKGD, softmax_scale=scale, return_lse=True, **_arguments4(tile))
    return out, lse_NHQ.transpose(1, 2)


def backward4(grad_NQHD, q_NQHD, k_NKGD, v_NKGD, out_NQHD, lse_NQH, tile: Tile, slopes, scale):
    from flash_attn.cute import interface

    return interface._flash_attn_bwd(
        q_NQHD, k_NKGD, v_NKGD, out_NQHD, grad_NQHD, _heads_first(lse_NQH), softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_arguments4(tile),
    )[:3]  # fmt: skip


def _heads_first(lse_NQH: torch.Tensor) -> torch.Tensor:
    """[N, H, Q] in this order in memory: the kernels read it by address."""
    return lse_NQH.transpose(1, 2).contiguous()


def _limits(tile: Tile) -> tuple[bool, int, int]:
    """(causal, left, right); a causal square is told as such, for the kernels are fastest then."""
    return (True, -1, -1) if tile.causal else (False, *flash_window(tile))


def _arguments2(tile: Tile, slopes, device: torch.device) -> dict:
    causal, left, right = _limits(tile)
    slopes_H = None
    if slopes is not None:
        causal, (left, right) = False, flash_window(tile)
        if right == 0 and not 0 <= left < tile.keys:  # no limit, or one of no effect: the kernel would take this for causal
            left = tile.keys - 1
        slopes_H = _on_device(slopes, _side(tile) * tile.stride, device)
    return {"causal": causal, "window_size_left": left, "window_size_right": right, "softcap": 0.0, "alibi_slopes": slopes_H}


def _arguments4(tile: Tile) -> dict:
    causal, left, right = _limits(tile)
    return {"causal": causal, "window_size_left": None if left < 0 else left, "window_size_right": None if right < 0 else right}


def _side(tile: Tile) -> int:
    """1 if every visible key lies on the kernel's diagonal or before it, −1 if on it or after it, 0 if on both sides."""
    corner = tile.keys - tile.queries
    if tile.keys - 1 <= corner or (tile.upper is not None and tile.upper <= corner):
        return 1
    if 1 - tile.queries >= corner or (tile.lower is not None and tile.lower >= corner):
        return -1
    return 0


def _sides(tile: Tile) -> list[Tile]:
    """The tile in tiles on one side of their diagonals, or in blocks for the plain formula."""
    if _side(tile):
        return [tile]
    queries, keys, lower, upper = tile.queries, tile.keys, tile.lower, tile.upper
    if queries > keys + 1:
        if queries > MOST_STRIPS * keys:
            return reference.split(tile, True)
        return [part for strip in row_pieces(tile, keys) for part in split2(strip, True)]
    # Before the diagonal: all keys but the last, and the queries that see one of them.
    first = max(0, queries - keys + 1)
    before = tile.moved(queries - first, keys - 1, first, 0, None if lower is None else lower + first, keys - 1 - queries + first)
    # On it and after it: without the keys that stand before it for every query.
    skipped = max(0, keys - queries)
    after = tile.moved(queries, keys - skipped, 0, skipped, keys - queries - skipped, None if upper is None else upper - skipped)
    return [before, after]


def _lse_shift(tile: Tile, slopes, device: torch.device) -> torch.Tensor:
    """[H]: the true bias less the kernel's, −slope · (the distance on the kernel's diagonal)."""
    return _on_device(slopes, tile.stride * (tile.keys - tile.queries) - tile.distance, device)


@lru_cache(maxsize=256)
def _on_device(slopes: tuple[float, ...], factor: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([slope * factor for slope in slopes], dtype=torch.float32, device=device)
