"""LoRA on every mesh: the same curve, the base as it was, and checkpoints that hold the adapter alone."""

import dataclasses

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from tests.distributed.test_huggingface import folder_of
from tests.distributed.test_training import assert_same_curve, name_of
from tests.distributed.training_cases import MODEL, losses, rows, run_training, with_steps
from workers.inference.generate import load_decoder
from workers.mesh import MeshSpec
from workers.model import load_pretrained
from workers.model.adapter import AdapterConfig
from workers.training import checkpoint as checkpoints
from workers.training.config import CheckpointConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = AdapterConfig(rank=4, targets=ALL)
OPENED = AdapterConfig(rank=3, targets=("v_proj", "down_proj"), train_norms=True, train_embeddings=True)
TRAINING = with_steps(6, learning_rate=1e-2)


def one_and_mesh(world, folder, spec, **arguments):
    """Run on one rank and on a mesh; the curves are the same."""
    for name, mesh in {"one": MeshSpec(), "mesh": spec}.items():
        world.run(run_training, ranks=mesh.world, spec=mesh, run=str(folder / name), training=TRAINING, **arguments)
    assert_same_curve(folder / "mesh", folder / "one")


def whole_weights(model) -> dict[str, torch.Tensor]:
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


@pytest.fixture(scope="module")
def one_process(world, tmp_path_factory):
    run = tmp_path_factory.mktemp("one")
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(run), training=TRAINING, adapter=ADAPTER, held_out=2)
    assert losses(run)[-1] < losses(run)[0] - 0.1
    return run


@pytest.mark.parametrize("spec", [MeshSpec(tp=2), MeshSpec(dp=2), MeshSpec(ring=2, tp=2), MeshSpec(ulysses=2)], ids=name_of)
def test_the_mesh_changes_nothing_but_speed(world, one_process, tmp_path, spec):
    world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path), training=TRAINING, adapter=ADAPTER, held_out=2 // spec.dp)
    assert_same_curve(tmp_path, one_process)
    ours, theirs = (rows(run, "evaluations.jsonl") for run in (tmp_path, one_process))
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)


def test_nine_query_heads_on_three_tensor_ranks(world, tmp_path):  # A4
    model = dataclasses.replace(MODEL, dim=36, heads=9, kv_heads=3, head_dim=4, ffn_dim=66)
    one_and_mesh(world, tmp_path, MeshSpec(ring=2, tp=3), model=model, adapter=ADAPTER)


@pytest.mark.parametrize(
    "changes", [dict(tie_embeddings=True, qk_norm=True), dict(memory=2, segment=8, window=8)], ids=["tied", "learnt memory and pooling"]
)
def test_norms_and_embeddings_train_as_well(world, tmp_path, changes):
    """Few targets, none of them before the first block's attention but v; what no base has trains, too."""
    one_and_mesh(world, tmp_path, MeshSpec(ring=2, tp=2), model=dataclasses.replace(MODEL, **changes), adapter=OPENED)


def test_the_first_loss_is_the_bases_and_only_the_adapter_moves(world, tmp_path):
    spec, common = MeshSpec(ring=2), dict(training=TRAINING, checkpoint=CheckpointConfig(every=0))
    before = world.run(run_training, ranks=2, spec=spec, run=str(tmp_path / "base"), look=whole_weights, training=with_steps(1))[0]["seen"]
    after = world.run(run_training, ranks=2, spec=spec, run=str(tmp_path / "lora"), look=whole_weights, adapter=ADAPTER, **common)[0][
        "seen"
    ]
    assert losses(tmp_path / "lora")[0] == losses(tmp_path / "base")[0]
    assert len(before) == 21 and before.keys() < after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert all(after[name].any() for name in after.keys() - before.keys())

    start = checkpoints.latest(tmp_path / "lora" / "checkpoints")
    held = FileSystemReader(start).read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in held if name.startswith("model.")} == after.keys() - before.keys()
    assert not [name for name in held if name.startswith("optimizer.") and ".lora_" not in name]
    weights = sum(value.numel() for value in before.values()) * 4
    assert sum(file.stat().st_size for file in start.rglob("*.distcp")) < 3 * weights

    merged = load_decoder(start)  # base, then adapter
    assert [name for name, _ in merged.named_parameters()] == list(before)
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, before[name]) == (not name.endswith(tuple(f"{target}.weight" for target in ALL))), name


@pytest.mark.parametrize("second", [MeshSpec(ring=2), MeshSpec(tp=2), MeshSpec()], ids=name_of)
def test_resume_on_another_mesh(world, one_process, tmp_path, second):  # T2
    common = dict(run=str(tmp_path), checkpoint=CheckpointConfig(every=2), training=TRAINING, adapter=ADAPTER)
    world.run(run_training, ranks=2, spec=MeshSpec(dp=2), die_at=4, **common)
    world.run(run_training, ranks=second.world, spec=second, **common)
    assert_same_curve(tmp_path, one_process)


def test_an_adapter_of_a_model_folder(world, tmp_path):
    """The folder is read again at a resume on another mesh, and under the adapter when the whole is loaded."""
    source = folder_of(MODEL, tmp_path / "model")
    common = dict(training=with_steps(4, learning_rate=1e-2), adapter=OPENED, checkpoint=CheckpointConfig(every=2), init=str(source))
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "one"), **common)
    world.run(run_training, ranks=2, spec=MeshSpec(dp=2), run=str(tmp_path / "two"), die_at=4, **common)
    world.run(run_training, ranks=2, spec=MeshSpec(tp=2), run=str(tmp_path / "two"), **common)
    assert_same_curve(tmp_path / "two", tmp_path / "one")
    ours, theirs = (load_decoder(checkpoints.latest(tmp_path / run / "checkpoints")) for run in ("two", "one"))
    base, frozen = dict(load_pretrained(source).named_parameters()), {*ALL, "lm_head"} - {*OPENED.targets}
    for (name, parameter), reference in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(parameter, reference, rtol=1e-3, atol=1e-4)
        assert torch.equal(parameter, base[name]) == name.endswith(tuple(f"{part}.weight" for part in frozen)), name


def test_a_planted_nan_is_skipped_by_all_ranks_together(world, tmp_path):  # T3
    nan = dict(nan_at=(3,), nan_rank=1, nan_in="layers.1.self_attn.q_proj.lora_B.weight")
    results = world.run(run_training, ranks=2, spec=MeshSpec(tp=2), run=str(tmp_path), training=TRAINING, adapter=ADAPTER, **nan)
    assert [row["skipped_steps"] for row in rows(tmp_path)] == [0, 0, 1, 1, 1, 1]
    assert len({result["loss"] for result in results}) == 1


def test_bf16_follows_fp32_and_holds_the_base_in_bf16(world, tmp_path):
    for precision in ("fp32", "bf16"):
        training = dataclasses.replace(TRAINING, precision=precision)
        common = dict(training=training, adapter=ADAPTER, look=held_types)
        result = world.run(run_training, ranks=2, spec=MeshSpec(ring=2), run=str(tmp_path / precision), **common)
    assert result[0]["seen"] == {(False, torch.bfloat16), (True, torch.float32)}
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=2e-2)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")


def held_types(model) -> set:
    return {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
