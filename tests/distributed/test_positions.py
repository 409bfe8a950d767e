"""Encodings whose values depend on the whole sequence, or on which tokens a tensor rank holds, are the same on every mesh."""

import dataclasses

import pytest
import torch

from tests.distributed.test_training import assert_same_curve
from tests.distributed.training_cases import MODEL, losses, run_training, window, with_steps
from workers.mesh import MeshSpec
from workers.training.batch import receive

ORIGINAL = 16  # most documents of the windows, of 96 tokens, are longer; some are not
SHARP = dataclasses.replace(MODEL, qk_norm=True, rope_theta=100.0)  # scores of order one, so that a wrong angle shows
FACTORS = dict(short_factor=[1.0, 1.0, 1.1, 1.1], long_factor=[1.0, 2.0, 4.0, 8.0])
ENCODINGS = {
    "dynamic": dict(rope_scaling=dict(rope_type="dynamic", factor=8.0, original_max_position_embeddings=ORIGINAL)),
    "longrope": dict(rope_scaling=dict(rope_type="longrope", factor=6.0, original_max_position_embeddings=ORIGINAL, **FACTORS)),
    "sinusoidal": dict(positions="sinusoidal"),
}
STEPS = with_steps(4, batch=2, micro_batch=2)


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory):
    run = tmp_path_factory.mktemp("plain")
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(run), model=SHARP, training=STEPS)
    return losses(run)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_mesh_changes_nothing_but_speed(world, plain, tmp_path, encoding):
    """Also the number of sequences taken at once: a short document beside a long one keeps its own frequencies."""
    model = dataclasses.replace(SHARP, **ENCODINGS[encoding])
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "one"), model=model, training=STEPS, held_out=2)
    assert max(abs(a / b - 1) for a, b in zip(losses(tmp_path / "one"), plain)) > 1e-4  # the encoding matters in these runs
    for name, spec, micro_batch in (("ring-tp", MeshSpec(ring=2, tp=2), 2), ("contiguous", MeshSpec(dp=2, ring=2, layout="contiguous"), 1)):
        training = dataclasses.replace(STEPS, micro_batch=micro_batch)
        run = tmp_path / name
        world.run(run_training, ranks=spec.world, spec=spec, run=str(run), model=model, training=training, held_out=2 // spec.dp)
        assert_same_curve(run, tmp_path / "one")


def lengths(spec: MeshSpec, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = spec.build("cpu")
    batch = receive([window(number, 32) for number in numbers] if mesh.is_leader else None, mesh, 32)
    return batch.positions, batch.length


def test_every_rank_knows_how_long_a_document_is(world):
    numbers = [0, 1, 2]
    documents = torch.tensor([window(number, 32).documents.tolist() for number in numbers])
    parts = world.run(lengths, ranks=2, spec=MeshSpec(ring=2, layout="contiguous"), numbers=numbers)
    positions, length = (torch.cat(part, dim=1) for part in zip(*parts))
    for row in range(len(numbers)):
        for document in documents[row].unique():
            mine = documents[row] == document
            assert (length[row, mine] == positions[row, mine].max() + 1).all()
    assert length.unique().numel() > 2
