"""Ranks for the training benchmarks: fresh processes that run the project's own ``train``, and what each of them used.

A rank is ``python -m tests.benchmarks.common BODY ARGUMENTS``: a new interpreter for every measurement, because a peak
resident size is of a process and never falls. One thread each, gloo between them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from workers.mesh import MeshSpec
from workers.model import ModelConfig
from workers.model.adapter import AdapterConfig
from workers.model.decoder import set_parameter
from workers.parallel.memory import MemoryConfig, return_pages
from workers.training.checkpoint import Checkpointer, Progress, latest
from workers.training.config import CheckpointConfig, TrainingConfig
from workers.training.loop import Job, build_model, train
from workers.training.loss import token_losses
from workers.training.meter import peak_resident
from workers.training.optimizer import build_optimizer
from workers.training.window import Window

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("workers", "cluster", "pipelines")
PEERS = ROOT.parent / "shared" / "peers"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TIMEOUT = 1800  # seconds for one measurement


class MeasurementFailed(RuntimeError):
    """A process of a measurement ended badly, or not in time."""


def launch(body: str, ranks: int, timeout: float = TIMEOUT, environment: dict | None = None, **arguments) -> list:
    """Run ``BODIES[body](**arguments)`` on fresh processes, and return what each rank's call returned, by rank; ``environment``
    has variables to set for them.

    Raises MeasurementFailed with a rank's last words when it fails or ``timeout`` seconds pass; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.common", body, json.dumps(arguments)]
        processes, logs = [], []
        for rank in range(ranks):
            logs.append((Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err"))
            variables = {**ONE_THREAD, **(environment or {}), "RANK": str(rank), "WORLD_SIZE": str(ranks), "STORE": f"{folder}/store"}
            with open(logs[rank][0], "w") as out, open(logs[rank][1], "w") as err:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=err))
        try:
            _wait(processes, logs, time.monotonic() + timeout, body)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(out.read_text().splitlines()[-1]) for out, _ in logs]


def _wait(processes, logs, deadline: float, body: str) -> None:
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll():
                raise MeasurementFailed(f"{body}: rank {rank} exited {process.returncode}:\n{logs[rank][1].read_text()[-2000:]}")
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"{body}: not done in time")
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise MeasurementFailed(f"{body}: rank {rank} exited {process.returncode}:\n{logs[rank][1].read_text()[-2000:]}")


def upper_median(values: list[float]) -> float:
    """The middle value, the upper one of two: what the peers' meter prints."""
    return sorted(values)[len(values) // 2]


def peers_module(folder: Path):
    """``common.py`` of the peers' folder. Loaded by path: its name is this file's."""
    spec = importlib.util.spec_from_file_location("peers_common", folder / "common.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peers_arguments(model: ModelConfig, context: int) -> Namespace:
    """The sizes as the peers' functions want them."""
    return Namespace(
        seq=context, dim=model.dim, heads=model.heads, kv=model.kv_heads, layers=model.layers, ffn=model.ffn_dim, vocab=model.vocab_size
    )


def _peers_windows(folder: Path, model: ModelConfig, context: int):
    module, sizes = peers_module(folder), peers_arguments(model, context)
    number = 0
    while True:
        row = module.batch(sizes, number)[0].to(torch.int32).numpy()
        yield _one_document(number, row)
        number += 1


def _random_windows(model: ModelConfig, context: int):
    generator, number = np.random.default_rng(0), 0
    while True:
        yield _one_document(number, generator.integers(0, model.vocab_size, context + 1, dtype=np.int32))
        number += 1


def _source_windows(folder: Path, context: int):
    """This project's sources in the tokenizer of a model folder, over and over."""
    from tokenizers import Tokenizer

    text = "\n".join(path.read_text() for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")))
    ids = np.array(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids, dtype=np.int32)
    number = 0
    while True:
        yield _one_document(number, np.take(ids, np.arange(number * context, (number + 1) * context + 1), mode="wrap"))
        number += 1


def _one_document(number: int, row: np.ndarray) -> Window:
    context = len(row) - 1
    return Window(number, row[:-1], row[1:], np.arange(context), np.zeros(context, dtype=np.int32))


def write_start(model: dict, peers: str, run: str) -> str:
    """Body of one rank: write the peers' weights as the checkpoint of a run at step 0; returns its path."""
    config, mesh = ModelConfig(**model), MeshSpec().build("cpu")
    job = Job(config, TrainingConfig(), CheckpointConfig(), Path(run))
    decoder = build_model(job, mesh)
    weights = peers_module(Path(peers)).hf_weights(peers_arguments(config, 0))
    for name, parameter in decoder.named_parameters():
        set_parameter(parameter, weights.pop(name if name.startswith("lm_head") else f"model.{name}"))
    assert not weights, f"weights that the model has no place for: {sorted(weights)}"
    saver = Checkpointer(job.checkpoint_folder, 1, config)
    saver.save(Progress(), decoder, build_optimizer(decoder, config=job.training))
    saver.finish()
    return str(latest(job.checkpoint_folder))


def training_run(
    model: dict, training: dict, mesh: dict, run: str, start: str | None = None, peers: str | None = None, memory: dict | None = None,
    init: str | None = None, adapter: dict | None = None,
) -> dict:  # fmt: skip
    """Body of each rank: ``train`` on the peers' tokens, or on random ones; with ``init``, a model folder, from its weights on
    this project's sources.

    Returns ``cpu_seconds`` of the middle step, ``pass_seconds`` of the last forward and backward (on the rank that reads; None on
    the others), ``peak_bytes`` and, with the checkpoint, ``whole_peak_bytes``. Steps are measured from one backward's end to the next:
    a whole step, and not the checkpoint after the last. The peak is read after the last backward for the same reason:
    it is that of training, and the peers write no checkpoint.
    """
    settings, built = TrainingConfig(**training), MeshSpec(**mesh).build("cpu")
    options = {"memory": MemoryConfig(**(memory or {})), "adapter": AdapterConfig(**(adapter or {}))}
    if init is not None:
        from workers.model.huggingface import from_huggingface, read_config

        options["init"] = Path(init)
        config = from_huggingface(read_config(Path(init)))
    else:
        config = ModelConfig(**model)
    job = Job(config, settings, CheckpointConfig(every=0), Path(run), resume=Path(start) if start else None, **options)
    seconds, peaks, reads = [], [], []

    def after_backward(step, _):
        seconds.append(time.process_time())
        peaks.append(peak_resident())

    windows = None
    if built.is_leader:
        if peers:
            given = _peers_windows(Path(peers), config, settings.context)
        else:
            given = _source_windows(Path(init), settings.context) if init else _random_windows(config, settings.context)
        timed = (reads.append(time.process_time()) or window for window in given)
        windows = lambda first: timed  # every run here begins at sequence 0
    train(job, built, windows, after_backward=after_backward)
    steps = [after - before for before, after in zip(seconds, seconds[1:])]
    last_pass = seconds[-1] - reads[-settings.micro_steps(built.spec.dp) * settings.micro_batch] if reads else None
    return {
        "cpu_seconds": upper_median(steps) if steps else None,
        "pass_seconds": last_pass,
        "peak_bytes": peaks[-1],
        "whole_peak_bytes": peak_resident(),
    }


def loss_run(tokens: int, vocabulary: int, hidden: int, chunk: int) -> dict:
    """Body of one rank: forward and backward of the loss. Returns ``taken_bytes`` (the rise of the peak resident size),
    ``cpu_seconds``, and ``error``: the largest difference of a gradient from that by the definition, over its largest value.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, hidden, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).mul_(hidden**-0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    before, began = peak_resident(), time.process_time()
    gradients = torch.autograd.grad(token_losses(x, weight, targets, chunk=chunk)[0], (x, weight))
    cpu_seconds, taken = time.process_time() - began, peak_resident() - before
    wanted = [torch.zeros_like(x), torch.zeros_like(weight)]
    for part in torch.arange(tokens).split(2048):
        piece = x[:, part].detach().requires_grad_()
        total = torch.nn.functional.cross_entropy((piece @ weight.t())[0], targets[0, part], reduction="sum")
        by_piece, by_weight = torch.autograd.grad(total, (piece, weight))
        wanted[0][:, part] = by_piece
        wanted[1] += by_weight
    error = max(((ours - want).abs().max() / want.abs().max()).item() for ours, want in zip(gradients, wanted))
    return {"hidden": hidden, "chunk": chunk, "taken_bytes": taken, "cpu_seconds": cpu_seconds, "error": error}


BODIES = {"write_start": write_start, "training_run": training_run, "loss_run": loss_run}


def _rank_main(body: str, arguments: str) -> None:
    torch.set_num_threads(1)
    return_pages()
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['STORE']}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    result = BODIES[body](**json.loads(arguments))
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
