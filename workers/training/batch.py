"""From windows to this rank's tensors: collate on the leader, lay out once, send each rank its own part.

Labels come already shifted (a window's target stands beside the token that predicts it), so slicing loses none; the
positions travel beside the tokens, so no module ever derives them from a local index.

Legend: B sequences, S tokens of the padded sequence, s = S / cp tokens of one rank, N planes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from workers.attention import Pattern
from workers.attention.layout import positions as layout_positions
from workers.training.window import IGNORE, Window

PLANES = 5  # of a batch: tokens, targets, positions, length, part


@dataclass
class Batch:
    """This rank's part of some sequences: int64 [B, s], and the pattern they are attended by.

    ``length``: longest position + 1 of each token's whole document, wherever its tokens are. ``part``: how many other parts of
    its document (papers of its shelf, files of its repository) stand before a token's own.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    length: torch.Tensor
    part: torch.Tensor
    pattern: Pattern


def causal(documents: torch.Tensor | None, parts: torch.Tensor | None = None) -> Pattern:
    return Pattern(documents=documents)


def receive(windows: list[Window] | None, mesh, context: int, pattern: Callable[..., Pattern] = causal, alone: bool = False) -> Batch:
    """This rank's part of the group's next sequences: ``windows`` on the leader, None on the other ranks. A collective.

    ``pattern(documents, parts)`` is what the model's tokens see (``ModelConfig.pattern``). ``alone`` takes every part for a
    document: what a model makes of a paper without those before it.

    The sequence is padded to what the mesh divides: padding is a document of its own, without targets.
    """
    length = mesh.spec.padded(context)
    ranks = mesh.spec.ranks_per_group
    slices, bounds = None, [None, None]
    if windows is not None:
        assert mesh.is_leader, "only the leader of a group reads windows"
        whole, *bounds = _collate(windows, length, alone)
        if ranks > 1:
            cp_slices = [whole[..., layout_positions(length, mesh, cp_rank=rank)] for rank in range(mesh.spec.cp)]
            slices = [own for own in cp_slices for _ in range(mesh.spec.tp)] * mesh.spec.pp
    if ranks == 1:
        own = whole
    else:
        header = torch.zeros(3, dtype=torch.int64)
        if windows is not None:
            header = torch.tensor([len(windows), *(ids is not None for ids in bounds)])
        dist.broadcast(header, mesh.leader, group=mesh.group)
        count, *present = header.tolist()
        own = torch.empty(PLANES, count, length // mesh.spec.cp, dtype=torch.int64)
        dist.scatter(own, slices, src=mesh.leader, group=mesh.group)
        for which in (which for which in range(2) if present[which]):
            if bounds[which] is None:
                bounds[which] = torch.empty(count, length, dtype=torch.int32)
            dist.broadcast(bounds[which], mesh.leader, group=mesh.group)
    return Batch(*own.to(mesh.device).unbind(), pattern(*bounds))


def _collate(windows: list[Window], length: int, alone: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The planes [N, B, S]; documents [B, S], or None where the causal order alone separates them; parts [B, S], or None where they are the documents."""
    context = len(windows[0].tokens)
    whole = np.zeros((PLANES, len(windows), length), dtype=np.int64)
    whole[1, :, context:] = IGNORE
    documents, parts = np.full((2, len(windows), length), -1, dtype=np.int32)
    for row, window in enumerate(windows):
        planes = (window.tokens, window.targets, window.positions, _document_length(window), _part_of_document(window))
        for plane, values in enumerate(planes):
            whole[plane, row, :context] = values
        documents[row, :context], parts[row, :context] = window.part_ids if alone else window.documents, window.part_ids
    one_document, one_part = _one_document(whole[1], documents), alone or not whole[4].any()
    return torch.from_numpy(whole), None if one_document else torch.from_numpy(documents), None if one_part else torch.from_numpy(parts)


def _document_length(window: Window) -> np.ndarray:
    """Longest position + 1 of each token's document, int64 [C]."""
    starts = np.flatnonzero(np.diff(window.documents, prepend=window.documents[0] - 1))
    return np.repeat(np.maximum.reduceat(window.positions, starts) + 1, np.diff(starts, append=len(window.documents)))


def _part_of_document(window: Window) -> np.ndarray:
    """How many other parts of its document stand before each token's own, int64 [C]."""
    first = np.flatnonzero(np.diff(window.documents, prepend=window.documents[0] - 1))
    changes = np.cumsum(np.diff(window.part_ids, prepend=window.part_ids[0]) != 0)
    return changes - np.repeat(changes[first], np.diff(first, append=len(window.documents)))


def _one_document(targets: np.ndarray, documents: np.ndarray) -> bool:
    """Whether in every row all that stands before the last target is one document: what follows it, causality hides."""
    for row in range(len(targets)):
        learnt = np.flatnonzero(targets[row] != IGNORE)
        if len(learnt) and (documents[row, : learnt[-1] + 1] != documents[row, 0]).any():
            return False
    return True
