"""Positions: rotary embedding (Su et al. 2021, RoFormer) in the half-rotation form of Llama checkpoints, its scalings, and sinusoids.

Positions are integers and **global**: never the index inside a rank's shard. Angles are products in float64, reduced by
whole turns before they become float32, so that positions of ten millions keep their accuracy.

Legend: B batch, S tokens of this rank, H heads, D head size (model size for sinusoids), F = D / 2 frequencies.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields

import torch
from torch import nn

# By type: what must be given, and what may be.
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
}
OPTIONAL = {
    "linear": ("original_max_position_embeddings",),
    "dynamic": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": (),
    "longrope": ("factor", "attention_factor"),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for sequences longer than the model was trained at. Names and results are Hugging Face's.

    linear: all divided by ``factor`` (Chen et al. 2023, position interpolation).
    dynamic: a larger base, by how far a sequence goes beyond ``original_max_position_embeddings`` (NTK-aware; bloc97, emozilla 2023).
    yarn: slow ones divided by ``factor``, fast ones kept, a ramp between those that turn ``beta_slow`` (1) and ``beta_fast`` (32)
        times in the original length; its ends are whole numbers unless ``truncate`` is false (Peng et al. 2023).
    llama3: the same with a ramp over wavelengths, original length / ``high_freq_factor`` to / ``low_freq_factor`` (Llama 3.1).
    longrope: each divided by its own ``short_factor``, or ``long_factor`` in a sequence beyond the original length (Ding et al. 2024).

    ``attention_factor`` multiplies cos and sin; by default yarn takes it from ``factor`` (with ``mscale``, ``mscale_all_dim``
    as DeepSeek does), longrope from ``factor`` and the original length.
    """

    rope_type: str
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.rope_type not in REQUIRED:
            raise ValueError(f"model.rope_scaling.rope_type is {self.rope_type!r}; it must be one of {', '.join(REQUIRED)}")
        known = REQUIRED[self.rope_type] + OPTIONAL[self.rope_type]
        for name in (field.name for field in fields(self)[1:]):
            value = getattr(self, name)
            if value is None:
                if name in REQUIRED[self.rope_type]:
                    raise ValueError(f"model.rope_scaling.{name} is not set; {self.rope_type} needs it")
                continue
            if name not in known:
                raise ValueError(f"model.rope_scaling.{name} is {value!r}, but {self.rope_type} has no such key; leave it out")
            if name in ("short_factor", "long_factor"):
                object.__setattr__(self, name, tuple(value) if isinstance(value, (list, tuple)) else (value,))
            if name != "truncate":
                _check_number(name, getattr(self, name))
            elif not isinstance(value, bool):
                raise ValueError(f"model.rope_scaling.truncate is {value!r}; it must be true or false")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"model.rope_scaling.high_freq_factor is {self.high_freq_factor}; it must be more than low_freq_factor = {self.low_freq_factor}"
            )
        if self.rope_type == "yarn" and (self.beta_fast or 32) < (self.beta_slow or 1):
            raise ValueError(
                f"model.rope_scaling.beta_fast is {self.beta_fast or 32}; it must be at least beta_slow = {self.beta_slow or 1}"
            )
        if self.rope_type == "longrope" and self.factor is None and self.attention_factor is None:
            raise ValueError(
                "model.rope_scaling has neither factor nor attention_factor; longrope needs one (factor = longest length / original length)"
            )

    @classmethod
    def parse(cls, given: dict) -> RopeScaling:
        """From a mapping, as a configuration or a checkpoint holds it. Raises ValueError, one line, for an unknown key too."""
        names = [field.name for field in fields(cls)]
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, 1, 0.0)[0]
                raise ValueError(f"unknown key model.rope_scaling.{key}; the nearest is {near}")
        if "rope_type" not in given:
            raise ValueError(f"model.rope_scaling.rope_type is not set; it must be one of {', '.join(REQUIRED)}")
        return cls(**given)

    def check(self, head_dim: int, theta: float) -> None:
        """Raise ValueError when a model of this head size and base cannot be scaled so."""
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if values is not None and len(values) != head_dim // 2:
                raise ValueError(f"model.rope_scaling.{name} has {len(values)} numbers; it must have model.head_dim / 2 = {head_dim // 2}")
        if self.rope_type == "dynamic" and head_dim == 2:
            raise ValueError("model.head_dim is 2; dynamic scaling has no base to change there: use at least 4")
        if self.rope_type == "yarn" and theta <= 1:
            raise ValueError(f"model.rope_theta is {theta}; yarn needs more than 1")

    @property
    def depends_on_length(self) -> bool:
        return self.rope_type in ("dynamic", "longrope")

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by: over a longer context scores need a wider spread."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.rope_type == "yarn":
            if self.mscale and self.mscale_all_dim:
                return self._yarn_scale(self.mscale) / self._yarn_scale(self.mscale_all_dim)
            return self._yarn_scale(1.0)
        if self.rope_type == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        return 1.0

    def _yarn_scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


def _check_number(name: str, value) -> None:
    """Raise ValueError unless every number is finite and at least what its formula needs."""
    least = {"factor": 1, "original_max_position_embeddings": 2, "mscale": 0, "mscale_all_dim": 0}.get(name)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"model.rope_scaling.{name} is {number!r}; it must be a number")
        if least is None and number <= 0:
            raise ValueError(f"model.rope_scaling.{name} is {number!r}; it must be more than 0")
        if least is not None and number < least:
            raise ValueError(f"model.rope_scaling.{name} is {number!r}; it must be at least {least}")


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None, length: torch.Tensor | None = None, device=None):
    """Radians that each pair of a head turns a position, float64 [F].

    With ``dynamic`` and ``longrope`` they depend on ``length``, int [...]: longest position + 1 of the sequence; then [..., F].
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    plain_F = theta**-exponent_F
    if scaling is None:
        return plain_F
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        return plain_F / factor
    if scaling.rope_type == "dynamic":
        stretch = factor * length.clamp(min=original).double() / original - (factor - 1)
        base = theta * stretch ** (head_dim / (head_dim - 2))
        return base.unsqueeze(-1) ** -exponent_F
    if scaling.rope_type == "longrope":
        short_F, long_F = (plain_F / plain_F.new_tensor(values) for values in (scaling.short_factor, scaling.long_factor))
        return torch.where((length > original).unsqueeze(-1), long_F, short_F)
    if scaling.rope_type == "llama3":
        turns_F = original * plain_F / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    else:
        kept_F = 1 - _yarn_ramp(head_dim, theta, scaling).to(plain_F.device)
    return plain_F * kept_F + plain_F / factor * (1 - kept_F)


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """How much each frequency is interpolated, float64 [F]: 0 for the fast ones, 1 for the slow ones."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast or 32), pair_that_turns(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, as Hugging Face has it
    return ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)


def rotary_table(
    positions_BS: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None, length: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, S, 1, F] of the angles, float32.

    ``length`` (int, [B, S] or [B, 1]) is what a scaling may depend on: longest position + 1 of each token's own document,
    over **all** ranks. None takes that of the positions given, row by row, which is right only where they are all there.
    """
    if length is None and scaling is not None and scaling.depends_on_length:
        length = positions_BS.amax(-1, keepdim=True) + 1
    inverse = inverse_frequencies(head_dim, theta, scaling, length, positions_BS.device)
    angles = _angles(positions_BS, inverse)
    cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)
    if scaling is not None and scaling.attention_scaling != 1:
        cos, sin = cos * scaling.attention_scaling, sin * scaling.attention_scaling
    return cos, sin


def _angles(positions_BS: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return torch.remainder(positions_BS.double().unsqueeze(-1) * inverse, 2 * torch.pi).float()


class Sinusoids(nn.Module):
    """Sinusoidal positions to be added to the embedding (Vaswani et al. 2017): sin in the even dims, cos in the odd ones.

    A module without weights, so that tensor parallelism can hand it the positions of the tokens that a rank holds.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, positions_BS: torch.Tensor) -> torch.Tensor:
        """float32 [B, S, D]."""
        angles_BSF = _angles(positions_BS, inverse_frequencies(self.dim, 10_000.0, device=positions_BS.device))
        return torch.stack((angles_BSF.sin(), angles_BSF.cos()), dim=-1).flatten(-2)


class _Rotate(torch.autograd.Function):
    """(a, b) → (a cos − b sin, b cos + a sin) for the halves of the head; the gradient turns back. Keeps no copy of x."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out


def rotate(x_BSHD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``x`` turned by the angles of ``rotary_table``; computed in float32, returned in the type of ``x``."""
    cos, sin = table
    return _Rotate.apply(x_BSHD.float(), cos, sin).to(x_BSHD.dtype)
