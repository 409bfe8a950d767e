"""What the plan says a forward pass leaves behind for backward is what a real one leaves behind."""

from functools import partial

import pytest
import torch
from torch.autograd.profiler import profile

from pipelines.config import Config
from pipelines.plan import make_shape
from pipelines.plan.block import kept, stored
from workers.model import Decoder
from workers.model.adapter import add_adapters
from workers.parallel.memory import apply_memory
from workers.training.loss import token_losses

MODEL = {"dim": 96, "layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn_dim": 160, "vocab_size": 128}

CASES = {
    "plain": {},
    "rows of a batch": {"training": {"micro_batch": 2, "batch": 2}},
    "heads of their own, with norms": {"model": {"kv_heads": 6, "qk_norm": True}},
    "a length that is no multiple of the kernel's squares": {"training": {"context": 1000}},
    "no positions": {"model": {"positions": "none", "window": 100}},
    "learnt memory": {"model": {"memory": 48}},
    "summaries": {"model": {"window": 64, "segment": 64, "summaries": 2}},
    "recomputed": {"memory": {"recompute": "full"}},
    "recomputed but attention": {"memory": {"recompute": "selective"}},
    "int8": {"memory": {"compress": "int8"}},
    "disk": {"memory": {"offload": "disk"}},
    "tiles": {"memory": {"mlp_tile": 256}},
    "recomputed, int8, in tiles": {"memory": {"recompute": "selective", "compress": "int8", "mlp_tile": 256}},
    "adapter": {"adapter": {"rank": 8}},
    "adapter of everything": {"adapter": {"rank": 8, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"], "train_norms": True}},
}


def left_behind(config: Config) -> int:
    """Bytes that are there after a forward pass and were not before."""
    context, rows = config.training.context, config.training.micro_batch
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    model = add_adapters(Decoder(config.model), config.adapter)
    model.init_weights(0)
    model.to(dtype)
    apply_memory(model, config.memory)
    tokens = torch.randint(0, config.model.vocab_size, (rows, context), dtype=torch.int64)
    head = partial(token_losses, targets_BS=tokens)
    positions, pattern = torch.arange(context).expand(rows, -1), config.model.pattern()
    with profile(profile_memory=True) as seen:
        loss, _ = model(tokens, positions, pattern, head=head)
    assert loss.isfinite()
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


def around(shape) -> int:
    """What is not of a block: the rotary table, the last norm's input, gradients and losses that the loss made."""
    tokens, head = shape.tokens, shape.held.head_trained
    table = tokens * shape.model.head_dim * 4 if shape.model.positions == "rope" else 0
    return table + 2 * shape.x + tokens * 4 + head * 4 + tokens * 4


NARROW = ("plain", "rows of a batch", "summaries", "recomputed, int8, in tiles", "adapter")


@pytest.mark.parametrize("name, precision", [*((name, "fp32") for name in CASES), *((name, "bf16") for name in NARROW)])
def test_what_is_kept_from_forward_to_backward(name, precision):
    case = CASES[name]
    training = {"context": 1024, "precision": precision, **case.get("training", {})}
    config = Config.model_validate({**case, "model": {**MODEL, **case.get("model", {})}, "training": training})
    shape = make_shape(config, None, "cpu")
    said = sum(item.bytes for item in stored(shape, kept(shape))) * shape.held.blocks
    assert left_behind(config) == pytest.approx(said + around(shape), rel=0.04)


def test_twice_the_tokens_are_twice_the_bytes():
    shapes = [
        make_shape(Config.model_validate({"model": MODEL, "training": {"context": context}}), None, "cpu") for context in (1024, 2048)
    ]
    once, twice = (sum(item.bytes for item in kept(shape).values()) for shape in shapes)
    assert twice == 2 * once
