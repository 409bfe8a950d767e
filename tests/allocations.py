"""Memory of a stretch of CPU code: what PyTorch's allocator gave out, event by event, and how far the process grew."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pipelines.bench.measure import PeakMemory


class Allocations(NamedTuple):
    """Bytes beyond what was allocated before: ``held`` at the end, ``peak`` at the worst moment; and the function's ``result``."""

    result: object
    held: int
    peak: int


def allocations(function: Callable) -> Allocations:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        result = function()
    changes = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return Allocations(result, held, peak)


def growth(function: Callable) -> int:
    """Bytes by which the process grows while ``function`` runs, at the worst moment.

    Counted from what it holds now; where the kernel lets no process reset its peak, from the largest that it ever held.
    """
    memory = PeakMemory(torch.device("cpu"))
    function()
    found = memory.read()
    return found["peak_bytes"] - found["start_bytes"]
