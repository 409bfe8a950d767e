"""The sizes of what one rank computes: bytes of the tensors of a block, and the rows that attention receives.

Names of tensors' widths, each in bytes for all of a rank's tokens: ``x`` [B, s, D]; ``x_part`` the s / tp tokens of it
between blocks; ``q`` [B, s, H / tp, K]; ``kv`` [B, s, G / tp, K], one of the two; ``ffn`` [B, s, F / tp].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pipelines.config import Config
from pipelines.plan.parameters import Held, Parameter, of_stage, parameters
from workers.attention.block import BACKENDS
from workers.attention.pattern import Pattern
from workers.attention.plan import Hop, make_plan
from workers.attention.tile import Tile
from workers.mesh import MeshSpec
from workers.model.config import ModelConfig
from workers.parallel import SMALL_MODEL_BYTES

FP32 = 4


@dataclass(frozen=True)
class Shape:
    """One rank of a run: the configuration (vocabulary known), its mesh, the type of its device, cpu or cuda, and its pipeline stage."""

    config: Config
    mesh: MeshSpec
    device: str
    stage: int = 0

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def element(self) -> int:
        """Bytes of a value in forward and backward."""
        return 2 if self.config.training.precision == "bf16" else FP32

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.element < FP32 else torch.float32

    @property
    def length(self) -> int:
        """Tokens of a padded sequence."""
        return self.mesh.padded(self.config.training.context)

    @property
    def tokens(self) -> int:
        """Tokens of a rank: of all sequences that it takes at once."""
        return self.config.training.micro_batch * self.length // self.mesh.cp

    @property
    def heads(self) -> int:
        """Query heads of a tensor rank."""
        return self.model.heads // self.mesh.tp

    @property
    def kv_heads(self) -> int:
        """KV heads of a tensor rank, repeated where ulysses ranks are more."""
        return max(self.model.kv_heads // self.mesh.tp, self.mesh.ulysses)

    @property
    def x(self) -> int:
        return self.tokens * self.model.dim * self.element

    @property
    def x_part(self) -> int:
        return self.x // self.mesh.tp

    @property
    def q(self) -> int:
        return self.tokens * self.heads * self.model.head_dim * self.element

    @property
    def kv(self) -> int:
        return self.tokens * self.kv_heads * self.model.head_dim * self.element

    @property
    def ffn(self) -> int:
        return self.tokens * self.model.ffn_dim // self.mesh.tp * self.element

    @property
    def lse(self) -> int:
        return self.tokens * self.heads * FP32

    @property
    def vocabulary(self) -> int:
        """Ids whose logits a rank forms."""
        return -(-self.model.vocab_size // self.mesh.tp)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Of the whole model."""
        return parameters(self.model, self.config.adapter, self.mesh, self.dtype)

    @cached_property
    def held(self) -> Held:
        """Of this stage."""
        return Held.of(of_stage(self.parameters, self.model, self.mesh.pp, self.stage))

    @property
    def stages(self) -> list[Shape]:
        """A rank of each stage that may hold most: the first keeps most micro-batches, the last has the loss."""
        return [replace(self, stage=stage) for stage in sorted({0, self.mesh.pp - 1})]

    @property
    def last_stage(self) -> bool:
        return self.stage == self.mesh.pp - 1

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations a stage keeps at once."""
        return (
            1
            if self.mesh.pp == 1
            else min(self.mesh.pp - self.stage, self.micro_steps)
            if self.micro_steps >= self.mesh.pp
            else self.micro_steps
        )

    @property
    def shards(self) -> bool:
        """Whether FSDP wraps the model: everywhere but on one rank in float32."""
        return self.mesh.world > 1 or self.element < FP32 or self.config.memory.optimizer == "host"

    @property
    def regathers(self) -> bool:
        """Whether blocks give their whole weights back after forward."""
        return self.held.whole_bytes > SMALL_MODEL_BYTES

    @property
    def restores(self) -> bool:
        """Whether what a block has kept comes back one by one as its backward reads it. From a GPU's host memory all of it comes at once."""
        memory = self.config.memory
        return memory.recompute == "none" and (memory.offload == "disk" or (memory.compress == "int8" and memory.offload == "none"))

    @property
    def bucket(self) -> int:
        """Blocks whose weights are gathered together."""
        return min(self.mesh.sync_every_blocks, self.held.blocks)

    @property
    def micro_steps(self) -> int:
        return self.config.training.micro_steps(self.mesh.dp)

    @property
    def backend(self) -> str:
        """The kernel of a tile: the one named, else the one that every machine with such a device has."""
        if self.config.attention.backend != "auto":
            return self.config.attention.backend
        if self.device == "cpu":
            return "cpu"
        if self.model.positions == "alibi":
            return "reference"
        return "cuda" if self.element < FP32 else "efficient"

    @cached_property
    def pattern(self) -> Pattern:
        """What a token sees. Of chosen blocks the rows are those of as many blocks as are kept, all of them before the query."""
        pattern = self.model.pattern()
        if pattern.top is not None:  # the choice is the tokens': what any choice may need is everything
            pattern = Pattern()
        return pattern

    @property
    def ring_ranks(self) -> list[int]:
        """The ring ranks to look at for the busiest: all of a small ring, of a large one the first, middle and last."""
        ring = self.mesh.ring
        return list(range(ring)) if ring <= 8 else [0, ring // 2, ring - 1]

    def hops(self, rank: int) -> list[Hop]:
        """The hops of a ring rank, tiles as its kernel wants them; those of the plain formula, which are countless, whole."""
        own = self.length // self.mesh.ring
        split = _whole if self.backend == "reference" else BACKENDS[self.backend].split
        return make_plan(self.pattern, own, own, self.mesh.ring, rank, self.mesh.layout, split)

    def row(self, values: int, element: int | None = None) -> int:
        """Bytes of ``values`` numbers for each sequence that a rank takes at once."""
        return self.config.training.micro_batch * values * (self.element if element is None else element)

    def changed(self, section: str, **keys) -> Shape:
        """The same rank with other keys in a section of its configuration; the mesh stays. Raises ValueError as the section does."""
        section_value = replace(getattr(self.config, section), **keys)
        return replace(self, config=self.config.model_copy(update={section: section_value}))


def _whole(tile: Tile, alibi: bool) -> list[Tile]:
    return [tile]
