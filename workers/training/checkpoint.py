"""Checkpoints: sharded (torch.distributed.checkpoint), asynchronous, atomic, loadable on any mesh; of what trains only.

A checkpoint is a folder ``step-00000050``. It is written under a ``.partial`` name and renamed when every rank's part
and ``state.json`` are on disk, so a name without the suffix is a whole checkpoint, and "latest" is simply the highest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from workers.model.adapter import AdapterConfig
from workers.model.base import Base
from workers.model.config import ModelConfig

log = logging.getLogger(__name__)
PARTIAL = ".partial"


@dataclass
class Progress:
    """Where a run stands. ``tokens`` counts the targets it has learnt.

    ``sequences`` counts windows of the global order: the next one to read has that number; ``windows`` names the plan whose
    order that is (a checkpoint of an older version does not say).
    """

    step: int = 0
    tokens: int = 0
    sequences: int = 0
    skipped_steps: int = 0
    windows: str = ""


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in ``folder``, oldest first."""
    return sorted(p for p in Path(folder).glob("step-*") if p.suffix != PARTIAL and (p / "state.json").exists())


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def read_progress(path: Path) -> Progress:
    """Where the run stood. Raises ValueError, naming the file, when it does not say so."""
    return _state(path, "progress", lambda fields: Progress(**fields))


def read_model(path: Path) -> ModelConfig:
    """The model's shape. Raises ValueError, naming the file, when it does not say so."""
    return _state(path, "model", lambda fields: ModelConfig(**fields))


def read_adapter(path: Path) -> tuple[AdapterConfig, Base | None]:
    """The adapter and the base it belongs to; (no adapter, None) where all weights trained."""
    return _state(path, "adapter", lambda fields: (AdapterConfig(**fields["config"]), Base(**fields["base"])), (AdapterConfig(), None))


def _state(path: Path, part: str, parse, absent=None):
    try:
        state = json.loads((path / "state.json").read_text())
        return absent if absent is not None and part not in state else parse(state[part])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / 'state.json'} is damaged: {part} cannot be read ({type(error).__name__}: {error})") from error


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor that a run changes under a flat name; DTensors, so each rank writes its shards and may read others'.

    The random state is that of rank 0: ranks draw nothing at random after the weights, which depend on the seed alone.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = {f"model.{name}": parameter.detach() for name, parameter in trained.items()}
    if optimizer is not None:
        for name, parameter in trained.items():
            assert parameter in optimizer.state, f"{name} is not the parameter that the optimizer moves"
            for key, value in optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
        state["random"] = torch.get_rng_state()
    return state


class Checkpointer:
    """Writes checkpoints of a run in the background; ``save`` returns once the state is copied.

    All ranks call the same methods in the same order. A save that fails (a full disk) is a warning, and the run goes on
    with the last good checkpoint.
    """

    def __init__(self, folder: Path, keep: int, model: ModelConfig, adapter: AdapterConfig = AdapterConfig(), base: Base | None = None):
        self._folder, self._keep = Path(folder), keep
        self._belongs_to = {"model": asdict(model)}
        if base is not None:
            self._belongs_to["adapter"] = {"config": asdict(adapter), "base": asdict(base)}
        self._group = dist.new_group(backend="gloo")  # the writer's own: its collectives run beside the step's
        self._poll_group = dist.new_group(backend="gloo")
        self._writing: tuple[Future, Path] | None = None
        self._main = dist.get_rank() == 0
        if self._main:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(leftover)

    def save(self, progress: Progress, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start writing a checkpoint; an earlier one is finished first."""
        self.finish()
        target = self._folder / f"step-{progress.step:08d}"
        partial = target.with_name(target.name + PARTIAL)
        error = None
        if self._main:
            try:
                partial.mkdir(parents=True, exist_ok=True)
                (partial / "state.json").write_text(json.dumps({"progress": asdict(progress), **self._belongs_to}, indent=1))
            except OSError as caught:  # a full disk, which the other ranks must learn of
                error = caught
        failed = torch.tensor(0 if error is None else 1)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if failed.item():
            self._give_up(target, error)
            return
        writer = dcp.FileSystemWriter(partial, thread_count=1)
        future = dcp.async_save(training_state(model, optimizer), storage_writer=writer, process_group=self._group)
        self._writing = (future, target)

    def finish(self) -> None:
        """Wait for the write in flight, if any, and make it the latest. A collective."""
        if self._writing is None:
            return
        (future, target), self._writing = self._writing, None
        error = future.exception()
        failed = torch.tensor(0 if error is None else 1)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if failed.item():
            self._give_up(target, error)
            return
        if self._main:
            partial = target.with_name(target.name + PARTIAL)
            os.rename(partial, target)
            for old in checkpoints(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier(group=self._group)  # nobody asks for the latest before it has its name

    def _give_up(self, target: Path, error: BaseException | None) -> None:
        """Say why on the ranks where it failed, and free what the write had taken of the disk."""
        if error is not None:
            log.warning("checkpoint %s was not written: %s; the run goes on with the one before", target.name, _one_line(error))
        if self._main:
            shutil.rmtree(target.with_name(target.name + PARTIAL), ignore_errors=True)

    def poll(self) -> None:
        """Finish the write in flight if every rank's part is done; never waits for the disk. A small collective."""
        if self._writing is None:
            return
        done = torch.tensor(1 if self._writing[0].done() else 0)
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._poll_group)
        if done.item():
            self.finish()


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read a checkpoint into a model (and optimizer) on whatever mesh they are on. A collective when distributed."""
    state = training_state(model, optimizer)
    _read(path, state)
    if optimizer is not None:
        torch.set_rng_state(state["random"])


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint holds, whole, by name: all, or those that trained with an adapter."""
    held = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size) for name, entry in held.items() if name.startswith("model.")}
    _read(path, state)
    return {name.removeprefix("model."): value for name, value in state.items()}


def _read(path: Path, state: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():  # on one process torch warns that there are no others
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())
        except dcp.api.CheckpointException as error:  # not an Exception to Python
            raise ValueError(f"{path} cannot be read: {_one_line(next(iter(error.failures.values()))[0])}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[-300:] or type(error).__name__
