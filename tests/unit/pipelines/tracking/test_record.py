"""A run folder is recorded by one process at a time."""

import pytest

from pipelines.tracking import Tracker
from tests.unit.pipelines.tracking.run_folder import CONFIG, LONG_S


def test_a_second_recorder_of_a_folder_is_refused(uri, run_dir):
    tracker = Tracker(run_dir, uri, "lock", "lock")
    tracker.start(CONFIG, {})
    with pytest.raises(ValueError, match="recorded by another process"):
        Tracker(run_dir, uri, "lock", "lock").start(CONFIG, {})
    assert tracker.close("FINISHED", LONG_S)
