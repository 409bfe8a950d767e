"""Checkpoints in one process: whole or not there, restored bit for bit, a failed write leaves the last good one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.training_cases import losses, run_training, with_steps
from tests.unit.workers.model.test_decoder import CONFIG, VARIANTS, decoder
from workers.attention import Pattern
from workers.mesh import MeshSpec
from workers.training import checkpoint as checkpoints
from workers.training.checkpoint import Checkpointer, Progress
from workers.training.config import TrainingConfig
from workers.training.optimizer import build_optimizer


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """A group that is this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stepped(config=CONFIG, steps: int = 2):
    """A model and an optimizer that have moved."""
    model = decoder(config)
    optimizer = build_optimizer(model, TrainingConfig(learning_rate=1e-2))
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    tokens = torch.arange(16)[None]
    model(tokens, tokens, Pattern()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saver(folder, keep: int = 2) -> Checkpointer:
    return Checkpointer(folder, keep, CONFIG)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_restored_run_goes_on_bit_for_bit(tmp_path, variant):
    model, optimizer = stepped(VARIANTS[variant])
    writer = Checkpointer(tmp_path, 2, VARIANTS[variant])
    progress = Progress(step=2, tokens=31, sequences=4, skipped_steps=1)
    torch.manual_seed(5)
    writer.save(progress, model, optimizer)
    drawn = torch.rand(3)
    step(model, optimizer)  # while the write may still be in flight: it must hold what was, not what is
    writer.finish()

    again = decoder(VARIANTS[variant], seed=9)
    restored = build_optimizer(again, TrainingConfig(learning_rate=1e-2))
    torch.manual_seed(6)
    checkpoints.load(checkpoints.latest(tmp_path), again, restored)
    assert checkpoints.read_progress(checkpoints.latest(tmp_path)) == progress
    assert torch.equal(torch.rand(3), drawn)
    step(again, restored)
    for (name, a), b in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(a, b), name
    assert checkpoints.read_model(checkpoints.latest(tmp_path)) == VARIANTS[variant]


def test_what_is_being_written_is_not_the_latest(tmp_path):
    model, optimizer = stepped()
    writer = saver(tmp_path)
    writer.save(Progress(step=1), model, optimizer)
    assert checkpoints.latest(tmp_path) is None
    writer.finish()
    assert checkpoints.latest(tmp_path).name == "step-00000001"
    writer.save(Progress(step=2), model, optimizer)
    assert checkpoints.latest(tmp_path).name == "step-00000001"
    writer.save(Progress(step=3), model, optimizer)  # finishes step 2 first
    assert checkpoints.latest(tmp_path).name == "step-00000002"
    writer.finish()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_poll_puts_a_finished_write_in_place(tmp_path):
    model, optimizer = stepped()
    writer = saver(tmp_path)
    writer.poll()  # nothing to do
    writer.save(Progress(step=7), model, optimizer)
    writer._writing[0].result(60)
    writer.poll()
    assert names(tmp_path) == ["step-00000007"]
    writer.finish()  # and once more there is nothing to do
    assert names(tmp_path) == ["step-00000007"]


def test_the_newest_by_step_and_not_by_name_or_time(tmp_path):
    for name in ("step-00000100", "step-00000020", "step-00000003.partial", "step-00000500"):
        (tmp_path / name).mkdir()
        if name != "step-00000500":
            (tmp_path / name / "state.json").write_text("{}")
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step-00000020", "step-00000100"]
    assert checkpoints.latest(tmp_path / "nowhere") is None


def test_what_a_killed_writer_left_goes_away_at_the_next_start(tmp_path):
    (tmp_path / "step-00000002.partial").mkdir(parents=True)
    (tmp_path / "step-00000002.partial" / "state.json").write_text("{")
    saver(tmp_path)
    assert names(tmp_path) == []


def test_a_full_disk_is_a_warning_and_the_last_good_checkpoint_stays(tmp_path, monkeypatch, caplog):  # T4
    model, optimizer = stepped()
    writer = saver(tmp_path, keep=1)
    writer.save(Progress(step=1), model, optimizer)
    writer.finish()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", full)
        writer.save(Progress(step=2), model, optimizer)
        writer.finish()
    assert "step-00000002 was not written" in caplog.text and "No space left on device" in caplog.text
    assert checkpoints.latest(tmp_path).name == "step-00000001"
    writer.save(Progress(step=3), model, optimizer)
    writer.finish()
    assert checkpoints.latest(tmp_path).name == "step-00000003"
    checkpoints.load(checkpoints.latest(tmp_path), decoder())


def test_the_note_of_the_folder_itself_may_not_fit_on_a_full_disk(tmp_path, monkeypatch, caplog):  # T4
    """state.json is the first thing that is written: a disk that is full then must not end the run either."""
    model, optimizer = stepped()
    writer = saver(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        writer.save(Progress(step=2), model, optimizer)
    writer.finish()
    assert checkpoints.latest(tmp_path) is None and "No space left on device" in caplog.text


def test_the_state_is_plain_json(tmp_path):
    model, optimizer = stepped()
    writer = saver(tmp_path)
    writer.save(Progress(step=2, tokens=2**40, sequences=9), model, optimizer)
    writer.finish()
    state = json.loads((tmp_path / "step-00000002" / "state.json").read_text())
    assert state["progress"] == {"step": 2, "tokens": 2**40, "sequences": 9, "skipped_steps": 0, "windows": ""}
    assert state["model"]["dim"] == 32


def test_a_finished_run_with_evaluations_goes_on_as_if_it_had_never_stopped(tmp_path):
    """The last step is evaluated and then saved: the checkpoint holds the optimizer of every weight."""
    curve = with_steps(6, decay="constant", evaluate_every=2)
    run_training(MeshSpec(), str(tmp_path / "whole"), training=curve, held_out=1)
    for steps in (4, 6):
        run_training(MeshSpec(), str(tmp_path / "parts"), training=replace(curve, steps=steps), held_out=1)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
