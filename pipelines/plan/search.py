"""The longest context that fits, and what each switch would make of it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from pipelines.plan.memory import peak
from pipelines.plan.shape import Shape
from workers.mesh import MeshSpec

GRAIN = 1024  # tokens: a context is told in multiples of what the mesh divides, at least so many
LONGEST = 1 << 30


def longest(shape: Shape, capacity: int) -> int:
    """Tokens of the longest sequence whose peak is at most ``capacity`` bytes a rank; 0 when not even the shortest fits.

    Memory grows with the context, so this is a bisection over ``peak``.
    """
    unit = shape.mesh.length_multiple
    unit *= -(-GRAIN // unit)
    fits = lambda units: peak(shape.changed("training", context=units * unit)).bytes <= capacity
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        if high * unit >= LONGEST:
            return high * unit
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low * unit


class Step(NamedTuple):
    """A change, what to set, and what it gives: peak bytes of a rank at the present context, the longest context, ranks."""

    change: str
    settings: list[str]
    bytes: int
    longest: int
    ranks: int


def steps(shape: Shape, capacity: int) -> list[Step]:
    """Each change that reaches further on its own, and all memory switches together, the furthest last."""
    found = []
    for change, settings, other in changes(shape):
        reach = longest(other, capacity)
        found.append(Step(change, settings, peak(other).bytes, reach, other.mesh.world))
    here = longest(shape, capacity)
    return sorted((step for step in found if step.longest > here), key=lambda step: step.longest)


def changes(shape: Shape):
    """(what, how to set it, the shape that it gives) for every switch that is not on and may be."""
    memory, mesh, cuda = shape.config.memory, shape.mesh, shape.device == "cuda"
    switches: dict[str, dict] = {}
    if memory.recompute == "none":
        switches["recompute all but attention"] = {"recompute": "selective"}
    if memory.recompute != "full":
        switches["recompute blocks"] = {"recompute": "full"}
    if memory.offload == "none":
        switches["keep activations in host memory" if cuda else "keep activations on disk"] = {"offload": "host" if cuda else "disk"}
    if memory.compress == "none":
        switches["keep activations in int8"] = {"compress": "int8"}
    if memory.mlp_tile is None:
        switches["feed-forward in tiles"] = {"mlp_tile": 4096}
    if memory.loss_chunk > 256:
        switches["smaller chunks of the loss"] = {"loss_chunk": 256}
    if memory.optimizer == "device" and cuda:
        switches["optimizer in host memory"] = {"optimizer": "host"}
    for what, keys in switches.items():
        yield what, _settings("memory", keys), shape.changed("memory", **keys)
    together = {key: value for keys in switches.values() for key, value in keys.items() if key != "compress"}
    if len(together) > 1:
        yield "these memory switches together", _settings("memory", together), shape.changed("memory", **together)
    if shape.config.training.precision == "fp32":
        yield "bfloat16", ["training.precision=bf16"], shape.changed("training", precision="bf16")
    if shape.config.mesh.cp is None:
        for factor in (2, 4):
            ring = mesh.ring * factor
            yield f"a ring of {ring}", [f"mesh.ring={ring}"], _with_ring(shape, ring)


def _settings(section: str, keys: dict) -> list[str]:
    return [f"{section}.{key}={value}" for key, value in keys.items()]


def _with_ring(shape: Shape, ring: int) -> Shape:
    mesh: MeshSpec = dataclasses.replace(shape.mesh, ring=ring)
    settings = dataclasses.replace(shape.config.mesh, ring=ring)
    return dataclasses.replace(shape, config=shape.config.model_copy(update={"mesh": settings}), mesh=mesh)
