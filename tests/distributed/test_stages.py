"""A run whose context and mesh grow from stage to stage: one curve, whatever mesh a stage is on, and whenever it is interrupted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from pipelines.config import load_config
from pipelines.train import _write_run_folder, prepare, run_stages
from tests.distributed.training_cases import losses, rows
from workers.training import checkpoint as checkpoints
from workers.training.checkpoint import Checkpointer
from workers.training.loop import train

SETTINGS = (
    "training.batch=2", "training.learning_rate=3e-3", "training.warmup_steps=2", "training.evaluate_every=0", "checkpoint.every=2",
    "model.dim=32", "model.ffn_dim=64", "model.tie_embeddings=false", "corpus.held_out=0.1", "corpus.held_out_windows=2",
)  # fmt: skip
RINGS = "stages=[{training: {context: 64, steps: 4}, mesh: {ring: %d}}, {training: {context: 128, steps: 5, decay: wsd}, model: {rope_theta: 2e6}, mesh: {ring: %d}}]"


class Crash(Exception):
    pass


def on_a_rank(job, spec, data, die_at: int | None):
    """What Ray Train's workers run, with the plans read directly; a save waits for the disk, so that a crash finds it there."""
    mesh = spec.build("cpu")
    reader = lambda plan: (lambda first=0: map(plan.read, range(first, 10_000))) if mesh.is_leader else None

    def after_backward(step, model):
        if step == die_at:
            raise KeyboardInterrupt("planted")

    save = Checkpointer.save
    try:
        with mock.patch.object(Checkpointer, "save", lambda saver, *state: (save(saver, *state), saver.finish())):
            return train(job, mesh, reader(data.train), reader(data.held_out), after_backward)
    except KeyboardInterrupt:
        return None


def run(world, store: Path, folder: Path, rings: tuple[int, int], die_at: int | None = None) -> list[int]:
    """Run what is left of the two stages, without Ray; gives the number of the sequence that each launch begins with."""
    config = load_config("code_completion/tiny", (f"corpus.store={store}", *SETTINGS, RINGS % rings))
    prepared = prepare(config, folder, folder if folder.exists() else None)
    _write_run_folder(prepared)
    firsts = []

    def launch(job, mesh, data, cluster):
        firsts.append(job.start()[1].sequences)
        result = world.run(on_a_rank, ranks=mesh.world, job=job, spec=mesh, data=data, die_at=die_at)[0]
        if result is None:
            raise Crash
        return result

    try:
        run_stages(prepared.stages, launch)
    except Crash:
        assert die_at is not None
    return firsts


@pytest.fixture(scope="module")
def stages(world, code_store):
    return partial(run, world, code_store)


@pytest.fixture(scope="module")
def undisturbed(stages, tmp_path_factory):
    """The folder of a run without a crash, and the sequence that its second stage begins with."""
    folder = tmp_path_factory.mktemp("stages") / "undisturbed"
    first, second = stages(folder, (1, 2))
    assert first == 0 < second < 8  # the first stage's eight windows are shorter
    return folder, second


def test_a_longer_context_on_a_longer_ring_goes_on_with_steps_tokens_and_weights(stages, undisturbed, tmp_path):
    folder, _ = undisturbed
    curve = rows(folder)
    assert [row["step"] for row in curve] == list(range(1, 10)) and curve[-1]["loss"] < curve[0]["loss"]
    rates = [row["learning_rate"] for row in curve]  # each stage warms up anew
    assert rates == pytest.approx([0.0015, 0.003, 0.00165, 0.0003] + [0.0015, 0.003, 0.003, 0.003, 0.003], rel=1e-6)
    grown = [row["tokens"] - before["tokens"] for before, row in zip(curve, curve[1:])]
    assert max(grown[:3]) <= 128 < min(grown[3:]) and max(grown) <= 256
    assert [row["step"] for row in rows(folder, "evaluations.jsonl")] == [0, 4, 9]
    latest = checkpoints.latest(folder / "checkpoints")
    assert checkpoints.read_model(latest).rope_theta == 2e6 and checkpoints.read_progress(latest).step == 9
    stages(tmp_path / "one rank", (1, 1))
    assert losses(tmp_path / "one rank") == pytest.approx(losses(folder), rel=1e-5)


def test_a_crash_in_any_stage_and_at_its_border_changes_nothing(stages, undisturbed, tmp_path):  # T1, T2
    """In the middle of each stage, the last time with another mesh; and in the second's first step, when the latest checkpoint
    counts the first's windows."""
    whole, second = undisturbed
    folder = tmp_path / "crashed"
    assert stages(folder, (1, 2), die_at=3) == [0]
    assert stages(folder, (1, 2), die_at=5) == [4, second]  # from step 2; then from the border, by tokens
    assert stages(folder, (1, 2), die_at=8) == [second]
    assert losses(folder) == losses(whole)[:7]
    assert stages(folder, (1, 1)) == [second + 4]  # two steps into the stage its own number counts
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)
    assert [row["tokens"] for row in rows(folder)] == [row["tokens"] for row in rows(whole)]
