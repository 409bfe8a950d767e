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
from collections import Counter
from pathlib import Path

import pytest
import yaml

from pipelines.report import clean_key, flatten, step_points
from pipelines.tracking import Tracker, default_uri, git_revision, send
from pipelines.ui import absolute_uri, public_uri

CONFIG = {"model": {"layers": 2, "width": 64}, "training": {"steps": 5}}
LONG_S = 90  # for a close on a busy machine; a quiet one needs a second


def a_row(step: int, **changes) -> dict:
    return {"step": step, "tokens": step * 64, "loss": 4.0 / step, "grad_norm": 1.0 + step, "learning_rate": 1e-3, "tokens_per_second": 1000.0,
            "peak_memory_bytes": 1 << 20, "loader_wait_seconds": 0.01, "exposed_comm_seconds": 0.0, "skipped_steps": 0} | changes


def an_evaluation(step: int, loss: float) -> dict:
    parts = [{"start": 0, "stop": 32, "loss": loss + 1, "targets": 31}, {"start": 32, "stop": 64, "loss": loss - 1, "targets": 32}]
    return {"step": step, "tokens": step * 64, "loss": loss, "loss_by_position": parts}


def append(path: Path, *rows: dict) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def replace(path: Path, *rows: dict) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scratch.replace(path)


def until(condition, seconds: float = LONG_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """One database for the module: creating its tables is the slowest part of a record."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def steps_of(client, run_id: str, key: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, key))


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
    assert {m.step: m.value for m in client.get_metric_history(run_id, "loss_by_tokens")} == {64 * s: 4.0 / s for s in range(1, 251)}
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "heldout/loss_at/32-64")] == [(0, 4.0), (250, 1.0)]
    assert steps_of(client, run_id, "heldout/loss") == [0, 250]
    assert steps_of(client, run_id, "heldout/loss_by_tokens") == [0, 250 * 64]
    assert any(key.startswith("system/") for key in run.data.metrics) and steps_of(client, run_id, "system/cpu_utilization_percentage")[0] == 0

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


def test_numbers_that_are_not_finite_and_odd_keys(client, uri, run_dir, caplog):
    append(run_dir / "metrics.jsonl", a_row(1, loss=math.nan), a_row(2, grad_norm=math.inf, **{"hop@3 %/../x\n": 7.0, "note": "text", "ok": True}))
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


def test_runs_left_by_requests_answered_too_late_are_adopted(client, uri, run_dir):
    tracker = Tracker(run_dir, uri, "late", "late")
    experiment = client.create_experiment("late", artifact_location=run_dir.as_uri())
    record = {"uri": uri, "experiment": "late", "run_name": "late", "key": "k1", "run_id": None, "experiment_id": None, "metrics_sent": -1,
              "evaluations_sent": -1, "params_sent": False, "tags_sent": {}, "artifacts_sent": {}, "status_sent": None, "system_samples": 0}
    (run_dir / "tracking.json").write_text(json.dumps(record))
    orphans = {client.create_run(experiment, tags={"ringspan.record": "k1"}).info.run_id for _ in range(3)}
    tracker.start(CONFIG, {})
    assert tracker.close("FINISHED", LONG_S)
    left = client.search_runs([experiment])
    assert [run.info.run_id for run in left] == [tracker.info.run_id] and tracker.info.run_id in orphans


def test_a_second_recorder_of_a_folder_is_refused(uri, run_dir):
    tracker = Tracker(run_dir, uri, "lock", "lock")
    tracker.start(CONFIG, {})
    with pytest.raises(ValueError, match="recorded by another process"):
        Tracker(run_dir, uri, "lock", "lock").start(CONFIG, {})
    assert tracker.close("FINISHED", LONG_S)


def test_a_failing_callback_and_a_bad_artifact_name(uri, run_dir, caplog):
    tracker = Tracker(run_dir, uri, "callback", "callback", on_step=lambda row: 1 // (row["step"] - 1))
    tracker.start(CONFIG, {})
    append(run_dir / "metrics.jsonl", a_row(1), a_row(2))
    for name in ("../outside.txt", "/etc/outside", ".hidden", ""):
        with pytest.raises(ValueError, match="artifact name"):
            tracker.log_text("x", name)
    assert tracker.close("FINISHED", LONG_S)
    assert "callback for step 1 failed" in caplog.text and "callback for step 2" not in caplog.text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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

    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts")]
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
    warnings = [record.message for record in caplog.records if record.name == "pipelines.tracking" and record.levelno == logging.WARNING]
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


def test_the_default_place_is_absolute(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert default_uri(Path("runs/one")) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///here.db")
    assert default_uri(Path("runs/one")) == f"sqlite:///{tmp_path}/here.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example:5000")
    assert default_uri(Path("runs/one")) == "http://tracking.example:5000"


@pytest.mark.parametrize("wrong", ["./mlruns", "file:///tmp/mlruns", "sqlite:///", "sqlite://x.db", "sqlite:////tmp/a?b.db"])
def test_places_mlflow_cannot_write_to_are_refused(wrong):
    with pytest.raises(ValueError, match="tracking uri"):
        absolute_uri(wrong)


def test_a_password_stays_out_of_files_and_logs(run_dir):
    secret = "postgresql://user:pa55@db.example:5432/mlflow"
    assert public_uri(secret) == "postgresql://user:***@db.example:5432/mlflow"
    assert public_uri("http://h:5000/x") == "http://h:5000/x"


def test_the_revision_of_a_working_tree(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tmp_path, check=True, capture_output=True)

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


def test_keys():
    assert clean_key("../a//b/./c%\n") == "a/b/c__" and clean_key("//") == "_" and len(clean_key("k" * 400)) == 250
    assert flatten({"a": {"b": [1, 2]}, "c": {}}) == {"a.b": "[1, 2]", "c": "{}"}
    assert len(flatten({"x" * 300: 1, "x" * 301: 2})) == 2
    assert Counter(key for key, _, _ in step_points(a_row(1))).most_common(1)[0][1] == 1
    assert step_points(a_row(1))[-1] == ("loss", 4.0, 1)  # last: a request cut short never hides a missing rest


def test_the_command_line_does_not_pay_for_mlflow():
    code = "import sys, pipelines.tracking, pipelines.ui, pipelines.report; print([m for m in ('mlflow', 'matplotlib', 'torch', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
