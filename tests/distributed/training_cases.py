"""A tiny training run on real text, for the tests of this folder: what every rank executes."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from workers.mesh import MeshSpec
from workers.model import ModelConfig
from workers.model.adapter import AdapterConfig
from workers.parallel.memory import MemoryConfig
from workers.training.config import CheckpointConfig, TrainingConfig
from workers.training.loop import Job, train
from workers.training.window import Window

MODEL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=256)
TRAINING = TrainingConfig(steps=10, context=96, batch=2, learning_rate=3e-3, warmup_steps=3)
TEXT = np.frombuffer(inspect.getsource(argparse).encode(), dtype=np.uint8)


def window(number: int, context: int, packed: bool = True, parts: int = 1) -> Window:
    """Sequence ``number``: stretches of source code, packed as documents of unequal length and ``parts`` parts, some without targets."""
    generator = np.random.default_rng(number)
    tokens, targets = np.zeros(context, np.int32), np.full(context, -100, np.int32)
    positions, documents = np.zeros(context, np.int64), np.zeros(context, np.int32)
    start, document = 0, 0
    while start < context:
        stop = min(context, start + int(generator.integers(5, context))) if packed else context
        offset = int(generator.integers(0, len(TEXT) - context - 1))
        text = TEXT[offset : offset + stop - start + 1]
        tokens[start:stop] = text[:-1]
        if not (packed and document % 3 == 2):
            targets[start:stop] = text[1:]
        positions[start:stop] = np.arange(stop - start)
        documents[start:stop] = document
        start, document = stop, document + 1
    part = documents * parts + np.minimum(positions // 9, parts - 1)
    return Window(number, tokens, targets, positions, documents, part.astype(np.int32) if parts > 1 else None)


def stream(first: int, context: int, mesh, dp: int, parts: int = 1):
    """The group's share of the global order from sequence ``first`` on, as the feed delivers it."""
    number = first + mesh.dp_rank
    while True:
        yield window(number, context, parts=parts)
        number += dp


def run_training(
    spec: MeshSpec,
    run: str,
    *,
    model: ModelConfig = MODEL,
    training: TrainingConfig = TRAINING,
    checkpoint=CheckpointConfig(every=0),
    resume: str | None = None,
    init: str | None = None,
    held_out: int = 0,
    die_at: int | None = None,
    nan_at: tuple = (),
    nan_rank: int = 0,
    nan_in: str = "layers.1.mlp.up_proj.weight",
    memory: MemoryConfig = MemoryConfig(),
    adapter: AdapterConfig = AdapterConfig(),
    look=lambda model: None,
    parts: int = 1,
    device_type: str = "cpu",
) -> dict:
    """Train on this rank; ``die_at`` raises before that step's optimizer, ``nan_at`` plants a NaN in one gradient of one rank.

    ``look(model)`` is called after each backward; what it says of the last step is in the result as ``seen``.
    """
    mesh = spec.build(device_type)
    Path(run).mkdir(parents=True, exist_ok=True)
    job = Job(
        model, training, checkpoint, Path(run), held_out=held_out, resume=Path(resume) if resume else None,
        init=Path(init) if init else None, memory=memory, adapter=adapter,
    )  # fmt: skip
    seen = []

    def after_backward(step, decoder):
        if step == die_at:
            raise KeyboardInterrupt("planted")
        if step in nan_at and dist.get_rank() == nan_rank:
            gradient = decoder.get_parameter(nan_in).grad.to_local()
            gradient.view(-1)[0] = torch.nan
        seen.append(look(decoder))

    leader = mesh.is_leader
    windows = (lambda first: stream(first, training.context, mesh, spec.dp, parts)) if leader else None
    fresh = (lambda: stream(10_000, training.context, mesh, spec.dp, parts)) if leader else None
    try:
        return {**train(job, mesh, windows, fresh, after_backward), "seen": seen[-1] if seen else None}
    except KeyboardInterrupt:
        return {"died": die_at}


def rows(run, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (Path(run) / name).read_text().splitlines()]


def losses(run) -> list[float]:
    return [row["loss"] for row in rows(run)]


def with_steps(steps: int, **changes) -> TrainingConfig:
    return dataclasses.replace(TRAINING, steps=steps, **changes)
