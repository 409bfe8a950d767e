"""Length up-sampling: long documents more often, the mix of sources as it was.

Fu et al. 2024, "Data engineering for scaling language models to 128K context": what makes a model use a long context is
long documents, but taking only those changes the subjects too (books in, conversations out). So long documents are
repeated within each source, and the sources keep their shares of the tokens.

A source is the root folder of a corpus. In a source of S short and L long tokens, repeating the long ones f times makes
it grow g = (S + f L) / (S + L) times. Every source is then repeated until it has grown as much as the one that grew most,
so nothing is left out. Repeats are whole: of documents that are due 2.3 times all are repeated twice, and the first by a
hash of their names, up to 0.3 of the tokens, once more.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from pipelines.corpus.store import TokenStore
from pipelines.corpus.windows import document_lengths, document_names


@dataclass(frozen=True)
class Upsample:
    """Documents of more than `longer_than` tokens come `factor` times as often as the shorter ones of their source."""

    longer_than: int = 4096
    factor: int = 5

    def __post_init__(self):
        if self.longer_than < 1:
            raise ValueError(f"corpus.upsample.longer_than is {self.longer_than}; it must be at least 1 token")
        if self.factor < 2:
            raise ValueError(f"corpus.upsample.factor is {self.factor}; it must be at least 2, or leave corpus.upsample null")


@dataclass(frozen=True)
class Share:
    """A source in the mix: its documents and tokens, those of them that are long, and its share of all tokens (0–1)."""

    source: str
    documents: int
    tokens: int
    long_tokens: int
    share: float


def repeats(store: TokenStore, documents: np.ndarray, upsample: Upsample) -> np.ndarray:
    """How often an epoch has each of `documents`: int64 [documents], each at least 1."""
    lengths, long, sources = _of(store, documents, upsample.longer_than)
    kinds = (long, upsample.factor), (~long, 1)
    names = document_names(store)
    order = np.array([_hash(names[d]) for d in documents], np.uint64)
    growth = {}
    for source, own in sources.items():
        tokens, more = int(lengths[own].sum()), int(lengths[own[long[own]]].sum())
        growth[source] = (tokens + (upsample.factor - 1) * more) / tokens if tokens else 1.0
    most = max(growth.values(), default=1.0)
    found = np.ones(len(documents), np.int64)
    for source, grown in growth.items():
        for kind, factor in kinds:
            own = sources[source][kind[sources[source]]]
            own = own[np.argsort(order[own], kind="stable")]
            whole, part = divmod(factor * most / grown, 1)
            ends = np.cumsum(lengths[own])
            found[own] = int(whole) + (ends - lengths[own] / 2 < part * (ends[-1] if len(own) else 0))
    return found


def mix(store: TokenStore, documents: np.ndarray, longer_than: int, times: np.ndarray | None = None) -> list[Share]:
    """The sources by name, with `times` (int64 [documents]) repeats."""
    lengths, long, sources = _of(store, documents, longer_than)
    times = np.ones(len(documents), np.int64) if times is None else times
    tokens = lengths * times
    total = max(1, int(tokens.sum()))
    return [
        Share(
            source, int(times[own].sum()), int(tokens[own].sum()), int(tokens[own[long[own]]].sum()),
            int(tokens[own].sum()) / total,
        )
        for source, own in sources.items()
    ]  # fmt: skip


def lines(before: list[Share], after: list[Share]) -> list[str]:
    """The change in words, a line a source."""
    told = lambda s: f"{s.tokens:,} tokens, {s.share:.1%} of all, {s.long_tokens / max(1, s.tokens):.1%} of them long"
    return [f"{was.source}: {told(was)} → {told(now)}" for was, now in zip(before, after)]


def _of(store: TokenStore, documents: np.ndarray, longer_than: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Of each document its tokens and whether it is long; and by source, sorted, which of `documents` are its own."""
    lengths = document_lengths(store)[documents]
    sources: dict[str, list[int]] = {}
    for i, row in enumerate(store.documents[documents]):
        sources.setdefault(store.paths(int(row)).partition("/")[0], []).append(i)
    return lengths, lengths > longer_than, {name: np.array(own) for name, own in sorted(sources.items())}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
