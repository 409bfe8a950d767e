"""One model over many ranks: pipeline → tensor → context → memory → data, in that written order."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from workers.model.decoder import Decoder
from workers.parallel.memory import MemoryConfig, apply_memory
from workers.parallel.pipeline import keep_stage
from workers.parallel.tensor import apply_tensor_parallel

SMALL_MODEL_BYTES = 256 << 20  # whole weights below this stay gathered from forward to backward: cheaper than gathering twice


def parallelize(
    model: Decoder, mesh, *, backend: str = "auto", verify_ring: bool = False, dtype: torch.dtype = torch.float32,
    memory: MemoryConfig = MemoryConfig(),
) -> Decoder:  # fmt: skip
    """Lay ``model`` (on the meta device) over ``mesh``, in place.

    1. Pipeline: the model keeps the layers of its stage (``workers.parallel.pipeline``); the rest sees no others.
    2. Tensor: weights become DTensors by the plan in ``workers.parallel.tensor``; before FSDP, for it changes module inputs.
    3. Context: attention learns its mesh; everything else already works on local tokens with explicit positions.
    4. Memory: what a block keeps for backward (``workers.parallel.memory``); a block that is recomputed finds its weights
       gathered, so it does not gather them again.
    5. Data: FSDP2 over dp × cp, one unit every ``sync_every_blocks`` blocks, so that context ranks share weights and optimizer
       state as well. With ``replicate`` the ranks fall into copies: weights are gathered inside a copy only.
       Gradients are **summed**: the loss is a sum over tokens, and the step divides once by the global count of targets.
       Every micro-step reduces into the sharded gradient: to wait for the last would save messages, but keep the whole
       model's gradient on each rank. Between copies that price is not due, so there only the last micro-step reduces.
       Blocks give their whole weights back after forward, unless the model is small (``SMALL_MODEL_BYTES``).
       A single rank has nothing to share; there FSDP is needed only to keep bfloat16 copies of the weights, or to bring them
       from the host, where it keeps them and their gradients if the optimizer is there.
    """
    keep_stage(model, mesh)
    model.activation_dtype = dtype
    if mesh.spec.tp > 1:
        apply_tensor_parallel(model, mesh.tp, tiled=memory.mlp_tile is not None)
    mesh.ring_transport.verify = verify_ring
    for block in model.layers:
        block.self_attn.mesh = mesh
        block.self_attn.backend = backend
    apply_memory(model, memory)
    on_host = memory.optimizer == "host"
    if mesh.spec.world == 1 and dtype == torch.float32 and not on_host:
        return model
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Inputs are left as they come: FSDP would cast the rotary table, too, and positions do not survive bfloat16.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    large = sum(p.numel() * p.element_size() for p in model.parameters()) > SMALL_MODEL_BYTES
    blocks, together = list(model.layers), mesh.spec.sync_every_blocks
    for unit in (*(blocks[first : first + together] for first in range(0, len(blocks), together)), [model]):
        fully_shard(unit, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload, reshard_after_forward=large)
        unit[0].set_gradient_divide_factor(1.0)
        unit[0].set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return model
