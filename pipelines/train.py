"""A training run from its configuration: check everything, train on the mesh, keep it on record, report."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import psutil

from cluster.launch import Data, check_resources, connected, launch
from pipelines.config import Config, load_config
from pipelines.corpus import TokenStore
from pipelines.corpus.windows import WindowPlan, held_out
from pipelines.paths import absolute, check_folder, read_mapping
from pipelines.tracking import Tracker, absolute_uri, default_uri
from pipelines.tracking.lines import read_rows
from workers.attention.block import check_backend
from workers.mesh import MeshSpec
from workers.model.config import ModelConfig, padded_vocabulary
from workers.training import checkpoint as checkpoints
from workers.training.loop import Job

log = logging.getLogger(__name__)
WORKER_BYTES = 400 << 20  # resident, with torch imported and no model


@dataclass(frozen=True)
class Prepared:
    """A run whose every input has been checked."""

    config: Config
    job: Job
    mesh: MeshSpec
    data: Data
    store: TokenStore
    uri: str


def prepare(config: Config, run: Path, resume: Path | None = None) -> Prepared:
    """Check a run before anything is started or written.

    ``resume`` is the run whose latest checkpoint is the start; the same folder as ``run`` continues it there.
    Raises ValueError, one line, for whatever a user got wrong.
    """
    run = absolute(run, "--out")
    check_folder(run, "--out")
    mesh = config.mesh_spec()
    _check_machine(mesh)
    config.training.micro_steps(mesh.dp)
    if config.corpus.store is None:
        raise ValueError("corpus.store is not set; make one with `ringspan ingest code PATH --out STORE`, then --set corpus.store=STORE")
    store = TokenStore.open(absolute(config.corpus.store, "corpus.store"))
    model = _model_for(config.model, store)
    mesh.check_model(model)
    checkpoint = _checkpoint(run, resume, config, model, store)
    config = config.model_copy(update={"model": model, "corpus": dataclasses.replace(config.corpus, store=str(store.folder))})
    data = _data(config, store)
    per_group = math.ceil(data.held_out_windows / mesh.dp)
    job = Job(
        model, config.training, config.checkpoint, run, config.attention.backend, config.attention.verify_ring, per_group, checkpoint,
        memory=config.memory,
    )  # fmt: skip
    check_backend(job.backend, job.dtype, model.head_dim, model.positions == "alibi")
    return Prepared(config, job, mesh, data, store, absolute_uri(config.tracking.uri) if config.tracking.uri else default_uri(run))


def execute(
    prepared: Prepared, *, verbose: bool = False,
    on_step: Callable[[dict], None] | None = None, on_evaluation: Callable[[dict], None] | None = None,
) -> tuple[dict, Tracker]:
    """Train. Returns the last step's figures and the closed tracker. Raises RunFailed, and ClusterTooSmall before anything is written."""
    from pipelines.report import loss_by_position_figure, loss_figure

    job, run, config = prepared.job, prepared.job.run, prepared.config
    with connected(cpus=prepared.mesh.world * config.cluster.cpus_per_worker + 4, verbose=verbose):
        check_resources(job, prepared.mesh, config.cluster)
        corpus = _write_run_folder(prepared)
        tracker = Tracker(run, prepared.uri, config.tracking.experiment, run.name, on_step=on_step, on_evaluation=on_evaluation)
        tracker.start(config.model_dump(), {f"corpus.{key}": value for key, value in corpus.items()})
        status = "FAILED"
        try:
            result = launch(job, prepared.mesh, prepared.data, config.cluster)
            status = "KILLED" if result["stopped"] else "FINISHED"
            tracker.log_figure(loss_figure(read_rows(run / "metrics.jsonl")), "loss.png")
            if (run / "evaluations.jsonl").exists():
                tracker.log_figure(loss_by_position_figure(read_rows(run / "evaluations.jsonl")), "loss_by_position.png")
            if (latest := checkpoints.latest(job.checkpoint_folder)) is not None:
                tracker.set_tag("checkpoint", str(latest))
            return result, tracker
        finally:
            tracker.close(status)


def _write_run_folder(prepared: Prepared) -> dict[str, str]:
    """What a run folder says of its origin: config.yaml, the tokenizer, corpus.json (returned)."""
    run, store = prepared.job.run, prepared.store
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(prepared.config.to_yaml(), encoding="utf-8")
    store.tokenizer.save(run)
    corpus = {"store": str(store.folder), "fingerprint": store.fingerprint, "tokenizer": store.tokenizer.fingerprint}
    (run / "corpus.json").write_text(json.dumps(corpus, indent=1), encoding="utf-8")
    return corpus


def _check_machine(mesh: MeshSpec) -> None:
    """Refuse a mesh that this machine could not even hold empty, where no cluster was named to hold it."""
    memory = psutil.virtual_memory().total
    if not os.environ.get("RAY_ADDRESS") and mesh.world * WORKER_BYTES > memory:
        raise ValueError(
            f"the mesh's {mesh.world} workers need some {mesh.world * WORKER_BYTES >> 30} GiB before they do anything, this machine has "
            f"{memory >> 30} GiB; use a smaller mesh, or name a cluster with RAY_ADDRESS"
        )


def _model_for(model: ModelConfig, store: TokenStore) -> ModelConfig:
    size = store.tokenizer.vocab_size
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=padded_vocabulary(size))
    if model.vocab_size < size:
        raise ValueError(
            f"{store.folder} was made with the tokenizer {store.tokenizer.name} of {size} ids, "
            f"but model.vocab_size is {model.vocab_size}; leave it null to fit the corpus"
        )
    return model


def _checkpoint(run: Path, resume: Path | None, config: Config, model: ModelConfig, store: TokenStore) -> Path | None:
    """The checkpoint to start from, after checking that it is of this model and tokenizer, and that its data goes on."""
    resume = absolute(resume, "--resume") if resume is not None else None
    own = checkpoints.latest(run / "checkpoints") is not None
    if (own or (run / "metrics.jsonl").exists()) and (resume is None or run.resolve() != resume.resolve()):
        # Its own checkpoint would be taken, whatever is resumed.
        way = f"give --resume {run} to go on with it, or another --out" if own else "it has no checkpoint to go on from; give another --out"
        raise ValueError(f"{run} holds a run already; {way}")
    if resume is None:
        return None
    if not resume.is_dir():
        raise ValueError(f"--resume {resume} is not a run folder")
    start = checkpoints.latest(resume / "checkpoints")
    if start is None:
        raise ValueError(f"{resume} holds no finished checkpoint to resume from")
    was = dataclasses.asdict(checkpoints.read_model(start))
    for name, value in dataclasses.asdict(model).items():
        if was[name] != value:
            raise ValueError(f"{start} is a checkpoint of another model: model.{name} is {was[name]} there and {value} here")
    corpus = read_mapping(resume / "corpus.json")
    if corpus.get("tokenizer") != store.tokenizer.fingerprint:
        raise ValueError(f"{store.folder} was made with another tokenizer ({store.tokenizer.name}) than the run {resume} was trained on")
    _check_data(resume, config, same_corpus=corpus.get("fingerprint") == store.fingerprint)
    done = checkpoints.read_progress(start).step
    if done >= config.training.steps:
        raise ValueError(f"{resume} has done {done} steps already and training.steps is {config.training.steps}; raise it to go on")
    return start


def _check_data(resume: Path, config: Config, same_corpus: bool) -> None:
    """Refuse a resume that would evaluate on what the run has learnt; warn of one whose windows are others than before."""
    before = load_config(str(resume / "config.yaml"))
    for section, key in (("corpus", "held_out"), ("training", "seed")):
        was, now = (getattr(getattr(c, section), key) for c in (before, config))
        if same_corpus and was != now:
            raise ValueError(f"{section}.{key} is {was} in {resume} and {now} here: documents it was trained on would be held out; keep {was}")
    same_windows = (before.training.context, before.corpus.overlap) == (config.training.context, config.corpus.overlap)
    if not (same_corpus and same_windows):
        log.warning("the windows are others than those of %s (another corpus, context or overlap); they go on at the number it had reached", resume)


def _data(config: Config, store: TokenStore) -> Data:
    corpus, training = config.corpus, config.training
    learnt, kept_back = held_out(store, corpus.held_out, training.seed)
    plan = lambda documents: WindowPlan(store, training.context, corpus.overlap, training.seed, documents, corpus.positions)
    train = plan(learnt)
    if not corpus.held_out or not corpus.held_out_windows or not store.lengths[kept_back].any():
        return Data(train)
    held = plan(kept_back)
    return Data(train, held, min(corpus.held_out_windows, len(held)))
