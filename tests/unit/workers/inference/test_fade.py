"""Weights of windows: they sum to 1, whatever the cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.corpus.windows import plan_pieces
from workers.inference.fade import cross_fade


def cut(length: int, context: int, overlap: int) -> tuple[np.ndarray, np.ndarray]:
    pieces = plan_pieces(np.array([length]), context, overlap)
    return pieces.start, pieces.stop


@given(length=st.integers(1, 300), context=st.integers(2, 60), blind=st.integers(0, 80), data=st.data())
def test_weights_of_a_token_sum_to_one_and_what_a_window_cannot_know_weighs_nothing(length, context, blind, data):
    overlap = data.draw(st.integers(0, context - 1))
    starts, stops = cut(length, context, overlap)
    total = np.zeros(length)
    for window in range(len(starts)):
        weights = cross_fade(starts, stops, window, blind)
        assert weights.dtype == np.float32 and ((0 <= weights) & (weights <= 1)).all()
        total[starts[window] : stops[window]] += weights
        if window and blind <= overlap:
            assert not weights[:blind].any()
    assert np.allclose(total, 1, atol=1e-6)


def test_two_windows_fade_in_a_line():
    starts, stops = cut(10, 7, 4)
    assert np.allclose(cross_fade(starts, stops, 0), [1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert np.allclose(cross_fade(starts, stops, 1), [0.2, 0.4, 0.6, 0.8, 1, 1, 1])
    assert np.allclose(cross_fade(starts, stops, 1, blind=2), [0, 0, 1 / 3, 2 / 3, 1, 1, 1])
