"""What a model makes of one window of a document: the loss of every token, and sums of its representations by segment.

Cross-fade weights are known beforehand (see ``fade``), so weighted sums over windows need no window's tokens but its own: what
leaves a window is a number a token and a vector a segment, however long the document is.

Legend: n tokens of the window, K segments in it, D model size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from workers.model import Decoder
from workers.training.loss import token_losses


class Piece(NamedTuple):
    """One window of a document: its targets [start, start + n) and, before each of them, the token that is read.

    number: its place in the order of all pieces. document: which one; its pieces follow each other.
    context_only: the first targets, which the piece before has scored.
    tokens, targets: int32 [n]; a target may be IGNORE. parts: int32 [n], the paper or file that a token belongs to.
    weights: float32 [n], of the cross-fade. segments: int32 [n], the document's segment of each token read, ascending.
    """

    number: int
    document: int
    start: int
    context_only: int
    tokens: np.ndarray
    targets: np.ndarray
    parts: np.ndarray
    weights: np.ndarray
    segments: np.ndarray


class Result(NamedTuple):
    """``losses`` float32 [n] (nats, 0 where there is no target) beside ``weights``; ``sums`` float32 [K, D], the weighted sums of
    the representations of each of ``segments`` int32 [K], and ``counts`` float32 [K], the sums of those weights."""

    number: int
    document: int
    start: int
    context_only: int
    losses: np.ndarray
    weights: np.ndarray
    segments: np.ndarray
    counts: np.ndarray
    sums: np.ndarray


@torch.no_grad()
def process(model: Decoder, piece: Piece) -> Result:
    """A token's representation is the hidden state, after the last norm, of the place that reads it."""
    device = model.embed_tokens.weight.device
    tokens, targets = (torch.from_numpy(x.astype(np.int64))[None].to(device) for x in (piece.tokens, piece.targets))
    parts = torch.from_numpy(piece.parts)[None] if (piece.parts != piece.parts[0]).any() else None
    segments, index = np.unique(piece.segments, return_inverse=True)
    weights = torch.from_numpy(piece.weights).to(device)

    def head(hidden_BSD, weight_VD):
        _, losses_BS = token_losses(hidden_BSD, weight_VD, targets)
        sums_KD = hidden_BSD.new_zeros(len(segments), hidden_BSD.shape[-1], dtype=torch.float32)
        sums_KD.index_add_(0, torch.from_numpy(index).to(device), hidden_BSD[0].float() * weights[:, None])
        return losses_BS[0], sums_KD

    positions = torch.arange(len(piece.tokens), device=device)[None]
    losses, sums = model(tokens, positions, model.config.pattern(None, parts), head=head)
    counts = np.bincount(index, piece.weights, len(segments)).astype(np.float32)
    return Result(*piece[:4], losses.cpu().numpy(), piece.weights, segments.astype(np.int32), counts, sums.cpu().numpy())


class Summary(NamedTuple):
    """A document's ``segments`` float32 [M, D], each the mean of its tokens' representations, and the mean of all, ``whole`` [D].

    ``counts`` float32 [M] are the segments' tokens.
    """

    document: int
    segments: np.ndarray
    counts: np.ndarray
    whole: np.ndarray


def summaries(results: Iterable[Result]) -> Iterator[Summary]:
    """The representation of each document. Memory: a vector a segment of one document."""
    document, sums, counts = None, [], []

    def summary() -> Summary:
        total, tokens = np.stack(sums), np.array(counts, np.float32)
        return Summary(document, total / np.maximum(tokens, 1e-9)[:, None], tokens, total.sum(0) / tokens.sum())

    for result in results:
        if document is not None and result.document != document:
            yield summary()
            sums, counts = [], []
        document = result.document
        for segment, vector, count in zip(result.segments.tolist(), result.sums, result.counts.tolist()):
            while len(sums) <= segment:
                sums.append(np.zeros_like(vector))
                counts.append(0.0)
            sums[segment] += vector
            counts[segment] += count
    if document is not None:
        yield summary()


def faded_losses(results: Iterable[Result]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(document, first target, losses float32): each target's loss over all windows that hold it, in order, as soon as they are known.

    Memory: one window.
    """
    document, first, losses = None, 0, np.zeros(0, np.float32)
    for result in results:
        known = len(losses) if result.document != document else result.start - first
        if known:
            yield document, first, losses[:known]
        if result.document != document:
            document, first, losses = result.document, result.start, np.zeros(0, np.float32)
        else:
            first, losses = result.start, losses[known:]
        losses = np.pad(losses, (0, max(0, len(result.losses) - len(losses))))
        losses[: len(result.losses)] += result.weights * result.losses
    if len(losses):
        yield document, first, losses
