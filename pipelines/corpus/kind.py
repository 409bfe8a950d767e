"""What differs between a corpus of code and one of papers: a `Kind`. What they share is `ingest`.

A store's row is one file or one paper. Rows of a repository or shelf form a *collection*. What windows take as one
document is a row, or a whole collection: `Kind.unit`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipelines.corpus.sources import Skipped, SourceFile
from pipelines.corpus.tokenizer import Tokenizer


@dataclass(frozen=True)
class Facts:
    """What the survey learnt of an input: checksum of its text, its bytes, its licence, and what the kind wants to know
    when it arranges them (JSON)."""

    checksum: str
    bytes: int
    licence: str | None = None
    more: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where an input stands in the store: its row's path, its collection, and whether it is that one's first or last;
    and its licence, which may stand in another file. `checksum` is what its facts say, filled in by `ingest`."""

    file: SourceFile
    name: str
    collection: str
    first: bool = True
    last: bool = True
    licence: str | None = None
    checksum: str | None = None


@dataclass(frozen=True)
class Document:
    """`text == source.decode(encoding)`; details is what is known of it beside the text (JSON)."""

    text: str
    source: bytes
    encoding: str
    licence: str | None = None
    details: dict | None = None


@dataclass(frozen=True)
class Special:
    """A control token among the parts of a row; text never becomes one."""

    content: str


Part = str | Special
END = Special("<|endoftext|>")


class Kind(Protocol):
    """A frozen, picklable dataclass: it travels to the tasks. Every method depends on its arguments alone."""

    unit: str
    held_out: tuple[str, ...]  # patterns (`holdout.held_out_part`) of what is kept from training

    def identity(self) -> list:
        """The options that decide the store's bytes (JSON)."""

    def find(self, paths) -> tuple[list[SourceFile], list[Skipped]]:
        """The inputs, and what was left out. Raises ValueError, in one line, for a wrong path and for no input at all."""

    def survey(self, file: SourceFile, data: bytes) -> Facts:
        """Raises Unreadable, `kind: detail`, for an input that has no place in the corpus."""

    def arrange(self, files: list[SourceFile], facts: list[Facts]) -> tuple[list[Place], list[Skipped]]:
        """The rows in their order (a collection's rows together), and what is left out now that all are known."""

    def read(self, place: Place, data: bytes) -> Document:
        """What the row holds, by the rules of `survey`."""

    def parts(self, place: Place, document: Document) -> list[Part]:
        """What is encoded, in order. A document for windows, if it isn't empty, ends in `END`."""

    def counts(self, facts: list[Facts]) -> dict[str, int]:
        """What there is in the rows beside files, bytes and tokens, for the manifest; {} for nothing."""


def checksum(text: str) -> str:
    """What tells texts apart: BLAKE2b, 128 bits."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def encode(parts: list[Part], tokenizer: Tokenizer) -> np.ndarray:
    """Ids [T], dtype `tokenizer.dtype`."""
    ids = [
        np.array([tokenizer.special[part.content]], tokenizer.dtype) if isinstance(part, Special) else tokenizer.encode(part)
        for part in parts
        if part
    ]
    return np.concatenate(ids) if ids else np.zeros(0, tokenizer.dtype)
