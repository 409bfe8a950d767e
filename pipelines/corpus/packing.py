"""Cutting and packing: how documents of given lengths become windows of a fixed context. Reads no token.

1. A document longer than the context becomes windows with a stride of context − overlap. In each but the first, the
   first `overlap` targets are context only: seen, not learnt, since the window before has learnt them.
2. What is shorter than the context, whole documents and tails, is packed by best-fit decreasing (Ding et al. 2024,
   "Fewer truncations improve language modeling"). Nothing is cut to make it fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """Windows as flat arrays, before any shuffling. Window w holds the pieces first[w] to first[w + 1] − 1.

    document, start, stop, context_only: int64 [pieces]; first: int64 [windows + 1].
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    context_only: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1


def plan_pieces(lengths: np.ndarray, context: int, overlap: int) -> Pieces:
    """Cuts documents of `lengths` (int64 [documents]) into pieces and packs the short ones. Reads no token.

    O(n log n) for n documents; the result depends on the arguments alone.
    """
    if context < 1:
        raise ValueError(f"context is {context}; it must be at least 1 token")
    if not 0 <= overlap < context:
        raise ValueError(f"overlap is {overlap}; it must be at least 0 and less than the context of {context}")
    lengths = np.asarray(lengths, dtype=np.int64)
    stride = context - overlap
    windows = np.where(lengths > context, 1 + -(-(lengths - context) // stride), np.minimum(lengths, 1))
    document = np.repeat(np.arange(len(lengths)), windows)
    number = np.arange(len(document)) - np.repeat(np.cumsum(windows) - windows, windows)
    start = number * stride
    stop = np.minimum(start + context, lengths[document])
    context_only = np.where(number > 0, overlap, 0)

    full = np.flatnonzero(stop - start == context)
    short = np.flatnonzero(stop - start < context)
    short = short[np.argsort(start[short] - stop[short], kind="stable")]  # longest first, then by document
    bins = best_fit(stop[short] - start[short], context)
    window = np.concatenate([np.arange(len(full)), len(full) + bins])
    by_window = np.argsort(window, kind="stable")
    piece = np.concatenate([full, short])[by_window]
    count = int(window.max()) + 1 if len(window) else 0
    first = np.searchsorted(window[by_window], np.arange(count + 1))
    return Pieces(document[piece], start[piece], stop[piece], context_only[piece], first)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, int64 [items]: each goes into the fullest bin that still has room, else into a new one.

    Items are taken in the order given; with `sizes` decreasing this is best-fit decreasing. The bins with r left
    stand in a list by r, and the smallest r that is large enough is found through two levels of bit sets (blocks of
    1,024 values of r, and the blocks that aren't empty), so that an item costs about a microsecond at any capacity.
    """
    bins = np.empty(len(sizes), np.int64)
    by_room: dict[int, list[int]] = {}
    blocks = [0] * ((capacity >> 10) + 1)
    occupied, count = 0, 0
    for item, size in enumerate(sizes.tolist()):
        block, bit = size >> 10, size & 1023
        fitting = blocks[block] >> bit
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
        elif later := occupied >> (block + 1):
            block += (later & -later).bit_length()
            room = (block << 10) + (blocks[block] & -blocks[block]).bit_length() - 1
        else:
            room = 0
        if room:
            same = by_room[room]
            chosen = same.pop()
            if not same:
                blocks[room >> 10] ^= 1 << (room & 1023)
                if not blocks[room >> 10]:
                    occupied ^= 1 << (room >> 10)
            left = room - size
        else:
            chosen, left = count, capacity - size
            count += 1
        bins[item] = chosen
        if left:
            same = by_room.setdefault(left, [])
            if not same:
                blocks[left >> 10] |= 1 << (left & 1023)
                occupied |= 1 << (left >> 10)
            same.append(chosen)
    return bins
