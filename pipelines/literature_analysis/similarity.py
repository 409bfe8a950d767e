"""How alike two papers' words are: TF-IDF cosine over a paper's most frequent words, hashed.

A paper is its 128 most frequent words, so that 100,000 papers are compared in memory and without scikit-learn, which
would be a dependency for one dot product.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable

MOST_TERMS = 128
_WORD = re.compile(r"[^\W\d_]{4,40}")
_COMMON = frozenset(
    "this that with from which have been were their these there than then also such other into more most some only "
    "between each both when where while used using based very same they what will would could should does about over "
    "under because however therefore thus here after before first second three four many much well figure table section".split()
)

Terms = dict[int, int]


def terms(text: str) -> list[list[int]]:
    """[hash, count] of the most frequent words, as JSON; ties by hash."""
    counts = Counter(word for word in _WORD.findall(text.lower()) if word not in _COMMON)
    hashed: Counter[int] = Counter()
    for word, count in counts.items():
        hashed[zlib.crc32(word.encode())] += count
    return [list(pair) for pair in sorted(hashed.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_TERMS]]


class Vectors:
    """Unit TF-IDF vectors of papers, for their cosine: 1 for the same words, 0 for none in common."""

    def __init__(self, papers: Iterable[list[list[int]]]):
        counted = [dict(map(tuple, pairs)) for pairs in papers]
        documents = Counter(term for counts in counted for term in counts)
        self.of: list[dict[int, float]] = []
        for counts in counted:
            # a word that every paper has still says a little, so that a corpus of one paper has a vector
            weights = {t: (1 + math.log(n)) * (0.1 + math.log(len(counted) / documents[t])) for t, n in counts.items()}
            norm = math.sqrt(sum(weight * weight for weight in weights.values())) or 1.0
            self.of.append({term: weight / norm for term, weight in weights.items()})

    def cosine(self, i: int, j: int) -> float:
        small, large = sorted((self.of[i], self.of[j]), key=len)
        return sum(weight * large.get(term, 0.0) for term, weight in small.items())
