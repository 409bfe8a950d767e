"""What MLflow can't hold as it is, and what requests answered too late have left there."""

import json
import math

from pipelines.tracking import Tracker
from tests.unit.pipelines.tracking.run_folder import CONFIG, LONG_S, a_row, append


def test_numbers_that_are_not_finite_and_odd_keys(client, uri, run_dir, caplog):
    odd = {"hop@3 %/../x\n": 7.0, "note": "text", "ok": True}
    append(run_dir / "metrics.jsonl", a_row(1, loss=math.nan), a_row(2, grad_norm=math.inf, **odd))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("not json\n")
    append(run_dir / "metrics.jsonl", a_row(3))
    tracker = Tracker(run_dir, uri, "odd", "odd")
    tracker.start({"a@b": 1, "a%b": 2, "long": "x" * 9000, "none": None, "empty": ""}, {"tag@key": "v"})
    assert tracker.close("FAILED", LONG_S)
    run = client.get_run(tracker.info.run_id)
    losses = [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert math.isnan(losses[0]) and losses[1:] == [2.0, 4.0 / 3]
    assert [math.isnan(m.value) for m in client.get_metric_history(run.info.run_id, "grad_norm")] == [False, True, False]
    assert run.data.metrics["hop_3 _/x_"] == 7.0 and not run.data.metrics.keys() & {"note", "ok"}
    assert run.data.params == {"a_b": "1", "a_b_2": "2", "long": "x" * 6000, "none": "null", "empty": ""}
    assert run.data.tags["tag_key"] == "v" and run.info.status == "FAILED"
    assert "can't be read" in caplog.text


def test_runs_left_by_requests_answered_too_late_are_adopted(client, uri, run_dir):
    tracker = Tracker(run_dir, uri, "late", "late")
    experiment = client.create_experiment("late", artifact_location=run_dir.as_uri())
    record = {
        "uri": uri,
        "experiment": "late",
        "run_name": "late",
        "key": "k1",
        "run_id": None,
        "experiment_id": None,
        "metrics_sent": -1,
        "evaluations_sent": -1,
        "params_sent": False,
        "tags_sent": {},
        "artifacts_sent": {},
        "status_sent": None,
        "system_samples": 0,
    }
    (run_dir / "tracking.json").write_text(json.dumps(record))
    orphans = {client.create_run(experiment, tags={"ringspan.record": "k1"}).info.run_id for _ in range(3)}
    tracker.start(CONFIG, {})
    assert tracker.close("FINISHED", LONG_S)
    left = client.search_runs([experiment])
    assert [run.info.run_id for run in left] == [tracker.info.run_id] and tracker.info.run_id in orphans
