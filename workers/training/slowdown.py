"""Why a step was slow: what it cost each rank beside what steps usually cost."""

from __future__ import annotations

from collections import deque
from statistics import median

from workers.training.meter import Sample

WINDOW = 20  # steps that say what is usual
LEAST = 5  # no verdict before so many
SLOW = 1.5  # times the median
STALLS = 100  # of memory, above the usual, that a healthy step doesn't have


class SlowSteps:
    """Keeps the last steps and names the cause of one that takes more than ``SLOW`` × their median.

    The causes, each with the seconds it explains:
    - memory: a rank's pages came back from disk, or its allocations were retried;
    - loader: a group stood still for its windows;
    - work: more (query, key) pairs than usual, as when documents are longer;
    - slow rank: one rank's attention takes longer a pair, while others wait for it;
    - network: **every** rank waited longer for attention's messages (one slow rank does not wait itself).
    What none of them explains is said to be elsewhere: the exchange of weights, a checkpoint, other programs.
    """

    def __init__(self):
        self._steps: deque[list[Sample]] = deque(maxlen=WINDOW)

    def add(self, step: list[Sample]) -> str | None:
        """The cause in a few words if this step (one sample a rank) was slow, else None."""
        usual, cause = self._steps, None
        if len(usual) >= LEAST:
            seconds = median(_longest(s, "seconds") for s in usual)
            if _longest(step, "seconds") > SLOW * seconds:
                cause = f"{_longest(step, 'seconds') / seconds:.1f} × the usual {seconds:.2f} s: {self._cause(step, seconds)}"
        usual.append(step)
        return cause

    def _cause(self, step: list[Sample], usual_seconds: float) -> str:
        excess = _longest(step, "seconds") - usual_seconds
        stalls = [sample.stalls - median(s[rank].stalls for s in self._steps) for rank, sample in enumerate(step)]
        if max(stalls) > STALLS:
            return f"memory, rank {stalls.index(max(stalls))} ran short of it {max(stalls):.0f} times"
        loading = self._more(step, max, "loading")
        work = sum(s.scores for s in step) / max(1.0, median(sum(s.scores for s in steps) for steps in self._steps))
        # Attention stands for all that a rank computes: a slow one is slow in the rest, too.
        pace = [_pace(sample) / max(1e-12, median(_pace(s[rank]) for s in self._steps)) for rank, sample in enumerate(step)]
        slowest = pace.index(max(pace))
        computing = usual_seconds - median(_longest(s, "loading") + min(x.exposed for x in s) for s in self._steps)
        explained = {
            f"loader, {loading:.2f} s more": loading,
            f"work, {work:.1f} × the usual pairs": (work - 1) * computing,
            f"slow rank {slowest}, {pace[slowest]:.1f} × its usual time a pair": (pace[slowest] - 1) * computing,
            f"network, every rank waited {self._more(step, min, 'exposed'):.2f} s more": self._more(step, min, "exposed"),
        }
        if min(pace) > 1 + (max(pace) - 1) / 2 and len(step) > 1:
            explained[f"all ranks compute slower, {min(pace):.1f} × their usual time a pair"] = explained.pop(
                f"slow rank {slowest}, {pace[slowest]:.1f} × its usual time a pair"
            )
        name = max(explained, key=explained.get)
        return name if explained[name] > excess / 3 else "elsewhere: weights' exchange, a checkpoint, or other programs"

    def _more(self, step: list[Sample], of_ranks, name: str) -> float:
        """Seconds above the median of the steps before, of the ranks' largest or smallest value."""
        value = lambda samples: of_ranks(getattr(s, name) for s in samples)
        return max(0.0, value(step) - median(value(s) for s in self._steps))


def _longest(step: list[Sample], name: str) -> float:
    return max(getattr(sample, name) for sample in step)


def _pace(sample: Sample) -> float:
    """Seconds of attention for a pair."""
    return sample.computing / max(1.0, sample.scores)
