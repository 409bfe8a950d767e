"""How long a step takes on a device: a range, from what is computed and sent and from stated shares of the data sheet's figures.

Published long-context runs reach 35–55 % of a GPU's peak in the model's own FLOPs when nothing is exposed (Llama 3, arXiv
2407.21783, table 4: 38–43 % at 8,192 to 131,072 tokens; FlashAttention-3, arXiv 2407.08608: up to 75 % in attention alone);
the range here is wider. The quick end hides what can be hidden behind computation, the slow end hides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.plan.block import kept, moved
from pipelines.plan.devices import Device
from pipelines.plan.shape import FP32, Shape
from pipelines.plan.traffic import Flow
from workers.attention.plan import busiest_over_mean, work
from workers.flops import attention_flops, matmul_flops, recomputed_flops, seen_pairs

EFFICIENCY = {"cuda": (0.30, 0.55), "cpu": (0.25, 0.80)}  # of peak FLOP/s: slow end, quick end
LINKS = (0.5, 0.85)  # of a link's data sheet


@dataclass(frozen=True)
class Work:
    """FLOPs of a step. model: of the whole mesh. rank: of the busiest rank of the ring, recomputation included;
    pipeline stages count as equal."""

    model: float
    attention: float
    rank: float
    imbalance: float


def step_work(shape: Shape) -> Work:
    """What a step computes. Chosen blocks and summaries count as balanced."""
    model, memory, batch = shape.model, shape.config.memory, shape.config.training.batch
    matrices = matmul_flops(model, batch * shape.length, shape.config.adapter)
    attention = attention_flops(model, float(batch * model.layers * model.heads) * seen_pairs(model, shape.length))
    balance = 1.0
    if model.top_blocks is None:
        balance = busiest_over_mean(work(shape.pattern, shape.length, shape.mesh.ring, shape.mesh.layout))
    again = recomputed_flops(model, batch * shape.length, shape.config.adapter) if memory.recompute != "none" else 0.0
    attended = 4 / 3 if memory.recompute == "full" else 1.0
    tiles = 0.0
    if memory.mlp_tile is not None:
        tiles = 2.0 * batch * shape.length * model.layers * 3 * model.dim * model.ffn_dim
    computed = (matrices + again + tiles + attention * attended * balance) / shape.mesh.world
    return Work(matrices + attention, attention, computed, balance)


@dataclass(frozen=True)
class Duration:
    """Seconds of a step: slow and quick end, and the parts of the quick end."""

    slow: float
    quick: float
    computing: float
    sending_hidden: float
    sending_exposed: float
    host: float

    def mfu(self, work: Work, world: int, device: Device, element: int) -> tuple[float, float]:
        """Share of the devices' peak that the model's FLOPs are, at the slow and the quick end."""
        peak = world * (device.bf16_flops if element < FP32 else device.fp32_flops)
        return work.model / (self.slow * peak), work.model / (self.quick * peak)


def duration(shape: Shape, device: Device, found: Work, sent: list[Flow]) -> Duration:
    """Seconds of a step on ``device``."""
    peak = device.bf16_flops if shape.element < FP32 else device.fp32_flops
    # AdamW reads weights, gradients and both moments, and writes all but the gradients.
    optimizer = 7 * shape.held.trained * FP32
    waits = 2 * moved(shape, kept(shape)) * shape.held.blocks * shape.micro_steps
    stepping = device.memory_bandwidth
    if shape.config.memory.optimizer == "host":  # FSDP fetches shards at every gather, and puts gradients there at every micro-step
        waits += ((2 if shape.regathers else 1) * shape.held.weights + shape.held.trained * FP32) * shape.micro_steps
        stepping = device.host_bandwidth  # of the same order as a GPU's share of the host's own memory
    ends = []
    bubble = (shape.micro_steps + shape.mesh.pp - 1) / shape.micro_steps
    for efficiency, link in zip(EFFICIENCY[device.type], LINKS):
        computing = bubble * found.rank / (peak * efficiency) + optimizer / (stepping * link)
        hidden, exposed = (_seconds([flow for flow in sent if flow.hidden is way], device) / link for way in (True, False))
        ends.append((computing, hidden, exposed, waits / (device.host_bandwidth * link)))
    slow = sum(ends[0])
    computing, hidden, exposed, host = ends[1]
    return Duration(slow, max(computing, hidden, host) + exposed, computing, hidden, exposed, host)


def _seconds(sent: list[Flow], device: Device) -> float:
    return sum(flow.inside / device.node_bandwidth + flow.between / device.network_bandwidth for flow in sent)
