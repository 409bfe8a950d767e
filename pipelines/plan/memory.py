"""Memory of one rank, by kind, at every moment of a step that can be its peak.

A step is a few moments: after the loss, in the backward of the last and the first block, at the end of backward, while the
optimizer steps, while a checkpoint is copied. Each is a list of what is there; the peak is the largest. A new kind is one
line in the list of the moments that it is there in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.plan.block import Item, kept, moments, moved, stored
from pipelines.plan.shape import FP32, Shape
from workers.training.batch import PLANES

MIB = 1 << 20
# Resident before any tensor exists, measured with models of a few thousand values. CPU: Python, torch and gloo, and in bfloat16
# oneDNN's kernels. CUDA: the context, cuBLAS, and NCCL's buffers; not measured here.
PROCESS = {("cpu", 4): 325 * MIB, ("cpu", 2): 340 * MIB, ("cuda", 4): 1536 * MIB, ("cuda", 2): 1536 * MIB}
SLACK = 0.02  # of what is in use: allocators hold a little more


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
    """The moment at which a rank of any stage holds most."""
    return max((instant for stage in shape.stages for instant in instants(stage)), key=lambda instant: instant.bytes)


def instants(shape: Shape) -> list[Instant]:
    """Every moment that can be the peak of a rank of ``shape.stage``, in the order of a step."""
    items, memory, held = kept(shape), shape.config.memory, shape.held
    saved, always = stored(shape, items), _always(shape)
    around = [*always, *_around_blocks(shape)]

    def waiting(count: int) -> list[Item]:
        """What so many blocks of this micro-batch have stored, and all blocks of the others in flight."""
        return [item._replace(bytes=item.bytes * (count + held.blocks * (shape.in_flight - 1))) for item in saved]

    found = [Instant("initialisation", [*always, *_initialisation(shape)])]
    if shape.last_stage:
        found.append(Instant("loss", [*around, *_earlier_gradients(shape), *gathered(shape, "loss"), *waiting(held.blocks), *_loss(shape)]))
    for moment in moments(shape):
        own = [items[name] for name in (moment.reads if shape.restores else moment.alive) if name in items]
        if memory.recompute == "selective" and memory.offload == memory.compress == "none":
            own = [item for item in own if item not in saved]  # it comes off the tape as it is
        # What is recomputed starts from what was stored; otherwise what was stored is what ``own`` are.
        again = 1 if memory.recompute != "none" or shape.restores else 0
        for name, before in (("last", held.blocks - 1), ("first", 0)):
            returning = moved(shape, items) if memory.offload == "host" and before else 0
            present = [*around, *gathered(shape, name), *gradients(shape, name), *waiting(before + again), *own, *moment.items]
            present.append(Item("activations", returning, "of the block before, on its way back from host memory"))
            found.append(Instant(f"backward of the {name} block: {moment.name}", present))
    end = Item("block", shape.x if held.outside_trained else 0, "the gradient of the embeddings")
    found.append(Instant("end of backward", [*around, *gathered(shape, "end"), *gradients(shape, "end"), *waiting(0), end]))
    if memory.optimizer == "device":
        found.append(Instant("optimizer", [*always, Item("gradients", held.trained * FP32, "float32, this rank's shards")]))
    found.append(Instant("checkpoint", [*always, *_checkpoint(shape)]))
    return [_with_slack(instant) for instant in found]


def host_bytes(shape: Shape) -> int:
    """What a rank keeps outside its device for backward, in host memory or on disk."""
    return max(moved(stage, kept(stage)) * stage.held.blocks * stage.in_flight for stage in shape.stages)


def host_optimizer_bytes(shape: Shape) -> int:
    """Weights, gradients and both moments of a rank that steps in host memory."""
    if shape.config.memory.optimizer == "device":
        return 0
    return max(stage.held.weights + 3 * stage.held.trained * FP32 for stage in shape.stages)


def _with_slack(instant: Instant) -> Instant:
    own = sum(item.bytes for item in instant.items if item.kind != "process")
    items = [*instant.items, Item("allocator", int(SLACK * own), "held by the allocator and not in use")]
    return Instant(instant.name, [item for item in items if item.bytes])


def _always(shape: Shape) -> list[Item]:
    why = "Python, torch and its process groups" if shape.device == "cpu" else "CUDA context and NCCL"
    items = [Item("process", PROCESS[shape.device, shape.element], why)]
    if shape.config.memory.optimizer == "device":
        items.append(Item("weights", shape.held.weights, "this rank's shards; what trains is in float32"))
        items.append(Item("optimizer", 2 * shape.held.trained * FP32, "both moments of AdamW, float32"))
    return items


def _around_blocks(shape: Shape) -> list[Item]:
    """What is there from the embedding to the end of backward."""
    model, tokens = shape.model, shape.tokens
    batch = PLANES * tokens * 8 * (shape.micro_steps if shape.mesh.pp > 1 else 1)
    if shape.mesh.ranks_per_group > 1:  # the leader cuts it up
        batch += PLANES * tokens * 8 * shape.mesh.cp
    items = [Item("batch", batch, "tokens, targets, positions, lengths and parts, int64")]
    if model.positions == "rope":
        items.append(Item("activations", tokens * model.head_dim * FP32 * shape.in_flight, "the rotary table, float32"))
    if shape.last_stage:
        items.append(Item("activations", shape.x_part + tokens // shape.mesh.tp * FP32, "the input of the last norm"))
        items.append(Item("loss", shape.x, "the gradient of the hidden states"))
    if shape.mesh.pp > 1:
        items.append(
            Item("stages", 2 * shape.x_part * (shape.in_flight + 1), "hidden states and their gradients on their way between stages")
        )
    return items


def _loss(shape: Shape) -> list[Item]:
    chunk, trained = min(shape.config.memory.loss_chunk, shape.tokens), shape.held.head_trained
    narrow = shape.element if shape.element < FP32 else 0  # in bfloat16 their gradient is there in both types
    items = [
        Item("loss", chunk * shape.vocabulary * (FP32 + narrow), f"logits of {chunk:,} tokens"),
        Item("loss", shape.x_part + (shape.x if shape.mesh.tp > 1 else 0), "hidden states"),
    ]
    if trained:
        items.append(Item("loss", trained * FP32, "the gradient of the head, float32"))
        if narrow:  # which a CPU widens before it is added
            items.append(Item("loss", trained * (narrow + FP32 * (shape.device == "cpu")), "a chunk's part of it"))
    return items


def _earlier_gradients(shape: Shape) -> list[Item]:
    """Of micro-steps before, whose gradients add up."""
    if shape.micro_steps == 1 or shape.config.memory.optimizer == "host":
        return []
    return [Item("gradients", shape.held.trained * FP32, "of micro-steps before, float32, this rank's shards")]


def gradients(shape: Shape, when: str) -> list[Item]:
    """Gradients in the backward of the last block, of the first one, or at its end."""
    held = shape.held
    outside = held.head_trained * shape.last_stage if when != "end" else held.outside_trained
    if when == "end" and shape.model.tie_embeddings and shape.mesh.pp == 1:
        outside += held.head_trained  # the embedding's part, before it is added to the head's
    done = {"last": 0, "first": held.blocks - 1, "end": held.blocks}[when]
    if not shape.shards:
        present = outside + (0 if shape.micro_steps > 1 else done * held.block_trained)
        return [*_earlier_gradients(shape), Item("gradients", present * FP32, "float32")]
    items = [
        *_earlier_gradients(shape),
        Item("gradients", outside * shape.element, "of the embedding and the head, whole until backward ends"),
    ]
    if shape.micro_steps == 1 and shape.config.memory.optimizer == "device":
        items.append(Item("gradients", done * held.block_trained_shard * FP32, "of the blocks, float32, this rank's shards"))
    if when == "end":
        packed = held.outside_trained + held.trained - held.blocks * held.block_trained_shard
        items.append(Item("gathered", packed * FP32, "gradients of the embedding and the head, packed to be reduced"))
    elif when == "first":
        items.append(Item("gathered", shape.bucket * held.block_trained * FP32, "a block's gradients, packed to be reduced"))
    return items


def gathered(shape: Shape, when: str) -> list[Item]:
    """Whole weights that FSDP has gathered: at the loss, in the backward of the last and of the first block, at its end."""
    if not shape.shards:
        return []
    held, unit = shape.held, shape.bucket
    if shape.regathers:
        count = {"loss": unit, "last": 3 * unit, "first": 2 * unit, "end": 0}[when]
        why = "the embedding and the head, a block, and the next one on its way"
    else:
        # What the last block was gathered into before it was cut into weights stays until the next gathering.
        count = {"loss": held.blocks + unit, "last": held.blocks + unit, "first": 2 * unit, "end": unit}[when]
        why = "the whole model: it is small, and stays gathered until backward"
    return [Item("gathered", (held.outside + count * held.block) * shape.element, why)]


def _initialisation(shape: Shape) -> list[Item]:
    if shape.device == "cuda":
        return []
    return [Item("block", shape.held.largest * FP32, "the largest parameter, whole, as it is drawn")]


def _checkpoint(shape: Shape) -> list[Item]:
    if shape.device == "cuda":
        return []  # the copy is made in host memory
    held = shape.held
    weights = held.weights if shape.config.adapter.rank is None else held.trained * FP32
    return [Item("checkpoint", weights + 2 * held.trained * FP32, "the copy of weights and optimizer that is written")]
