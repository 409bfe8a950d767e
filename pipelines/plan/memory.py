"""Memory of one rank, by kind, at every point of a step that can be its peak.

A step is a few moments: after the loss, in the backward of the last and the first block, at the end of backward, while the
optimizer steps, while a checkpoint is copied. Each is a list of what is there; the peak is the largest. A new kind is one
line in the list of the moments that it is there in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.plan.block import Item, kept, moments, moved, stored
from pipelines.plan.shape import FP32, Shape

MIB = 1 << 20
# Resident before any tensor exists, measured with a model of a few thousand values: Python, torch and gloo; with FSDP's modules
# besides; what Ray adds to a worker; on CUDA the context and NCCL's buffers.
PROCESS = {"cpu": 320 * MIB, "cuda": 1536 * MIB}
# Allocators hold more than is in use.
SLACK = 0.03


@dataclass(frozen=True)
class Instant:
    """One moment of a step and what a rank holds then."""

    name: str
    items: list[Item]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, the largest first."""
        kinds: dict[str, int] = {}
        for item in self.items:
            kinds[item.kind] = kinds.get(item.kind, 0) + item.bytes
        return dict(sorted(kinds.items(), key=lambda pair: -pair[1]))


def peak(shape: Shape) -> Instant:
    """The moment at which a rank holds most."""
    return max(instants(shape), key=lambda instant: instant.bytes)


def instants(shape: Shape) -> list[Instant]:
    """Every moment that can be the peak, in the order of a step."""
    items, blocks = kept(shape), shape.model.layers
    saved = stored(shape, items)
    of_blocks = lambda count: [item._replace(bytes=item.bytes * count) for item in saved]  # noqa: E731
    around = [*_always(shape), *_around_blocks(shape)]
    found = [Instant("initialisation", [*_always(shape), *_initialisation(shape)])]
    found.append(Instant("loss", [*around, *_earlier_gradients(shape), *gathered(shape, "loss"), *of_blocks(blocks), *_loss(shape)]))
    for moment in moments(shape):
        own = [items[name] for name in moment.alive if name in items]
        if shape.config.memory.recompute == "selective" and shape.config.memory.offload == "none":
            own = [item for item in own if item not in saved]
        for name, before in (("last", blocks - 1), ("first", 0)):
            others = of_blocks(before) if shape.config.memory.recompute == "none" else of_blocks(before + 1)
            held = [*around, *gathered(shape, name), *gradients(shape, name)]
            found.append(Instant(f"backward of the {name} block: {moment.name}", [*held, *others, *own, *moment.items]))
    found.append(Instant("end of backward", [*around, *gathered(shape, "end"), *gradients(shape, "end"), Item("block", shape.x, "the gradient of the embeddings")]))
    found.append(Instant("optimizer", [*_always(shape), Item("gradients", shape.held.trainable_shard * FP32, "float32, this rank's shards")]))
    found.append(Instant("checkpoint", [*_always(shape), *_checkpoint(shape)]))
    return [_with_slack(instant) for instant in found]


def host_bytes(shape: Shape) -> int:
    """What a rank keeps outside its device for backward, in pinned host memory or on disk."""
    return moved(shape, kept(shape)) * shape.model.layers


def _with_slack(instant: Instant) -> Instant:
    own = sum(item.bytes for item in instant.items if item.kind != "process")
    return Instant(instant.name, [*instant.items, Item("allocator", int(SLACK * own), "held by the allocator and not in use")])


def _always(shape: Shape) -> list[Item]:
    host = shape.config.memory.optimizer == "host"
    items = [Item("process", PROCESS[shape.device], "Python, torch, and the process groups" if shape.device == "cpu" else "CUDA context and NCCL")]
    if not host:
        items.append(Item("weights", shape.held.shard * FP32, "float32, this rank's shards"))
        items.append(Item("optimizer", 2 * shape.held.trainable_shard * FP32, "both moments of AdamW, float32"))
    return items


def _around_blocks(shape: Shape) -> list[Item]:
    """What is there from the embedding to the end of backward."""
    model, tokens = shape.model, shape.tokens
    items = [Item("batch", 3 * tokens * 8 + (tokens * shape.mesh.cp * 3 * 8 if shape.mesh.ranks_per_group > 1 else 0), "tokens, targets and positions, int64")]
    if model.positions == "rope":
        items.append(Item("activations", tokens * model.head_dim * FP32, "the rotary table, float32"))
    items.append(Item("activations", shape.x_part + tokens // shape.mesh.tp * FP32, "the input of the last norm"))
    items.append(Item("loss", shape.x, "the gradient of the hidden states"))
    return items


def _loss(shape: Shape) -> list[Item]:
    chunk = min(shape.config.memory.loss_chunk, shape.tokens)
    logits = chunk * shape.vocabulary
    chunks = -(-shape.tokens // chunk)
    head = shape.vocabulary * shape.model.dim
    # A chunk's logits are formed while the one before still has its name.
    each = FP32 * (2 if chunks > 1 else 1) if shape.element == FP32 else (FP32 + 2 + 2 + FP32 if chunks > 1 else FP32 + 2)
    items = [
        Item("loss", logits * each, f"logits of {chunk:,} tokens, and of the {chunk:,} before"),
        Item("loss", head * FP32, "the gradient of the head, float32"),
        Item("loss", shape.x_part + (shape.x if shape.mesh.tp > 1 else 0), "hidden states"),
    ]
    return items


def _earlier_gradients(shape: Shape) -> list[Item]:
    """Of micro-steps before, whose gradients add up."""
    if shape.micro_steps == 1:
        return []
    return [Item("gradients", shape.held.trainable_shard * FP32, "of micro-steps before, float32, this rank's shards")]


def gradients(shape: Shape, when: str) -> list[Item]:
    """Gradients in the backward of the last block, of the first one, or at its end."""
    held, model = shape.held, shape.model
    head = shape.vocabulary * model.dim
    rest = held.rest if when == "end" or model.tie_embeddings is False else 0
    if not shape.shards:
        of_blocks = {"last": 0, "first": (model.layers - 1) * held.block, "end": model.layers * held.block}[when]
        outside = head if when != "end" else 2 * head
        if shape.micro_steps > 1:
            return [*_earlier_gradients(shape), Item("gradients", outside * FP32, "of this micro-step, float32")]
        return [Item("gradients", (of_blocks + outside) * FP32, "float32")]
    outside = head if when != "end" else max(rest, 2 * head)
    items = [Item("gradients", outside * shape.element, "of the embedding and the head, whole until backward ends")]
    if shape.micro_steps > 1:
        items += _earlier_gradients(shape)
    else:
        of_blocks = {"last": 0, "first": model.layers - 1, "end": model.layers}[when]
        items.append(Item("gradients", of_blocks * held.block_shard * FP32, "of the blocks, float32, this rank's shards"))
    if when == "end":
        items.append(Item("gathered", held.rest * FP32 + (held.trainable_shard - model.layers * held.block_shard) * FP32, "gradients of the embedding and the head, packed to be reduced"))
    elif when == "first":
        items.append(Item("gathered", held.block * FP32, "a block's gradients, packed to be reduced"))
    return items


def gathered(shape: Shape, when: str) -> list[Item]:
    """Whole weights that FSDP has gathered: at the loss, in the backward of the last and of the first block, at its end."""
    if not shape.shards:
        return []
    held, blocks = shape.held, shape.model.layers
    if shape.regathers:
        count = {"loss": 1, "last": 3, "first": 2, "end": 0}[when]
        why = "the embedding and the head, a block, and the next one on its way"
    else:
        # What the last block was gathered into before it was cut into weights stays until the next gathering.
        count = {"loss": blocks + 1, "last": blocks + 1, "first": 2, "end": 1}[when]
        why = "the whole model: it is small, and stays gathered until backward"
    return [Item("gathered", (held.rest + count * held.block) * shape.element, why)]


def _initialisation(shape: Shape) -> list[Item]:
    if shape.device == "cuda":
        return []
    return [Item("block", shape.held.largest * FP32, "the largest parameter, whole, as it is drawn")]


def _checkpoint(shape: Shape) -> list[Item]:
    if shape.device == "cuda":
        return []
    held = shape.held
    return [Item("checkpoint", (held.shard + 2 * held.trainable_shard) * FP32, "the copy of weights and optimizer that is written")]
