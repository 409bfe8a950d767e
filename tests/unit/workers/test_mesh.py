"""The mesh fits its workers, its model and its sequences, or says in numbers why not; ranks stand where the design says."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from workers.mesh import MeshSpec, split_context
from workers.model.config import ModelConfig


@pytest.mark.parametrize(
    "spec, workers, dp",
    [
        (MeshSpec(dp=-1, ring=2), 6, 3),
        (MeshSpec(dp=-1, ring=2, ulysses=2, tp=2), 8, 1),
        (MeshSpec(dp=-1, ring=2), None, 1),
        (MeshSpec(dp=3), 3, 3),
        (MeshSpec(dp=3, ring=2), None, 3),
    ],
)
def test_dp_takes_the_workers_that_are_left(spec, workers, dp):
    resolved = spec.resolve(workers)
    assert resolved.dp == dp
    assert resolved.world == dp * spec.ring * spec.ulysses * spec.tp


@pytest.mark.parametrize(
    "spec, workers, said",
    [
        (MeshSpec(ring=2), 3, "1 × 2 × 1 × 1 needs 2 workers, not 3"),
        (MeshSpec(dp=-1, ring=2, tp=2), 6, "6 workers cannot be split into groups of ring × ulysses × tp = 2 × 1 × 2 = 4"),
        (MeshSpec(dp=2, tp=4), 4, "needs 8 workers, not 4"),
        (MeshSpec(dp=-1, ring=2), 0, "0 workers"),
        (MeshSpec(dp=-1, ring=2), -2, "-2 workers"),
        (MeshSpec(pp=2, ring=2), 6, "dp × pp × ring × ulysses × tp = 1 × 2 × 2 × 1 × 1 needs 4 workers, not 6"),
        (MeshSpec(dp=-1, pp=3, tp=2), 8, "groups of pp × ring × ulysses × tp = 3 × 1 × 1 × 2 = 6"),
        (MeshSpec(dp=-1, ring=2, replicate=2), 6, "mesh.replicate = 2 does not divide mesh.dp = 3"),
    ],
)
def test_a_mesh_that_does_not_fit_its_workers(spec, workers, said):
    with pytest.raises(ValueError, match=said):
        spec.resolve(workers)


@pytest.mark.parametrize(
    "axis, value",
    [("ring", 0), ("ulysses", -1), ("tp", 0), ("dp", 0), ("dp", -2), ("pp", 0), ("replicate", 0), ("sync_every_blocks", 0)],
)
def test_an_axis_is_at_least_one(axis, value):
    with pytest.raises(ValueError, match=f"mesh.{axis} is {value}"):
        MeshSpec(**{axis: value})


def test_copies_of_the_weights_take_whole_data_parallel_groups():
    assert MeshSpec(dp=4, ring=2, replicate=2).world == 8
    with pytest.raises(ValueError, match="mesh.replicate = 2 does not divide mesh.dp = 1"):
        MeshSpec(ring=2, replicate=2)


def test_every_stage_needs_a_block():
    MeshSpec(pp=3).check_model(ModelConfig(layers=3))
    with pytest.raises(ValueError, match="mesh.pp = 4 stages for model.layers = 3 blocks; .* at most 3"):
        MeshSpec(pp=4).check_model(ModelConfig(layers=3))


def test_an_unknown_layout_names_those_there_are():
    with pytest.raises(ValueError, match="'spiral'; it must be one of zigzag, contiguous, striped"):
        MeshSpec(layout="spiral")


@pytest.mark.parametrize(
    "spec, said",
    [
        (MeshSpec(tp=2), r"9 query heads do not divide by tp × ulysses = 2 × 1; .* divides 3"),  # A4
        (MeshSpec(tp=9), "3 KV heads do not divide by tp × ulysses = 9 × 1"),
    ],
)
def test_heads_that_do_not_divide(spec, said):
    with pytest.raises(ValueError, match=said):
        spec.check_model(ModelConfig(dim=36, heads=9, kv_heads=3, head_dim=4, ffn_dim=64))


def test_fewer_kv_heads_than_ulysses_ranks_are_repeated_but_only_whole():
    model = ModelConfig(dim=48, heads=12, kv_heads=3, head_dim=4, ffn_dim=48)
    MeshSpec(ulysses=6).check_model(model)
    MeshSpec(tp=3, ulysses=4).check_model(model)
    for ulysses in (2, 4):
        with pytest.raises(ValueError, match=f"3 KV heads do not divide by tp × ulysses = 1 × {ulysses}"):
            MeshSpec(ulysses=ulysses).check_model(model)


@pytest.mark.parametrize(
    "cp, heads, kv_heads, tp, node, expected",
    [
        (16, 32, 8, 1, 8, (2, 8)),  # a ring of two nodes, all-to-all inside
        (16, 32, 8, 2, 8, (4, 4)),  # tensor ranks take half of the KV heads and half of the node
        (16, 9, 3, 1, 8, (16, 1)),  # nothing divides
        (6, 9, 3, 1, 8, (2, 3)),
        (8, 32, 1, 1, 8, (8, 1)),  # one KV head: it would be sent to every rank
        (4, 32, 32, 8, 8, (4, 1)),  # tensor ranks fill the node
        (1, 32, 8, 1, 8, (1, 1)),
    ],
)
def test_the_context_axis_is_split_by_heads_and_node(cp, heads, kv_heads, tp, node, expected):
    assert split_context(cp, heads, kv_heads, tp, node) == expected
    ring, ulysses = expected
    MeshSpec(ring=ring, ulysses=ulysses, tp=tp if kv_heads % tp == 0 else 1).check_model(
        ModelConfig(dim=heads * 4, heads=heads, kv_heads=kv_heads, ffn_dim=64)
    )


def test_heads_that_divide_and_a_feed_forward_layer_that_does_not():
    model = ModelConfig(dim=36, heads=9, kv_heads=3, head_dim=4, ffn_dim=64)
    MeshSpec(ulysses=3, ring=2).check_model(model)
    with pytest.raises(ValueError, match="model.ffn_dim = 64 does not divide by mesh.tp = 3"):
        MeshSpec(tp=3).check_model(model)


@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(ring=2), MeshSpec(ring=2, ulysses=3, tp=2), MeshSpec(dp=4)])
def test_a_length_is_padded_and_never_cut(spec):
    for length in range(1, 60):
        padded = spec.padded(length)
        assert length <= padded < length + spec.length_multiple
        assert padded % (2 * spec.ring * spec.ulysses) == 0 == padded % (spec.cp * spec.tp)
        assert spec.padded(padded) == padded


@pytest.fixture
def built():
    """A function that gives a mesh of 16 ranks, by default dp 2 × ring 2 × ulysses 2 × tp 2, as rank r sees it."""

    def build(rank: int, spec: MeshSpec = MeshSpec(dp=2, ring=2, ulysses=2, tp=2)):
        dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
        return spec.build("cpu")

    yield build
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(0, 16, 5))
def test_tensor_ranks_are_neighbours_and_dp_is_outermost(built, rank):  # A1 of the specification
    mesh = built(rank)
    ranks = {
        name: dist.get_process_group_ranks(group)
        for name, group in {
            "tp": mesh.tp.get_group(), "ulysses": mesh.ulysses_group, "ring": mesh.ring_transport.group,
            "group": mesh.group, "fsdp": mesh.fsdp.get_group(),
        }.items()
    }  # fmt: skip
    assert ranks["tp"] == [rank & ~1, rank | 1]
    assert ranks["ulysses"] == [rank & ~2, rank | 2]
    assert ranks["ring"] == [rank & ~4, rank | 4]
    assert ranks["group"] == list(range(rank & 8, (rank & 8) + 8))
    assert ranks["fsdp"] == list(range(rank & 1, 16, 2))  # dp × ring × ulysses: not a tensor rank among them
    assert (mesh.dp_rank, mesh.ring_rank, mesh.ulysses_rank, mesh.tp_rank) == (rank >> 3, rank >> 2 & 1, rank >> 1 & 1, rank & 1)
    assert mesh.cp_rank == rank >> 1 & 3
    assert mesh.leader == rank & 8 and mesh.is_leader == (rank in (0, 8))


@pytest.mark.parametrize("rank", (0, 6, 9, 15))
def test_copies_are_outermost_and_a_stage_keeps_its_context_ranks_together(built, rank):
    mesh = built(rank, MeshSpec(dp=4, replicate=2, pp=2, ring=2))
    copy, shard, stage, ring = rank >> 3, rank >> 2 & 1, rank >> 1 & 1, rank & 1
    assert (mesh.dp_rank, mesh.pp_rank, mesh.ring_rank) == (2 * copy + shard, stage, ring)
    assert dist.get_process_group_ranks(mesh.ring_transport.group) == [rank & ~1, rank | 1]
    assert dist.get_process_group_ranks(mesh.pp_group) == [rank & ~2, rank | 2]
    assert dist.get_process_group_ranks(mesh.group) == list(range(rank & ~3, (rank & ~3) + 4))
    replicas, shards = (dist.get_process_group_ranks(mesh.fsdp.get_group(axis)) for axis in range(2))
    assert replicas == [rank & 7, rank | 8]
    assert shards == [8 * copy + 4 * s + 2 * stage + r for s in range(2) for r in range(2)]  # this stage's ranks only
    assert mesh.is_leader == (rank & 3 == 0) and mesh.is_last_stage == (stage == 1)


def test_a_built_mesh_needs_as_many_ranks_as_it_says(built):
    built(0)
    with pytest.raises(ValueError, match="needs 4 workers, not 16"):
        MeshSpec(ring=4).build("cpu")
