"""What was built apart, together: pipeline stages, adapters, memory switches and buckets on one mesh, against one plain process."""

import dataclasses

import pytest

from tests.distributed.test_training import assert_same_curve
from tests.distributed.training_cases import MODEL, losses, run_training, with_steps
from workers.mesh import MeshSpec
from workers.model.adapter import AdapterConfig
from workers.model.positions import RopeScaling
from workers.parallel.memory import MemoryConfig
from workers.training.config import CheckpointConfig

THREE = dataclasses.replace(MODEL, layers=3)
TIED = dataclasses.replace(MODEL, tie_embeddings=True)
NINE = dataclasses.replace(MODEL, dim=36, heads=9, kv_heads=3, head_dim=4, ffn_dim=66, tie_embeddings=True)
LORA = AdapterConfig(rank=4, targets=("q_proj", "v_proj", "o_proj", "down_proj"), train_norms=True)
YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32)

# name: model, adapter, mesh, memory
TOGETHER = {
    "nine heads, adapter, all that saves memory": (  # A4
        NINE, LORA, MeshSpec(ring=2, tp=3), MemoryConfig(recompute="selective", offload="disk", mlp_tile=16, loss_chunk=24),
    ),
    "stages of an adapted model, recomputed": (THREE, LORA, MeshSpec(pp=2, ring=2), MemoryConfig(recompute="full")),
    "stages that share a frozen embedding": (TIED, LORA, MeshSpec(pp=2), MemoryConfig()),
    "stages that share an embedding beside an adapter": (
        TIED, dataclasses.replace(LORA, train_embeddings=True), MeshSpec(pp=2, tp=2), MemoryConfig(recompute="full"),
    ),
    "stages of tensor ranks, tiles on disk": (THREE, AdapterConfig(), MeshSpec(pp=2, tp=2), MemoryConfig(offload="disk", mlp_tile=16)),
    "copies, buckets, recomputed but for attention": (
        THREE, AdapterConfig(), MeshSpec(dp=2, ring=2, replicate=2, sync_every_blocks=2), MemoryConfig(recompute="selective"),
    ),
    "buckets of an adapted model with scaled positions": (
        dataclasses.replace(THREE, rope_scaling=YARN), LORA, MeshSpec(ring=2, ulysses=2, sync_every_blocks=3), MemoryConfig(recompute="selective"),
    ),
    "sinusoids and stages": (dataclasses.replace(THREE, positions="sinusoidal"), AdapterConfig(), MeshSpec(pp=2, tp=2), MemoryConfig()),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_the_law_holds_for_what_is_switched_on_together(world, tmp_path, name):
    model, adapter, mesh, memory = TOGETHER[name]
    common = dict(model=model, adapter=adapter, training=with_steps(4))
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "one"), **common)
    world.run(run_training, ranks=mesh.world, spec=mesh, run=str(tmp_path / "mesh"), memory=memory, **common)
    assert_same_curve(tmp_path / "mesh", tmp_path / "one")


@pytest.mark.parametrize("adapter", [AdapterConfig(), LORA], ids=["all weights", "adapter"])
def test_a_run_moves_between_meshes_and_switches(world, tmp_path, adapter):  # T2
    """Stages with copies, then a ring of tensor ranks, then one process: each goes on where the one before was stopped."""
    common = dict(model=THREE, adapter=adapter, training=with_steps(9), checkpoint=CheckpointConfig(every=3))
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "one"), **common)
    moves = [
        (MeshSpec(dp=2, pp=2, replicate=2), MemoryConfig(recompute="full", offload="disk"), 5),
        (MeshSpec(ring=2, tp=2), MemoryConfig(recompute="selective", mlp_tile=8), 8),
        (MeshSpec(), MemoryConfig(), None),
    ]
    for mesh, memory, die_at in moves:
        world.run(run_training, ranks=mesh.world, spec=mesh, run=str(tmp_path / "moved"), memory=memory, die_at=die_at, **common)
    assert len(losses(tmp_path / "moved")) == 9
    assert_same_curve(tmp_path / "moved", tmp_path / "one")


def _messages(spec: MeshSpec, run: str, memory: MemoryConfig) -> list[int]:
    """Bytes and messages of attention on this rank, in a step of two micro-batches."""
    seen = []
    look = lambda model: seen.append((model.layers[-1].self_attn.mesh.traffic.bytes_sent, model.layers[-1].self_attn.mesh.traffic.messages))
    training = with_steps(2, batch=2, micro_batch=1)
    run_training(spec, run, model=THREE, memory=memory, training=training, look=look)
    return seen


def test_selective_recompute_sends_nothing_twice_on_a_stage(world, tmp_path):  # A11
    plain, selective, full = (
        world.run(_messages, ranks=4, spec=MeshSpec(pp=2, ring=2), run=str(tmp_path / recompute), memory=MemoryConfig(recompute=recompute))
        for recompute in ("none", "selective", "full")
    )
    assert selective == plain and plain[0][0][0] > 0
    assert all(more[-1][0] > less[-1][0] for more, less in zip(full, plain))
