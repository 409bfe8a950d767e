"""Runs on real Ray Train actors, typed as a user types them: the same losses as without Ray, also after a kill and a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import BIN, last_json, ringspan

SETTINGS = [
    "training.context=256", "training.steps=12", "training.batch=2", "model.dim=32", "model.layers=2", "model.ffn_dim=64",
    "corpus.held_out_windows=3", "checkpoint.every=3",
]  # fmt: skip


def train_command(store, run, *extra) -> list:
    settings = [f"corpus.store={store}", *SETTINGS, *extra]
    return ["train", "code_completion/tiny", "--out", run, "--json", *(part for value in settings for part in ("--set", value))]


def losses(run) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(ray_head, code_store, tmp_path_factory):
    """A finished run on ring 2, and what the command printed."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    result = ringspan(*train_command(code_store, run), env=ray_head.environment())
    assert result.returncode == 0, result.stderr[-3000:]
    return run, result


def test_a_run_leaves_what_the_design_says(undisturbed):
    run, result = undisturbed
    answer = last_json(result)
    assert answer["step"] == 12 and answer["skipped_steps"] == 0
    assert [e["step"] for e in answer["evaluations"]] == [0, 12]
    assert answer["evaluations"][1]["loss"] < answer["evaluations"][0]["loss"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    keys = {"step", "tokens", "loss", "grad_norm", "tokens_per_second", "peak_memory_bytes", "loader_wait_seconds", "exposed_comm_seconds"}
    assert keys <= set(rows[0])
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-00000009", "step-00000012"]
    assert result.stderr.count("held-out loss at step") == 2
    assert all(f"step {step:>7}" in result.stderr for step in range(1, 13))


def test_the_run_is_on_record(undisturbed):
    from mlflow.tracking import MlflowClient

    run, result = undisturbed
    answer = last_json(result)
    client = MlflowClient(answer["tracking_uri"])
    recorded = client.get_run(json.loads((run / "tracking.json").read_text())["run_id"])
    history = client.get_metric_history(recorded.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == list(enumerate(losses(run), 1))
    assert recorded.data.params["training.context"] == "256"
    assert {"corpus.fingerprint", "git.revision", "checkpoint"} <= set(recorded.data.tags)
    assert recorded.info.status == "FINISHED"


def test_the_same_losses_on_one_rank_without_ray(world, undisturbed, code_store, tmp_path):
    """The stream of Ray Data and the plan read directly are the same sequences."""
    run, _ = undisturbed
    world.run(train_directly, ranks=1, store=str(code_store), run=str(tmp_path))
    assert losses(tmp_path) == pytest.approx(losses(run), rel=1e-5)


def train_directly(store: str, run: str) -> None:
    from pipelines.config import load_config
    from pipelines.train import prepare
    from workers.training.loop import train

    config = load_config("code_completion/tiny", (f"corpus.store={store}", *SETTINGS, "mesh.ring=1", "corpus.held_out_windows=0"))
    prepared = prepare(config, Path(run) / "unused")
    job = prepared.job.__class__(**{**vars(prepared.job), "run": Path(run), "held_out": 0})
    train(job, prepared.mesh.build("cpu"), lambda first: map(prepared.data.train.read, range(first, 24)))


def worker_processes(run: Path) -> list[psutil.Process]:
    """The Ray Train workers of a run: they have its log file open."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(Path(file.path).parent == run / "logs" for file in process.open_files()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_step(run: Path, step: int, process: subprocess.Popen, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < step:
        assert process.poll() is None, process.stderr.read()[-3000:]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


def start(ray_head, *command) -> subprocess.Popen:
    return subprocess.Popen(
        [BIN / "ringspan", *map(str, command)], env=ray_head.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_worker_changes_nothing(ray_head, undisturbed, code_store, tmp_path):  # T1
    """Killed twice, one of the times in the middle of a checkpoint: the curve is that of the undisturbed run, bit for bit."""
    run = tmp_path / "killed"
    process = start(ray_head, *train_command(code_store, run))
    for step in (5, 9):
        wait_for_step(run, step, process)
        if step == 9:
            deadline = time.monotonic() + 60
            while not list((run / "checkpoints").glob("step-*9*")) and time.monotonic() < deadline:
                time.sleep(0.001)  # the write of step 9 has begun
        workers = worker_processes(run)
        assert len(workers) == 2
        os.kill(workers[step % 2].pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr[-3000:]
    assert losses(run) == losses(undisturbed[0])
    assert not list((run / "checkpoints").glob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_cleanly_and_the_run_resumes(ray_head, undisturbed, code_store, tmp_path, number):  # T6
    run = tmp_path / "stopped"
    process = start(ray_head, *train_command(code_store, run))
    wait_for_step(run, 4, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    done = len(losses(run))
    assert f"stopped after step {done}, which is saved; go on with: ringspan train --resume {run}" in stderr
    assert (run / "checkpoints" / f"step-{done:08d}").is_dir()
    assert worker_processes(run) == []
    assert losses(run) == losses(undisturbed[0])[:done]
    if number == signal.SIGINT:  # what is saved is the same after either
        resumed = ringspan("train", "--resume", run, "--json", env=ray_head.environment())
        assert resumed.returncode == 0, resumed.stderr[-3000:]
        assert losses(run) == losses(undisturbed[0])


def test_a_mesh_larger_than_the_cluster_is_refused(ray_head, code_store, tmp_path):
    result = ringspan(*train_command(code_store, tmp_path / "run", "mesh.ring=8"), env=ray_head.environment())
    assert result.returncode == 2
    assert "8 workers and their data need 10 CPUs, the cluster has 8" in result.stderr
    assert not (tmp_path / "run").exists()


def test_what_saves_nothing_on_a_cpu_is_refused_before_a_worker_starts(monkeypatch, tmp_path):
    from cluster.launch import ClusterConfig, ClusterTooSmall, check_resources
    from workers.mesh import MeshSpec
    from workers.model import ModelConfig
    from workers.parallel.memory import MemoryConfig
    from workers.training.config import CheckpointConfig, TrainingConfig
    from workers.training.loop import Job

    have = {"CPU": 8}
    monkeypatch.delenv("RINGSPAN_AUTOSCALING", raising=False)
    monkeypatch.setattr("ray.cluster_resources", lambda: have)
    for memory in (MemoryConfig(offload="host"), MemoryConfig(optimizer="host")):
        job = Job(ModelConfig(vocab_size=64), TrainingConfig(), CheckpointConfig(), tmp_path, memory=memory)
        have.pop("GPU", None)
        with pytest.raises(ClusterTooSmall, match="is 'host', but this run is on CPUs, whose memory that is already"):
            check_resources(job, MeshSpec(ring=2), ClusterConfig())
        have["GPU"] = 2
        check_resources(job, MeshSpec(ring=2), ClusterConfig())
