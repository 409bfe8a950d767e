"""Memory switches on one CUDA device: what only a device has a use for, and that losses stay what they were."""

import gc
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.distributed.training_cases import losses, rows, run_training, with_steps
from workers.mesh import MeshSpec
from workers.model import ModelConfig
from workers.parallel.memory import MemoryConfig
from workers.parallel.store import HostStore
from workers.training.config import CheckpointConfig

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(dim=256, layers=6, heads=8, kv_heads=2, ffn_dim=768, vocab_size=256)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(run, memory: MemoryConfig, precision: str = "bf16", steps: int = 3, **options) -> tuple[list[dict], int]:
    """The rows of a run, and the most bytes that the device held."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training = with_steps(steps, context=2048, batch=2, precision=precision)
    run_training(MeshSpec(), str(run), model=MODEL, training=training, memory=memory, device_type="cuda", **options)
    return rows(run), torch.cuda.max_memory_allocated() - before


SWITCHES = {
    "full": dict(recompute="full"),
    "selective": dict(recompute="selective"),
    "host": dict(offload="host"),
    "host, full": dict(offload="host", recompute="full"),
    "host, selective": dict(offload="host", recompute="selective"),
    "disk": dict(offload="disk"),
    "int8": dict(compress="int8"),
    "tiles": dict(mlp_tile=256),
    "optimizer": dict(optimizer="host"),
    "all": dict(offload="host", recompute="full", compress="int8", mlp_tile=256, loss_chunk=256, optimizer="host"),
}


@pytest.mark.parametrize("switches", SWITCHES)
def test_a_device_holds_less_and_losses_stay(one_rank, tmp_path, switches):
    plain, most = train(tmp_path / "plain", MemoryConfig())
    switched, less = train(tmp_path / "switched", MemoryConfig(**SWITCHES[switches]))
    assert [row["loss"] for row in switched] == pytest.approx([row["loss"] for row in plain], rel=2e-3)
    assert [row["grad_norm"] for row in switched] == pytest.approx([row["grad_norm"] for row in plain], rel=2e-2)
    assert less < most


def test_a_run_goes_on_with_its_optimizer_on_the_host_or_not(one_rank, tmp_path):
    checkpoint = CheckpointConfig(every=2)
    whole, _ = train(tmp_path / "whole", MemoryConfig(), steps=4)
    train(tmp_path / "parts", MemoryConfig(optimizer="host"), steps=4, checkpoint=checkpoint, die_at=3)
    train(tmp_path / "parts", MemoryConfig(), steps=4, checkpoint=checkpoint)
    assert losses(tmp_path / "parts") == pytest.approx([row["loss"] for row in whole], rel=2e-3)


def test_pinned_buffers_are_used_again_and_never_while_a_copy_is_under_way():
    store, generator = HostStore(), torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(1 << 20, device="cuda", generator=generator) for _ in range(8)]
    buffers = set()
    for _ in range(10):
        places = [store.put(x.clone()) for x in tensors]  # the clone goes at once: its memory must not be given away too early
        scratch = [torch.full((1 << 20,), -1.0, device="cuda") for _ in tensors]
        buffers |= {place._buffer.data_ptr() for place in places}
        for place in reversed(places):
            place.fetch()
        for place, x in zip(places, tensors):
            assert torch.equal(place.get(), x)
        del places, scratch
    assert all(place.is_pinned() for sizes in store.pool._free.values() for place in sizes)
    assert len(buffers) <= 9  # eight, and one that the loop's variable holds


def test_segments_grow_unless_the_environment_says_otherwise():
    code = (
        "from workers.parallel.memory import grow_segments; import torch; grow_segments(); x = torch.zeros(1 << 22, device='cuda');"
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    for setting, said in ((None, "True"), ("expandable_segments:False", "False")):
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert result.stdout.split()[-1] == said
