import pytest

from workers.training.guard import Diverged, Guard


def test_a_series_restores_once_and_a_second_one_ends_the_run():
    guard = Guard(limit=3)
    assert [guard.skip(step, "layers.0.mlp") for step in (5, 6, 7)] == [False, False, True]
    assert [guard.skip(step, None) for step in (8, 9)] == [False, False]
    with pytest.raises(
        Diverged, match=r"3 steps in a row .* \(step 10, first in the gradient of layers.1.mlp\); lower training.learning_rate"
    ):
        guard.skip(10, "layers.1.mlp")
    assert guard.skipped == 6


def test_a_good_step_begins_the_count_anew():
    guard = Guard(limit=2)
    for step in range(0, 20, 2):
        assert not guard.skip(step, None)
        guard.good()
    assert [guard.skip(20, None), guard.skip(21, None)] == [False, True]
    guard.good()  # after a restore a good step is a recovery: the next series may restore again
    assert [guard.skip(23, None), guard.skip(24, None)] == [False, True]


def test_a_limit_of_one_restores_at_the_first():
    guard = Guard(limit=1)
    assert guard.skip(1, None)
    with pytest.raises(Diverged, match=r"\(step 2, in the loss\)"):
        guard.skip(2, None)


def test_a_resumed_run_goes_on_counting_and_says_where(caplog):
    guard = Guard(limit=5, skipped=7)
    guard.skip(30, "norm.weight")
    assert guard.skipped == 8
    assert "step 30 skipped: not finite, first in the gradient of norm.weight (1 in a row)" in caplog.text
