"""LoRA on every mesh: the same curve, the base as it was, and checkpoints that hold the adapter alone."""

import dataclasses

import pytest
import torch

from tests.distributed.test_training import assert_same_curve, name_of
from tests.distributed.training_cases import MODEL, losses, rows, run_training, with_steps
from workers.mesh import MeshSpec
from workers.model.adapter import AdapterConfig
from workers.training.config import CheckpointConfig

ADAPTER = AdapterConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
OPENED = dataclasses.replace(ADAPTER, rank=3, targets=("v_proj", "down_proj"), train_norms=True, train_embeddings=True)
TRAINING = with_steps(6, learning_rate=1e-2)


def frozen_and_trained(model) -> dict:
    """The whole weights by name; of those without a gradient only."""
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is None
    }


@pytest.fixture(scope="module")
def one_process(world, tmp_path_factory):
    run = tmp_path_factory.mktemp("one")
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(run), training=TRAINING, adapter=ADAPTER, held_out=2)
    assert losses(run)[-1] < losses(run)[0] - 0.2
    return run


@pytest.mark.parametrize("spec", [MeshSpec(ring=2), MeshSpec(tp=2), MeshSpec(dp=2), MeshSpec(ulysses=2), MeshSpec(ring=2, tp=2)], ids=name_of)
def test_the_mesh_changes_nothing_but_speed(world, one_process, tmp_path, spec):
    world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path), training=TRAINING, adapter=ADAPTER, held_out=2 // spec.dp)
    assert_same_curve(tmp_path, one_process)
