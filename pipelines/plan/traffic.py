"""What a rank sends in a step, by what it is for, inside its node and to others.

Ranks are numbered dp × pp × ring × ulysses × tp, innermost last, ``mesh.ranks_per_node`` to a node. Of attention the rows are those
that the pattern asks for (``workers.attention.plan``); figures are of the rank that sends most.
"""

from __future__ import annotations

from typing import NamedTuple

from pipelines.plan.shape import FP32, Shape


class Flow(NamedTuple):
    """Bytes that a rank sends in a step to ranks of its node and to other nodes. hidden: computation goes on meanwhile."""

    kind: str
    inside: int
    between: int
    hidden: bool
    why: str

    @property
    def bytes(self) -> int:
        return self.inside + self.between


def flows(shape: Shape) -> list[Flow]:
    """What a rank of the first or last pipeline stage sends in a step; kinds that send nothing are left out.

    Not counted: batches from a group's leader, the all-reduce of a tied embedding over stages, and of chosen blocks' scores.
    """
    found = [*ring(shape), *ulysses(shape), *tensor(shape), *data(shape), *stages(shape)]
    return [flow for flow in found if flow.bytes]


def ring(shape: Shape) -> list[Flow]:
    """Keys, values, and the gradients that go home; summaries where the pattern has some."""
    mesh, model = shape.mesh, shape.model
    times = shape.held.blocks * shape.micro_steps
    forwards = 3 if shape.config.memory.recompute == "full" else 2  # backward needs keys and values again
    heads = shape.kv_heads // mesh.ulysses
    row = shape.row(2 * heads * model.head_dim, 1)
    busiest = (0, 0)
    for rank in shape.ring_ranks:
        sent = {True: 0, False: 0}
        for hop in shape.hops(rank):
            rows = [sum(stop - start for start, stop in ranges) for ranges in (hop.sent, hop.received)]
            for ring_rank, bytes in (
                ((rank + hop.distance) % mesh.ring, forwards * rows[0] * row * shape.element),
                ((rank - hop.distance) % mesh.ring, rows[1] * row * FP32),
            ):
                sent[_one_node(shape, rank, ring_rank)] += bytes
        busiest = max(busiest, (sent[False], sent[True]))
    found = [Flow("ring", busiest[1] * times, busiest[0] * times, True, "keys and values, and their gradients on the way home")]
    parts = _parts(shape)
    if parts and mesh.ring > 1:
        together = mesh.ring * mesh.ulysses * mesh.tp <= shape.config.mesh.ranks_per_node
        bytes = parts * (mesh.ring - 1) * times
        found.append(Flow("summaries", bytes * together, bytes * (not together), False, "summaries of segments, to every ring rank"))
    return found


def _parts(shape: Shape) -> int:
    """Bytes of what a ring rank pools of its segments, for one other rank, forward and backward."""
    model = shape.model
    heads = shape.kv_heads // shape.mesh.ulysses
    own = shape.length // shape.mesh.ring
    if model.segment is not None:
        passes = 3 if shape.config.memory.recompute == "full" else 2
        return passes * shape.row(-(-own // model.segment) * model.summaries * heads * (2 * model.head_dim + 1), FP32)
    if model.top_blocks is not None:
        return shape.row(-(-own // model.top_block_size) * heads * (2 * model.head_dim + 1), FP32)
    return 0


def _one_node(shape: Shape, a: int, b: int) -> bool:
    """Whether two ring ranks, at the same place of the axes inside the ring, are on one node."""
    inner, node = shape.mesh.ulysses * shape.mesh.tp, shape.config.mesh.ranks_per_node
    return a * inner // node == b * inner // node


def ulysses(shape: Shape) -> list[Flow]:
    """Heads for tokens, and back: queries, keys, values and the output, and their gradients."""
    mesh = shape.mesh
    passes = 3 if shape.config.memory.recompute == "full" else 2
    bytes = passes * 2 * (shape.q + shape.kv) * (mesh.ulysses - 1) // mesh.ulysses * shape.held.blocks * shape.micro_steps
    return [
        _split(shape, "ulysses", bytes, mesh.ulysses * mesh.tp, False, "queries, keys, values and outputs change between tokens and heads")
    ]


def tensor(shape: Shape) -> list[Flow]:
    """Gathers of the sequence and reductions to its parts: two of each a block and pass, and around the blocks."""
    mesh = shape.mesh
    recomputed = 3 if shape.config.memory.recompute != "none" else 0  # the last reduction of a block is not needed again
    block = 8 + recomputed
    bytes = (block * shape.held.blocks + 4) * (mesh.tp - 1) * shape.x_part
    rows = 2 * (mesh.tp - 1) * 3 * shape.tokens * FP32 // mesh.tp  # the loss's maxima, sums and targets
    return [
        _split(
            shape, "tensor", (bytes + rows) * shape.micro_steps, mesh.tp, False, "the sequence gathered for tensor ranks, sums scattered"
        )
    ]


def data(shape: Shape) -> list[Flow]:
    """Weights gathered and gradients reduced over the ranks that share a copy of the weights, and summed over the copies."""
    mesh, held = shape.mesh, shape.held
    ranks = mesh.dp * mesh.cp // mesh.replicate
    if not shape.shards:
        return []
    whole = held.outside + held.block * held.blocks
    trained = held.outside_trained + held.block_trained * held.blocks
    gathers = (2 if shape.regathers else 1) * whole * shape.element * (ranks - 1) // ranks * shape.micro_steps
    reductions = trained * FP32 * (ranks - 1) // ranks * shape.micro_steps
    again = " and again for backward" if shape.regathers else ""
    copies = 2 * (mesh.replicate - 1) * held.trained * FP32 // mesh.replicate
    return [
        _over_nodes(shape, "gather", gathers, ranks, f"weights, gathered for forward{again}"),
        _over_nodes(shape, "reduce", reductions, ranks, "gradients, float32, reduced to shards"),
        _over_copies(shape, copies),
    ]


def stages(shape: Shape) -> list[Flow]:
    """Hidden states to the next pipeline stage, and their gradients back."""
    mesh = shape.mesh
    if mesh.pp == 1:
        return []
    sides = 1 if shape.stage in (0, mesh.pp - 1) else 2
    bytes, together = sides * shape.x_part * shape.micro_steps, mesh.ranks_per_group <= shape.config.mesh.ranks_per_node
    return [Flow("stages", bytes * together, bytes * (not together), True, "hidden states or their gradients, to a neighbouring stage")]


def _over_copies(shape: Shape, bytes: int) -> Flow:
    """An all-reduce of a rank with its like in each copy of the weights: copies are whole ranges of ranks, one behind the other."""
    mesh, apart = shape.mesh, shape.mesh.world // shape.mesh.replicate
    beside = min(mesh.replicate, max(1, shape.config.mesh.ranks_per_node // apart))  # of them share a node
    between = bytes // beside if beside < mesh.replicate else 0
    return Flow("copies", bytes - between, between, True, "gradients, float32, summed over the copies of the weights")


def _over_nodes(shape: Shape, kind: str, bytes: int, ranks: int, why: str) -> Flow:
    """A collective of ``ranks`` ranks: into every node comes what it lacks, once, and its ranks carry equal shares of that."""
    mesh, node = shape.mesh, shape.config.mesh.ranks_per_node
    span = ranks * mesh.tp * (mesh.pp if ranks > mesh.cp else 1)
    nodes = -(-span // node)
    groups = max(1, node // max(1, span // ranks)) if nodes > 1 else ranks  # ranks of one collective that share a node
    between = bytes // groups if nodes > 1 else 0
    return Flow(kind, bytes - between, between, True, why)


def _split(shape: Shape, kind: str, bytes: int, span: int, hidden: bool, why: str) -> Flow:
    """A flow among ``span`` ranks that are numbered one after the other: between nodes where they do not fit one."""
    node = shape.config.mesh.ranks_per_node
    share = max(0, span - node) / max(1, span - 1) if span > node else 0
    return Flow(kind, int(bytes * (1 - share)), int(bytes * share), hidden, why)
