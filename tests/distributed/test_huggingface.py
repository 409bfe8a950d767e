"""Weights of a model folder on every mesh: each rank reads its part, and what is gathered again is the folder, bit for bit."""

import dataclasses

import pytest
import torch

from tests.distributed.training_cases import MODEL, losses, run_training, with_steps
from workers.mesh import MeshSpec
from workers.model import Decoder, ModelConfig, load_pretrained, save_pretrained
from workers.model.huggingface import FolderTensors

# The heads of SmolLM2-135M, and a vocabulary that does not divide over three tensor ranks.
NINE_HEADS = ModelConfig(dim=36, layers=2, heads=9, kv_heads=3, ffn_dim=96, vocab_size=256, tie_embeddings=True)
QWEN = dataclasses.replace(MODEL, qkv_bias=True)


def folder_of(config: ModelConfig, path, dtype=torch.bfloat16):
    model = Decoder(config)
    model.init_weights(3)
    for parameter in model.parameters():  # no norm is 1 and no bias 0
        parameter.data.mul_(2).add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())), alpha=0.05)
    save_pretrained(model, path, dtype=dtype, shard_bytes=20_000)
    return path


def there_and_back(spec: MeshSpec, source: str, out: str) -> bool:
    model = load_pretrained(source, spec.build("cpu"))
    save_pretrained(model, out, dtype=torch.bfloat16)
    return True


@pytest.mark.parametrize(
    "config, spec",
    [
        (QWEN, MeshSpec(dp=2)),
        (QWEN, MeshSpec(ring=2, tp=2)),
        (NINE_HEADS, MeshSpec(ring=2, tp=3)),
        (QWEN, MeshSpec(dp=2, replicate=2, tp=2)),
    ],
    ids=["qwen-dp2", "qwen-ring2-tp2", "nine-heads-ring2-tp3", "qwen-copies-tp2"],
)
def test_training_from_a_model_folder_is_the_same_on_every_mesh(world, tmp_path, config, spec):  # A4, T2
    source = folder_of(config, tmp_path / "model")
    training = with_steps(3)
    for name, mesh in {"one": MeshSpec(), "mesh": spec}.items():
        world.run(run_training, ranks=mesh.world, spec=mesh, run=str(tmp_path / name), model=config, training=training, init=str(source))
    assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "seed"), model=config, training=training)
    assert losses(tmp_path / "seed")[0] != pytest.approx(losses(tmp_path / "one")[0], rel=1e-3)

    world.run(there_and_back, ranks=spec.world, spec=spec, source=str(source), out=str(tmp_path / "back"))
    before, after = FolderTensors(source), FolderTensors(tmp_path / "back")
    assert before.sizes == after.sizes
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.sizes)


def save_a_part(spec: MeshSpec, source: str, out: str) -> None:
    save_pretrained(load_pretrained(source, spec.build("cpu")), out)


def test_stages_start_from_a_model_folder_and_write_none(world, tmp_path):
    """Rank 0 would write the layers of its own stage, as if they were all."""
    source = folder_of(NINE_HEADS, tmp_path / "model")
    for name, spec in {"one": MeshSpec(), "stages": MeshSpec(pp=2)}.items():
        world.run(
            run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), model=NINE_HEADS, training=with_steps(3), init=str(source)
        )
    assert losses(tmp_path / "stages") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    with pytest.raises(AssertionError, match="ValueError: a pipeline stage holds a part of the model"):
        world.run(save_a_part, ranks=2, spec=MeshSpec(pp=2), source=str(source), out=str(tmp_path / "part"))
    assert not (tmp_path / "part").exists()


def test_learnt_keys_that_no_folder_has_are_drawn_by_the_seed(world, tmp_path):
    source = folder_of(MODEL, tmp_path / "model")
    config = dataclasses.replace(MODEL, memory=2, segment=16, window=16)
    for name, spec in {"one": MeshSpec(), "mesh": MeshSpec(ring=2, tp=2)}.items():
        world.run(
            run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), model=config, training=with_steps(2), init=str(source)
        )
    assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_runs_own_checkpoint_comes_before_the_folder(world, tmp_path):
    source = folder_of(MODEL, tmp_path / "model")
    run = lambda name, steps, **start: world.run(
        run_training,
        ranks=2,
        spec=MeshSpec(dp=2),
        run=str(tmp_path / name),
        training=with_steps(steps, decay="constant"),
        init=str(source),
        **start,
    )
    run("whole", 4)
    run("two", 2)
    run("two", 4)
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")
