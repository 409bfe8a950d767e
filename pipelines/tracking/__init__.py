"""Puts a run folder on record in MLflow without ever holding up the run.

1. Rank 0 appends a line a step to `RUN/metrics.jsonl` and a line an evaluation to `RUN/evaluations.jsonl`.
2. A reader thread in the driver follows both and calls `on_step` and `on_evaluation`; it never talks to a server.
3. A writer thread, the only one that talks to MLflow, sends what the files hold beyond the last step on record.

The files are the queue: while the server is away nothing piles up in memory and nothing can be lost. What has been sent
stands in `RUN/tracking.json`; figures, texts and the configuration wait in `RUN/record/`. A run that crashed, a run that
resumes, and `send` and `add` on a finished folder all go on from there.

`tracker` has the two threads, `record` what the folder knows of its own recording, `writer` MLflow, `lines` the files of
the run and their metrics, `uri` the place. Importing any of them loads no MLflow: the writer does, in its thread.
"""

from pipelines.tracking.record import TrackerInfo
from pipelines.tracking.tracker import Tracker, add, git_revision, send
from pipelines.tracking.uri import absolute_uri, default_uri

__all__ = ["Tracker", "TrackerInfo", "absolute_uri", "add", "default_uri", "git_revision", "send"]
