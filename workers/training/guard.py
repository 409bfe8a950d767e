"""What happens when a loss or a gradient is not finite."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """The run cannot go on: steps stay non-finite after the last checkpoint was restored."""


class Guard:
    """Counts skipped steps and says when to restore the last checkpoint.

    The decision is made from the reduced loss and norm, which are equal on every rank, so all ranks skip together, before
    the optimizer moves. After ``limit`` skips in a row the last checkpoint is restored once, data going on from
    where it stands; a second series of ``limit`` before any good step ends the run.
    """

    def __init__(self, limit: int, skipped: int = 0):
        self._limit = limit
        self._in_a_row = 0
        self._restored = False
        self.skipped = skipped

    def good(self) -> None:
        self._in_a_row = 0
        self._restored = False

    def skip(self, step: int, culprit: str | None) -> bool:
        """Count a skipped step; True when the last checkpoint should be restored. Raises Diverged when that was tried."""
        self.skipped += 1
        self._in_a_row += 1
        where = f"first in the gradient of {culprit}" if culprit else "in the loss"
        log.warning("step %d skipped: not finite, %s (%d in a row)", step, where, self._in_a_row)
        if self._in_a_row < self._limit:
            return False
        if self._restored:
            raise Diverged(
                f"{self._limit} steps in a row were not finite again after the last checkpoint was restored (step {step}, {where}); "
                "lower training.learning_rate or training.clip, or look at the data around this step"
            )
        self._in_a_row = 0
        self._restored = True
        return True
