"""Held-out loss of a trained model on a store: in all, by document, by context and by position.

A document longer than the context is processed in windows (``cluster.process``). Each target is scored once, by the window that
gives it most context: strided perplexity, whose sum of losses over count of targets is the loss (Baevski & Auli 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.config import load_config
from pipelines.corpus import TokenStore
from pipelines.corpus.tokenizer import load_tokenizer
from pipelines.corpus.windows import document_lengths, document_names, held_out
from pipelines.evaluation.pieces import DocumentPieces
from pipelines.models.source import Source, open_source
from pipelines.paths import read_mapping
from workers.inference.process import Result
from workers.model import ModelConfig
from workers.training.evaluate import position_edges


@dataclass(frozen=True)
class Evaluation:
    """An evaluation whose every input has been checked. ``names`` are those of the documents of ``pieces``, in order."""

    source: Source
    pieces: DocumentPieces
    names: list[str]


def prepare(
    path: Path,
    store: str | Path | None,
    *,
    only_held_out: bool = False,
    documents: int = 100,
    context: int | None = None,
    overlap: int | None = None,
) -> Evaluation:
    """Check what is asked for. ``store`` None is the one that the run was trained on.

    ``documents`` is the most that are scored, spread evenly over those that have tokens. ``overlap`` is by default half a context.
    Raises ValueError, one line, before anything is started.
    """
    source = open_source(path)
    if documents < 1:
        raise ValueError(f"--documents is {documents}; it must be at least 1")
    context = source.context if context is None else context
    overlap = context // 2 if overlap is None else overlap
    if context < 1 or not 0 <= overlap < context:
        raise ValueError(
            f"--context is {context} and --overlap {overlap}; they must be at least 1, and at least 0 and less than the context"
        )
    opened = open_store(source, store)
    used = np.arange(len(opened.documents) - 1)
    if only_held_out:
        used = _held_out(source, opened)
    used = used[document_lengths(opened)[used] > 0]
    if not len(used):
        raise ValueError(f"{opened.folder} has no {'held-out ' if only_held_out else ''}document with a token; name another --store")
    if len(used) > documents:
        used = used[np.linspace(0, len(used) - 1, documents).round().astype(np.int64)]
    pieces = DocumentPieces(opened, used, context, overlap, blind=blind(source.model))
    return Evaluation(source, pieces, document_names(opened, used))


def blind(model: ModelConfig) -> int:
    """A window's first tokens whose receptive field is cut off there (see ``cross_fade``); 0 where that has no bound."""
    return (model.receptive_field or 1) - 1


def open_store(source: Source, store: str | Path | None) -> TokenStore:
    """The store, or the one that the run was trained on; ValueError when there is none."""
    if store is None:
        recorded = source.folder / "corpus.json"
        if not recorded.is_file():
            raise ValueError(f"{source.folder} does not say what it was trained on; name a store with --store")
        store = read_mapping(recorded)["store"]
    return of_model(source, TokenStore.open(store))


def of_model(source: Source, opened: TokenStore) -> TokenStore:
    """The store; ValueError when its ids are not the model's."""
    if opened.tokenizer.fingerprint != load_tokenizer(source.folder).fingerprint:
        raise ValueError(f"{opened.folder} was made with the tokenizer {opened.tokenizer.name}, which is not that of {source.folder}")
    return opened


def _held_out(source: Source, store: TokenStore) -> np.ndarray:
    if not (source.folder / "config.yaml").is_file():
        raise ValueError(f"--held-out wants a run, which says what it held out; {source.folder} is a model folder")
    config = load_config(str(source.folder / "config.yaml"))
    return held_out(store, config.corpus.held_out, config.training.seed)[1]


def score(evaluation: Evaluation, results: Iterable[Result]) -> dict:
    """Sums over ``results``, which are read once. Memory: a row a document."""
    context = evaluation.pieces.context
    edges = position_edges(context)
    by_context, by_position = np.zeros((2, len(edges) - 1)), np.zeros((2, 64))
    by_document, faded = np.zeros((2, len(evaluation.names))), 0.0
    for result in results:
        losses = result.losses[result.context_only :].astype(np.float64)
        seen = np.arange(result.context_only, len(result.losses))
        for totals, bucket in (
            (by_context, np.searchsorted(edges, seen, "right") - 1),
            (by_position, np.frexp(result.start + seen)[1]),  # position 0, then octaves
            (by_document, np.full(len(seen), result.document)),
        ):
            for row, values in zip(totals, (losses, np.ones(len(losses)))):
                row += np.bincount(bucket, values, len(row))
        faded += float((result.losses.astype(np.float64) * result.weights).sum())
    total, targets = by_document.sum(1)
    return {
        "loss": total / targets, "perplexity": _exp(total / targets), "targets": int(targets), "faded_loss": faded / targets,
        "loss_by_context": list(_curve(by_context, edges)),
        "loss_by_position": list(_curve(by_position, [0, *(1 << octave for octave in range(64))])),
        "documents": [
            {"name": name, "targets": int(n), "loss": s / n} for name, s, n in zip(evaluation.names, *by_document.tolist())
        ],
    }  # fmt: skip


def _curve(totals: np.ndarray, edges: list[int]) -> Iterator[dict]:
    for start, stop, s, n in zip(edges, edges[1:], *totals.tolist()):
        if n:
            yield {"start": start, "stop": stop, "loss": s / n, "targets": int(n)}


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
