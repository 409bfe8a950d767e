"""The laws of training: the mesh changes nothing but speed; nothing is lost to a crash, a resume or a bad gradient."""

import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.training_cases import MODEL, TRAINING, losses, rows, run_training, with_steps
from workers.mesh import MeshSpec
from workers.training.config import CheckpointConfig
from workers.training.loop import Job, build_model
from workers.training.optimizer import build_optimizer

MESHES = [
    MeshSpec(ring=2),
    MeshSpec(ring=4),
    MeshSpec(ring=2, layout="contiguous"),
    MeshSpec(ring=2, layout="striped"),
    MeshSpec(tp=2),
    MeshSpec(dp=2),
    MeshSpec(ulysses=2),
    MeshSpec(ring=2, tp=2),
    MeshSpec(ring=2, ulysses=2),
    MeshSpec(dp=2, ring=2, tp=2),
]


def name_of(spec: MeshSpec) -> str:
    return f"dp{spec.dp}-ring{spec.ring}-ulysses{spec.ulysses}-tp{spec.tp}-{spec.layout}"


@pytest.fixture(scope="module")
def one_process(world, tmp_path_factory):
    """Ten undisturbed steps on one rank: what every other run is compared with."""
    run = tmp_path_factory.mktemp("one")
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(run), held_out=2)
    assert losses(run)[-1] < losses(run)[0]
    return run


def assert_same_curve(run, reference, relative=1e-5):
    assert losses(run) == pytest.approx(losses(reference), rel=relative)
    norms = [[row["grad_norm"] for row in rows(r)] for r in (run, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * relative)
    assert [row["tokens"] for row in rows(run)] == [row["tokens"] for row in rows(reference)]


@pytest.mark.parametrize("spec", MESHES, ids=name_of)
def test_the_mesh_changes_nothing_but_speed(world, one_process, tmp_path, spec):  # A5, A7, A9: packed documents, empty shards
    world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path), held_out=2 // spec.dp)
    assert_same_curve(tmp_path, one_process)
    for ours, theirs in zip(rows(tmp_path, "evaluations.jsonl"), rows(one_process, "evaluations.jsonl")):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert [(b["start"], b["targets"]) for b in ours["loss_by_position"]] == [
            (b["start"], b["targets"]) for b in theirs["loss_by_position"]
        ]


@pytest.mark.parametrize("spec", [MeshSpec(dp=2), MeshSpec(dp=2, ring=2)], ids=name_of)
def test_accumulation_over_data_parallel_groups(world, tmp_path, spec):
    training = with_steps(5, batch=4)
    for name, mesh in {"one": MeshSpec(), "mesh": spec}.items():
        world.run(run_training, ranks=mesh.world, spec=mesh, run=str(tmp_path / name), training=training)
    assert_same_curve(tmp_path / "mesh", tmp_path / "one")


VARIANTS = {
    "tied": dataclasses.replace(MODEL, tie_embeddings=True),
    "qwen": dataclasses.replace(MODEL, qkv_bias=True, qk_norm=True),
}


SEEN = {
    "window, sinks and learnt memory": dict(window=17, sinks=3, memory=2),
    "blocks": dict(block=16),
    "alibi": dict(positions="alibi", window=40),
    "no positions, strided": dict(positions="none", stride=4),
    "hierarchical": dict(window=8, segment=8, summaries=2, memory=1),
    "hierarchical, mean": dict(window=8, segment=16, pooling="mean", reach=3),
    "top blocks": dict(top_blocks=3, top_block_size=8),
}


@pytest.mark.parametrize("seen", SEEN)
def test_the_law_holds_whatever_a_token_sees(world, tmp_path, seen):
    """Packed documents on rings, ulysses and tensor ranks; learnt keys and pooling vectors are sharded with their heads."""
    model = dataclasses.replace(MODEL, kv_heads=2, **SEEN[seen])
    training = with_steps(4)
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "one"), model=model, training=training)
    for spec in (MeshSpec(ring=2, tp=2), MeshSpec(ring=2, ulysses=2, layout="contiguous"), MeshSpec(ring=4), MeshSpec(dp=2, tp=2)):
        run = tmp_path / name_of(spec)
        world.run(run_training, ranks=spec.world, spec=spec, run=str(run), model=model, training=training)
        assert_same_curve(run, tmp_path / "one")


@pytest.mark.parametrize("seen", ["hierarchical", "dense"])
def test_the_law_holds_for_shelves(world, tmp_path, seen):
    """Shelves of several papers, packed: losses, and those with and without the earlier papers."""
    model = dataclasses.replace(MODEL, **(dict(window=8, segment=8) if seen == "hierarchical" else {}))
    common = dict(model=model, training=with_steps(3), held_out=2, parts=3)
    for name, spec in {"one": MeshSpec(), "mesh": MeshSpec(ring=2)}.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), **common)
    assert_same_curve(tmp_path / "mesh", tmp_path / "one")
    for ours, theirs in zip(rows(tmp_path / "mesh", "evaluations.jsonl"), rows(tmp_path / "one", "evaluations.jsonl")):
        assert ours["later_targets"] == theirs["later_targets"] > 0
        for name in ("loss", "later_loss", "alone_loss", "alone_later_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
        assert ours["alone_later_loss"] != ours["later_loss"]


def test_more_ulysses_ranks_than_kv_heads(world, tmp_path):
    model = dataclasses.replace(MODEL, kv_heads=1)
    for name, spec in {"one": MeshSpec(), "mesh": MeshSpec(ring=2, ulysses=2)}.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), model=model, training=with_steps(4))
    assert_same_curve(tmp_path / "mesh", tmp_path / "one")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_law_holds_for_other_models(world, tmp_path, variant):
    specs = {
        "one": MeshSpec(),
        "ring and tensor": MeshSpec(ring=2, tp=2),
        "data and tensor": MeshSpec(dp=2, tp=2),
        "both": MeshSpec(ulysses=2, tp=2),
    }
    model = dataclasses.replace(VARIANTS[variant], kv_heads=4)
    for name, spec in specs.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), model=model)
    for name in list(specs)[1:]:
        assert_same_curve(tmp_path / name, tmp_path / "one")


def test_nine_query_heads_on_three_tensor_ranks(world, tmp_path):  # A4
    model = dataclasses.replace(MODEL, dim=36, heads=9, kv_heads=3, head_dim=4, ffn_dim=66)  # 256 ids: an uneven vocabulary
    for name, spec in {"one": MeshSpec(), "mesh": MeshSpec(ring=2, tp=3)}.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), model=model)
    assert_same_curve(tmp_path / "mesh", tmp_path / "one")


@pytest.mark.parametrize("context", [7, 93])
def test_a_length_that_does_not_divide_is_padded(world, tmp_path, context):  # A3
    training = with_steps(4, context=context)
    for name, spec in {"one": MeshSpec(), "mesh": MeshSpec(ring=2, tp=2)}.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), training=training)
    assert_same_curve(tmp_path / "mesh", tmp_path / "one")


def test_accumulation_equals_one_large_batch(world, tmp_path):  # A8
    for name, micro_batch in {"large": 4, "accumulated": 1}.items():
        training = with_steps(5, batch=4, micro_batch=micro_batch)
        world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / name), training=training)
    assert_same_curve(tmp_path / "accumulated", tmp_path / "large")


def test_two_runs_are_bit_identical(world, tmp_path):
    for name in ("a", "b"):
        world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / name))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize("second", [MeshSpec(dp=2), MeshSpec(ring=2), MeshSpec(tp=2), MeshSpec()], ids=name_of)
def test_resume_on_another_mesh(world, one_process, tmp_path, second):  # T2
    checkpoint = CheckpointConfig(every=4)
    common = dict(run=str(tmp_path), checkpoint=checkpoint)
    world.run(run_training, ranks=2, spec=MeshSpec(dp=2), die_at=7, **common)
    assert len(losses(tmp_path)) == 6
    results = world.run(run_training, ranks=second.world, spec=second, **common)
    assert results[0]["step"] == 10
    assert_same_curve(tmp_path, one_process)


def test_resume_on_the_same_mesh_is_bit_identical(world, tmp_path):  # T1
    common = dict(checkpoint=CheckpointConfig(every=3))
    world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / "whole"), **common)
    for die_at in (5, 8):
        world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / "broken"), die_at=die_at, **common)
    world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / "broken"), **common)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_resume_from_another_run(world, one_process, tmp_path):
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "a"), checkpoint=CheckpointConfig(every=4, keep=9))
    checkpoint = str(tmp_path / "a" / "checkpoints" / "step-00000004")
    world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / "b"), resume=checkpoint)
    assert losses(tmp_path / "b") == pytest.approx(losses(one_process)[4:], rel=1e-5)


@pytest.mark.parametrize("spec", [MeshSpec(ring=2), MeshSpec(dp=2, tp=2)], ids=name_of)
def test_a_planted_nan_is_skipped_by_all_ranks_together(world, tmp_path, spec):  # T3
    results = world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path), nan_at=(3, 4), nan_rank=1)
    assert [r["skipped_steps"] for r in results] == [2] * spec.world
    assert [row["skipped_steps"] for row in rows(tmp_path)] == [0, 0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert len({r["loss"] for r in results}) == 1
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_a_skipped_step_leaves_the_weights_alone(world, tmp_path):
    """Skipping every step but the first leaves what one step gave: the held-out loss after it does not move."""
    training = with_steps(4, evaluate_every=1)
    world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path), training=training, nan_at=(2, 3, 4), held_out=1)
    held_out = [row["loss"] for row in rows(tmp_path, "evaluations.jsonl")]
    assert held_out[0] != held_out[1] and held_out[1:] == [held_out[1]] * 4


def test_after_n_skips_the_checkpoint_is_restored_and_then_the_run_ends(world, tmp_path):
    common = dict(training=with_steps(12, skips_in_a_row=2), checkpoint=CheckpointConfig(every=2))
    world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / "a"), nan_at=(5, 6), **common)
    assert len(losses(tmp_path / "a")) == 12
    with pytest.raises(AssertionError, match=r"Diverged: 2 steps in a row .*step 8, first in the gradient of layers.1.mlp.up_proj"):
        world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / "b"), nan_at=range(5, 12), **common)


def test_only_the_newest_checkpoints_stay(world, tmp_path):
    world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path), checkpoint=CheckpointConfig(every=2, keep=2))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000008", "step-00000010"]


def rotary_types(spec: MeshSpec, run: str):
    from workers.model import decoder

    seen, plain = [], decoder.rotate
    decoder.rotate = lambda x, table: seen.append((x.dtype, table[0].dtype)) or plain(x, table)
    try:
        run_training(spec, run, training=with_steps(1, precision="bf16"))
    finally:
        decoder.rotate = plain
    return set(seen)


def test_positions_stay_float32_under_bf16(world, tmp_path):
    for seen in world.run(rotary_types, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path)):
        assert seen == {(torch.bfloat16, torch.float32)}


def slow_rename(spec: MeshSpec, run: str):
    """What each rank sees as the latest checkpoint right after ``finish``, when the rename on rank 0 takes its time."""
    from workers.training import checkpoint as checkpoints

    plain = os.rename

    def late(*names):
        time.sleep(0.5)
        plain(*names)

    os.rename = late
    try:
        mesh = spec.build("cpu")
        job = Job(MODEL, TRAINING, CheckpointConfig(), Path(run))
        model = build_model(job, mesh)
        saver = checkpoints.Checkpointer(job.checkpoint_folder, 1, MODEL)
        seen = []
        for step in (1, 2):
            saver.save(checkpoints.Progress(step=step), model, build_optimizer(model, TRAINING))
            saver.finish()
            seen.append(checkpoints.latest(job.checkpoint_folder).name)
        return seen
    finally:
        os.rename = plain


def test_all_ranks_see_the_same_latest_checkpoint(world, tmp_path):
    assert world.run(slow_rename, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path)) == [["step-00000001", "step-00000002"]] * 2


def test_bf16_follows_fp32(world, tmp_path):
    for name, precision in {"fp32": "fp32", "bf16": "bf16"}.items():
        world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / name), training=with_steps(5, precision=precision))
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=2e-2)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")
