"""From documents to windows of a fixed context: which tokens each training sequence holds, and in what order.

A document of L tokens has L targets. The input of a target is the token before it; the first target's input is
`end_of_text`, the mark that a document starts. Hence a span of targets [start, stop) reads the inputs
document[start − 1 : stop − 1].

1. A document longer than the context becomes windows with a stride of context − overlap. In each but the first, the
   first `overlap` targets are context only: seen, not learnt, since the window before has learnt them.
2. What is shorter than the context, whole documents and tails, is packed by best-fit decreasing (Ding et al. 2024,
   "Fewer truncations improve language modeling"). Nothing is cut to make it fit.
3. The seed and the epoch permute the windows; they change no window. So each token is a target exactly once an epoch
   and the order is known from (seed, epoch) alone, on any number of machines: sequence g of a run is window
   `order(g // n)[g % n]` for n windows an epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipelines.corpus.store import TokenStore
from workers.training.window import IGNORE, Window


@dataclass(frozen=True)
class Span:
    """Targets [start, stop) of a document; the first `context_only` of them are not learnt here."""

    document: int
    start: int
    stop: int
    context_only: int


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


class WindowPlan:
    """The windows of a store, in the order of every epoch.

    Args:
        store: a TokenStore.
        context: tokens in a window.
        overlap: context-only targets at the head of a continued document's window; default context // 8.
        seed: of the order; 0 ≤ seed < 2⁶⁴.
        documents: indices to use (a set: order and repeats don't matter); default all.
        positions: "restart" counts from 0 in each piece, "continue" counts through the window.

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
    ):
        overlap = context // 8 if overlap is None else overlap
        if positions not in ("restart", "continue"):
            raise ValueError(f"positions is {positions!r}; choose restart or continue")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}; it must lie in 0–2⁶⁴ − 1")
        self.store, self.context, self.overlap, self.seed, self.positions = store, context, overlap, seed, positions
        self.documents = None if documents is None else _checked(documents, len(store))
        lengths = store.lengths if documents is None else store.lengths[self.documents]
        self.pieces = plan_pieces(lengths, context, overlap)
        if len(self.pieces) == 0:
            raise ValueError(f"no window: none of the {len(lengths):,} documents in {store.folder} has a token")
        self._orders: dict[int, np.ndarray] = {}

    def __reduce__(self):
        documents = None if self.documents is None else self.documents.tobytes()
        arguments = (self.context, self.overlap, self.seed, documents, self.positions)
        return _rebuild, (self.store.address, self.store.fingerprint, *arguments)

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def targets(self) -> int:
        """Targets an epoch, which is the number of tokens in the documents used."""
        pieces = self.pieces
        return int((pieces.stop - pieces.start - pieces.context_only).sum())

    @property
    def fingerprint(self) -> str:
        """Names the windows and their order: plans of equal fingerprint give the same spans for the same number."""
        documents = b"all" if self.documents is None else self.documents.tobytes()
        told = f"{self.store.fingerprint} {self.context} {self.overlap} {self.seed} ".encode()
        return hashlib.blake2b(told + documents, digest_size=16).hexdigest()

    def sequence_after(self, tokens: int) -> int:
        """The first sequence with at least ``tokens`` targets before it, over all epochs: how a run goes on in another plan.

        In the plan that the tokens were learnt in, this is the very next sequence. In another (another context, overlap or
        corpus) windows are cut and permuted anew, so what is left of the epoch holds some targets twice and misses as many;
        but the epochs keep their length, the order is never read from its start again before it has been read to its end,
        and the answer depends on the number of tokens alone, not on the mesh.
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
        document = pieces.document if self.documents is None else self.documents[pieces.document]
        return [
            Span(int(document[p]), int(pieces.start[p]), int(pieces.stop[p]), int(pieces.context_only[p])) for p in used
        ]

    def read(self, g: int) -> Window:
        """Sequence g: its pieces' documents count 0, 1, 2 …; padding is the next one, `end_of_text` without targets.

        The tokens are copied from the memory map; nothing else of the store is touched.
        """
        end_of_text = self.store.tokenizer.end_of_text
        spans = self.window(g)
        tokens = np.full(self.context, end_of_text, np.int32)
        targets = np.full(self.context, IGNORE, np.int32)
        positions = np.arange(self.context, dtype=np.int64)
        documents = np.full(self.context, len(spans), np.int32)
        at = 0
        for i, span in enumerate(spans):
            ids = self.store[span.document]
            end = at + span.stop - span.start
            before = max(span.start - 1, 0)
            tokens[end - (span.stop - 1 - before) : end] = ids[before : span.stop - 1]
            targets[at + span.context_only : end] = ids[span.start + span.context_only : span.stop]
            documents[at:end] = i
            if self.positions == "restart":
                positions[at:end] -= at
            at = end
        if self.positions == "restart":
            positions[at:] -= at
        return Window(g, tokens, targets, positions, documents)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # A reader near the end of an epoch may look ahead into the next: two orders are kept.
            self._orders = dict([*self._orders.items()][-1:])
            # Philox's raw stream is fixed by its algorithm; numpy promises no such thing for `permutation`.
            keys = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(len(self))
            self._orders[epoch] = np.argsort(keys, kind="stable")
        return self._orders[epoch]


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


def held_out(store: TokenStore, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Splits documents into (train, held out), int64 indices each.

    A hash of the path decides, so a file stays on its side when others are added. Where chance leaves one side
    without a token, the document nearest to the border moves over: with two or more documents that have tokens,
    both sides have one; with a single one, training has it. A fraction of 0 holds nothing out.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"held-out fraction is {fraction}; it must be at least 0 and less than 1")
    hashes = np.array([_unit_hash(f"{seed}:{store.paths(i)}") for i in range(len(store))])
    out = hashes < fraction
    filled = np.flatnonzero(store.lengths > 0)
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
def _rebuild(folder, fingerprint, context, overlap, seed, documents, positions) -> WindowPlan:
    store = TokenStore.open(folder)
    if store.fingerprint != fingerprint:
        raise ValueError(f"{folder} changed since the windows were planned: was {fingerprint}, is {store.fingerprint}")
    documents = None if documents is None else np.frombuffer(documents, np.int64)
    return WindowPlan(store, context, overlap, seed, documents, positions)
