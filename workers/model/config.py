"""The shape of a decoder of the Llama family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. ``vocab_size=None`` is filled from the corpus, rounded up to a multiple of 64.

    ``head_dim`` is ``dim / heads`` and ``kv_heads`` is ``heads`` unless given.
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
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        for name in ("dim", "layers", "heads", "head_dim", "ffn_dim", "vocab_size"):
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
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; rotary embeddings need an even number")

    @property
    def parameters(self) -> int:
        """Number of trainable values; ``vocab_size`` must be known."""
        heads_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.dim * (2 * heads_dim + 2 * kv_dim) + (heads_dim + 2 * kv_dim if self.qkv_bias else 0)
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        block = attention + 3 * self.dim * self.ffn_dim + norms
        return self.layers * block + self.dim + self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)


def padded_vocabulary(size: int, multiple: int = 64) -> int:
    """The vocabulary rounded up, so that it divides over tensor ranks; the extra ids never occur."""
    return -(-size // multiple) * multiple
