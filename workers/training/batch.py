"""From windows to this rank's tensors: collate on the leader, lay out once, send each rank its own part.

Labels come already shifted (a window's target stands beside the token that predicts it), so slicing loses none; the
positions travel beside the tokens, so no module ever derives them from a local index.

Legend: B sequences, S tokens of the padded sequence, s = S / cp tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np
import torch
import torch.distributed as dist

from workers.attention import Pattern
from workers.attention.layout import positions as layout_positions
from workers.training.window import IGNORE, Window


@dataclass
class Batch:
    """This rank's part of some sequences: int64 [B, s], and the pattern they are attended by.

    ``length``: longest position + 1 of each token's whole document, wherever its tokens are.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    length: torch.Tensor
    pattern: Pattern


def causal(documents: torch.Tensor | None) -> Pattern:
    return Pattern(documents=documents)


def receive(windows: list[Window] | None, mesh, context: int, pattern: Callable[[torch.Tensor | None], Pattern] = causal) -> Batch:
    """This rank's part of the group's next sequences: ``windows`` on the leader, None on the other ranks. A collective.

    ``pattern(documents)`` is what the model's tokens see (``ModelConfig.pattern``).

    The sequence is padded to what the mesh divides: padding is a document of its own, without targets.
    """
    length = mesh.spec.padded(context)
    ranks = mesh.spec.ranks_per_group
    parts, documents = None, None
    if windows is not None:
        assert mesh.is_leader, "only the leader of a group reads windows"
        whole, documents = _collate(windows, length)
        if ranks > 1:
            cp_parts = [whole[..., layout_positions(length, mesh, cp_rank=rank)] for rank in range(mesh.spec.cp)]
            parts = [part for part in cp_parts for _ in range(mesh.spec.tp)] * mesh.spec.pp
    if ranks == 1:
        part = whole
    else:
        header = torch.zeros(2, dtype=torch.int64)
        if documents is not None:
            header = torch.tensor([len(windows), documents.numel()])
        elif windows is not None:
            header = torch.tensor([len(windows), 0])
        dist.broadcast(header, mesh.leader, group=mesh.group)
        count, has_documents = header.tolist()
        part = torch.empty(4, count, length // mesh.spec.cp, dtype=torch.int64)
        dist.scatter(part, parts, src=mesh.leader, group=mesh.group)
        if has_documents:
            documents = torch.empty(count, length, dtype=torch.int32) if documents is None else documents
            dist.broadcast(documents, mesh.leader, group=mesh.group)
    return Batch(*part.to(mesh.device).unbind(), pattern(documents))


def _collate(windows: list[Window], length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens, targets, positions and lengths as [4, B, S], and documents [B, S], or None where the causal order alone separates them."""
    context = len(windows[0].tokens)
    whole = np.zeros((4, len(windows), length), dtype=np.int64)
    whole[1, :, context:] = IGNORE
    documents = np.full((len(windows), length), -1, dtype=np.int32)
    for row, window in enumerate(windows):
        for plane, values in enumerate((window.tokens, window.targets, window.positions, _document_length(window))):
            whole[plane, row, :context] = values
        documents[row, :context] = window.documents
    return torch.from_numpy(whole), None if _one_document(whole[1], documents) else torch.from_numpy(documents)


def _document_length(window: Window) -> np.ndarray:
    """Longest position + 1 of each token's document, int64 [C]."""
    starts = np.flatnonzero(np.diff(window.documents, prepend=window.documents[0] - 1))
    return np.repeat(np.maximum.reduceat(window.positions, starts) + 1, np.diff(starts, append=len(window.documents)))


def _one_document(targets: np.ndarray, documents: np.ndarray) -> bool:
    """Whether in every row all that stands before the last target is one document: what follows it, causality hides."""
    for row in range(len(targets)):
        learnt = np.flatnonzero(targets[row] != IGNORE)
        if len(learnt) and (documents[row, : learnt[-1] + 1] != documents[row, 0]).any():
            return False
    return True
