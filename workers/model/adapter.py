"""Low-rank adapters (LoRA, Hu et al. 2021): the base model is frozen, chosen projections learn a correction of low rank.

The usual way to lengthen a model on few GPUs: frozen weights have no gradient and no optimizer state, and a checkpoint
holds the adapter alone. LongLoRA (Chen et al. 2023) found that norms and embeddings must train as well when the context grows.

Legend: B batch, S tokens of this rank, I and O inputs and outputs of a projection, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from workers.model.config import ModelConfig
from workers.model.decoder import OWN_OF_ATTENTION, Decoder, generator_of, set_parameter
from workers.model.layers import local_part


@dataclass(frozen=True)
class AdapterConfig:
    """rank: of the corrections; null is no adapter, all weights train. alpha: a correction is alpha / rank · B A; 16 is LongLoRA's.

    targets: the projections that have one: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.
    train_norms, train_embeddings: train these weights of the base, too (a tied head goes with its embedding).
    """

    rank: int | None = None
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    train_norms: bool = False
    train_embeddings: bool = False

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))  # JSON knows lists only
        if self.rank is None:
            for name, field in type(self).__dataclass_fields__.items():
                if getattr(self, name) != field.default:
                    raise ValueError(
                        f"adapter.{name} is {getattr(self, name)!r}, but adapter.rank is not set: set it, or leave out adapter.{name}"
                    )
        elif self.rank < 1:
            raise ValueError(f"adapter.rank is {self.rank}; it must be at least 1, or null for no adapter")
        if self.alpha <= 0:
            raise ValueError(f"adapter.alpha is {self.alpha}; it must be more than 0")
        known = projections(ModelConfig())
        for name in self.targets:
            if name not in known:
                raise ValueError(f"adapter.targets has {name!r}; it can have {', '.join(known)}")
        if not self.targets:
            raise ValueError(f"adapter.targets is empty; name at least one of {', '.join(known)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError when the rank is more than a target of ``model`` can have."""
        for name in self.targets if self.rank is not None else ():
            inputs, outputs = projections(model)[name]
            if self.rank > min(inputs, outputs):
                raise ValueError(
                    f"adapter.rank = {self.rank} is more than the rank of {name}, which is {outputs} × {inputs}; "
                    f"choose at most {min(inputs, outputs)}, or leave {name} out of adapter.targets"
                )

    def trains(self, name: str) -> bool:
        """Does the parameter of this name train beside the adapter's own?"""
        return (
            ".lora_" in name
            or name.endswith(OWN_OF_ATTENTION)
            or (self.train_norms and name.endswith("norm.weight"))
            or (self.train_embeddings and name == "embed_tokens.weight")
        )


def projections(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every projection of a block."""
    heads_dim, kv_dim = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "q_proj": (model.dim, heads_dim), "k_proj": (model.dim, kv_dim), "v_proj": (model.dim, kv_dim), "o_proj": (heads_dim, model.dim),
        "gate_proj": (model.dim, model.ffn_dim), "up_proj": (model.dim, model.ffn_dim), "down_proj": (model.ffn_dim, model.dim),
    }  # fmt: skip


class LoRALinear(nn.Linear):
    """A projection with its adapter: y = W x + scale · B (A x). Names of parameters are those of PEFT, the base's stay as they are.

    Under tensor parallelism the correction is computed on local tensors and has the layout of the base's output before it
    is reduced, so the two are reduced as one, and no message is added:

    1. columns (W by outputs): A whole, B by outputs; x is whole, and its gradient a part of the sum, as the base's;
    2. rows (W by inputs): A by inputs, B whole; x is this rank's share, the correction a part of the sum, as W x is.

    What is whole gets a part of its gradient on each rank (``local_part``).
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x_BSI: torch.Tensor) -> torch.Tensor:
        base_BSO = super().forward(x_BSI)
        low_BSR = F.linear(local_part(x_BSI), local_part(self.lora_A.weight)) * self.scale
        correction_BSO = F.linear(low_BSR, local_part(self.lora_B.weight))
        if isinstance(base_BSO, DTensor):
            correction_BSO = DTensor.from_local(
                correction_BSO, base_BSO.device_mesh, base_BSO.placements, run_check=False, shape=base_BSO.shape, stride=base_BSO.stride()
            )
        return base_BSO + correction_BSO

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain projection that gives the same: W + scale · B A, summed in float32 and cast to W's type. Whole weights only."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        correction_OI = self.lora_B.weight.float() @ self.lora_A.weight.float()
        plain.weight = nn.Parameter(torch.add(self.weight, correction_OI, alpha=self.scale).to(self.weight.dtype))
        plain.bias = self.bias
        return plain


def add_adapters(model: Decoder, config: AdapterConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """Give the targets their adapters and freeze the rest, in place, before the model is parallelized; nothing without a rank.

    Frozen weights are held in ``dtype``, that of the forward pass: nothing is ever added to them, so they need no wider copy.
    """
    if config.rank is None:
        return model
    for block in model.layers:
        for owner in (block.self_attn, block.mlp):
            for name in set(config.targets).intersection(dict(owner.named_children())):
                setattr(owner, name, LoRALinear(getattr(owner, name), config.rank, config.scale))
    for name, parameter in model.named_parameters():
        if not config.trains(name):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
    return model


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted projections by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def init_adapters(model: nn.Module, seed: int) -> None:
    """A uniform in ±1 / √inputs (PEFT's choice), B zero: the model starts as its base, to the bit. The same on every mesh."""
    for name, module in adapters(model).items():
        generator = generator_of(seed, f"{name}.lora_A.weight")
        shape, bound = module.lora_A.weight.shape, module.in_features**-0.5
        set_parameter(module.lora_A.weight, torch.empty(shape).uniform_(-bound, bound, generator=generator))
        set_parameter(module.lora_B.weight, torch.zeros(module.lora_B.weight.shape))


def merge(model: Decoder) -> Decoder:
    """Put the adapters into the weights, in place: what is left is a decoder without adapters. Whole weights only."""
    for name, module in adapters(model).items():
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, module.merged())
    return model


def count_parameters(model: ModelConfig, config: AdapterConfig) -> tuple[int, int]:
    """(parameters that train, parameters in all) of a model with its adapter."""
    with torch.device("meta"):
        parameters = list(add_adapters(Decoder(model), config).parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
