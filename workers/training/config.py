"""What a training run is told: steps, optimizer, schedule, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation.

    steps: optimizer steps of the whole run, or of a stage of it.
    context: tokens of a window; the mesh pads it to what it divides.
    batch: sequences of a step over the whole mesh. micro_batch: sequences that a data-parallel group takes at once;
        the rest of its share accumulates.
    learning_rate: peak; reached after warmup_steps, then kept (decay "constant") or brought down to
        learning_rate · final_ratio at the last step ("linear", "cosine", or "wsd": kept until the last share decay_ratio of the steps).
    clip: largest norm of the gradient over the whole mesh; 0 does not clip.
    skips_in_a_row: after so many non-finite steps in a row the last checkpoint is restored; when it happens again, the run stops.
    evaluate_every: steps between held-out evaluations; 0 evaluates before the first step and after the last only.
    precision: "fp32", or "bf16" for weights and activations in bfloat16 with float32 master weights and reductions.
    """

    steps: int = 100
    context: int = 4096
    batch: int = 1
    micro_batch: int = 1
    seed: int = 0
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    decay: str = "cosine"
    decay_ratio: float = 0.1
    final_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    skips_in_a_row: int = 5
    evaluate_every: int = 0
    precision: str = "fp32"

    def __post_init__(self):
        for name in ("steps", "context", "batch", "micro_batch", "skips_in_a_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup_steps", "evaluate_every", "learning_rate", "weight_decay", "clip", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"training.{name} is {getattr(self, name)}; it must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}; it must be at least 0 and less than 1")
        if self.eps <= 0:
            raise ValueError(f"training.eps is {self.eps}; it must be more than 0")
        for name in ("final_ratio", "decay_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}; it must lie in 0–1")
        if self.seed >= 1 << 32:
            raise ValueError(f"training.seed is {self.seed}; it must be less than 2³²")
        if self.decay not in ("constant", "linear", "cosine", "wsd"):
            raise ValueError(f"training.decay is {self.decay!r}; it must be constant, linear, cosine or wsd")
        if self.decay != "wsd" and self.decay_ratio != type(self).decay_ratio:
            raise ValueError(
                f"training.decay_ratio is {self.decay_ratio}, but training.decay is {self.decay}: set it to wsd, or leave out decay_ratio"
            )
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"training.precision is {self.precision!r}; it must be fp32 or bf16")

    def micro_steps(self, dp: int) -> int:
        """Forward passes of a data-parallel group in one step. Raises ValueError when the batch does not divide."""
        if self.batch % (dp * self.micro_batch):
            raise ValueError(
                f"training.batch = {self.batch} sequences do not divide by mesh.dp × training.micro_batch = {dp} × {self.micro_batch}"
            )
        return self.batch // (dp * self.micro_batch)


@dataclass(frozen=True)
class CheckpointConfig:
    """every: steps between checkpoints; 0 writes one at the end only. keep: how many of the newest stay.

    init: a model folder (see ``ringspan import``) whose architecture and weights a new run starts from.
    """

    every: int = 50
    keep: int = 2
    init: str | None = None

    def __post_init__(self):
        if self.every < 0:
            raise ValueError(f"checkpoint.every is {self.every}; it must not be negative")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep is {self.keep}; at least 1 must stay")
