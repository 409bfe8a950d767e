"""Stages, copies of the weights and buckets of blocks change nothing but speed, either."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_training import assert_same_curve
from tests.distributed.training_cases import MODEL, losses, rows, run_training, with_steps
from workers import parallel
from workers.mesh import MeshSpec
from workers.parallel import pipeline
from workers.training.loop import STOP_FILE

DEEP = dataclasses.replace(MODEL, layers=3)
TIED = dataclasses.replace(DEEP, tie_embeddings=True)
TRAINING = with_steps(5, batch=4)  # packed documents; accumulation over windows with unequal numbers of targets

MESHES = {
    "two stages, a ring": (DEEP, MeshSpec(pp=2, ring=2)),
    "tied stages, tensor ranks": (TIED, MeshSpec(pp=2, tp=2)),
    "three tied stages": (TIED, MeshSpec(pp=3)),
    "stages, data groups, buckets": (DEEP, MeshSpec(pp=2, dp=2, sync_every_blocks=2)),
    "fewer micro-batches than stages": (DEEP, MeshSpec(pp=3, dp=2)),
    "copies of rings, buckets": (DEEP, MeshSpec(dp=2, ring=2, replicate=2, sync_every_blocks=2)),
    "copies of shards": (DEEP, MeshSpec(dp=4, replicate=2)),
    "copies, tied stages": (TIED, MeshSpec(dp=2, pp=2, replicate=2)),
    "copies, tensor ranks": (DEEP, MeshSpec(dp=2, replicate=2, tp=2)),
}


@pytest.fixture(scope="module")
def references(world, tmp_path_factory):
    """For each model, undisturbed steps on one rank."""
    runs = {}
    for model in (DEEP, TIED):
        runs[model] = tmp_path_factory.mktemp("one")
        world.run(run_training, ranks=1, spec=MeshSpec(), run=str(runs[model]), model=model, training=TRAINING, held_out=4)
    return runs


@pytest.mark.parametrize("name", MESHES)
def test_the_mesh_changes_nothing_but_speed(world, references, tmp_path, name):  # A8, A9
    model, spec = MESHES[name]
    world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path), model=model, training=TRAINING, held_out=4 // spec.dp)
    assert_same_curve(tmp_path, references[model])
    ours, theirs = (rows(run, "evaluations.jsonl") for run in (tmp_path, references[model]))
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["targets"] == b["targets"]


def test_a_micro_batch_of_several_sequences_travels_whole(world, references, tmp_path):
    training = dataclasses.replace(TRAINING, micro_batch=2)
    world.run(run_training, ranks=2, spec=MeshSpec(pp=2), run=str(tmp_path), model=DEEP, training=training, held_out=1)
    assert_same_curve(tmp_path, references[DEEP])


def train_as_if_large(**arguments) -> None:
    """Blocks give their whole weights back after forward, with other micro-batches still to go backward through them."""
    small, parallel.SMALL_MODEL_BYTES = parallel.SMALL_MODEL_BYTES, 0
    try:
        run_training(**arguments)
    finally:
        parallel.SMALL_MODEL_BYTES = small


@pytest.mark.parametrize(
    "spec", [MeshSpec(pp=2, ring=2, sync_every_blocks=2), MeshSpec(dp=2, ring=2, replicate=2)], ids=["stages", "copies"]
)
def test_a_large_model_gathers_its_weights_again(world, references, tmp_path, spec):
    held_out = 4 // spec.dp
    world.run(train_as_if_large, ranks=4, spec=spec, run=str(tmp_path), model=DEEP, training=TRAINING, held_out=held_out)
    assert_same_curve(tmp_path, references[DEEP])


@pytest.mark.parametrize("seen", [dict(positions="alibi", window=40), dict(window=8, segment=8, summaries=2, memory=1)], ids=str)
def test_stages_see_what_one_rank_sees(world, tmp_path, seen):
    model = dataclasses.replace(DEEP, **seen)
    for name, spec in {"one": MeshSpec(), "stages": MeshSpec(pp=2, ulysses=2)}.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), model=model, training=TRAINING)
    assert_same_curve(tmp_path / "stages", tmp_path / "one")


def reductions_between_copies(spec: MeshSpec, run: str) -> int:
    """All-reduces of gradients in one step; what else is all-reduced here is not float32."""
    seen, plain = [], dist.all_reduce
    dist.all_reduce = lambda x, *rest, **named: seen.append(x.dtype) or plain(x, *rest, **named)
    try:
        run_training(spec, run, model=DEEP, training=dataclasses.replace(TRAINING, steps=1))
    finally:
        dist.all_reduce = plain
    return seen.count(torch.float32)


@pytest.mark.parametrize("together, units", [(1, 4), (2, 3)])  # three blocks, or two and one; and the rest of the model
def test_copies_reduce_once_a_step_in_buckets_of_blocks(world, tmp_path, together, units):
    spec = MeshSpec(dp=2, replicate=2, sync_every_blocks=together)
    assert world.run(reductions_between_copies, ranks=2, spec=spec, run=str(tmp_path)) == [units] * 2


def buffers_between_stages(run: str) -> list[int]:
    seen, plain = [], pipeline._in_turn
    pipeline._in_turn = lambda buffers, count: seen.append(len(buffers)) or plain(buffers, count)
    try:
        run_training(MeshSpec(pp=2), run, model=DEEP, training=dataclasses.replace(TRAINING, steps=1, batch=6))
    finally:
        pipeline._in_turn = plain
    return seen


def test_a_stage_holds_what_is_in_flight_however_long_the_step(world, tmp_path):
    """Of six micro-batches: hidden states of two, a gradient of one."""
    assert world.run(buffers_between_stages, ranks=2, run=str(tmp_path)) == [[2, 1]] * 2


def test_resume_on_other_stages_and_back(world, references, tmp_path):  # T2
    """Each leg is asked to stop after one step, and the next one goes on from its checkpoint on another mesh."""
    legs = [MeshSpec(pp=2), MeshSpec(ring=2), MeshSpec(pp=3), MeshSpec(dp=2, replicate=2, pp=2)]
    for done, spec in enumerate(legs, 1):
        (tmp_path / STOP_FILE).touch()
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path), model=TIED, training=TRAINING)
        assert len(losses(tmp_path)) == done
    (tmp_path / STOP_FILE).unlink()
    world.run(run_training, ranks=2, spec=MeshSpec(tp=2), run=str(tmp_path), model=TIED, training=TRAINING)
    assert_same_curve(tmp_path, references[TIED])


def test_a_planted_nan_on_the_last_stage_is_skipped_by_all_and_named(world, tmp_path):  # T3
    common = dict(ranks=4, spec=MeshSpec(pp=2, tp=2), nan_rank=3)
    training = with_steps(8, skips_in_a_row=2)
    results = world.run(run_training, run=str(tmp_path / "a"), training=training, nan_at=(3, 5), **common)
    assert [r["skipped_steps"] for r in results] == [2] * 4 and len({r["loss"] for r in results}) == 1
    assert [row["skipped_steps"] for row in rows(tmp_path / "a")] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert losses(tmp_path / "a")[-1] < losses(tmp_path / "a")[0]
    with pytest.raises(AssertionError, match=r"Diverged: .*first in the gradient of layers.1.mlp.up_proj"):
        world.run(run_training, run=str(tmp_path / "b"), training=training, nan_at=range(3, 9), **common)


def test_stages_follow_fp32_under_bf16(world, references, tmp_path):
    training = dataclasses.replace(TRAINING, precision="bf16")
    world.run(run_training, ranks=2, spec=MeshSpec(pp=2), run=str(tmp_path), model=DEEP, training=training, held_out=1)
    assert losses(tmp_path) == pytest.approx(losses(references[DEEP]), rel=2e-2)
    assert losses(tmp_path) != losses(references[DEEP])
