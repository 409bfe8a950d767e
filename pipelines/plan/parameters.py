"""The parameters of a run: how many there are, how many train, and how many of them a rank holds.

They are read off the model itself, built on the meta device, and off the plan of tensor parallelism, so nothing is declared twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from workers.mesh import MeshSpec
from workers.model import Decoder, ModelConfig
from workers.parallel.tensor import BLOCK_PLAN, MODEL_PLAN, VocabularyShards


@dataclass(frozen=True)
class Parameter:
    """``whole`` values; ``tensor`` of them on a tensor rank; ``shard`` of them on the first rank of dp × cp, which has the most.

    block: the index of the block that it belongs to, None outside blocks. trains: whether it has a gradient.
    """

    name: str
    block: int | None
    whole: int
    tensor: int
    shard: int
    trains: bool = True


@lru_cache(maxsize=64)
def parameters(model: ModelConfig, mesh: MeshSpec) -> list[Parameter]:
    """Every parameter of the model, as ``mesh`` lays it out."""
    with torch.device("meta"):
        decoder = Decoder(model)
    found = []
    for name, value in decoder.named_parameters():
        shape = list(value.shape)
        dim = _split_dim(decoder, name)
        if dim is not None:
            shape[dim] = -(-shape[dim] // mesh.tp)
        rows = -(-shape[0] // (mesh.dp * mesh.cp))
        parts = name.split(".")
        block = int(parts[1]) if parts[0] == "layers" else None
        found.append(Parameter(name, block, value.numel(), math.prod(shape), rows * math.prod(shape[1:]), value.requires_grad))
    return found


def _split_dim(decoder: nn.Module, name: str) -> int | None:
    """The dim along which tensor ranks split a parameter, by the plans in ``workers.parallel.tensor``; None: they have it whole."""
    path, _, last = name.rpartition(".")
    inside = path.split(".", 2)[2] if path.startswith("layers.") else path
    if inside == "self_attn":
        return 1  # learnt keys, values and pooling vectors go with their KV heads
    style = (BLOCK_PLAN if path.startswith("layers.") else MODEL_PLAN).get(inside)
    if isinstance(style, (ColwiseParallel, VocabularyShards)):
        return 0
    if isinstance(style, RowwiseParallel):
        return 0 if isinstance(decoder.get_submodule(path), nn.Embedding) else 1
    return None


@dataclass(frozen=True)
class Held:
    """Sums over parameters: values of one block and of the rest (embedding, last norm, head) on a tensor rank, and a rank's shards."""

    total: int
    trainable: int
    block: int
    rest: int
    largest: int
    shard: int
    trainable_shard: int
    block_shard: int

    @classmethod
    def of(cls, found: list[Parameter]) -> "Held":
        blocks = [p.tensor for p in found if p.block == 0]
        return cls(
            total=sum(p.whole for p in found),
            trainable=sum(p.whole for p in found if p.trains),
            block=sum(blocks),
            rest=sum(p.tensor for p in found if p.block is None),
            largest=max(p.whole for p in found),
            shard=sum(p.shard for p in found),
            trainable_shard=sum(p.shard for p in found if p.trains),
            block_shard=sum(p.shard for p in found if p.block == 0 and p.trains),
        )
