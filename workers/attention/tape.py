"""What attention computed or received, recorded in a layer's forward, so that a recomputation of the layer takes it as it was.

A layer that is recomputed in backward would otherwise run the whole ring again. ``once`` marks what is worth keeping:
attention's output and lse, what came over a link, and a choice. It computes plainly where no tape is running.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

_thread = threading.local()  # CUDA's backward, and so a recomputation, runs in another thread than forward


class Tape:
    """The results of one layer's forward, in order. ``pack(tensor) → anything`` and its inverse say how tensors are kept.

    1. ``recording()`` surrounds the forward; 2. ``replaying()`` its recomputation, which takes the results off the tape.
    """

    def __init__(self, pack: Callable = lambda x: x, unpack: Callable = lambda x: x):
        self._pack, self._unpack = pack, unpack
        self._results: deque = deque()

    def recording(self):
        return _running(self._record)

    def replaying(self):
        return _running(self._replay)

    def _record(self, compute, arguments):
        with _running(None):  # what is recorded whole is not recorded in parts
            result = compute(*arguments)
        parts = result if isinstance(result, tuple) else (result,)
        self._results.append((type(result), [self._keep(x) for x in parts]))
        return result

    def _keep(self, x):
        if not isinstance(x, torch.Tensor):
            return lambda: x
        kept = x.detach()  # an output belongs to the graph, which would then own the tape that owns it
        kept.__dict__.update(x.__dict__)  # its marks
        return partial(self._unpack, self._pack(kept))

    def _replay(self, compute, arguments):
        kind, parts = self._results.popleft()
        result = tuple(part() for part in parts)
        return result if kind is tuple else result[0]


def once(compute: Callable, *arguments):
    """``compute(*arguments)``, a tensor or a tuple of tensors or one object; while a tape replays, what it was when recorded."""
    run = getattr(_thread, "run", None)
    return compute(*arguments) if run is None else run(compute, arguments)


@contextlib.contextmanager
def _running(run):
    before = getattr(_thread, "run", None)
    _thread.run = run
    try:
        yield
    finally:
        _thread.run = before
