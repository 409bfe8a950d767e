"""The stream: every sequence reaches its data-parallel group, in order, from any position, in bounded memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import ray

from cluster import feed
from workers.training.window import IGNORE, Window

pytestmark = pytest.mark.usefixtures("ray_cluster")
CONTEXT = 64
QUIET = feed.Stalls(0, 600)


class Numbers:
    """A reader whose windows say their number."""

    def __init__(self, context: int = CONTEXT):
        self._context = context

    def read(self, number: int) -> Window:
        values = np.full(self._context, number, dtype=np.int32)
        return Window(number, values, values, values.astype(np.int64), values)


@ray.remote(num_cpus=0)
class Group:
    """What a data-parallel group's leader does with its split."""

    def read(self, split, first: int, dp: int):
        return [
            (w.number, int(w.tokens[0]), int(w.targets[0]), w.positions.dtype.name, len(w.tokens))
            for w in feed.windows(split, first, dp, QUIET)
        ]

    def read_some_twice(self, split, rank: int, dp: int, count: int):
        start = feed.fresh(split, rank, dp, QUIET)
        return [[w.number for w in itertools.islice(start(), count)] for _ in range(2)]


def splits(first: int, stop: int, dp: int, ranks_per_group: int = 1):
    config = feed.MeshDataConfig(dp, ranks_per_group, CONTEXT)
    data = feed.dataset(Numbers(), CONTEXT, dp, first, stop)
    return [rank["train"] for rank in config.configure({"train": data}, dp * ranks_per_group, None, None)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Three windows a block and four blocks a task, so that few windows make many of both."""
    monkeypatch.setattr(feed, "BLOCK_BYTES", 3 * CONTEXT * feed.BYTES_PER_TOKEN)
    monkeypatch.setattr(feed, "BLOCKS_PER_TASK", 4)


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_sequence_g_goes_to_group_g_modulo_dp(dp):
    first, stop = 6, 6 + 40 * dp
    readers = [Group.remote() for _ in range(dp)]
    got = ray.get([r.read.remote(split, first + rank, dp) for rank, (r, split) in enumerate(zip(readers, splits(first, stop, dp)))])
    for rank, rows in enumerate(got):
        assert rows[:40] == [(g, g, g, "int64", CONTEXT) for g in range(first + rank, stop, dp)]
        assert all(row[0] >= stop and row[2] == IGNORE for row in rows[40:]) and len(rows) == 42


def test_only_leaders_hold_a_split():
    assert [split is not None for split in splits(0, 4, dp=2, ranks_per_group=3)] == [True, False, False, True, False, False]


def test_held_out_windows_beyond_the_last_are_blank_and_a_pass_can_be_repeated():
    readers = [Group.remote() for _ in range(2)]
    parts = splits(0, 5, dp=2)
    twice = ray.get([r.read_some_twice.remote(p, rank, 2, 3) for rank, (r, p) in enumerate(zip(readers, parts))])
    assert twice == [[[0, 2, 4]] * 2, [[1, 3, 5]] * 2]
    rows = ray.get([r.read.remote(p, rank, 2) for rank, (r, p) in enumerate(zip(readers, splits(0, 5, dp=2)))])
    assert rows[1][2][:3] == (5, 0, IGNORE)


@ray.remote(num_cpus=6)
class Busy:
    """Holds CPUs as the workers of a mesh do, so that two are left."""

    def ready(self) -> bool:
        return True


@ray.remote(num_cpus=0)
class Evaluating:
    def read(self, train, held_out) -> tuple[list[int], list[int]]:
        stream = feed.windows(train, 0, 1, QUIET)
        before = [next(stream).number for _ in range(5)]
        passed = [w.number for w in itertools.islice(feed.fresh(held_out, 0, 1, QUIET)(), 8)]
        return before + [next(stream).number for _ in range(5)], passed


def test_an_evaluation_is_read_while_a_long_training_stream_waits(monkeypatch):
    """The waiting stream has filled what it may, with tasks left over, and all but two CPUs belong to the mesh."""
    monkeypatch.undo()  # blocks and tasks of their real sizes
    context = 4096
    busy = Busy.remote()
    ray.get(busy.ready.remote())
    config = feed.MeshDataConfig(1, 1, context)
    data = {"train": feed.dataset(Numbers(context), context, 1, 0, 6000), "held_out": feed.dataset(Numbers(context), context, 1, 0, 8)}
    split = config.configure(data, 1, None, None)[0]
    reader = Evaluating.remote()
    train, held_out = ray.get(reader.read.remote(split["train"], split["held_out"]), timeout=180)
    assert train == list(range(10)) and held_out == list(range(8))
    for actor in (busy, reader):
        ray.kill(actor)


def test_a_sequence_that_is_not_due_is_an_error():
    reader = Group.remote()
    with pytest.raises(RuntimeError, match="the stream gave sequence 4 where 5 was due"):
        ray.get(reader.read.remote(splits(4, 8, dp=1)[0], 5, 1))
