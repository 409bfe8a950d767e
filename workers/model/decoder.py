"""The decoder: embedding, blocks of attention and feed-forward, norm, head. Names are those of Llama checkpoints.

Legend: B batch, S tokens of this rank, D model size, H query heads, G KV heads, K head size, V vocabulary.

Build on the meta device, parallelize (``workers.parallel``), materialise with ``to_empty``, then ``init_weights`` or load.
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from workers.attention import Pattern, attend
from workers.model.config import ModelConfig
from workers.model.layers import MLP, RMSNorm
from workers.model.positions import Sinusoids, rotary_table, rotate

# Learnt by attention of models that see otherwise: no published model, and so no file and no adapter's base, has them.
OWN_OF_ATTENTION = ("self_attn.memory_k", "self_attn.memory_v", "self_attn.pool")


class Attention(nn.Module):
    """Projections, rotary positions, and ``attend``. ``mesh`` and ``backend`` are set when the model is parallelized.

    ``memory_k``, ``memory_v`` [M, G, K] are keys and values that every token sees, ``pool`` [N, G, K] the vectors that
    summarise segments (see ``workers.attention.hierarchical``); None where the model has none.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.where = f" in layer {layer}"
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.dim, config.heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        learnt = lambda count: nn.Parameter(torch.empty(count, config.kv_heads, config.head_dim)) if count else None
        self.memory_k, self.memory_v = learnt(config.memory), learnt(config.memory)
        self.pool = learnt(config.summaries if config.learns_pooling else 0)
        self.mesh = None
        self.backend = "auto"

    def forward(self, x_BSD: torch.Tensor, table, pattern: Pattern, cache=None) -> torch.Tensor:
        # Under tensor parallelism a rank's projections hold its share of the heads.
        q_BSHK, k_BSGK, v_BSGK = (proj(x_BSD).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        if table is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, table), rotate(k_BSGK, table)
        if cache is not None:
            k_BSGK, v_BSGK = cache.append(k_BSGK, v_BSGK)
        memory = (_local(self.memory_k), _local(self.memory_v)) if self.memory_k is not None else None
        out_BSHK = attend(
            q_BSHK, k_BSGK, v_BSGK, pattern, mesh=self.mesh, backend=self.backend,
            memory=memory, pool=_local(self.pool), where=self.where,
        )  # fmt: skip
        return self.o_proj(out_BSHK.flatten(2))


def _local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This tensor rank's share of the heads."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config.dim, config.ffn_dim)

    def forward(self, x_BSD: torch.Tensor, table, pattern: Pattern, cache=None) -> torch.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), table, pattern, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Decoder(nn.Module):
    """A decoder of the Llama family.

    1. Embed tokens; compute the rotary table once, from explicit positions (with ALiBi the attention knows them; sinusoids
       are added to the embedding, which is multiplied by √D to be of their size, as Vaswani et al. 2017 do).
    2. Run the blocks. Everything is local to this rank but ``attend``.
    3. Norm; then ``head``: by default logits, in training whatever ``head`` computes from hidden states and the head's
       weight (the chunked loss, which never forms logits of the whole sequence).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.vocab_size is not None, "fill vocab_size before building the model"
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.sinusoids = Sinusoids(config.dim) if config.positions == "sinusoidal" else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share the embedding with the head; again after ``to_empty``, which gives each its own storage."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor,
        pattern: Pattern,
        *,
        length: torch.Tensor | None = None,
        head=None,
        caches=None,
    ):
        """
        Args:
            tokens_BS: this rank's tokens, int.
            positions_BS: their positions, int; local tokens, global numbers.
            length: int [B, S], longest position + 1 of each token's document (``Batch.length``), for scalings of the rotary embedding
                that depend on it; None where this rank holds the whole sequence, or what there is of it so far.
            head: ``head(hidden_BSD, weight_VD)``; None gives logits [B, S, V].
            caches: one KV cache a block, for generation on one rank; tokens are then the continuation.
        """
        x_BSD = self.embed_tokens(tokens_BS)
        if self.sinusoids is not None:
            x_BSD = x_BSD * math.sqrt(self.config.dim) + self.sinusoids(positions_BS).to(x_BSD.dtype)
        table = None
        if self.config.positions == "rope":
            table = rotary_table(positions_BS, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling, length)
        for index, block in enumerate(self.layers):
            x_BSD = block(x_BSD, table, pattern, caches[index] if caches is not None else None)
        x_BSD = self.norm(x_BSD)
        if head is None:
            return F.linear(x_BSD, self.lm_head.weight)
        return head(x_BSD, self.lm_head.weight)

    @torch.no_grad()
    def init_weights(self, seed: int, names: set[str] | None = None) -> None:
        """The same values on every mesh: each parameter is drawn whole from a generator seeded by the run's seed and its name, then sharded.

        Normal with deviation 0.02; projections back into the residual stream 0.02 / √(2 · layers) (Radford et al. 2019).
        ``names`` are those to draw; None is all.
        """
        for name, parameter in self.named_parameters():
            if names is not None and name not in names:
                continue
            generator = generator_of(seed, name)
            if parameter.ndim == 1:
                whole = torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
            else:
                deviation = 0.02 / math.sqrt(2 * self.config.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                whole = torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
            set_parameter(parameter, whole)


def generator_of(seed: int, name: str) -> torch.Generator:
    """What draws the parameter ``name`` of a run with this seed: the same numbers whatever else is drawn."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # it looks at 32 bits only


@torch.no_grad()
def set_parameter(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the whole value into a parameter, sharded or not. Every rank has the value, so nothing is sent."""
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
