"""Tensor parallelism as a plan over DTensor (Shoeybi et al. 2019, Megatron-LM), with sequence-parallel norms
(Korthikanti et al. 2022): between blocks each rank holds S / tp tokens, inside them all tokens for its share of the heads.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

from workers.parallel.pipeline import Elsewhere


class ColumnShards(ColwiseParallel):
    """A projection split by its outputs; of an adapter (``workers.model.adapter``) B is split as it is, A whole."""

    def _partition_linear_fn(self, name, module, device_mesh):
        _distribute(module, device_mesh, Replicate() if name == "lora_A" else Shard(0))


class RowShards(RowwiseParallel):
    """A projection split by its inputs; of an adapter A is split as it is, B whole."""

    def _partition_linear_fn(self, name, module, device_mesh):
        _distribute(module, device_mesh, Replicate() if name == "lora_B" else Shard(1))


class ReplicatedWeight(ParallelStyle):
    """The weight is whole on every rank; inputs and outputs stay local. For norms, which work token by token."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _replicate)


class VocabularyShards(ParallelStyle):
    """The head's weight is split by vocabulary; ``workers.training.loss`` works on the shards."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _shard_rows)


def _replicate(name, module, device_mesh):
    _distribute(module, device_mesh, Replicate())


def _shard_rows(name, module, device_mesh):
    _distribute(module, device_mesh, Shard(0))


def _distribute(module, device_mesh, placement):
    for name, parameter in module.named_parameters(recurse=False):
        sharded = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


SEQUENCE = Shard(1)
# The table is made of the tokens that a rank holds between blocks.
SINUSOIDS = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(SEQUENCE,), use_local_output=True)

MODEL_PLAN = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
    "norm": ReplicatedWeight(),
    "lm_head": VocabularyShards(),
}

BLOCK_PLAN = {
    "input_layernorm": ReplicatedWeight(),
    # Gathered once for the three projections, which take it as it comes.
    "self_attn": PrepareModuleInput(input_layouts=(SEQUENCE, None, None, None), desired_input_layouts=(Replicate(), None, None, None)),
    "self_attn.q_proj": ColumnShards(),
    "self_attn.k_proj": ColumnShards(),
    "self_attn.v_proj": ColumnShards(),
    "self_attn.q_norm": ReplicatedWeight(),
    "self_attn.k_norm": ReplicatedWeight(),
    "self_attn.o_proj": RowShards(output_layouts=SEQUENCE),
    "post_attention_layernorm": ReplicatedWeight(),
    "mlp": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
    "mlp.gate_proj": ColumnShards(),
    "mlp.up_proj": ColumnShards(),
    "mlp.down_proj": RowShards(output_layouts=SEQUENCE),
}

# A feed-forward layer that runs on tiles (``workers.parallel.tiles``) sums over ranks once, not for every tile.
TILED_PLAN = {
    "mlp": PrepareModuleInputOutput(
        input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),), output_layouts=(Partial(),), desired_output_layouts=(SEQUENCE,)
    ),
    "mlp.down_proj": RowShards(output_layouts=Partial(), use_local_output=False),
}


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh, tiled: bool = False) -> None:
    """Turn the weights of ``model`` into DTensors by the plans above, in place. Sizes must divide (``MeshSpec.check_model``)."""
    # A stage's stand-in for a layer of another stage has no work to plan, at most the embedding's weight that the head shares.
    plan = {name: VocabularyShards() if isinstance(getattr(model, name), Elsewhere) else style for name, style in MODEL_PLAN.items()}
    parallelize_module(model, tp_mesh, plan)
    if model.sinusoids is not None:
        parallelize_module(model.sinusoids, tp_mesh, SINUSOIDS)
    model.tie()
    for block in model.layers:
        parallelize_module(block, tp_mesh, {**BLOCK_PLAN, **(TILED_PLAN if tiled else {})})
        _distribute(block.self_attn, tp_mesh, Shard(1))  # learnt keys, values and pooling vectors go with their KV heads
