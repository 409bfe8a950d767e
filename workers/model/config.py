"""The shape of a decoder of the Llama family."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from workers.attention import Hierarchy, Pattern, TopBlocks
from workers.model.positions import RopeScaling

POSITIONS = ("rope", "alibi", "sinusoidal", "none")
# Fields that no weight's shape or meaning hangs on; of the hierarchy's, those that ``other_weights`` compares by themselves.
WEIGHTLESS = {
    "norm_eps", "rope_theta", "rope_scaling", "positions", "window", "sinks", "block", "stride",
    "segment", "summaries", "reach", "pooling", "top_blocks", "top_block_size",
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. ``vocab_size=None`` is filled from the corpus, rounded up to a multiple of 64.

    ``head_dim`` is ``dim / heads`` and ``kv_heads`` is ``heads`` unless given. ``positions`` is rope, alibi,
    sinusoidal or none; ``rope_scaling`` stretches the first (a ``RopeScaling``, or a mapping of its fields).

    What a token sees, besides causality and documents (see ``workers.attention.Pattern`` for the first four):
    window, sinks, block, stride;
    memory: keys and values that each layer learns and every token sees (learnt sinks; Sukhbaatar et al. 2019);
    segment, summaries, reach, pooling: hierarchical attention, on when ``segment`` is set; pooling is learnt or mean;
    top_blocks, top_block_size: dynamic top-k attention, on when ``top_blocks`` is set.
    """

    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn_dim: int = 768
    vocab_size: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: str = "rope"
    window: int | None = None
    sinks: int = 0
    block: int | None = None
    stride: int | None = None
    memory: int = 0
    segment: int | None = None
    summaries: int = 1
    reach: int | None = None
    pooling: str = "learnt"
    top_blocks: int | None = None
    top_block_size: int = 128

    def __post_init__(self):
        for name in (
            "top_blocks",
            "top_block_size",
            "segment",
            "summaries",
            "reach",
            "dim",
            "layers",
            "heads",
            "head_dim",
            "ffn_dim",
            "vocab_size",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("norm_eps", "rope_theta"):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be more than 0")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}")
        if self.head_dim is None:
            if self.dim % self.heads:
                raise ValueError(f"model.dim = {self.dim} does not divide by model.heads = {self.heads}; set model.head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.head_dim % 2 and self.positions == "rope":
            raise ValueError(f"model.head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.dim % 2 and self.positions == "sinusoidal":
            raise ValueError(f"model.dim is {self.dim}; sinusoidal positions need an even number")
        if self.rope_scaling is not None:
            if not isinstance(self.rope_scaling, RopeScaling):
                object.__setattr__(self, "rope_scaling", RopeScaling.parse(self.rope_scaling))
            if self.positions != "rope":
                raise ValueError(f"model.rope_scaling is set, but model.positions is {self.positions}; leave it out, or use rope")
            self.rope_scaling.check(self.head_dim, self.rope_theta)
        for name, choices in (("positions", POSITIONS), ("pooling", ("learnt", "mean"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"model.{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}")
        if self.memory < 0:
            raise ValueError(f"model.memory is {self.memory}; it must not be negative")
        for switch, names in (("segment", ("summaries", "reach", "pooling")), ("top_blocks", ("top_block_size",))):
            for name in names:
                if getattr(self, switch) is None and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ValueError(
                        f"model.{name} is {getattr(self, name)!r}, but model.{switch} is not set: set it, or leave out model.{name}"
                    )
        try:
            self.pattern()
        except ValueError as error:
            raise ValueError(f"model: {error}") from error

    def pattern(self, documents: torch.Tensor | None = None, parts: torch.Tensor | None = None) -> Pattern:
        """What the tokens of sequences with these documents see. Raises ValueError for fields that do not combine.

        ``parts`` are the papers of a shelf or the files of a repository, which together are one document; None: a document is
        one part. Nothing is seen across documents. Across a document's parts all is seen, but under a hierarchy summaries only.
        """
        hierarchy = Hierarchy(self.segment, self.summaries, self.reach) if self.segment is not None else None
        top = TopBlocks(self.top_block_size, self.top_blocks) if self.top_blocks is not None else None
        shelves = documents if hierarchy is not None else None
        if hierarchy is not None and parts is not None:
            documents = parts
        return Pattern(
            window=self.window, documents=documents, sinks=self.sinks, block=self.block, stride=self.stride,
            alibi=self.positions == "alibi", hierarchy=hierarchy, top=top, shelves=shelves,
        )  # fmt: skip

    def other_weights(self, other: ModelConfig) -> str | None:
        """The first field because of which weights of ``other`` are none of this model; None when they are."""
        names = [field.name for field in fields(self) if field.name not in WEIGHTLESS]
        if self.learns_pooling != other.learns_pooling:
            names += ["pooling", "segment"]
        elif self.learns_pooling:
            names += ["summaries"]
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)

    @property
    def learns_pooling(self) -> bool:
        return self.segment is not None and self.pooling == "learnt"

    @property
    def receptive_field(self) -> int | None:
        """Tokens, its own the last of them, that a token's representation depends on; None where that has no bound, or where the
        place in the document matters (of sinks, blocks, segments, absolute positions)."""
        placed = self.sinks or self.block is not None or self.segment is not None or self.top_blocks is not None
        if placed or self.window is None or self.positions == "sinusoidal" or self.rope_scaling is not None:
            return None
        return 1 + self.layers * (self.window - 1)

    @property
    def parameters(self) -> int:
        """Number of trainable values; ``vocab_size`` must be known."""
        heads_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.dim * (2 * heads_dim + 2 * kv_dim) + (heads_dim + 2 * kv_dim if self.qkv_bias else 0)
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        attention += 2 * self.memory * kv_dim + (self.summaries * kv_dim if self.learns_pooling else 0)
        block = attention + 3 * self.dim * self.ffn_dim + norms
        return self.layers * block + self.dim + self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)


def padded_vocabulary(size: int, multiple: int = 64) -> int:
    """The vocabulary rounded up, so that it divides over tensor ranks; the extra ids never occur."""
    return -(-size // multiple) * multiple
