"""Each cause planted in one step of four ranks, beside steps that differ a little, as real ones do."""

import random

import pytest

from workers.training.meter import Sample
from workers.training.slowdown import LEAST, SlowSteps

RANKS = 4
USUAL = Sample(seconds=1.0, loading=0.01, exposed=0.05, computing=0.5, scores=1e9, memory=1e9, stalls=0)


def step(generator=random.Random(0), every=None, **ranks) -> list[Sample]:
    """A usual step; ``every=dict(...)`` changes all ranks, ``rank_2=dict(...)`` then one."""
    jitter = lambda: generator.uniform(0.95, 1.05)
    usual = [USUAL._replace(seconds=USUAL.seconds * jitter(), computing=USUAL.computing * jitter()) for _ in range(RANKS)]
    return [sample._replace(**(every or {}))._replace(**ranks.get(f"rank_{rank}", {})) for rank, sample in enumerate(usual)]


def verdict(slow: list[Sample], before: int = 12) -> str | None:
    watch = SlowSteps()
    assert [watch.add(step()) for _ in range(before)] == [None] * before
    return watch.add(slow)


CAUSES = {
    # The other ranks of the group wait for the leader's batch, too.
    "loader, 1.19 s more": dict(every=dict(seconds=2.2, loading=1.2)),
    "slow rank 2, ": dict(every=dict(seconds=2.5, exposed=1.5), rank_2=dict(seconds=2.5, exposed=0.01, computing=2.0)),
    "network, every rank waited 1.95 s more": dict(every=dict(seconds=3.0, exposed=2.0)),
    "memory, rank 1 ran short of it 5000 times": dict(every=dict(seconds=3.0), rank_1=dict(stalls=5000)),
    "work, 3.0 × the usual pairs": dict(every=dict(seconds=2.0, computing=1.5, scores=3e9)),
    "all ranks compute slower, ": dict(every=dict(seconds=2.5, computing=1.5)),
    "elsewhere": dict(every=dict(seconds=2.5)),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(cause):
    assert cause in verdict(step(**CAUSES[cause]))


def test_a_usual_step_has_no_cause_and_a_young_run_no_verdict():
    assert verdict(step()) is None
    assert verdict(step(every=dict(seconds=9.0, loading=8.0)), before=LEAST - 1) is None


def test_one_rank_alone():
    watch = SlowSteps()
    for _ in range(8):
        watch.add([USUAL])
    assert "slow rank 0" in watch.add([USUAL._replace(seconds=3.0, computing=2.0)])


def test_what_becomes_usual_is_no_longer_slow():
    watch = SlowSteps()
    slow = [watch.add(step()) for _ in range(20)] + [watch.add(step(every=dict(seconds=2.0))) for _ in range(20)]
    assert slow[20] is not None and slow[-1] is None
