"""How much a model computes, and how much a device could: what MFU and the plan of a run are made of.

Counted are the multiplications and additions of matrix products that the model needs, forward and backward (backward is
twice forward). What a rank computes a second time, to save memory or inside a fused kernel, is no model FLOP, so MFU pays
nothing for it (Chowdhery et al. 2022, PaLM, appendix B). Attention counts the pairs of a query and a key that the pattern
lets see each other, not S².
"""

from __future__ import annotations

import re
import time

import torch

from workers.attention import Pattern
from workers.attention.plan import work
from workers.model.adapter import AdapterConfig, projections
from workers.model.config import ModelConfig

# Dense bfloat16 FLOP/s of the tensor cores, from the vendor's data sheets, by words of the device's name.
PEAK_FLOPS = {
    "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L4": 121e12, "L40": 181e12, "L40S": 362e12, "RTX 4090": 165e12,
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
}  # fmt: skip


def matmul_flops(model: ModelConfig, tokens: int, adapter: AdapterConfig = AdapterConfig()) -> float:
    """FLOPs of the weight matrices for ``tokens`` tokens, forward and backward: projections, feed-forward, head, the adapter's own.

    A frozen matrix passes a gradient on and has none: two products, where one that trains has three.
    """
    block, own = _block_weights(model, adapter)
    head = model.dim * model.vocab_size
    if adapter.rank is None:
        return 6.0 * tokens * (model.layers * block + head)
    head_products = 3 if adapter.train_embeddings and model.tie_embeddings else 2
    return 2.0 * tokens * (model.layers * (2 * block + 3 * own) + head_products * head)


def recomputed_flops(model: ModelConfig, tokens: int, adapter: AdapterConfig = AdapterConfig()) -> float:
    """FLOPs of the blocks' weight matrices in one more forward, frozen or not; the head is never run again."""
    return 2.0 * tokens * model.layers * sum(_block_weights(model, adapter))


def _block_weights(model: ModelConfig, adapter: AdapterConfig) -> tuple[int, int]:
    """Weights in the matrices of a block, and in those that an adapter adds to it."""
    sizes = projections(model)
    own = adapter.rank * sum(sum(sizes[name]) for name in set(adapter.targets)) if adapter.rank is not None else 0
    return sum(inputs * outputs for inputs, outputs in sizes.values()), own


def attention_flops(model: ModelConfig, scores: float) -> float:
    """FLOPs of attention for ``scores`` (query, key, head) triples, summed over layers, forward and backward."""
    return 12.0 * model.head_dim * scores


def seen_pairs(model: ModelConfig, length: int) -> float:
    """Pairs of a query and a key that see each other, in one layer and head, in a document of ``length`` tokens.

    Learnt memory and summaries count as keys; of chosen blocks (``top_blocks``) a query sees as many as it may.
    """
    pattern = model.pattern()
    if model.top_blocks is not None:
        size, keep = model.top_block_size, model.top_blocks
        pairs = sum((min(keep, index + 1) - 1) * size * min(size, length - index * size) for index in range(-(-length // size)))
        pairs += work(Pattern(block=size), length, 1, "contiguous")[0]
    else:
        pairs = work(pattern, length, 1, "contiguous")[0]
    if model.segment is not None:
        behind = (torch.arange(length) - model.window + 1).clamp(min=0) // model.segment
        pairs += model.summaries * int(behind.clamp(max=model.reach or length).sum())
    return float(pairs + model.memory * length)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that one rank could reach: the data sheet's for a known GPU, else that of a large matrix product, measured here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [key for key in PEAK_FLOPS if re.search(rf"\b{key}\b", name)]
        if known and dtype in (torch.bfloat16, torch.float16):
            return PEAK_FLOPS[max(known, key=len)]
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, repeats: int = 3) -> float:
    """FLOP/s of a product of two square matrices with the threads that this process has: the best of ``repeats``."""
    size = 4096 if device.type == "cuda" else 512
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
