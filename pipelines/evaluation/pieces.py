"""A store's documents as the windows of hierarchical processing: cut as for training, in order, and not packed.

Legend: L tokens of a document, n of a piece.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pipelines.corpus.store import TokenStore
from pipelines.corpus.windows import plan_pieces
from workers.inference.fade import cross_fade
from workers.inference.process import Piece


class DocumentPieces:
    """The pieces of some of a store's documents, document after document.

    Args:
        store: a TokenStore. documents: which, int64; numbers of rows or collections as ``unit`` says (default: the store's own).
        context: most tokens of a piece. overlap: targets that two neighbours share; default context // 8.
        blind: see ``cross_fade``. segment: tokens of a segment. marks: ids that begin a segment, in place of a fixed size.
    """

    def __init__(
        self, store: TokenStore, documents: np.ndarray, context: int, overlap: int | None = None, *,
        unit: str | None = None, blind: int = 0, segment: int = 512, marks: tuple[int, ...] = (),
    ):  # fmt: skip
        self.store, self.context, self.blind = store, context, blind
        self._segment, self._marks = segment, marks
        rows = store.documents if (unit or store.unit) == "collection" else np.arange(len(store) + 1)
        self.documents = np.asarray(documents, np.int64)
        self.first_row, self.last_row = rows[self.documents], rows[self.documents + 1]
        lengths = self.store.starts[self.last_row] - self.store.starts[self.first_row]
        pieces = plan_pieces(lengths, context, context // 8 if overlap is None else overlap)
        order = np.lexsort((pieces.start, pieces.document))
        self._document, self._start, self._stop, self._context_only = (
            getattr(pieces, name)[order] for name in ("document", "start", "stop", "context_only")
        )
        self._first = np.searchsorted(self._document, np.arange(len(self.documents) + 1))

    def __len__(self) -> int:
        return len(self._document)

    def tokens(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop) of the document and the row, counted in the document, of each: int32 [n] twice."""
        first = int(self.first_row[document])
        before = int(self.store.starts[first])
        ids, rows = np.empty(stop - start, np.int32), np.empty(stop - start, np.int32)
        at = 0
        for row, a, b in self.store.rows_between(before + start, before + stop):
            ids[at : at + b - a] = self.store[row][a:b]
            rows[at : at + b - a] = row - first
            at += b - a
        return ids, rows

    def edges(self, document: int) -> np.ndarray:
        """Where the segments of a document begin, int64, the first at 0."""
        length = self.store.starts[self.last_row[document]] - self.store.starts[self.first_row[document]]
        if not self._marks:
            return np.arange(0, length, self._segment)
        found = np.flatnonzero(np.isin(self.tokens(document, 0, length)[0], self._marks))
        return np.union1d([0], found)

    def read(self, number: int) -> Piece:
        """The first token of a document is read after `end_of_text`, which counts to its first row and segment."""
        document, start, stop = (int(x[number]) for x in (self._document, self._start, self._stop))
        ids, parts = self.tokens(document, max(start - 1, 0), stop)
        if start == 0:
            ids, parts = np.append(np.int32(self.store.tokenizer.end_of_text), ids), np.append(parts[:1], parts)
        read = np.maximum(np.arange(start, stop) - 1, 0)
        first, last = self._first[document : document + 2]
        weights = cross_fade(self._start[first:last], self._stop[first:last], number - first, self.blind)
        segments = np.searchsorted(_edges(self, document), read, "right") - 1
        context_only = int(self._context_only[number])
        return Piece(number, document, start, context_only, ids[:-1], ids[1:], parts[:-1], weights, segments.astype(np.int32))


@lru_cache(maxsize=2)
def _edges(pieces: DocumentPieces, document: int) -> np.ndarray:
    return pieces.edges(document)
