"""`ray job submit` against a local head, as the README says: logs stream, the exit code is true, paths hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.cluster.test_launch import SETTINGS, losses
from tests.conftest import BIN, ROOT


def submit(ray_head, *arguments, environment=None, timeout=300) -> subprocess.CompletedProcess:
    command = [BIN / "ray", "job", "submit", "--address", ray_head.dashboard, "--working-dir", ROOT, "--"]
    command += ["python", "-m", "pipelines.cli", *arguments]
    env = {**os.environ, **(environment or {}), "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, timeout=timeout)


def test_a_submitted_run_trains_and_records_where_it_was_told(ray_head, code_store, tmp_path):
    run = tmp_path / "submitted"
    settings = [f"corpus.store={code_store}", *SETTINGS, "training.steps=4"]
    result = submit(ray_head, "train", "code_completion/tiny", "--out", run, *(part for s in settings for part in ("--set", s)))
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-3000:]
    assert "step       4" in output and "succeeded" in output
    assert len(losses(run)) == 4
    assert (run / "checkpoints" / "step-00000004" / "state.json").is_file()
    record = json.loads((run / "tracking.json").read_text())
    assert record["uri"] == f"sqlite:///{tmp_path}/mlflow.db" and Path(f"{tmp_path}/mlflow.db").is_file()


def test_a_wrong_input_fails_the_job_with_its_line(ray_head, tmp_path):
    result = submit(ray_head, "train", "code_completion/tiny", "--out", tmp_path / "run", "--set", "training.step=4")
    assert result.returncode == 1
    assert "unknown configuration key training.step; the nearest is training.steps" in result.stdout + result.stderr


def test_a_relative_run_folder_is_refused_inside_a_job(ray_head, code_store):
    result = submit(ray_head, "train", "code_completion/tiny", "--out", "runs/x", "--set", f"corpus.store={code_store}")
    assert result.returncode == 1
    assert "inside a Ray job give an absolute path" in result.stdout + result.stderr
