"""Run folders in which no step was taken: everything but the training is real."""

from pathlib import Path

import torch.distributed as dist

from pipelines.config import load_config
from pipelines.train import _write_run_folder, prepare
from workers.mesh import MeshSpec
from workers.training.checkpoint import Checkpointer, Progress
from workers.training.loop import build_model
from workers.training.optimizer import build_optimizer

SMALL = ("model.dim=32", "model.layers=1", "model.ffn_dim=64")
SHORT = ("training.context=64", "training.steps=2", "mesh.ring=1")


def untrained_run(folder: Path, *settings: str, resume: Path | None = None) -> Path:
    """A run folder with a checkpoint of step 2, of the tiny preset with these settings, on one rank and short."""
    prepared = prepare(load_config("code_completion/tiny", (*SHORT, *settings)), folder, resume)
    _write_run_folder(prepared)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        job = prepared.job
        model = build_model(job, MeshSpec().build("cpu"))
        saver = Checkpointer(job.checkpoint_folder, 2, job.model)
        saver.save(Progress(step=2, sequences=2), model, build_optimizer(model, job.training))
        saver.finish()
    finally:
        dist.destroy_process_group()
    return folder
