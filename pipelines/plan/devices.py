"""What the devices of a rank can do, from the vendors' data sheets.

Memory and its bandwidth; links inside a node (NVLink, or PCIe where there is none) and the network, one direction, of one GPU;
the network is that of the vendor's own eight-GPU systems: one 400 Gb/s adapter a GPU (DGX H100, H200, B200), 200 Gb/s (DGX A100;
taken for L40S servers, too). Sources: NVIDIA H100, H200, A100 80GB, L40S and DGX B200 data sheets. bfloat16 FLOP/s stand in
``workers.flops``; float32 ones are without TF32, which is off by default in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from workers.flops import PEAK_FLOPS, measured_flops

GB = 10**9


@dataclass(frozen=True)
class Device:
    """Bytes; FLOP/s of dense matrix products; bytes a second of memory, links inside a node, network, and host, one direction."""

    name: str
    type: str
    memory: int
    bf16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float


def _gpu(name: str, flops: str, memory: int, fp32: float, hbm: float, node: float, network: float, host: float) -> Device:
    return Device(name, "cuda", memory * GB, PEAK_FLOPS[flops], fp32 * 1e12, hbm * GB, node * GB, network * GB, host * GB)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-80", "A100", 80, 19.5, 2039, 300, 25, 32),
        _gpu("L40S", "L40S", 48, 91.6, 864, 32, 25, 32),
        _gpu("H100", "H100", 80, 66.9, 3350, 450, 50, 64),
        _gpu("H200", "H200", 141, 66.9, 4800, 450, 50, 64),
        _gpu("B200", "B200", 180, 80, 8000, 900, 50, 64),
    )
}
NAMES = (*GPUS, "cpu")


def device(name: str, ranks: int) -> Device:
    """The device called ``name``; "cpu" is this machine, whose memory ``ranks`` ranks share. Raises ValueError for an unknown one."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    if name.lower() != "cpu":
        raise ValueError(f"--device {name!r} is not known; it must be one of {', '.join(NAMES)}")
    rates = [measured_flops(torch.device("cpu"), dtype) for dtype in (torch.bfloat16, torch.float32)]
    # Memory as measured on laptops and small servers, gloo between processes of one machine and over 10 Gb/s.
    return Device("cpu", "cpu", psutil.virtual_memory().total // ranks, *rates, 10 * GB, 1 * GB, 1 * GB, 1 * GB)
