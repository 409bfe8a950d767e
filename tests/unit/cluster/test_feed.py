"""A stream that stalls says so, by rank, sequence and time, ever more seldom; one that doesn't is silent."""

import logging
import time

import numpy as np
import pytest

from cluster import feed
from workers.training.window import Window, blank


class Slow:
    """A split whose batches of two windows come after these seconds."""

    def __init__(self, *seconds: float, first: int = 0):
        self.seconds, self.first = seconds, first

    def iter_batches(self, **_):
        for batch, wait in enumerate(self.seconds):
            time.sleep(wait)
            rows = [blank(self.first + 2 * batch + i, 4) for i in range(2)]
            yield {name: np.stack([getattr(window, name) for window in rows]) for name in Window._fields}


def test_a_slow_stream_is_warned_of_while_it_is_waited_for(tmp_path, caplog):
    note = tmp_path / "stalled-rank-3"
    stream = feed.windows(Slow(0.0, 0.9, 0.0, first=40), 40, 1, feed.Stalls(3, 0.1, note))
    with caplog.at_level(logging.WARNING, "cluster.feed"):
        assert [next(stream).number for _ in range(2)] == [40, 41] and not caplog.records
        assert next(stream).number == 42
        told = [record.message for record in caplog.records]
        assert 2 <= len(told) <= 4  # after 0.1 s, 0.2 s, 0.4 s, 0.8 s
        assert all(text.startswith("rank 3 has waited") and "for sequence 42: the stream of windows stalls" in text for text in told)
        assert [next(stream).number for _ in range(3)] == [43, 44, 45] and len(caplog.records) == len(told)
    assert not note.exists()  # the stream goes on
    assert next(stream, None) is None


def test_the_driver_can_read_of_a_stall_as_long_as_it_lasts(tmp_path):
    note = tmp_path / "stalled-rank-0"
    with feed.Stalls(0, 0.05, note).watched(7):
        time.sleep(0.3)
        assert "for sequence 7" in note.read_text()
    assert not note.exists()


def test_a_reader_that_fails_ends_the_watch(caplog):
    def fails(**_):
        raise OSError("disk gone")
        yield

    split = Slow()
    split.iter_batches = fails
    with pytest.raises(OSError, match="disk gone"):
        next(feed.windows(split, 0, 1, feed.Stalls(0, 0.05)))
    time.sleep(0.2)
    assert not caplog.records


def test_a_window_that_is_not_due_is_refused():
    with pytest.raises(RuntimeError, match="the stream gave sequence 5 where 4 was due"):
        next(feed.windows(Slow(0.0, first=5), 4, 1, feed.Stalls(0, 60)))
