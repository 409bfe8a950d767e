"""Ray Train starts one actor a rank, restarts them all when one dies, and each runs ``workers.training.loop``.

Checkpoints are written by the ranks themselves to the run folder, which every node shares; a restarted group starts
from the latest whole one. Ray Train's own reports are not used: each is a barrier over the controller's poll.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from cluster import feed
from workers.attention.block import BACKENDS
from workers.mesh import MeshSpec
from workers.parallel.memory import grow_segments, return_pages
from workers.training import checkpoint as checkpoints
from workers.training.guard import Diverged
from workers.training.loop import STOP_FILE, Job, train

log = logging.getLogger(__name__)
STALLED = "stalled-rank-"


@dataclass(frozen=True)
class ClusterConfig:
    """workers: ranks; null is as many as the mesh needs. cpus_per_worker and gpus_per_worker: what each reserves;
    gpus_per_worker null is 1 where the cluster has one for every worker, else 0. max_failures: restarts after a lost worker or node.
    collective_timeout: seconds after which a rank that waits for a lost one gives up. stall_seconds: after so many without
    the next window a warning says so.
    """

    workers: int | None = None
    cpus_per_worker: int = 1
    gpus_per_worker: int | None = None
    max_failures: int = 3
    collective_timeout: int = 600
    stall_seconds: int = 60

    def __post_init__(self):
        least = {"workers": 1, "cpus_per_worker": 1, "gpus_per_worker": 0, "max_failures": 0, "collective_timeout": 1, "stall_seconds": 1}
        for name, value in least.items():
            if getattr(self, name) is not None and getattr(self, name) < value:
                raise ValueError(f"cluster.{name} is {getattr(self, name)}; it must be at least {value}")


class RunFailed(RuntimeError):
    """The run ended without reaching its last step; the message says why, in one line."""


class ClusterTooSmall(ValueError):
    """The cluster cannot hold the mesh; the message has the numbers."""


@dataclass(frozen=True)
class Data:
    """The readers of a run: training windows, and ``held_out_windows`` held-out ones (both in global order)."""

    train: feed.WindowReader
    held_out: feed.WindowReader | None = None
    held_out_windows: int = 0


@contextlib.contextmanager
def connected(cpus: int, verbose: bool = False):
    """Inside, this process is a driver of the cluster that RAY_ADDRESS (or the surrounding Ray job) names, else of a local Ray
    with ``cpus`` logical CPUs that ends with it. ``verbose`` shows the logs of Ray and its workers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A worker group that has to import torch on a busy laptop needs more than Ray's minute.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    common = dict(log_to_driver=verbose, logging_level=logging.INFO if verbose else logging.ERROR)
    if os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(**common)
        except ConnectionError as error:
            raise ConnectionError(
                f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: no Ray cluster lets this machine in ({error}); "
                "start one (ray start --head), or unset RAY_ADDRESS for one that lasts as long as the command"
            ) from error
    else:  # "local": a head that happens to run on this machine is somebody else's until RAY_ADDRESS says otherwise
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **common)
    if not verbose:
        logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def check_resources(job: Job, mesh: MeshSpec, config: ClusterConfig) -> None:
    """Raise ClusterTooSmall when the cluster, as it stands, cannot hold the workers and the tasks that read their data.

    A cluster that can grow (RINGSPAN_AUTOSCALING=1, which ray_cluster.yaml sets) is not held to what it has now.
    """
    if os.environ.get("RINGSPAN_AUTOSCALING"):
        return
    have = ray.cluster_resources()
    gpus = gpus_per_worker(mesh, config)
    backend, device = BACKENDS.get(job.backend), "cuda" if gpus else "cpu"
    if backend is not None and backend.device not in (None, device):
        raise ClusterTooSmall(f"attention.backend {backend.name!r} cannot run on {device}, where this run is; use auto or reference")
    try:
        job.memory.check_device(device)
    except ValueError as error:
        raise ClusterTooSmall(str(error)) from error
    streams = 2 if job.held_out else 1
    need = {"CPU": mesh.world * config.cpus_per_worker + streams, "GPU": mesh.world * gpus}
    for kind, amount in need.items():
        if amount > have.get(kind, 0):
            raise ClusterTooSmall(
                f"the mesh's {mesh.world} workers and their data need {amount} {kind}s, the cluster has {have.get(kind, 0):g}; "
                f"use a smaller mesh, or a larger cluster (locally: ray start --head --num-cpus={need['CPU']})"
                + ("; --set cluster.gpus_per_worker=0 trains on CPUs" if kind == "GPU" else "")
            )


def gpus_per_worker(mesh: MeshSpec, config: ClusterConfig) -> int:
    """What the configuration says, else 1 where the cluster has a GPU for every worker."""
    if config.gpus_per_worker is not None:
        return config.gpus_per_worker
    gpus = ray.cluster_resources().get("GPU", 0)
    if 0 < gpus < mesh.world:
        log.warning("the cluster's %d GPUs are too few for %d workers: training on CPUs", gpus, mesh.world)
    return 1 if gpus >= mesh.world else 0


def launch(job: Job, mesh: MeshSpec, data: Data, config: ClusterConfig) -> dict:
    """Run ``job`` on the mesh and wait for its end; Ray must be connected.

    Ctrl-C or SIGTERM asks the ranks to save and end after the present step; a second one raises KeyboardInterrupt.
    Returns what rank 0's ``train`` returned. Raises RunFailed.
    """
    context = job.training.context

    def train_windows():
        # Called at every start of the worker group: after a failure the data goes on where the checkpoint stands.
        _, done = job.start()
        left = (job.last_step - done.step) * job.training.batch
        return feed.dataset(data.train, context, mesh.dp, done.sequences, done.sequences + left)

    datasets = {"train": train_windows}
    if job.held_out:
        datasets["held_out"] = lambda: feed.dataset(data.held_out, context, mesh.dp, 0, data.held_out_windows)
    use_gpu = gpus_per_worker(mesh, config)
    resources = {"CPU": config.cpus_per_worker, **({"GPU": use_gpu} if use_gpu else {})}
    trainer = TorchTrainer(
        _rank,
        train_loop_config={"job": job, "mesh": mesh, "threads": config.cpus_per_worker, "stall_seconds": config.stall_seconds},
        datasets=datasets,
        dataset_config=feed.MeshDataConfig(mesh.dp, mesh.ranks_per_group, context),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout_s=config.collective_timeout),
        scaling_config=ScalingConfig(num_workers=mesh.world, use_gpu=bool(use_gpu), resources_per_worker=resources),
        # A name of its own for every launch: Ray Train would silently continue an old one.
        run_config=RunConfig(
            name=f"launch-{time.time_ns()}",
            storage_path=str(job.run / "ray"),
            failure_config=FailureConfig(max_failures=config.max_failures),
        ),
    )
    for left in (job.run / STOP_FILE, *job.run.glob(f"logs/{STALLED}*")):
        left.unlink(missing_ok=True)
    try:
        with _signals_ask_to_stop(job.run / STOP_FILE):
            result = _fit(trainer, job.run)
    except TrainingFailedError as error:
        raise RunFailed(f"{_cause(error)}; {_where(job)}") from error
    if "diverged" in result:
        raise RunFailed(f"{result['diverged']}; {_where(job)}")
    return result


def _where(job: Job) -> str:
    latest = checkpoints.latest(job.checkpoint_folder)
    return f"{f'the last checkpoint is {latest}' if latest else 'there is no checkpoint yet'}; each rank's log is in {job.run / 'logs'}"


def _fit(trainer: TorchTrainer, run: Path) -> dict:
    """``trainer.fit()`` in a thread, where Ray Train leaves signals alone; this thread stays free to take them, and passes
    on what a leader says of a stream that stalls."""
    said = {}
    outcome = {}

    def fit():
        try:
            outcome["value"] = trainer.fit().return_value
        except BaseException as error:  # handed to the caller below
            outcome["error"] = error

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        for note in run.glob(f"logs/{STALLED}*"):
            with contextlib.suppress(FileNotFoundError):  # the stream goes on
                if (text := note.read_text(encoding="utf-8")) and said.get(note) != text:
                    said[note] = text
                    log.warning(text)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


@contextlib.contextmanager
def _signals_ask_to_stop(stop_file: Path):
    """Inside, the first SIGINT or SIGTERM makes ``stop_file``. Entered after Ray's start, for Ray sets handlers of its own."""

    def ask(number, frame):
        if stop_file.exists():
            raise KeyboardInterrupt
        stop_file.touch()
        log.warning("stopping after this step, with a checkpoint; once more ends at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(error: TrainingFailedError) -> str:
    failures = getattr(error, "worker_failures", None) or {}
    if failures:
        rank, failure = min(failures.items())
        text = str(failure).strip().splitlines()
        return f"rank {rank} failed: {text[-1] if text else type(failure).__name__}"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _rank(arguments: dict) -> dict:
    """What each Ray Train worker runs."""
    import torch

    job, spec = arguments["job"], arguments["mesh"]
    context = ray.train.get_context()
    _log_to_file(job.run / "logs" / f"rank-{context.get_world_rank()}.log")
    device = "cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu"
    if device == "cuda":
        grow_segments()
        torch.cuda.set_device(ray.train.torch.get_device())
    else:
        return_pages()
        torch.set_num_threads(arguments["threads"])
    mesh = spec.build(device)
    _check_placement(mesh)
    split = ray.train.get_dataset_shard("train")
    held_out = ray.train.get_dataset_shard("held_out") if job.held_out else None
    assert (split is not None) == mesh.is_leader, "splits and leaders disagree"
    stalls = feed.Stalls(context.get_world_rank(), arguments["stall_seconds"], job.run / "logs" / f"{STALLED}{context.get_world_rank()}")
    stream = (lambda first: feed.windows(split, first + mesh.dp_rank, spec.dp, stalls)) if mesh.is_leader else None
    try:
        return train(job, mesh, stream, feed.fresh(held_out, mesh.dp_rank, spec.dp, stalls) if held_out is not None else None)
    except Diverged as error:  # an answer, not a failure: a restart would only diverge again
        return {"diverged": str(error)}


def _check_placement(mesh) -> None:
    """Raise RuntimeError when a tensor group spans nodes, where its traffic would crawl. A collective."""
    import torch.distributed as dist

    nodes = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
    for first in range(0, len(nodes), mesh.spec.tp):
        if len(set(nodes[first : first + mesh.spec.tp])) > 1:
            raise RuntimeError(
                f"tensor ranks {first}–{first + mesh.spec.tp - 1} were placed on several nodes; "
                f"use nodes whose number of workers is a multiple of mesh.tp = {mesh.spec.tp}"
            )


def _log_to_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
