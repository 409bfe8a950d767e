"""A plan: every figure of a run that can be told from its configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pipelines.config import Config, naming_stage
from pipelines.plan.block import Item
from pipelines.plan.devices import Device, device
from pipelines.plan.duration import Duration, Work, duration, step_work
from pipelines.plan.memory import Instant, host_bytes, host_optimizer_bytes, instants
from pipelines.plan.search import Step, longest, steps
from pipelines.plan.shape import Shape
from pipelines.plan.simulate import Simulation, mesh_of, simulate
from pipelines.plan.traffic import Flow, flows
from workers.attention.block import BACKENDS, check_backend
from workers.model.config import padded_vocabulary


@dataclass(frozen=True)
class Plan:
    """Of a run, or of its stage number ``stage``; bytes are of one rank, of the pipeline stage that holds most.

    ``instants`` are the moments of a step that can be its peak; ``longest`` is the longest context that fits, in tokens, 0 for
    none; ``steps`` are the changes that reach further.
    """

    shape: Shape
    device: Device
    stage: int | None
    instants: list[Instant]
    flows: list[Flow]
    work: Work
    duration: Duration
    longest: int
    steps: list[Step]
    simulation: Simulation | None

    @property
    def peak(self) -> Instant:
        return max(self.instants, key=lambda instant: instant.bytes)

    @property
    def total(self) -> int:
        return sum(p.whole for p in self.shape.parameters)

    @property
    def trainable(self) -> int:
        return sum(p.whole for p in self.shape.parameters if p.trains)

    @property
    def fits(self) -> bool:
        return self.peak.bytes <= self.device.memory

    @property
    def largest(self) -> Item:
        """The kind that takes most at the peak, with all of its bytes, and why its largest part is there."""
        kind, bytes = next(iter(self.peak.by_kind().items()))
        part = max((item for item in self.peak.items if item.kind == kind), key=lambda item: item.bytes)
        return Item(kind, bytes, part.why)

    @property
    def host_bytes(self) -> int:
        return host_bytes(self.shape)

    @property
    def host_optimizer_bytes(self) -> int:
        return host_optimizer_bytes(self.shape)


def make_shape(config: Config, vocab: int | None, device_type: str) -> Shape:
    """The rank that a plan of one stage is of. ``vocab``: ids of the tokenizer, where the configuration leaves that to the corpus.

    Raises ValueError for what the run would be refused for, and when the vocabulary is not known.
    """
    model = config.model
    if vocab is not None and vocab < 1:
        raise ValueError(f"--vocab is {vocab}; it must be at least 1")
    if vocab is not None and model.vocab_size is not None:
        raise ValueError(f"--vocab is {vocab}, but model.vocab_size is {model.vocab_size}; leave out --vocab")
    if vocab is not None:
        model = dataclasses.replace(model, vocab_size=padded_vocabulary(vocab))
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is not set, and a plan reads no corpus; give --vocab N, or --set model.vocab_size=N")
    config = config.model_copy(update={"model": model})
    mesh = config.mesh_spec()
    mesh.check_model(model)
    config.training.micro_steps(mesh.dp)
    config.memory.check_device(device_type)
    config.adapter.check_model(model)
    shape = Shape(config, mesh, device_type)
    if config.attention.backend != "auto":
        backend = BACKENDS[config.attention.backend]
        if backend.device not in (None, device_type):
            raise ValueError(f"attention.backend {backend.name!r} cannot run on {device_type}; use auto or reference")
        check_backend(backend.name, shape.dtype, model.head_dim, model.positions == "alibi")
    return shape


def make_plan(config: Config, *, device_name: str = "H100", vocab: int | None = None, simulated_ranks: int | None = None) -> Plan:
    """The plan of a run on devices called ``device_name``; of a run in stages, of the stage in which a rank holds most.

    ``simulated_ranks`` also runs the ring of so many ranks. Raises ValueError, one line, for whatever a user got wrong.
    """
    stages = config.each_stage()
    kind = device(device_name, max(stage.mesh_spec().world for stage in stages))
    shapes = []
    for number, stage in enumerate(stages, 1):
        with naming_stage(number, len(config.stages)):
            shapes.append(make_shape(stage, vocab, kind.type))
    found = {number: max(shape.stages, key=lambda rank: max(i.bytes for i in instants(rank))) for number, shape in enumerate(shapes, 1)}
    number, shape = max(found.items(), key=lambda pair: max(i.bytes for i in instants(pair[1])))
    simulation = simulate(mesh_of(shape, simulated_ranks)) if simulated_ranks is not None else None
    sent, work = flows(shape), step_work(shape)
    return Plan(
        shape, kind, number if config.stages else None, instants(shape), sent, work, duration(shape, kind, work, sent),
        longest(shape, kind.memory), steps(shape, kind.memory), simulation,
    )  # fmt: skip
