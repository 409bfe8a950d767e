"""The training loop, as one rank runs it: batch → forward → loss → backward → norm → guard → clip → step → meter → checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from workers import flops
from workers.attention.block import resolve
from workers.model import Decoder, ModelConfig
from workers.model.adapter import AdapterConfig, add_adapters, init_adapters
from workers.model.base import Base
from workers.model.huggingface import load_weights
from workers.parallel import parallelize
from workers.parallel.memory import MemoryConfig
from workers.parallel.pipeline import held_twice
from workers.training import checkpoint as checkpoints
from workers.training.batch import Batch, receive
from workers.training.checkpoint import Checkpointer, Progress
from workers.training.config import CheckpointConfig, TrainingConfig
from workers.training.evaluate import evaluate
from workers.training.guard import Guard
from workers.training.meter import JsonLines, Meter
from workers.training.optimizer import build_optimizer, first_non_finite, learning_rate, local_gradients, scale_, squared_norm
from workers.training.passes import forward_backward
from workers.training.slowdown import SlowSteps
from workers.training.window import Window

log = logging.getLogger(__name__)
STOP_FILE = "stop"  # its presence in the run folder asks every rank to save and end after the present step


@dataclass(frozen=True)
class Job:
    """What every rank of a run is told. ``run`` is a folder that all ranks and the driver share.

    ``held_out`` is the number of held-out windows of a data-parallel group; ``resume`` a checkpoint of another run; ``init``
    a model folder whose weights a run without any checkpoint starts from.
    A run of several stages is a job each: ``first_step`` steps were done before this one, from which its schedule and its
    ``training.steps`` count. ``windows`` names the plan that is read; from a checkpoint that counts others, it is read from
    ``sequence`` on.
    """

    model: ModelConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    run: Path
    backend: str = "auto"
    verify_ring: bool = False
    held_out: int = 0
    resume: Path | None = None
    init: Path | None = None
    adapter: AdapterConfig = AdapterConfig()
    memory: MemoryConfig = MemoryConfig()
    first_step: int = 0
    windows: str = ""
    sequence: int = 0

    @property
    def last_step(self) -> int:
        return self.first_step + self.training.steps

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations in forward and backward."""
        return torch.bfloat16 if self.training.precision == "bf16" else torch.float32

    @property
    def base(self) -> Base | None:
        """The frozen weights of a run that trains an adapter."""
        return Base.of(self.init, self.training.seed) if self.adapter.rank is not None else None

    @property
    def checkpoint_folder(self) -> Path:
        return self.run / "checkpoints"

    def start(self) -> tuple[Path | None, Progress]:
        """The checkpoint to start from (the run's own latest, else the one it resumes, else none), and where it stands."""
        path = checkpoints.latest(self.checkpoint_folder) or self.resume
        progress = checkpoints.read_progress(path) if path else Progress()
        if progress.windows != self.windows:
            progress = replace(progress, windows=self.windows, sequences=self.sequence)
        return path, progress


def attention_backend(job: Job, mesh) -> str:
    """The kernel that a run's attention uses on this rank's device. Raises ValueError for one that cannot run here."""
    return resolve(job.backend, mesh.device, job.dtype, job.model.head_dim, job.model.positions == "alibi").name


def build_model(job: Job, mesh) -> Decoder:
    """The model on this rank's part of the mesh, read or initialised by the seed: meta device → parallelize → materialise → values."""
    job.memory.check_device(mesh.device_type)
    with torch.device("meta"):
        model = add_adapters(Decoder(job.model), job.adapter, job.dtype)
    backend = attention_backend(job, mesh)
    if dist.get_rank() == 0:
        log.info("attention: backend %s, layout %s", backend, mesh.layout)
    parallelize(model, mesh, backend=backend, verify_ring=job.verify_ring, dtype=job.dtype, memory=job.memory)
    model.to_empty(device="cpu" if job.memory.optimizer == "host" else mesh.device)
    model.tie()
    drawn = load_weights(model, job.init) if job.init is not None else None
    model.init_weights(job.training.seed, drawn)
    init_adapters(model, job.training.seed)
    return model


def train(
    job: Job,
    mesh,
    windows: Callable[[int], Iterator[Window]] | None,
    held_out: Callable[[], Iterator[Window]] | None = None,
    after_backward: Callable[[int, Decoder], None] | None = None,
) -> dict:
    """Train until ``job.last_step``, or until asked to stop. Called by every rank.

    Args:
        windows: on a group's leader a function that gives its windows, from the group's first one at or after a sequence number
            on; None elsewhere.
        held_out: on a leader, a fresh pass over the group's held-out windows.
        after_backward: called with (step, model) between backward and the norm; for fault injection in tests.

    Returns on every rank ``step``, ``loss`` (of the last step), ``skipped_steps``, ``stopped`` and ``attention_backend``.
    Raises ``Diverged`` when steps stay non-finite.
    """
    config = job.training
    model = build_model(job, mesh)
    optimizer = build_optimizer(model, config)
    start, progress = _from_rank_0(job.start)
    if start is not None:
        checkpoints.load(start, model, optimizer)
    stream = windows(progress.sequences) if windows is not None else None
    saver = Checkpointer(job.checkpoint_folder, job.checkpoint.keep, job.model, job.adapter, job.base)
    guard = Guard(config.skips_in_a_row, progress.skipped_steps)
    meter, slow_steps = Meter(mesh), SlowSteps()
    peak = flops.peak_flops(mesh.device, job.dtype) * mesh.spec.world
    main = dist.get_rank() == 0
    metrics, evaluations = JsonLines(job.run / "metrics.jsonl"), JsonLines(job.run / "evaluations.jsonl")
    if main:
        metrics.cut(progress.step)
        evaluations.cut(progress.step if progress.step else -1)
    loss, stopped = float("nan"), False

    def micro_batches() -> Iterator[Batch]:
        for _ in range(config.micro_steps(mesh.spec.dp)):
            with meter.loading():
                batch = receive(_take(stream, config.micro_batch), mesh, config.context, job.model.pattern)
            yield batch

    def held_out_loss() -> None:
        if job.held_out:
            score = lambda **how: evaluate(
                model, mesh, config.context, held_out() if held_out else None, job.held_out, job.memory.loss_chunk, **how
            )
            result = score()
            if "later_loss" in result:  # what the papers or files before a target are worth: the same targets without them
                alone = score(alone=True)
                result |= {f"alone_{name}": alone[name] for name in ("loss", "later_loss")}
            if main:
                evaluations.append({"step": progress.step, "time": time.time(), "tokens": progress.tokens, **result})

    if progress.step == 0:
        held_out_loss()
    while progress.step < job.last_step and not stopped:
        step = progress.step + 1
        meter.start()
        totals = torch.zeros(4, dtype=torch.float64)  # loss, targets, squared norm, ranks that saw a request to stop
        totals[0], totals[1] = forward_backward(model, mesh, micro_batches(), config.micro_steps(mesh.spec.dp), job.memory.loss_chunk)
        if after_backward is not None:
            after_backward(step, model)
        gradients = local_gradients(model, held_twice(model, mesh))
        totals[2] = squared_norm(gradients)
        totals[3] = (job.run / STOP_FILE).exists() if main else 0
        totals = totals.to(mesh.device)
        dist.all_reduce(totals)
        loss_sum, targets, squared, stop = totals.tolist()

        # The gradient so far is of the sum of the losses; the one division makes it that of their mean.
        divisor = max(targets, 1.0)
        loss, norm = loss_sum / divisor, squared**0.5 / divisor
        rate = learning_rate(config, step - job.first_step)
        if torch.isfinite(torch.tensor([loss, norm])).all():
            clip = min(1.0, config.clip / (norm + 1e-6)) if config.clip else 1.0
            scale_(gradients, clip / divisor)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            guard.good()
        elif guard.skip(step, first_non_finite(gradients, mesh.pp_rank)):
            saver.finish()
            good, _ = _from_rank_0(job.start)
            if good is not None:
                checkpoints.load(good, model, optimizer)
                log.warning("step %d: weights and optimizer restored from %s", step, good.name)
        optimizer.zero_grad()
        del gradients  # else they would live on beside the next step's

        progress = Progress(step, progress.tokens + round(targets), progress.sequences + config.batch, guard.skipped, job.windows)
        samples = meter.samples()
        slow = slow_steps.add(samples)
        if main:
            metrics.append(_row(job, progress, loss, norm, rate, targets, samples, peak, slow))
        stopped = bool(stop) and step < job.last_step
        saver.poll()
        if step == job.last_step or (config.evaluate_every and step % config.evaluate_every == 0):
            held_out_loss()  # before the save: a run that resumes at this step has its evaluation
        if step == job.last_step or stopped or (job.checkpoint.every and step % job.checkpoint.every == 0):
            saver.save(progress, model, optimizer)
    saver.finish()
    return {
        "step": progress.step,
        "loss": loss,
        "skipped_steps": guard.skipped,
        "stopped": stopped,
        "attention_backend": attention_backend(job, mesh),
    }


def _from_rank_0(ask: Callable):
    """What ``ask()`` answers on rank 0, on every rank: on shared storage each might see another state of a folder. A collective."""
    answer = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _take(windows: Iterator[Window] | None, count: int) -> list[Window] | None:
    return [next(windows) for _ in range(count)] if windows is not None else None


def _row(
    job: Job, progress: Progress, loss: float, norm: float, rate: float, targets: float, samples: list, peak: float, slow: str | None
) -> dict:
    """A step as ``metrics.jsonl`` keeps it. What ranks differ in is the worst rank's: longest wait, highest peak."""
    seconds = max(s.seconds for s in samples)
    useful = flops.matmul_flops(job.model, job.training.batch * job.training.context, job.adapter)
    useful += flops.attention_flops(job.model, sum(s.scores for s in samples))
    return {
        "step": progress.step,
        "time": time.time(),
        "tokens": progress.tokens,
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": rate,
        "tokens_per_second": targets / seconds,
        "tokens_per_second_per_rank": targets / seconds / len(samples),
        "mfu": useful / seconds / peak,
        "peak_memory_bytes": max(s.memory for s in samples),
        "loader_wait_seconds": max(s.loading for s in samples),
        "exposed_comm_seconds": max(s.exposed for s in samples),
        "skipped_steps": progress.skipped_steps,
        "slow": slow,
    }
