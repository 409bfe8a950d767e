"""Small models trained at L tokens and scored at multiples of L, one for each position encoding, in one process.

1. Of the documents that are long enough, one in ten is held out. All models see the same windows and start from the same weights.
2. The first ``longest`` tokens of each held-out document are cut into windows of m · L and scored, so that every m predicts
   the same targets; what differs is how much stands before them.
3. A rotary model is scored as it is and with each scaling, without further training; and once more after a short training at the
   longest length with YaRN, a tenth of the steps, as its authors do.

Legend: N documents, S tokens, B sequences of a batch.
"""

from __future__ import annotations

import dataclasses
import math
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from workers.model import Decoder, ModelConfig
from workers.training.config import TrainingConfig
from workers.training.loss import token_losses
from workers.training.optimizer import build_optimizer, learning_rate

THETA = 10_000.0
TUNED = "rope, yarn tuned"
ENCODINGS = ("rope", "alibi", "sinusoidal", "none")
HEAD_DIM = 32
HELD_OUT_SHARE = 10


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The sizes. ``context`` is L; ``batch`` sequences of L tokens make a step; ``windows`` documents are held out at most."""

    context: int
    multiples: tuple[int, ...]
    steps: int
    batch: int
    dim: int
    layers: int
    windows: int
    seed: int
    vocab_size: int

    @property
    def longest(self) -> int:
        return self.context * self.multiples[-1]

    def model(self, **changes) -> ModelConfig:
        shape = dict(dim=self.dim, layers=self.layers, heads=self.dim // HEAD_DIM, ffn_dim=3 * self.dim, vocab_size=self.vocab_size)
        return ModelConfig(**{**shape, "rope_theta": THETA, **changes})

    def scored(self, multiple: int) -> dict[str, ModelConfig]:
        """What is scored at ``multiple`` · L, by name; what stands before the comma is the model that was trained."""
        scaling = lambda kind, factor: {"rope_type": kind, "factor": factor, "original_max_position_embeddings": self.context}
        return {
            **{name: self.model(positions=name) for name in ENCODINGS},
            "rope, linear": self.model(rope_scaling=scaling("linear", multiple)),
            "rope, dynamic": self.model(rope_scaling=scaling("dynamic", 2)),
            "rope, ntk": self.model(rope_theta=THETA * multiple ** (HEAD_DIM / (HEAD_DIM - 2))),  # the base alone, told the length
            "rope, yarn": self.model(rope_scaling=scaling("yarn", multiple)),
            TUNED: self.tuned,
        }

    @property
    def tuned(self) -> ModelConfig:
        scaling = {"rope_type": "yarn", "factor": self.multiples[-1], "original_max_position_embeddings": self.context}
        return self.model(rope_scaling=scaling)


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents to learn from, and held-out ones int64 [N, longest + 1]."""

    learnt: list[np.ndarray]
    held_out: torch.Tensor

    @classmethod
    def split(cls, documents: Iterator[np.ndarray], longest: int, windows: int) -> Text:
        """One long document in ten is held out, ``windows`` at most. Raises ValueError when none is long enough for that."""
        learnt, kept = [], []
        for number, document in enumerate(d for d in documents if len(d) > longest):
            keep = number % HELD_OUT_SHARE == 0 and len(kept) < windows
            (kept if keep else learnt).append(document[: longest + 1].astype(np.int64) if keep else document)
        if not kept or not learnt:
            found = len(kept) + len(learnt)
            raise ValueError(f"{found} documents have more than {longest} tokens and 2 are needed; use a smaller --context or --multiples")
        return cls(learnt, torch.from_numpy(np.stack(kept)))

    def batches(self, batch: int, tokens: int, seed: int) -> Iterator[torch.Tensor]:
        """Endless: int64 [B, tokens + 1], each row from inside one document, every place as likely."""
        generator = np.random.default_rng(seed)
        places = np.array([len(document) - tokens for document in self.learnt])
        while True:
            chosen = generator.choice(len(self.learnt), size=batch, p=places / places.sum())
            starts = generator.integers(places[chosen])
            yield torch.from_numpy(np.stack([self.learnt[d][s : s + tokens + 1].astype(np.int64) for d, s in zip(chosen, starts)]))


def standard_library() -> Iterator[np.ndarray]:
    """The bytes of each module of this Python's standard library, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(folder).parts):
            yield np.frombuffer(path.read_bytes(), dtype=np.uint8)


def measure(experiment: Experiment, text: Text, say: Callable[[str], None]) -> list[dict]:
    """A row for each encoding and multiple; see ``_row``. ``say`` gets a line when something is finished."""
    losses: dict[tuple[str, int], torch.Tensor] = {}
    trained: dict[str, Decoder] = {}
    for name in (*ENCODINGS, TUNED):
        if name == TUNED:
            model, steps = decoder(experiment.tuned, trained["rope"].state_dict()), max(1, experiment.steps // 10)
            tokens, batch = experiment.longest, max(1, experiment.batch // experiment.multiples[-1])
        else:
            model, steps, tokens, batch = decoder(experiment.model(positions=name)), experiment.steps, experiment.context, experiment.batch
            model.init_weights(experiment.seed)
        loss = train(model, text.batches(batch, tokens, experiment.seed), steps, tuning=name == TUNED)
        say(f"{name}: trained {steps} steps of {batch} × {tokens} tokens, loss {loss:.3f}")
        trained[name] = model
    for multiple in experiment.multiples:
        for name, config in experiment.scored(multiple).items():
            weights = trained[name if name in trained else name.partition(",")[0]].state_dict()
            losses[name, multiple] = score(decoder(config, weights), text.held_out, experiment.context * multiple)
        say(f"scored at {multiple} × {experiment.context} tokens")
    return [_row(experiment, name, multiple, losses) for name, multiple in losses]


def decoder(config: ModelConfig, weights: dict[str, torch.Tensor] | None = None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    if weights is not None:
        model.load_state_dict(weights)
    return model


def train(model: Decoder, batches: Iterator[torch.Tensor], steps: int, tuning: bool) -> float:
    """AdamW with a cosine; a tuning starts at a fifth of the rate. Returns the mean loss of the last tenth of the steps."""
    config = TrainingConfig(steps=steps, learning_rate=4e-4 if tuning else 2e-3, warmup_steps=max(1, steps // 20))
    optimizer = build_optimizer(model, config)
    last: list[float] = []
    for step in range(1, steps + 1):
        whole = next(batches)
        loss = _losses(model, whole)[0] / whole[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        optimizer.zero_grad()
        last = [*last, loss.item()][-max(1, steps // 10) :]
    return sum(last) / len(last)


@torch.no_grad()
def score(model: Decoder, held_out: torch.Tensor, tokens: int) -> torch.Tensor:
    """Loss of every held-out target, float32 [N, longest], when nothing is seen but windows of so many ``tokens``."""
    rows = held_out.unfold(1, tokens + 1, tokens).flatten(0, 1)  # windows overlap by one: the last target is the next one's first token
    at_once = max(1, 4096 // tokens)
    return torch.cat([_losses(model, part)[1] for part in rows.split(at_once)]).view(len(held_out), -1)


def _losses(model: Decoder, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and [B, S] of the losses of a batch [B, S + 1]."""
    tokens, targets = whole[:, :-1], whole[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, model.config.pattern(), head=partial(token_losses, targets_BS=targets))


def _row(experiment: Experiment, name: str, multiple: int, losses: dict[tuple[str, int], torch.Tensor]) -> dict:
    """perplexity: of all targets. ratio: to that of the model at L, without scaling. last_ratio: the same, of the targets of the last L
    tokens of each window alone. by_position: perplexity of each stretch of L tokens of a window.
    """
    context, base = experiment.context, name.partition(",")[0]
    stretches, at_l = (values.view(-1, multiple, context) for values in (losses[name, multiple], losses[base, 1]))
    return {
        "encoding": name, "multiple": multiple, "tokens": context * multiple,
        "perplexity": _perplexity(stretches),
        "ratio": _perplexity(stretches) / _perplexity(at_l),
        "last_ratio": _perplexity(stretches[:, -1]) / _perplexity(at_l[:, -1]),
        "by_position": [_perplexity(stretches[:, place]) for place in range(multiple)],
    }  # fmt: skip


def _perplexity(losses: torch.Tensor) -> float:
    return math.exp(losses.double().mean().item())
