"""Texts that are there twice: exactly, or nearly, by MinHash and locality-sensitive hashing.

A text is the set of its shingles, five words in a row. Two texts are near duplicates if their sets have a Jaccard
similarity of at least a threshold (Broder 1997, "On the resemblance and containment of documents"). 128 minima of hashes
estimate it (standard error 0.03 at 0.85), and bands of these find the candidates without comparing all pairs (Leskovec
et al., "Mining of Massive Datasets", ch. 3; for language models Lee et al. 2022, "Deduplicating Training Data Makes
Language Models Better").

A signature is 512 bytes; making it is linear in the text, and finding duplicates linear in the number of texts: of those
that share a band, a text is compared with no more than 16. Hashes are arithmetic on 64 bits, the same on any machine.
(datasketch and rensa want every shingle as a Python object, which costs more than all the rest of it.)
"""

from __future__ import annotations

import base64
from collections import defaultdict
from functools import lru_cache

import numpy as np

SHINGLE = 5
HASHES = 128
_FEWEST_WORDS = 20  # below that, what texts share is the form of a file: an empty `__init__`, an include guard
_COMPARED = 16
_PIECE = 1 << 9  # shingles hashed at once: HASHES × this × 4 bytes
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2⁶⁴
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_BLOCK = 1 << 16  # bytes

_generator = np.random.Generator(np.random.PCG64(2022))
_FACTORS = _generator.integers(0, 1 << 31, HASHES, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
_TERMS = _generator.integers(0, 1 << 32, HASHES, dtype=np.uint32)
_IS_WORD = np.zeros(256, bool)
_IS_WORD[[c for c in range(256) if chr(c).isalnum() and c < 128 or c == ord("_") or c >= 128]] = True


def signature(text: str) -> str | None:
    """The minima of a text in base 64, or None for one of fewer than 20 words, which has no near duplicates."""
    words = _word_hashes(np.frombuffer(text.encode(), np.uint8))
    if len(words) < _FEWEST_WORDS:
        return None
    count = len(words) - SHINGLE + 1
    shingles = np.zeros(count, np.uint64)
    for k in range(SHINGLE):
        shingles = (shingles ^ words[k : k + count]) * _BASE
        shingles ^= shingles >> np.uint64(29)
    shingles = np.unique((shingles >> np.uint64(32)).astype(np.uint32))
    minima = np.full(HASHES, np.iinfo(np.uint32).max, np.uint32)
    for at in range(0, len(shingles), _PIECE):
        np.minimum(minima, (shingles[None, at : at + _PIECE] * _FACTORS[:, None] + _TERMS[:, None]).min(axis=1), out=minima)
    return base64.b64encode(minima.astype("<u4").tobytes()).decode()


def _word_hashes(data: np.ndarray) -> np.ndarray:
    """uint64 [words]: polynomial hashes of the maximal runs of letters, digits, `_` and bytes beyond ASCII.

    The hash of a run is a difference of prefix sums Σ byte · baseⁱ, moved to the front by the inverse power.
    """
    inside = np.concatenate([[False], _IS_WORD[data], [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    hashes = np.zeros(len(starts), np.uint64)
    at = 0
    while at < len(starts):  # in blocks that stay in the cache
        first = starts[at]
        stop = max(at + 1, int(np.searchsorted(ends, first + _BLOCK, side="right")))
        block = data[first : ends[stop - 1]].astype(np.uint64) + np.uint64(1)
        powers, inverses = _powers(max(_BLOCK, len(block)))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(block * powers[: len(block)])])
        begin = starts[at:stop] - first
        hashes[at:stop] = (sums[ends[at:stop] - first] - sums[begin]) * inverses[begin]
        at = stop
    return (hashes ^ (hashes >> np.uint64(31))) * _BASE


@lru_cache(maxsize=1)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first powers of the base and of its inverse."""
    powers, inverses = np.full(count, _BASE, np.uint64), np.full(count, _INVERSE, np.uint64)
    powers[:1] = inverses[:1] = 1
    return np.cumprod(powers), np.cumprod(inverses)


class NearDuplicates:
    """Texts in the order in which they come; `earlier` names the first of them that a new one nearly equals."""

    def __init__(self, threshold: float):
        if not 0.5 <= threshold <= 1:
            raise ValueError(f"near duplicates at a similarity of {threshold}: it must be between 0.5 and 1")
        self._threshold = threshold
        self._rows = _rows(threshold)
        self._signatures: list[np.ndarray] = []
        self._bands: dict[bytes, list[int]] = defaultdict(list)

    def earlier(self, signature: str) -> int | None:
        """The number (from 0) of the first added text of at least this similarity, among those compared, or None."""
        values = _values(signature)
        candidates = sorted({number for band in self._split(values) for number in self._bands.get(band, ())})
        alike = (n for n in candidates if np.count_nonzero(self._signatures[n] == values) >= self._threshold * HASHES)
        return next(alike, None)

    def add(self, signature: str) -> int:
        """Remembers a text; returns its number."""
        values = _values(signature)
        for band in self._split(values):
            if len(self._bands[band]) < _COMPARED:
                self._bands[band].append(len(self._signatures))
        self._signatures.append(values)
        return len(self._signatures) - 1

    def _split(self, values: np.ndarray) -> list[bytes]:
        return [bytes([b]) + values[b * self._rows : (b + 1) * self._rows].tobytes() for b in range(HASHES // self._rows)]


def _values(signature: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(signature), "<u4")


def _rows(threshold: float) -> int:
    """Values in a band: the most, so the fewest candidates, that still find 99% of the pairs at the threshold."""
    return max((r for r in range(1, HASHES + 1) if 1 - (1 - threshold**r) ** (HASHES // r) >= 0.99), default=1)
