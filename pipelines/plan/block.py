"""What one block keeps from forward to backward, and what its backward needs besides, by tensor.

Everything follows from the code of ``workers.model`` and ``workers.attention``; what autograd saves is checked against it in
the tests. Widths are those of ``shape``.
"""

from __future__ import annotations

from typing import NamedTuple

from pipelines.plan.shape import FP32, Shape
from workers.attention.kernels import reference


class Item(NamedTuple):
    """Bytes of one rank, what kind they are of, and why they are there."""

    kind: str
    bytes: int
    why: str


def kept(shape: Shape) -> dict[str, Item]:
    """What a block saves for backward when nothing is recomputed, compressed or offloaded, by name."""
    model, tokens, tp, ulysses = shape.model, shape.tokens, shape.mesh.tp, shape.mesh.ulysses
    scale = tokens // tp * FP32
    items = {
        "input": ("activations", shape.x_part, "the block's input"),
        "normed": ("activations", shape.x + scale, "what the projections read, and the norm's scale"),
        "projected": ("activations", 0, "queries and keys before their norms"),
        "qkv": ("attention", shape.q + 2 * shape.kv, "queries, keys and values"),
        "out": ("attention", shape.q + shape.lse, "attention's output and lse"),
        "read out": ("attention", shape.q if ulysses > 1 or _heads_first(shape) else 0, "that output as the output projection reads it"),
        "extra": ("attention", 0, "learnt keys and summaries"),
        "middle": ("activations", shape.x_part, "the input of the feed-forward layer's norm"),
        "middle normed": ("activations", shape.x + scale, "what the feed-forward layer reads, and the norm's scale"),
        "gate and up": ("activations", 2 * shape.ffn, "the two inputs of SwiGLU"),
        "gated": ("activations", shape.ffn, "what the down projection reads"),
    }
    if model.qk_norm:
        heads = (model.heads + model.kv_heads) // tp
        items["projected"] = ("activations", tokens * heads * (model.head_dim * shape.element + FP32), items["projected"][2])
    items["extra"] = ("attention", _extra(shape), items["extra"][2])
    adapter = shape.config.adapter
    if adapter.rank is not None:  # a frozen projection does not read its input in backward, its adapter does
        low = len(adapter.targets) * tokens * adapter.rank * shape.element
        items["low"] = ("activations", low, "what adapters have between their two matrices")
        for name, readers, rest in (
            ("normed", {"q_proj", "k_proj", "v_proj"}, scale), ("middle normed", {"gate_proj", "up_proj"}, scale), ("gated", {"down_proj"}, 0),
        ):  # fmt: skip
            if not readers & set(adapter.targets):
                items[name] = ("activations", rest, "the norm's scale")
        if "o_proj" not in adapter.targets and ulysses == 1:
            items["read out"] = ("attention", 0, "")
    if shape.config.memory.mlp_tile is not None:
        del items["gate and up"], items["gated"]
        items["middle normed"] = ("activations", shape.x + scale, items["middle normed"][2])
    return {name: Item(*item) for name, item in items.items() if item[1]}


def _heads_first(shape: Shape) -> bool:
    """Whether the output keeps the order in which the CPU's kernel gives it, so that the projection reads a copy: when its first
    call covers the output, and is not a ladder over several sequences."""
    if shape.device == "cuda":
        return False
    tile = shape.hops(0)[0].tiles[0][1][0]
    alone = tile.rungs == 1 or shape.config.training.micro_batch == 1
    return tile.step == 1 and tile.queries * tile.rungs == shape.length // shape.mesh.ring and alone


def _extra(shape: Shape) -> int:
    """Keys and values that a rank has whole besides the sequence's own, and what summaries keep to be pooled."""
    model = shape.model
    heads = shape.kv_heads // shape.mesh.ulysses
    total = 2 * shape.row(model.memory * heads * model.head_dim)
    if model.segment is not None:
        summaries = -(-shape.length // model.segment) * model.summaries
        own = shape.length // shape.mesh.ring
        total += 2 * shape.row(summaries * heads * model.head_dim)
        # In float32: keys and values beside one another, the same weighted for each summary, weights; keys for the learnt weights.
        wide = 2 * model.head_dim * (1 + model.summaries) + 3 * model.summaries + model.head_dim * model.learns_pooling
        total += shape.row(own * heads * wide + 2 * summaries * heads * (2 * model.head_dim + 1), FP32)
    return total


def stored(shape: Shape, items: dict[str, Item]) -> list[Item]:
    """What of a block waits on the device for backward, as the memory switches say; ``items`` is what ``kept`` gave."""
    memory = shape.config.memory
    if memory.recompute == "full":
        items = {"input": items["input"]}
    elif memory.recompute == "selective":
        items = {name: items[name] for name in ("input", "out", "extra") if name in items}
        if shape.mesh.ulysses > 1:
            items["sent back"] = Item("attention", shape.q, "the output after its heads came back from ulysses ranks")
            items["received"] = Item("attention", shape.q + 2 * shape.kv, "what came from ulysses ranks")
    if memory.offload != "none":
        return []  # besides the block that is computed, and of a GPU the one before it (``moments``)
    if memory.compress == "int8":
        values = {name: item._replace(bytes=int(item.bytes / shape.element * (1 + 4 / 256))) for name, item in items.items()}
        return [item._replace(why=f"{item.why}, in int8") for item in values.values()]
    return list(items.values())


def moved(shape: Shape, items: dict[str, Item]) -> int:
    """Bytes of a block that wait elsewhere: in host memory or on disk."""
    memory = shape.config.memory
    if memory.offload == "none":
        return 0
    here = shape.changed("memory", offload="none", offload_folder=None)
    return sum(item.bytes for item in stored(here, items))


class Moment(NamedTuple):
    """A point of a block's backward: which of its own kept tensors are still there, what is there besides, and which of the
    kept ones are read at this point (the others may not have been brought back yet)."""

    name: str
    alive: tuple[str, ...]
    items: list[Item]
    reads: tuple[str, ...]


ATTENTION = ("input", "normed", "projected", "low", "qkv", "out", "extra")
MIDDLE = (*ATTENTION, "read out", "middle")


def moments(shape: Shape) -> list[Moment]:
    """The points at which a block's backward needs most, last layers first."""
    tp, wide = shape.mesh.tp, shape.x // shape.element * FP32 // shape.mesh.tp
    memory = shape.config.memory
    # The gradient of the residual stream; of a tensor rank's part it is gathered for the row-parallel projection.
    stream = Item("block", shape.x_part + (shape.x if tp > 1 else 0), "the gradient of the residual stream")
    feed = shape.held.mlp_trained * shape.element
    if memory.mlp_tile is None:
        inner = Item("block", 3 * shape.ffn, "gradients inside the feed-forward layer")
        mlp_weights = Item("block", feed // 3, "the gradient of its down projection")
        found = [
            Moment("feed-forward", (*MIDDLE, "middle normed", "gate and up"), [stream, inner, mlp_weights], ("gate and up",)),
            Moment(
                "feed-forward's input", (*MIDDLE, "middle normed"),
                [
                    stream, Item("block", 2 * shape.ffn + 2 * shape.x, "gradients of SwiGLU's inputs and of what both read"),
                    Item("block", feed, "gradients of its weights"),
                ],
                ("middle normed",),
            ),
        ]  # fmt: skip
    else:
        tile = min(memory.mlp_tile, shape.length // shape.mesh.cp) / (shape.length // shape.mesh.cp)
        inner = int(tile * (6 * shape.ffn + 3 * shape.x))
        wide_weights = shape.held.mlp_trained * FP32
        found = [
            Moment(
                "feed-forward", (*MIDDLE, "middle normed"),
                [
                    stream, Item("block", shape.x, "the gradient of the feed-forward layer's input"),
                    Item("block", inner, "one tile of the feed-forward layer"),
                    Item("block", wide_weights + feed, "gradients of its weights: their sum over tiles, and one tile's"),
                ],
                ("middle normed",),
            )
        ]  # fmt: skip
    norm = 3 * wide + shape.x_part if shape.element == FP32 else 4 * wide + 2 * shape.x_part
    found.append(Moment("feed-forward's norm", MIDDLE, [stream, Item("block", norm, "the norm's backward, in float32")], ("middle",)))
    found.append(Moment("attention", ATTENTION, [stream, *attention_backward(shape)], ("qkv", "out", "extra")))
    return found


def attention_backward(shape: Shape) -> list[Item]:
    """What the backward of attention needs besides what was kept: sums in float32, a tile's gradients, what is on its way."""
    accumulators = 1 if shape.element == FP32 else 2
    sums = accumulators * (shape.q + 2 * shape.kv)
    # In the end the sums become the inputs' type.
    sums += 0 if shape.element == FP32 else shape.q + 2 * shape.kv
    rows, pieces = _busiest(shape)
    own = shape.length // shape.mesh.ring
    kv_row = shape.row(2 * shape.kv_heads // shape.mesh.ulysses * shape.model.head_dim, 1)
    items = [
        Item("attention", shape.q, "the gradient of attention's output"),
        Item("attention", sums, "sums of the gradients of queries, keys and values"),
        Item("attention", int(pieces[0] / own * shape.q + pieces[1] / own * 2 * shape.kv), "one tile's gradients"),
    ]
    if shape.mesh.ring > 1:
        received, sent = rows
        travelling = kv_row * (2 * received + sent) * shape.element  # this hop's, the next one's, and what goes out
        returning = kv_row * (2 * received + sent) * FP32  # sums of the hop, packed to go home, and what comes home
        items.append(Item("ring", travelling, "keys and values of this hop and the next"))
        items.append(Item("ring", returning, "gradients on their way home"))
    if shape.mesh.ulysses > 1:
        items.append(Item("attention", shape.q + 2 * shape.kv, "gradients packed for ulysses ranks"))
    return items


def _busiest(shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """The most rows that a hop brings and takes away, and the most queries and keys of a tile, on any ring rank."""
    received = sent = queries = keys = 0
    for rank in shape.ring_ranks:
        for hop in shape.hops(rank):
            received = max(received, sum(stop - start for start, stop in hop.received))
            sent = max(sent, sum(stop - start for start, stop in hop.sent))
            for _, tiles in hop.tiles:
                for tile in tiles:
                    queries, keys = max(queries, tile.queries * tile.rungs), max(keys, tile.keys * tile.rungs)
    if shape.backend == "reference":
        queries, keys = min(queries, reference.ROWS), min(keys, reference.COLUMNS)
    return (received, sent), (queries, keys)
