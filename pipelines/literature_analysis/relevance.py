"""Which sections of a shelf a question is about: by how much likelier the section makes the question.

A section's relevance is log p(question | section) − log p(question), a token of the question: pointwise mutual information, by
the model itself (Ponte & Croft 1998, "A language modeling approach to information retrieval"; Sachan et al. 2022, "Improving
passage retrieval with zero-shot question generation"). It needs no training for retrieval, where pooled hidden states of a model
that learnt the next token are poor as embeddings: these choose only which sections are scored where a shelf has too many.

Legend: M sections, D model size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipelines.corpus.store import TokenStore
from pipelines.corpus.windows import plan_pieces
from workers.inference.process import Piece, Result, Summary
from workers.training.window import IGNORE


@dataclass(frozen=True)
class Section:
    """Tokens [start, stop) of a row; ``number`` counts its sections, 0 is what stands before the first heading."""

    row: int
    number: int
    start: int
    stop: int


class QuestionPieces:
    """Pieces that score questions after windows of sections: document p of them is the pair (question, section) ``pairs[p]``; a
    section of None scores the question by itself.

    Raises ValueError for a question that leaves less than half a context to the sections.
    """

    def __init__(self, store: TokenStore, questions: list[np.ndarray], pairs: list[tuple[int, Section | None]], context: int):
        longest = max(map(len, questions))
        if longest + 1 > context // 2:
            raise ValueError(f"a question of {longest} tokens is too long for a context of {context}; ask in at most {context // 2 - 1}")
        self.store, self.context, self._questions, self._pairs = store, context, questions, pairs
        lengths = np.array([section.stop - section.start if section is not None else 0 for _, section in pairs])
        room = context - longest - 1
        pieces = plan_pieces(lengths, room, room // 8)
        order = np.lexsort((pieces.start, pieces.document))
        pair, start, stop = (getattr(pieces, name)[order] for name in ("document", "start", "stop"))
        alone = np.flatnonzero(lengths == 0)  # a question by itself has no window
        order = np.argsort(np.concatenate([pair, alone]), kind="stable")
        self._pair, self._start, self._stop = (
            np.concatenate(columns)[order] for columns in ((pair, alone), (start, 0 * alone), (stop, 0 * alone))
        )

    def __len__(self) -> int:
        return len(self._pair)

    def read(self, number: int) -> Piece:
        """Only the question's tokens are targets, and only their representations are summed."""
        pair, start, stop = (int(x[number]) for x in (self._pair, self._start, self._stop))
        question, section = self._questions[self._pairs[pair][0]], self._pairs[pair][1]
        passage = self.store[section.row][section.start + start : section.start + stop] if section is not None else question[:0]
        ids = np.concatenate([[self.store.tokenizer.end_of_text], passage, question]).astype(np.int32)
        asked = np.arange(1, len(ids)) > len(passage)
        nothing = np.zeros(len(ids) - 1, np.int32)
        targets = np.where(asked, ids[1:], IGNORE).astype(np.int32)
        return Piece(number, pair, start, 0, ids[:-1], targets, nothing, asked.astype(np.float32), nothing)


def losses_of_questions(results: Iterable[Result], pairs: int) -> np.ndarray:
    """Nats of the question in each pair, float64 [pairs]: of a long section's windows the one that tells most."""
    best = np.full(pairs, np.inf)
    for result in results:
        best[result.document] = min(best[result.document], float(result.losses.astype(np.float64).sum()))
    return best


def sections_of(edges: np.ndarray, row: int, length: int) -> list[Section]:
    return [Section(row, number, int(a), int(b)) for number, (a, b) in enumerate(zip(edges, [*edges[1:], length]))]


def nearest(shelf: Iterable[Summary], questions: list[np.ndarray], most: int) -> list[list[tuple[int, int]]]:
    """The ``most`` (document, segment) pairs whose representations are nearest to each question's, float32 [D].

    Cosine of the differences from the shelf's mean, which all text of a model has in common. Memory: the M · D of the shelf.
    """
    names, vectors, weights = [], [], []
    for summary in shelf:
        names += [(summary.document, segment) for segment in range(len(summary.segments))]
        vectors.append(summary.segments)
        weights.append(summary.counts)
    vectors_MD, weights_M = np.concatenate(vectors), np.concatenate(weights)
    middle = (vectors_MD * weights_M[:, None]).sum(0) / weights_M.sum()
    unit = lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9)
    near = [unit(vectors_MD - middle) @ unit(question - middle) for question in questions]
    return [[names[i] for i in np.argsort(-cosine, kind="stable")[:most]] for cosine in near]
