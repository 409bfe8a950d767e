"""Memory switches change what is kept, not what is learnt; on every axis of the mesh, and from one run to the next."""

import dataclasses

import pytest

from tests.distributed.training_cases import MODEL, losses, rows, run_training, with_steps
from workers.attention import transport
from workers.mesh import MeshSpec
from workers.parallel.memory import MemoryConfig
from workers.training.config import CheckpointConfig

FULL, SELECTIVE = MemoryConfig(recompute="full"), MemoryConfig(recompute="selective")


def traffic_of(spec: MeshSpec, run: str, **options):
    """What this rank sent in a run for attention: messages and bytes."""
    sent, plain = [0, 0], transport.Traffic.count

    def count(traffic, tensor):
        sent[0] += 1
        sent[1] += tensor.numel() * tensor.element_size()
        plain(traffic, tensor)

    transport.Traffic.count = count
    try:
        run_training(spec, run, **options)
    finally:
        transport.Traffic.count = plain
    return sent


def assert_same_bits(run, other) -> None:
    for key in ("loss", "grad_norm", "tokens"):
        assert [row[key] for row in rows(run)] == [row[key] for row in rows(other)], key


SEEN = {
    "packed": {},
    "hierarchical": dict(window=8, segment=8, summaries=2, memory=1),
    "top blocks": dict(top_blocks=3, top_block_size=8),
}


@pytest.mark.parametrize("spec, seen", [
    (MeshSpec(ring=2, ulysses=2), "packed"), (MeshSpec(ring=2, tp=2), "packed"),
    (MeshSpec(ring=2, ulysses=2), "hierarchical"), (MeshSpec(ring=2, ulysses=2), "top blocks"),
], ids=str)  # fmt: skip
def test_recomputation_changes_no_bit_and_selective_sends_nothing_again(world, tmp_path, spec, seen):  # A11
    model = dataclasses.replace(MODEL, qk_norm=True, **SEEN[seen])
    common = dict(spec=spec, model=model, training=with_steps(2, batch=2))
    sent = {}
    for memory in (MemoryConfig(), FULL, SELECTIVE):
        run = tmp_path / memory.recompute
        sent[memory.recompute] = world.run(traffic_of, ranks=spec.world, run=str(run), memory=memory, **common)
        assert_same_bits(run, tmp_path / "none")
    assert sent["selective"] == sent["none"]
    assert all(again > once for ours, plain in zip(sent["full"], sent["none"]) for again, once in zip(ours, plain))


DISK = dict(offload="disk")
TILES = dict(mlp_tile=10, loss_chunk=20)  # neither divides what a rank holds
EXACT = {
    "disk on tensor ranks": (MeshSpec(tp=2), DISK),
    "disk, full": (MeshSpec(dp=2), DISK | {"recompute": "full"}),
    "disk, selective": (MeshSpec(ulysses=2, tp=2), DISK | {"recompute": "selective"}),
}
EQUAL = {
    "tiles on tensor ranks": (MeshSpec(tp=2), TILES),
    "everything exact": (MeshSpec(dp=2, tp=2), TILES | DISK | {"recompute": "selective"}),
}


@pytest.mark.parametrize(
    "case, precision", [*((case, "fp32") for case in EXACT | EQUAL), ("disk, selective", "bf16"), ("everything exact", "bf16")]
)
def test_the_losses_are_those_without_the_switches(world, tmp_path, case, precision):
    spec, switches = (EXACT | EQUAL)[case]
    training = with_steps(3, batch=4, micro_batch=2, precision=precision)
    for name, memory in {"plain": MemoryConfig(), "switched": MemoryConfig(**switches)}.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), training=training, memory=memory, held_out=1)
    if case in EXACT:
        assert_same_bits(tmp_path / "switched", tmp_path / "plain")
        assert rows(tmp_path / "switched", "evaluations.jsonl")[1]["loss"] == rows(tmp_path / "plain", "evaluations.jsonl")[1]["loss"]
        return
    # Sums are in another order, which bfloat16 shows.
    relative = 1e-6 if precision == "fp32" else 1e-4
    assert losses(tmp_path / "switched") == pytest.approx(losses(tmp_path / "plain"), rel=relative)
    norms = [[row["grad_norm"] for row in rows(tmp_path / name)] for name in ("switched", "plain")]
    assert norms[0] == pytest.approx(norms[1], rel=10 * relative)


def test_compression_follows_closely(world, tmp_path):
    """The error of a value is 1/254 of its block's largest (tests/unit/workers/parallel/test_keep.py); of the whole gradient's norm it is less."""
    spec = MeshSpec(tp=2)
    training = with_steps(4)
    switched = {"plain": {}, "int8": dict(compress="int8"), "all": TILES | DISK | dict(compress="int8", recompute="selective")}
    for name, switches in switched.items():
        world.run(run_training, ranks=spec.world, spec=spec, run=str(tmp_path / name), training=training, memory=MemoryConfig(**switches))
    for name in ("int8", "all"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
        assert losses(tmp_path / name) != losses(tmp_path / "plain")


def test_switches_may_change_with_the_mesh_when_a_run_goes_on(world, tmp_path):  # T2
    training, checkpoint = with_steps(6), CheckpointConfig(every=3)
    world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path / "whole"), training=training)
    common = dict(run=str(tmp_path / "parts"), training=training, checkpoint=checkpoint)
    first = MemoryConfig(recompute="full", offload="disk", mlp_tile=16)
    world.run(run_training, ranks=2, spec=MeshSpec(dp=2), die_at=5, memory=first, **common)
    results = world.run(run_training, ranks=2, spec=MeshSpec(ring=2), memory=SELECTIVE, **common)
    assert results[0]["step"] == 6
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def optimizer_on_host(spec: MeshSpec, run: str, memory: MemoryConfig, **options):
    """As on a GPU's host, but for pinned memory: here host and device are one."""
    plain, MemoryConfig.check_device = MemoryConfig.check_device, lambda self, device_type: None
    try:
        return run_training(spec, run, memory=memory, **options)
    finally:
        MemoryConfig.check_device = plain


def test_the_optimizer_steps_on_the_host(world, tmp_path):
    common = dict(ranks=2, spec=MeshSpec(dp=2), training=with_steps(4, batch=4), checkpoint=CheckpointConfig(every=2), held_out=1)
    world.run(run_training, run=str(tmp_path / "device"), **common)
    for options in (dict(die_at=4), {}):  # and goes on from a checkpoint
        world.run(optimizer_on_host, run=str(tmp_path / "host"), memory=MemoryConfig(optimizer="host"), **common, **options)
    assert_same_bits(tmp_path / "host", tmp_path / "device")


def test_ranks_refuse_what_saves_nothing_on_a_cpu(world, tmp_path):
    with pytest.raises(AssertionError, match="ValueError: memory.offload is 'host', but this run is on CPUs"):
        world.run(run_training, ranks=1, spec=MeshSpec(), run=str(tmp_path), memory=MemoryConfig(offload="host"))
