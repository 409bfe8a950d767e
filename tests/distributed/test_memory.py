"""Memory switches change what is kept, not what is learnt."""

import dataclasses

import pytest
import torch

from tests.distributed.training_cases import MODEL, losses, rows, run_training, stream, with_steps
from workers.attention import transport
from workers.mesh import MeshSpec
from workers.parallel.memory import MemoryConfig
from workers.training.config import CheckpointConfig

FULL, SELECTIVE = MemoryConfig(recompute="full"), MemoryConfig(recompute="selective")


def traffic_of(spec: MeshSpec, run: str, **options):
    """What this rank sent in a run: messages and bytes."""
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


def same_rows(run, other) -> None:
    """Bit for bit."""
    for key in ("loss", "grad_norm", "tokens"):
        assert [row[key] for row in rows(run)] == [row[key] for row in rows(other)], key


SEEN = {
    "packed": {},
    "hierarchical": dict(window=8, segment=8, summaries=2, memory=1),
    "top blocks": dict(top_blocks=3, top_block_size=8),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("spec", [MeshSpec(ring=2, ulysses=2), MeshSpec(ring=2, tp=2)], ids=str)
def test_recomputation_changes_no_bit_and_selective_sends_nothing_again(world, tmp_path, spec, seen):  # A11
    model = dataclasses.replace(MODEL, qk_norm=True, **SEEN[seen])
    common = dict(spec=spec, model=model, training=with_steps(3, batch=4, micro_batch=2))
    sent = {}
    for memory in (MemoryConfig(), FULL, SELECTIVE):
        run = tmp_path / memory.recompute
        sent[memory.recompute] = world.run(traffic_of, timeout=600, ranks=spec.world, run=str(run), memory=memory, **common)
        same_rows(run, tmp_path / "none")
    assert sent["selective"] == sent["none"]
    assert all(again > once for ours, plain in zip(sent["full"], sent["none"]) for again, once in zip(ours, plain))
