"""What a forward pass leaves behind for backward under each switch, and that gradients stay what they were."""

import gc
import platform
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.allocations import allocations
from workers.attention import Pattern
from workers.attention.tape import Tape
from workers.model import Decoder, ModelConfig
from workers.parallel.keep import Parcel
from workers.parallel.memory import MemoryConfig, apply_memory
from workers.training.loss import token_losses

MODEL = ModelConfig(dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=96, vocab_size=64, tie_embeddings=True)
LENGTH = 1024


def forward_pass(memory: MemoryConfig):
    """A model with these switches, and a function that runs it forward and gives the loss."""
    decoder = Decoder(MODEL)
    decoder.init_weights(0)
    apply_memory(decoder, memory)
    tokens = torch.randint(0, 64, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    head = partial(token_losses, targets_BS=tokens[:, 1:], chunk=64)
    return decoder, lambda: decoder(tokens[:, :-1], torch.arange(LENGTH)[None], Pattern(), head=head)[0]


def step(memory: MemoryConfig):
    """(bytes held after forward, peak bytes, all gradients) of one step; what the embedding, norm and loss hold is in it."""
    decoder, run = forward_pass(memory)
    forward = allocations(run)
    backward = allocations(forward.result.backward)
    gradients = torch.cat([parameter.grad.flatten() for parameter in decoder.parameters()])
    return forward.held, max(forward.peak, forward.held + backward.peak), gradients


@pytest.fixture(scope="module")
def plain():
    return step(MemoryConfig())


# Measured shares of what is held without a switch, rounded up; a switch that saves nothing is at 1.
SAVES = {
    "recompute=full": 0.12,
    "recompute=selective": 0.18,
    "offload=disk": 0.06,
    "offload=disk recompute=full": 0.06,
    "offload=disk recompute=selective": 0.06,
    "mlp_tile=64": 0.6,
}
COMPRESSED = {
    "compress=int8": 0.33,
    "compress=int8 recompute=full": 0.08,
    "compress=int8 recompute=selective": 0.1,
    "compress=int8 offload=disk": 0.06,
}


def config(text: str) -> MemoryConfig:
    pairs = dict(pair.split("=") for pair in text.split())
    return MemoryConfig(**{key: int(value) if value.isdigit() else value for key, value in pairs.items()})


@pytest.mark.parametrize("switches", SAVES)
def test_memory_falls_and_gradients_stay(switches, plain):
    held, peak, gradients = step(config(switches))
    assert held <= SAVES[switches] * plain[0] and peak < plain[1]
    if "mlp_tile" in switches:
        torch.testing.assert_close(gradients, plain[2], rtol=0, atol=1e-6 * plain[2].abs().max().item())
    else:
        assert torch.equal(gradients, plain[2])


@pytest.mark.parametrize("switches", COMPRESSED)
def test_compression_keeps_a_quarter_and_gradients_nearly(switches, plain):
    held, peak, gradients = step(config(switches))
    assert held <= COMPRESSED[switches] * plain[0] and peak < plain[1]
    assert 0 < (gradients - plain[2]).norm() <= 0.01 * plain[2].norm()


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_kept_outlives_its_step(backward):
    """Were a kept output part of the graph that owns its tape, a forward pass without a backward would leave both behind."""
    forward_pass(config("recompute=selective"))[1]()  # the first checkpoint of a process imports, which leaves frames behind
    gc.collect()
    gc.disable()
    try:
        for memory in (config("recompute=selective"), config("recompute=selective compress=int8 mlp_tile=100"), config("offload=disk")):
            decoder, run = forward_pass(memory)
            loss = run()
            if backward:
                loss.backward()
            del decoder, run, loss
            assert not [x for x in gc.get_objects() if type(x) in (Tape, Parcel)]
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong, said", [
    (dict(recompute="some"), "memory.recompute is 'some'; it must be one of none, full, selective"),
    (dict(offload="nvme"), "memory.offload is 'nvme'; it must be one of none, host, disk"),
    (dict(compress="int4"), "memory.compress is 'int4'; it must be one of none, int8"),
    (dict(optimizer="disk"), "memory.optimizer is 'disk'; it must be one of device, host"),
    (dict(mlp_tile=0), "memory.mlp_tile is 0; it must be at least 1"),
    (dict(loss_chunk=-1), "memory.loss_chunk is -1; it must be at least 1"),
    (dict(offload_folder="/scratch"), "memory.offload_folder is '/scratch', but memory.offload is 'none'; set it to disk"),
])  # fmt: skip
def test_wrong_values(wrong, said):
    with pytest.raises(ValueError) as caught:
        MemoryConfig(**wrong)
    assert str(caught.value) == said


def test_host_memory_is_refused_on_cpus():
    for name, instead in (("offload", "disk or none can be used there"), ("optimizer", "use device")):
        memory = MemoryConfig(**{name: "host"})
        memory.check_device("cuda")
        with pytest.raises(ValueError, match=f"memory.{name} is 'host', but this run is on CPUs.*; {instead}"):
            memory.check_device("cpu")


HOLES = """
import torch
from workers.parallel.memory import return_pages
{first}
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
torch.ones(4 << 20)
before = resident()
tensors = [torch.ones(1 << 19) for _ in range(200)]
tensors = tensors[-1:]
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_the_memory_of_freed_tensors_goes_back_to_the_system():
    left = [
        int(subprocess.run([sys.executable, "-c", HOLES.format(first=first)], capture_output=True, text=True, check=True).stdout)
        for first in ("return_pages()", "")
    ]
    assert left[0] < 20 and left[1] > 300, f"MiB resident after 398 of 400 MiB were freed, with and without: {left}"
