"""From documents to windows of a fixed context: which tokens each training sequence holds, and in what order.

A document is a row of the store, or all rows of a collection, one after another (`store.unit`). Of L tokens it has L
targets. The input of a target is the token before it; the first target's input is `end_of_text`, the mark that a
document starts. Hence a span of targets [start, stop) reads the inputs document[start − 1 : stop − 1].

1. `packing` cuts documents that are longer than the context and packs what is shorter.
2. The seed and the epoch permute the windows; they change no window. So each token is a target exactly once an epoch
   (r times, where a document is repeated r times on purpose) and the order is known from (seed, epoch) alone, on any
   number of machines: sequence g of a run is window `order(g // n)[g % n]` for n windows an epoch.
3. What a window teaches may be rewritten as it is read (fill-in-the-middle), inside one row, into room that was left.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from pipelines.corpus.holdout import held_out_part
from pipelines.corpus.packing import plan_pieces
from pipelines.corpus.store import TokenStore
from pipelines.corpus.tokenizer import Tokenizer
from workers.training.window import IGNORE, Window


@dataclass(frozen=True)
class Span:
    """Targets [start, stop) of a document; the first `context_only` of them are not learnt here."""

    document: int
    start: int
    stop: int
    context_only: int


class Rewriter(Protocol):
    """Changes what a window teaches, as `code_completion.fim.Fim` does. A frozen dataclass: it travels with the plan."""

    def reserve(self, context: int) -> int:
        """Tokens that each window leaves free."""

    def rewrite(self, row: np.ndarray, start: int, stop: int, room: int, tokenizer: Tokenizer, place: tuple[int, ...]) -> np.ndarray:
        """What is learnt in place of row[start:stop], at most `room` tokens longer; `place` seeds chance."""


class WindowPlan:
    """The windows of a store, in the order of every epoch.

    Args:
        store: a TokenStore.
        context: tokens in a window.
        overlap: context-only targets at the head of a continued document's window; default context // 8.
        seed: of the order; 0 ≤ seed < 2⁶⁴.
        documents: indices into `store.documents` to use (a set: order and repeats don't matter); default all.
        positions: "restart" counts from 0 in each piece, "continue" counts through the window.
        repeats: int64 [documents used], how often an epoch has each; default once.
        rewriter: what changes the windows as they are read.

    `len(plan)` is the windows an epoch. A plan pickles as the store's folder and these arguments; a process that
    receives many copies plans once. Raises ValueError for arguments that allow no window.
    """

    def __init__(
        self,
        store: TokenStore,
        context: int,
        overlap: int | None = None,
        seed: int = 0,
        documents: np.ndarray | None = None,
        positions: str = "restart",
        repeats: np.ndarray | None = None,
        rewriter: Rewriter | None = None,
    ):
        overlap = context // 8 if overlap is None else overlap
        if positions not in ("restart", "continue"):
            raise ValueError(f"positions is {positions!r}; choose restart or continue")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}; it must lie in 0–2⁶⁴ − 1")
        self.store, self.context, self.overlap, self.seed, self.positions = store, context, overlap, seed, positions
        self.documents = None if documents is None else _checked(documents, len(store.documents) - 1)
        self.repeats, self.rewriter = repeats, rewriter
        lengths = document_lengths(store) if documents is None else document_lengths(store)[self.documents]
        used = np.arange(len(lengths)) if repeats is None else np.repeat(np.arange(len(lengths)), repeats)
        self.pieces = plan_pieces(lengths[used], *self._room())
        if len(self.pieces) == 0:
            raise ValueError(f"no window: none of the {len(lengths):,} documents in {store.folder} has a token")
        self._document = (used if self.documents is None else self.documents[used])[self.pieces.document]
        self._orders: dict[int, np.ndarray] = {}

    def __reduce__(self):
        documents, repeats = (None if a is None else np.asarray(a, np.int64).tobytes() for a in (self.documents, self.repeats))
        arguments = (self.context, self.overlap, self.seed, documents, self.positions, repeats, self.rewriter)
        return _rebuild, (self.store.address, self.store.fingerprint, *arguments)

    def _room(self) -> tuple[int, int]:
        """The tokens that may be planned in a window, and the overlap in it."""
        reserve = self.rewriter.reserve(self.context) if self.rewriter is not None else 0
        if reserve >= self.context - self.overlap > 0:
            raise ValueError(
                f"context is {self.context}; an overlap of {self.overlap} and the {reserve} tokens that fill-in-the-middle keeps free "
                f"leave no room: take a larger context, or set corpus.fim_rate to 0"
            )
        return self.context - reserve, self.overlap

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def targets(self) -> int:
        """Targets an epoch: the tokens of the documents used, as often as they are; before any rewriting."""
        pieces = self.pieces
        return int((pieces.stop - pieces.start - pieces.context_only).sum())

    @property
    def fingerprint(self) -> str:
        """Names the windows and their order: plans of equal fingerprint give the same spans for the same number."""
        documents = b"all" if self.documents is None else self.documents.tobytes()
        told = f"{self.store.fingerprint} {self.context} {self.overlap} {self.seed} ".encode()
        if self.repeats is not None:
            documents += b" repeats " + np.asarray(self.repeats, np.int64).tobytes()
        if self.rewriter is not None:
            documents += f" room {self._room()[0]}".encode()
        return hashlib.blake2b(told + documents, digest_size=16).hexdigest()

    def sequence_after(self, tokens: int) -> int:
        """The first sequence with at least ``tokens`` targets before it, over all epochs: how a run goes on in another plan.

        In the plan that the tokens were learnt in, this is the very next sequence. In another (another context, overlap or
        corpus) windows are cut and permuted anew, so what is left of the epoch holds some targets twice and misses as many;
        but the epochs keep their length, the order is never read from its start again before it has been read to its end,
        and the answer depends on the number of tokens alone, not on the mesh. What a rewriter added counts among the tokens
        learnt and not among a plan's targets: by so much, the room it kept free at most, another plan is entered further on.
        """
        pieces = self.pieces
        epoch, rest = divmod(tokens, self.targets)
        targets = np.add.reduceat(pieces.stop - pieces.start - pieces.context_only, pieces.first[:-1])
        before = np.concatenate([[0], np.cumsum(targets[self._order(epoch)])])
        return epoch * len(self) + int(np.searchsorted(before, rest))

    def window(self, g: int) -> list[Span]:
        """What sequence g holds; g counts from 0 over all epochs."""
        if g < 0:
            raise IndexError(f"sequence {g}: sequences are counted from 0")
        epoch, place = divmod(g, len(self))
        window = self._order(epoch)[place]
        pieces = self.pieces
        used = range(pieces.first[window], pieces.first[window + 1])
        return [Span(int(self._document[p]), int(pieces.start[p]), int(pieces.stop[p]), int(pieces.context_only[p])) for p in used]

    def read(self, g: int) -> Window:
        """Sequence g: its pieces' documents count 0, 1, 2 …, and so do their rows where a document has several (`parts`);
        padding is the next one, `end_of_text` without targets.

        The tokens are copied from the memory map; nothing else of the store is touched.
        """
        spans = self.window(g)
        tokens = np.full(self.context, self.store.tokenizer.end_of_text, np.int32)
        targets = np.full(self.context, IGNORE, np.int32)
        positions = np.arange(self.context, dtype=np.int64)
        documents = np.full(self.context, len(spans), np.int32)
        parts = np.zeros(self.context, np.int32)
        at, room = 0, self.context - sum(span.stop - span.start for span in spans)
        for i, span in enumerate(spans):
            learnt_from = span.start + span.context_only
            learnt, learnt_rows = self._learnt(span.document, learnt_from, span.stop, room, g)
            room -= len(learnt) - (span.stop - learnt_from)
            seen, seen_rows = self._ids(span.document, max(span.start - 1, 0), learnt_from)
            first = at + (span.start == 0)  # before the first target stands end_of_text
            begin, end = at + span.context_only, at + span.context_only + len(learnt)
            tokens[first : first + len(seen)] = seen
            tokens[begin + 1 : end] = learnt[:-1]
            targets[begin:end] = learnt
            documents[at:end] = i
            rows = np.concatenate([seen_rows, learnt_rows])
            parts[at:] = parts[at - 1] + 1 if at else 0
            parts[first:end] += (rows[:-1] - rows[0]).astype(np.int32)
            if self.positions == "restart":
                positions[at:end] -= at
            at = end
        parts[at:] = parts[at - 1] + 1
        if self.positions == "restart":
            positions[at:] -= at
        return Window(g, tokens, targets, positions, documents, parts if self.store.unit == "collection" else None)

    def _ids(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop) of a document, over all its rows, and the row of each."""
        return self._joined([(row, self.store[row][a:b]) for row, a, b in self._rows(document, start, stop)])

    def _joined(self, pieces: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        ids = pieces[0][1] if len(pieces) == 1 else np.concatenate([np.zeros(0, self.store.tokenizer.dtype), *(ids for _, ids in pieces)])
        return ids, np.repeat(np.array([row for row, _ in pieces], np.int64), [len(ids) for _, ids in pieces])

    def _rows(self, document: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Tokens [start, stop) of a document as (row of the store, first, last + 1 in that row)."""
        before = int(self.store.starts[self.store.documents[document]])
        return self.store.rows_between(start + before, stop + before)

    def _learnt(self, document: int, start: int, stop: int, room: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """What sequence `number` learns of tokens [start, stop), at most `room` tokens longer than these, and the row of each."""
        if self.rewriter is None:
            return self._ids(document, start, stop)
        pieces = []
        for row, a, b in self._rows(document, start, stop):
            place = (self.seed, number, row, a)  # the number: another epoch, or a repeat in this one, is cut elsewhere
            pieces.append((row, self.rewriter.rewrite(self.store[row], a, b, room, self.store.tokenizer, place)))
            room -= len(pieces[-1][1]) - (b - a)
        return self._joined(pieces)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # A reader near the end of an epoch may look ahead into the next: two orders are kept.
            self._orders = dict([*self._orders.items()][-1:])
            # Philox's raw stream is fixed by its algorithm; numpy promises no such thing for `permutation`.
            keys = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(len(self))
            self._orders[epoch] = np.argsort(keys, kind="stable")
        return self._orders[epoch]


def document_lengths(store: TokenStore) -> np.ndarray:
    """Tokens of each document, int64 [documents]."""
    return np.diff(store.starts[store.documents])


def document_names(store: TokenStore, documents: np.ndarray | slice = slice(None)) -> list[str]:
    """Of each of ``documents`` its path, or where it is a collection that one's name."""
    name = store.paths if store.unit == "row" else store.collection
    return [name(int(first)) for first in store.documents[:-1][documents]]


def held_out(store: TokenStore, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Splits documents into (train, held out), int64 indices each.

    What the ingest was told to hold out is held out, and nothing else: a document of which a row's path, a folder above
    it, or the collection matches a pattern. Where it was told nothing, a hash of the name decides, so a document stays on
    its side when others are added. Where chance leaves one side without a token, the document nearest to the border moves
    over: with two or more documents that have tokens, both sides have one; with a single one, training has it. A fraction
    of 0 holds nothing out. Raises ValueError where nothing is left to train on.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"held-out fraction is {fraction}; it must be at least 0 and less than 1")
    lengths = document_lengths(store)
    if patterns := store.manifest["held_out"]:
        rows = np.array([held_out_part(store.paths(row), store.collection(row), patterns) is not None for row in range(len(store))], bool)
        out = np.diff(np.concatenate([[0], np.cumsum(rows)])[store.documents]) > 0
        if not lengths[~out].any():
            raise ValueError(f"{store.folder} holds out {', '.join(patterns)}, which is all it has; ingest something to train on beside")
        return np.flatnonzero(~out), np.flatnonzero(out)
    hashes = np.array([_unit_hash(f"{seed}:{name}") for name in document_names(store)])
    out = hashes < fraction
    filled = np.flatnonzero(lengths > 0)
    if len(filled) == 1:
        out[filled] = False
    if fraction > 0 and len(filled) > 1:
        if not out[filled].any():
            out[filled[hashes[filled].argmin()]] = True
        if out[filled].all():
            out[filled[hashes[filled].argmax()]] = False
    return np.flatnonzero(~out), np.flatnonzero(out)


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _checked(documents: np.ndarray, count: int) -> np.ndarray:
    documents = np.unique(np.asarray(documents, dtype=np.int64))
    if len(documents) and not (0 <= documents[0] and documents[-1] < count):
        raise ValueError(f"documents {documents[0]}–{documents[-1]} asked for, the store has 0–{count - 1}")
    return documents


@lru_cache(maxsize=4)
def _rebuild(folder, fingerprint, context, overlap, seed, documents, positions, repeats, rewriter) -> WindowPlan:
    store = TokenStore.open(folder)
    if store.fingerprint != fingerprint:
        raise ValueError(f"{folder} changed since the windows were planned: was {fingerprint}, is {store.fingerprint}")
    documents, repeats = (None if data is None else np.frombuffer(data, np.int64) for data in (documents, repeats))
    return WindowPlan(store, context, overlap, seed, documents, positions, repeats, rewriter)
