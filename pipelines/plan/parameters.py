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
from workers.model.adapter import AdapterConfig, add_adapters
from workers.parallel.tensor import BLOCK_PLAN, MODEL_PLAN, VocabularyShards


@dataclass(frozen=True)
class Parameter:
    """``whole`` values; ``tensor`` of them on a tensor rank; ``shard`` of them on the first of the ranks that share a copy of
    the weights, which has the most.

    block: the index of the block that it belongs to, None outside blocks. trains: whether it has a gradient.
    element: bytes of a value where it is kept.
    """

    name: str
    block: int | None
    whole: int
    tensor: int
    shard: int
    trains: bool
    element: int


@lru_cache(maxsize=64)
def parameters(model: ModelConfig, adapter: AdapterConfig, mesh: MeshSpec, dtype: torch.dtype) -> tuple[Parameter, ...]:
    """Every parameter of the model, as ``mesh`` lays it out; ``dtype`` is that of the forward pass, in which frozen ones are kept."""
    with torch.device("meta"):
        decoder = add_adapters(Decoder(model), adapter, dtype)
    sharers = mesh.dp * mesh.cp // mesh.replicate
    found = []
    for name, value in decoder.named_parameters():
        shape = list(value.shape)
        dim = _split_dim(decoder, name)
        if dim is not None:
            shape[dim] = -(-shape[dim] // mesh.tp)
        rows = -(-shape[0] // sharers)
        parts = name.split(".")
        block = int(parts[1]) if parts[0] == "layers" else None
        shard = rows * math.prod(shape[1:])
        found.append(Parameter(name, block, value.numel(), math.prod(shape), shard, value.requires_grad, value.element_size()))
    return tuple(found)


def _split_dim(decoder: nn.Module, name: str) -> int | None:
    """The dim along which tensor ranks split a parameter, by the plans in ``workers.parallel.tensor``; None: they have it whole."""
    path, _, last = name.rpartition(".")
    path, _, adapter = path.partition(".lora_")
    inside = path.split(".", 2)[2] if path.startswith("layers.") else path
    if inside == "self_attn":
        return 1  # learnt keys, values and pooling vectors go with their KV heads
    style = (BLOCK_PLAN if path.startswith("layers.") else MODEL_PLAN).get(inside)
    if isinstance(style, (ColwiseParallel, VocabularyShards)):
        return None if adapter == "A" else 0
    if isinstance(style, RowwiseParallel):
        if last == "bias" or adapter == "B":
            return None
        return 0 if isinstance(decoder.get_submodule(path), nn.Embedding) else 1
    return None


def of_stage(found: tuple[Parameter, ...], model: ModelConfig, stages: int, stage: int) -> list[Parameter]:
    """Those of a pipeline stage (see ``workers.parallel.pipeline.keep_stage``)."""
    first, stop = (number * model.layers // stages for number in (stage, stage + 1))
    last = stage == stages - 1

    def here(p: Parameter) -> bool:
        if p.block is not None:
            return first <= p.block < stop
        return stage == 0 or (last and model.tie_embeddings) if p.name.startswith("embed_tokens") else last

    return [p for p in found if here(p)]


@dataclass(frozen=True)
class Held:
    """Sums over the parameters of one stage. Values of a tensor rank: of one ``block``, of the rest (``outside``), and of those
    that train; ``head`` of what the loss gives a gradient to, ``mlp`` of a block's feed-forward layer. Of a rank's shards:
    ``weights`` in bytes, ``trained`` values, and those of one block. ``whole_bytes`` are of the stage, ``largest`` of a parameter.
    """

    blocks: int
    block: int
    block_trained: int
    mlp_trained: int
    outside: int
    outside_trained: int
    head_trained: int
    weights: int
    trained: int
    block_trained_shard: int
    whole_bytes: int
    largest: int

    @classmethod
    def of(cls, found: list[Parameter]) -> Held:
        first = min(p.block for p in found if p.block is not None)
        block, outside = [p for p in found if p.block == first], [p for p in found if p.block is None]
        head = "lm_head" if any(p.name.startswith("lm_head") for p in outside) else "embed_tokens"
        tensor = lambda chosen: sum(p.tensor for p in chosen)
        return cls(
            blocks=len({p.block for p in found if p.block is not None}),
            block=tensor(block),
            block_trained=tensor(p for p in block if p.trains),
            mlp_trained=tensor(p for p in block if p.trains and ".mlp." in p.name),
            outside=tensor(outside),
            outside_trained=tensor(p for p in outside if p.trains),
            head_trained=tensor(p for p in outside if p.trains and p.name.startswith(head)),
            weights=sum(p.shard * p.element for p in found),
            trained=sum(p.shard for p in found if p.trains),
            block_trained_shard=sum(p.shard for p in block if p.trains),
            whole_bytes=sum(p.whole * p.element for p in found),
            largest=max(p.whole for p in found),
        )
