"""The record in MLflow is complete, holds nothing twice, and never holds up the run: real SQLite, a real server."""

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from pipelines.tracking import Tracker, git_revision, send
from tests.conftest import free_port
from tests.unit.pipelines.tracking.run_folder import CONFIG, LONG_S, a_row, an_evaluation, append, replace, steps_of, until


def test_every_metric_is_on_record_exactly_once(client, uri, run_dir):
    seen, evaluated = [], []
    tracker = Tracker(run_dir, uri, "once", "first", on_step=seen.append, on_evaluation=evaluated.append)
    tracker.start(CONFIG | {"folder": run_dir}, {"corpus.fingerprint": "abc123"})
    append(run_dir / "metrics.jsonl", *map(a_row, range(1, 251)))
    append(run_dir / "evaluations.jsonl", an_evaluation(0, 5.0), an_evaluation(250, 2.0))
    tracker.set_tag("last", "1")
    tracker.set_tag("last", "2")
    tracker.log_text("hello", "notes/hello.txt")
    until(lambda: tracker._record.state["system_samples"] > 0)
    assert tracker.close("FINISHED", LONG_S)

    run_id = tracker.info.run_id
    run = client.get_run(run_id)
    for key in a_row(1).keys() - {"step"}:
        assert steps_of(client, run_id, key) == list(range(1, 251)), key
    assert {m.step: m.value for m in client.get_metric_history(run_id, "loss")} == {s: 4.0 / s for s in range(1, 251)}
    by_tokens = {m.step: m.value for m in client.get_metric_history(run_id, "loss_by_tokens")}
    assert by_tokens == {64 * s: 4.0 / s for s in range(1, 251)}
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "heldout/loss_at/32-64")] == [(0, 4.0), (250, 1.0)]
    assert steps_of(client, run_id, "heldout/loss") == [0, 250]
    assert steps_of(client, run_id, "heldout/loss_by_tokens") == [0, 250 * 64]
    assert any(key.startswith("system/") for key in run.data.metrics)
    assert steps_of(client, run_id, "system/cpu_utilization_percentage")[0] == 0

    assert [row["step"] for row in seen] == list(range(1, 251)) and [row["step"] for row in evaluated] == [0, 250]
    assert run.info.status == "FINISHED" and run.info.run_name == "first"
    assert run.data.params == {"model.layers": "2", "model.width": "64", "training.steps": "5", "folder": str(run_dir)}
    assert run.data.tags["corpus.fingerprint"] == "abc123" and run.data.tags["last"] == "2" and run.data.tags["ringspan.version"]
    with open(client.download_artifacts(run_id, "config.yaml")) as file:
        assert yaml.safe_load(file) == CONFIG | {"folder": str(run_dir)}
    assert Path(client.download_artifacts(run_id, "notes/hello.txt")).read_text() == "hello"
    assert (tracker.info.waiting, tracker.info.uri) == (0, uri)


def test_a_file_cut_back_and_grown_again_gives_no_duplicates(client, uri, run_dir):
    seen = []
    tracker = Tracker(run_dir, uri, "cut", "crashed", on_step=lambda row: seen.append(row["step"]))
    tracker.start(CONFIG, {})
    metrics = run_dir / "metrics.jsonl"
    append(metrics, *map(a_row, range(1, 8)))
    until(lambda: tracker._record.state["metrics_sent"] == 7 and len(seen) == 7)
    with metrics.open("a") as file:
        file.write('{"step": 8, "lo')  # the worker died while it wrote
    time.sleep(0.6)
    replace(metrics, *map(a_row, range(1, 5)))
    time.sleep(0.6)
    append(metrics, *map(a_row, range(5, 12)))
    assert tracker.close("FINISHED", LONG_S)
    assert seen == list(range(1, 12))
    for key in ("loss", "grad_norm"):
        assert steps_of(client, tracker.info.run_id, key) == list(range(1, 12))


def test_a_resumed_run_goes_on_in_the_same_record(client, uri, run_dir, caplog):
    metrics = run_dir / "metrics.jsonl"
    first = Tracker(run_dir, uri, "resume", "resumed")
    first.start(CONFIG, {"start": "1"})
    append(metrics, *map(a_row, range(1, 6)))
    assert first.close("KILLED", LONG_S)
    assert client.get_run(first.info.run_id).info.status == "KILLED"

    # As after a crash between a request and its note: the folder believes in less than the server holds.
    record = json.loads((run_dir / "tracking.json").read_text()) | {"metrics_sent": 2, "params_sent": False}
    (run_dir / "tracking.json").write_text(json.dumps(record))
    replace(metrics, *map(a_row, range(1, 5)))
    seen = []
    second = Tracker(run_dir, uri, "resume", "resumed", on_step=lambda row: seen.append(row["step"]))
    second.start(CONFIG | {"training": {"steps": 9}}, {"start": "2"})
    append(metrics, *map(a_row, range(5, 10)))
    assert second.close("FINISHED", LONG_S)

    assert second.info.run_id == first.info.run_id and seen == list(range(5, 10))
    assert steps_of(client, first.info.run_id, "loss") == list(range(1, 10)) == steps_of(client, first.info.run_id, "tokens")
    run = client.get_run(first.info.run_id)
    assert run.info.status == "FINISHED" and run.data.tags["start"] == "2"
    # MLflow lets nobody change a parameter: a warning, the old value, and the configuration in force as the artifact.
    assert run.data.params["training.steps"] == "5" and "parameters on record stay" in caplog.text
    assert yaml.safe_load(Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text())["training"] == {"steps": 9}


def test_a_failing_callback_and_a_bad_artifact_name(uri, run_dir, caplog):
    tracker = Tracker(run_dir, uri, "callback", "callback", on_step=lambda row: 1 // (row["step"] - 1))
    tracker.start(CONFIG, {})
    append(run_dir / "metrics.jsonl", a_row(1), a_row(2))
    for name in ("../outside.txt", "/etc/outside", ".hidden", ""):
        with pytest.raises(ValueError, match="artifact name"):
            tracker.log_text("x", name)
    assert tracker.close("FINISHED", LONG_S)
    assert "callback for step 1 failed" in caplog.text and "callback for step 2" not in caplog.text


def test_a_server_that_comes_late_loses_nothing_and_delays_nothing(tmp_path, run_dir, caplog, capfd):
    from mlflow import MlflowClient

    port, shown = free_port(), {}
    server_uri, metrics = f"http://127.0.0.1:{port}", run_dir / "metrics.jsonl"
    tracker = Tracker(run_dir, server_uri, "late server", "patient", on_step=lambda row: shown.update({row["step"]: time.monotonic()}))
    begun = time.monotonic()
    tracker.start(CONFIG, {})
    assert time.monotonic() - begun < 1
    written = {}
    for step in range(1, 6):  # nobody listens on the port
        written[step] = time.monotonic()
        append(metrics, a_row(step, loss=math.nan if step == 3 else 1.0))
        time.sleep(0.3)
    until(lambda: "takes nothing" in caplog.text)

    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "artifacts"),
    ]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        until(lambda: _healthy(server_uri))
        until(lambda: tracker._record.state["metrics_sent"] == 5)
        step, written[6] = 6, time.monotonic()
        append(metrics, a_row(step))
        tracker.log_text("late but here", "note.txt")
        assert tracker.close("FINISHED", LONG_S)
        client, run_id = MlflowClient(server_uri), tracker.info.run_id
        for key in ("loss", "grad_norm"):
            assert steps_of(client, run_id, key) == [1, 2, 3, 4, 5, 6]
        values = [metric.value for metric in client.get_metric_history(run_id, "loss")]
        assert math.isnan(values[2]) and values[:2] == [1.0, 1.0]
        assert client.get_run(run_id).data.params["model.layers"] == "2"
        assert Path(client.download_artifacts(run_id, "note.txt", str(tmp_path))).read_text() == "late but here"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)
    assert all(shown[step] - written[step] < 2 for step in written)  # a step's line never waits for the server
    warnings = [
        record.message for record in caplog.records if record.name.startswith("pipelines.tracking") and record.levelno == logging.WARNING
    ]
    assert len(warnings) == 2 and "takes nothing" in warnings[0] and "is back after" in warnings[1]
    assert capfd.readouterr().out == ""  # stdout belongs to the command: MLflow likes to write addresses there


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=1) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.parametrize("server", ["absent", "silent"])
def test_what_a_dead_server_missed_is_sent_afterwards(client, uri, run_dir, caplog, server):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "silent":  # takes connections and never answers
            listener.listen()
        seen = []
        tracker = Tracker(run_dir, f"http://127.0.0.1:{listener.getsockname()[1]}", "afterwards", server, on_step=seen.append)
        begun = time.monotonic()
        tracker.start(CONFIG, {})
        append(run_dir / "metrics.jsonl", *map(a_row, range(1, 4)))
        until(lambda: len(seen) == 3, seconds=2)
        assert not tracker.close("FINISHED", timeout_s=1.0)
        assert time.monotonic() - begun < 4 and "3 steps" in caplog.text
    command = re.search(r'python -c "(.+)"', caplog.text)[1]
    assert str(run_dir) in command and compile(command, "hint", "exec")

    info = send(run_dir, uri)
    assert info.waiting == 0 and steps_of(client, info.run_id, "loss") == [1, 2, 3]
    assert client.get_run(info.run_id).info.status == "FINISHED"
    assert send(run_dir).run_id == info.run_id and steps_of(client, info.run_id, "loss") == [1, 2, 3]
    with pytest.raises(ValueError, match="nothing was recorded"):
        send(run_dir.parent)


def test_the_revision_of_a_working_tree(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    assert git_revision(tmp_path) is None
    git("init")
    assert git_revision(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    (tmp_path / "untracked").write_text("1")
    commit, dirty = git_revision(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", commit) and dirty is False
    (tmp_path / "a").write_text("2")
    assert git_revision(tmp_path) == (commit, True)


def test_the_command_line_does_not_pay_for_mlflow():
    code = (
        "import sys, pipelines.tracking, pipelines.ui, pipelines.report; "
        "print([m for m in ('mlflow', 'matplotlib', 'torch', 'ray') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
