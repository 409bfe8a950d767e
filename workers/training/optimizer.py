"""AdamW (Loshchilov & Hutter 2019), its schedule, and the gradient's norm over the whole mesh."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from workers.training.config import TrainingConfig


def build_optimizer(model: torch.nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Fused AdamW over what trains; matrices decay, norms and biases do not. Its state exists from the start, so a checkpoint can be loaded into it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for parameter in matrices + vectors:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate of a stage's optimizer step ``step`` (the first is 1). A function of the step alone, so there is nothing to restore.

    "wsd" is warm-up, stable, decay (Hu et al. 2024, MiniCPM): a run can be prolonged from any checkpoint of its stable part. It
    falls as 1 − √progress, which ends lower than a line (Hägele et al. 2024, "Scaling laws … beyond fixed training durations").
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    first, last = config.warmup_steps, config.steps
    if config.decay == "wsd":
        first = max(first, last - round(config.decay_ratio * last))
    progress = min(max(0, step - first) / max(1, last - first), 1.0)
    shape = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "wsd": 1 - math.sqrt(progress)}
    return config.learning_rate * (config.final_ratio + (1 - config.final_ratio) * shape[config.decay])


def local_gradients(model: torch.nn.Module, held_twice: tuple[str, ...] = ()) -> list[tuple[str, torch.Tensor, int]]:
    """``(name, this rank's part of the gradient, how many ranks hold that same part)``; two pipeline stages have what ``held_twice`` names."""
    found = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        copies = 2 if name in held_twice else 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.placements, gradient.device_mesh.shape)
            copies *= math.prod(size for placement, size in sizes if placement.is_replicate())
            gradient = gradient.to_local()
        found.append((name, gradient, copies))
    return found


def squared_norm(gradients: list[tuple[str, torch.Tensor, int]]) -> float:
    """This rank's share of the squared gradient norm: shares of all ranks add up to the square of the true global norm.

    A gradient that is replicated over tensor ranks counts once, not once a rank. The sum is in float64.
    """
    held = [(gradient, copies) for _, gradient, copies in gradients if gradient.numel()]
    if not held:  # more ranks than rows
        return 0.0
    norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in held])).double()
    copies = torch.tensor([copies for _, copies in held], dtype=torch.float64, device=norms.device)
    return (norms.square() / copies).sum().item()


def first_non_finite(gradients: list[tuple[str, torch.Tensor, int]], stage: int = 0) -> str | None:
    """The name of the first parameter, in the model's order, whose gradient is not finite on any rank. A collective.

    ``stage`` is this rank's pipeline stage: later stages have later parameters.
    """
    ours = next(((stage, i, name) for i, (name, g, _) in enumerate(gradients) if not torch.isfinite(g).all()), None)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, ours)
    first = min(filter(None, found), default=None)
    return first[2] if first is not None else None


def scale_(gradients: list[tuple[str, torch.Tensor, int]], factor: float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    torch._foreach_mul_([gradient for _, gradient, _ in gradients], factor)
