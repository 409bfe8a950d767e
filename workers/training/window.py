"""One training sequence, whole, as it comes from a corpus. Imports numpy only: processes that read windows need no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

IGNORE = -100  # a target that is not learnt, as in torch.nn.functional.cross_entropy


class Window(NamedTuple):
    """A sequence of C = context tokens.

    number: its place in the global order, which depends on the seed and the epoch alone.
    tokens: int32 [C], inputs. targets: int32 [C], the token to predict at each place; IGNORE where nothing is learnt.
    positions: int64 [C], for the rotary embedding. documents: int32 [C]; nothing is attended across documents.
    parts: int32 [C], which paper of its shelf or file of its repository a token belongs to, by an id that no other part of the
        window has; None where each document is one part.
    """

    number: int
    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    parts: np.ndarray | None = None

    @property
    def part_ids(self) -> np.ndarray:
        return self.documents if self.parts is None else self.parts


def blank(number: int, context: int) -> Window:
    """A window without targets: it fills the last round when the windows do not divide over the data-parallel groups."""
    zeros = np.zeros(context, dtype=np.int32)
    return Window(number, zeros, np.full(context, IGNORE, dtype=np.int32), zeros.astype(np.int64), zeros)
