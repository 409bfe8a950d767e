"""One model over many ranks: tensor → context → memory → data, in that written order."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from workers.model.decoder import Decoder
from workers.parallel.memory import MemoryConfig, apply_memory
from workers.parallel.tensor import apply_tensor_parallel


SMALL_MODEL_BYTES = 256 << 20  # whole weights below this stay gathered from forward to backward: cheaper than gathering twice


def parallelize(
    model: Decoder, mesh, *, backend: str = "auto", verify_ring: bool = False, dtype: torch.dtype = torch.float32,
    memory: MemoryConfig = MemoryConfig(),
) -> Decoder:  # fmt: skip
    """Lay ``model`` (on the meta device) over ``mesh``, in place.

    1. Tensor: weights become DTensors by the plan in ``workers.parallel.tensor``; first, for it changes module inputs.
    2. Context: attention learns its mesh; everything else already works on local tokens with explicit positions.
    3. Memory: what a block keeps for backward (``workers.parallel.memory``); a block that is recomputed finds its weights
       gathered, so it does not gather them again.
    4. Data: FSDP2 over dp × cp, one unit a block, so that context ranks share weights and optimizer state as well.
       Gradients are **summed**: the loss is a sum over tokens, and the step divides once by the global count of targets.
       Blocks give their whole weights back after forward, unless the model is small (``SMALL_MODEL_BYTES``).
       A single rank has nothing to share; there FSDP is needed only to keep bfloat16 copies of the weights.
    """
    if mesh.spec.tp > 1:
        apply_tensor_parallel(model, mesh.tp, tiled=memory.mlp_tile is not None)
    mesh.ring_transport.verify = verify_ring
    for block in model.layers:
        block.self_attn.mesh = mesh
        block.self_attn.backend = backend
    apply_memory(model, memory)
    if mesh.spec.world == 1 and dtype == torch.float32:
        return model
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Inputs are left as they come: FSDP would cast the rotary table, too, and positions do not survive bfloat16.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    large = sum(p.numel() * p.element_size() for p in model.parameters()) > SMALL_MODEL_BYTES
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=large)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return model
