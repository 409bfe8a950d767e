"""A training run from its configuration: check everything, train on the mesh, stage by stage, keep it on record, report.

A stage is a launch of its own, on its own mesh: it starts from the checkpoint in which the one before ended, in the same
run folder, and counts its steps on. A run without stages is one stage.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.launch import ClusterConfig, Data, RunFailed, check_resources, connected, launch
from pipelines.code_completion.fim import Fim, template
from pipelines.config import Config, load_config, naming_stage
from pipelines.corpus import TokenStore
from pipelines.corpus.mix import Share, mix, repeats
from pipelines.corpus.remote import located
from pipelines.corpus.tokenizer import FILE_NAME, load_tokenizer
from pipelines.corpus.windows import WindowPlan, document_lengths, held_out
from pipelines.models.source import ORIGIN
from pipelines.paths import absolute, check_folder, read_mapping
from pipelines.tracking import Tracker, absolute_uri, default_uri
from pipelines.tracking.lines import read_rows
from workers.attention.block import check_backend
from workers.mesh import MeshSpec
from workers.model.config import ModelConfig, padded_vocabulary
from workers.model.huggingface import CARRIED, check_weights, from_huggingface, is_model_folder, read_config
from workers.model.huggingface.config import CONFIG_FILE
from workers.training import checkpoint as checkpoints
from workers.training.loop import STOP_FILE, Job

log = logging.getLogger(__name__)
WORKER_BYTES = 400 << 20  # resident, with torch imported and no model


@dataclass(frozen=True)
class Stage:
    """A part of a run with a mesh, a context and a schedule of its own."""

    job: Job
    mesh: MeshSpec
    data: Data
    cluster: ClusterConfig


@dataclass(frozen=True)
class Prepared:
    """A run whose every input has been checked. ``stages`` are those that are not done yet; at least one."""

    config: Config
    stages: tuple[Stage, ...]
    store: TokenStore
    uri: str

    @property
    def job(self) -> Job:
        return self.stages[0].job

    @property
    def mesh(self) -> MeshSpec:
        return self.stages[0].mesh

    @property
    def data(self) -> Data:
        return self.stages[0].data


def prepare(config: Config, run: Path, resume: Path | None = None) -> Prepared:
    """Check a run, with all its stages, before anything is started or written.

    ``resume`` is the run whose latest checkpoint is the start; the same folder as ``run`` continues it there.
    Raises ValueError, one line, for whatever a user got wrong.
    """
    run = absolute(run, "--out")
    check_folder(run, "--out")
    config.check_meshes()
    for stage in config.each_stage():
        _check_machine(stage.mesh_spec())
    if config.corpus.store is None:
        raise ValueError(
            "corpus.store is not set; make one with `ringspan ingest code|papers PATH --out STORE`, then --set corpus.store=STORE"
        )
    store = TokenStore.open(located(config.corpus.store, "corpus.store"))
    # A checkpoint has all weights, but for those that an adapter leaves as they are.
    init = _init(config, store) if resume is None or config.adapter.rank is not None else None
    if init is not None:
        config = config.model_copy(update={"checkpoint": dataclasses.replace(config.checkpoint, init=str(init))})
    config = config.model_copy(
        update={"model": _model_for(config.model, store), "corpus": dataclasses.replace(config.corpus, store=store.address)}
    )
    start = _checkpoint(run, resume)
    stages, first_step = [], 0
    for number, stage in enumerate(config.each_stage(), 1):
        with naming_stage(number, len(config.stages)):
            stages.append(_stage(stage, run, start, init, first_step, store))
        first_step = stages[-1].job.last_step
        init = init if config.adapter.rank is not None else None  # a later stage has the checkpoint of the one before
    if start is not None:
        stages = _stages_left(stages, start)
        _check_start(start, stages[0], config, store)
        _check_adapter(start, stages[0].job)
    return Prepared(config, tuple(stages), store, absolute_uri(config.tracking.uri) if config.tracking.uri else default_uri(run))


def _stage(config: Config, run: Path, start: Path | None, init: Path | None, first_step: int, store: TokenStore) -> Stage:
    mesh, data = config.mesh_spec(), _data(config, store)
    config.adapter.check_model(config.model)
    memory = config.memory
    if memory.offload_folder is not None:
        memory = dataclasses.replace(memory, offload_folder=str(absolute(memory.offload_folder, "memory.offload_folder")))
        check_folder(Path(memory.offload_folder), "memory.offload_folder")
    per_group = math.ceil(data.held_out_windows / mesh.dp)
    job = Job(
        config.model, config.training, config.checkpoint, run,
        backend=config.attention.backend, verify_ring=config.attention.verify_ring, held_out=per_group, resume=start, init=init,
        adapter=config.adapter, memory=memory, first_step=first_step, windows=data.train.fingerprint,
    )  # fmt: skip
    check_backend(job.backend, job.dtype, job.model.head_dim, job.model.positions == "alibi")
    return Stage(job, mesh, data, config.cluster)


def execute(
    prepared: Prepared,
    *,
    verbose: bool = False,
    on_step: Callable[[dict], None] | None = None,
    on_evaluation: Callable[[dict], None] | None = None,
) -> tuple[dict, Tracker]:
    """Train. Returns the last step's figures and the closed tracker. Raises RunFailed, and ClusterTooSmall before anything is written."""
    from pipelines.report import loss_by_position_figure, loss_figure

    job, run, config = prepared.job, prepared.job.run, prepared.config
    cpus = max(stage.mesh.world * stage.cluster.cpus_per_worker for stage in prepared.stages)
    with connected(cpus=cpus + 4, verbose=verbose):
        for stage in prepared.stages:
            check_resources(stage.job, stage.mesh, stage.cluster)
        corpus = _write_run_folder(prepared)
        tracker = Tracker(run, prepared.uri, config.tracking.experiment, run.name, on_step=on_step, on_evaluation=on_evaluation)
        tracker.start(config.model_dump(), {f"corpus.{key}": value for key, value in corpus.items()})
        status = "FAILED"
        try:
            result = run_stages(prepared.stages, launch)
            status = "KILLED" if result["stopped"] else "FINISHED"
            tracker.log_figure(loss_figure(read_rows(run / "metrics.jsonl")), "loss.png")
            if (run / "evaluations.jsonl").exists():
                tracker.log_figure(loss_by_position_figure(read_rows(run / "evaluations.jsonl")), "loss_by_position.png")
            if (latest := checkpoints.latest(job.checkpoint_folder)) is not None:
                tracker.set_tag("checkpoint", str(latest))
            return result, tracker
        finally:
            tracker.close(status)


def run_stages(stages: tuple[Stage, ...], launch: Callable[[Job, MeshSpec, Data, ClusterConfig], dict]) -> dict:
    """Launch the stages one after another until the last is done or one was asked to stop; returns what the last launch did."""
    for stage in stages:
        job, last = stage.job, stage is stages[-1]
        _, done = job.start()
        # A checkpoint of the stage before counts other windows: the tokens it has learnt say where to go on.
        result = launch(
            dataclasses.replace(job, sequence=stage.data.train.sequence_after(done.tokens)), stage.mesh, stage.data, stage.cluster
        )
        if not last and (job.run / STOP_FILE).exists():  # asked in the very last step
            result = {**result, "stopped": True}
        if result["stopped"]:
            break
        saved = job.start()[1].step
        if not last and saved != job.last_step:
            raise RunFailed(
                f"the checkpoint of step {job.last_step}, from which the next stage starts, was not written (the latest is of step {saved})"
            )
    return result


def _write_run_folder(prepared: Prepared) -> dict[str, str]:
    """What a run folder says of its origin: config.yaml, the tokenizer, corpus.json (returned)."""
    run, store = prepared.job.run, prepared.store
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(prepared.config.to_yaml(), encoding="utf-8")
    store.tokenizer.save(run)
    _keep_origin(prepared.job)
    corpus = {"store": store.address, "fingerprint": store.fingerprint, "tokenizer": store.tokenizer.fingerprint, "unit": store.unit}
    mixes = [dataclasses.asdict(change) for change in changed_mixes(prepared)]
    (run / "corpus.json").write_text(json.dumps(corpus | ({"mix": mixes} if mixes else {}), indent=1), encoding="utf-8")
    return corpus


@dataclass(frozen=True)
class ChangedMix:
    """The sources of a stage that repeats documents, without the repeats and with them."""

    first_step: int
    last_step: int
    before: list[Share]
    after: list[Share]


def changed_mixes(prepared: Prepared) -> list[ChangedMix]:
    """Of the stages that are left, those with corpus.upsample."""
    found = []
    for stage, config in zip(prepared.stages, prepared.config.each_stage()[-len(prepared.stages) :]):
        plan, upsample = stage.data.train, config.corpus.upsample
        if upsample is not None:
            before, after = (mix(prepared.store, plan.documents, upsample.longer_than, times) for times in (None, plan.repeats))
            found.append(ChangedMix(stage.job.first_step + 1, stage.job.last_step, before, after))
    return found


def _keep_origin(job: Job) -> None:
    """Copy what the model that the run started from carries beside its weights: an export gives it on, wherever the folder is by then."""
    origin = job.init or (job.resume.parent.parent / ORIGIN if job.resume is not None else None)
    if origin is None or not is_model_folder(origin) or (job.run / ORIGIN).exists():
        return
    (job.run / ORIGIN).mkdir()
    for name in (CONFIG_FILE, *CARRIED):
        if (origin / name).is_file():
            shutil.copyfile(origin / name, job.run / ORIGIN / name)


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


def _init(config: Config, store: TokenStore) -> Path | None:
    """The model folder that a new run starts from, after checking that it is of this model and tokenizer."""
    if config.checkpoint.init is None:
        return None
    folder = absolute(config.checkpoint.init, "checkpoint.init")
    theirs = from_huggingface(read_config(folder), str(folder / CONFIG_FILE))
    for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size", "tie_embeddings", "qkv_bias", "qk_norm"):
        if getattr(config.model, name) != getattr(theirs, name):
            raise ValueError(
                f"model.{name} is {getattr(config.model, name)}, but {getattr(theirs, name)} in {folder}, whose weights the run "
                f"starts from; leave out model.{name}"
            )
    check_weights(folder, config.model)
    if load_tokenizer(folder).fingerprint != store.tokenizer.fingerprint:
        raise ValueError(
            f"{store.folder} was made with the tokenizer {store.tokenizer.name}, which is not that of the model {folder}; "
            f"ingest again with --tokenizer {folder / FILE_NAME}"
        )
    if store.tokenizer.vocab_size > theirs.vocab_size:
        raise ValueError(
            f"{folder} has {theirs.vocab_size} ids and none for some of the control tokens that a corpus has; "
            "import the model again with --special-tokens, and ingest with its tokenizer"
        )
    return folder


def _checkpoint(run: Path, resume: Path | None) -> Path | None:
    """The checkpoint to start from, when a run is resumed."""
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
    return start


def _stages_left(stages: list[Stage], start: Path) -> list[Stage]:
    """The stages that a checkpoint has not done, the first of them perhaps in part."""
    done = checkpoints.read_progress(start).step
    left = [stage for stage in stages if stage.job.last_step > done]
    if not left:
        has, more = (
            (f"training.steps is {stages[0].job.last_step}", "raise it")
            if len(stages) == 1
            else (f"its stages have {stages[-1].job.last_step}", "prolong the last, or add one,")
        )
        raise ValueError(f"{start.parent.parent} has done {done} steps already and {has}; {more} to go on")
    return left


def _check_adapter(start: Path, job: Job) -> None:
    """Refuse to go on from a checkpoint with another adapter than its own, or on another base."""
    adapter, base = checkpoints.read_adapter(start)
    if (adapter.rank is None) != (job.adapter.rank is None):
        if adapter.rank is None:
            raise ValueError(
                f"{start} has no adapter, but adapter.rank is {job.adapter.rank}; leave it null, or start a new run from an export of this one"
            )
        raise ValueError(f"{start} is an adapter of rank {adapter.rank}, but adapter.rank is not set; keep it")
    for name, value in dataclasses.asdict(job.adapter).items():
        if (was := getattr(adapter, name)) != value:
            raise ValueError(f"{start} holds another adapter: adapter.{name} is {was} there and {value} here")
    if base is not None and not base.same_weights(job.base):
        raise ValueError(
            f"{start} is an adapter of {base}, here the base is {job.base}; start from the same checkpoint.init and training.seed"
        )


def _check_start(start: Path, stage: Stage, config: Config, store: TokenStore) -> None:
    """Refuse a checkpoint that ``stage`` cannot go on from; warn of what will be otherwise than before."""
    resume = start.parent.parent
    was, model = checkpoints.read_model(start), stage.job.model
    if name := was.other_weights(model):
        raise ValueError(
            f"{start} is a checkpoint of another model: model.{name} is {getattr(was, name)} there and {getattr(model, name)} here"
        )
    corpus = read_mapping(resume / "corpus.json")
    if corpus.get("tokenizer") != store.tokenizer.fingerprint:
        raise ValueError(f"{store.folder} was made with another tokenizer ({store.tokenizer.name}) than the run {resume} was trained on")
    before = load_config(str(resume / "config.yaml"))
    for section, key in (("corpus", "held_out"), ("training", "seed")):
        was_set, is_set = (getattr(getattr(c, section), key) for c in (before, config))
        if corpus.get("fingerprint") == store.fingerprint and was_set != is_set:
            raise ValueError(
                f"{section}.{key} is {was_set} in {resume} and {is_set} here: documents it was trained on would be held out; keep {was_set}"
            )
    if config.checkpoint.init is not None and stage.job.base is None:
        given, started = (
            absolute(c.checkpoint.init, "checkpoint.init") if c.checkpoint.init is not None else None for c in (config, before)
        )
        if given != started:
            log.warning("checkpoint.init %s is not read: the weights are those of %s", given, start)
    progress = checkpoints.read_progress(start)
    if progress.step == stage.job.first_step:
        return  # a stage begins, whose changes are meant
    for field in dataclasses.fields(model):
        values = [getattr(of, field.name) for of in (was, model)]
        if values[0] != values[1]:
            log.warning("model.%s was %s in %s and is %s here", field.name, values[0], resume, values[1])
    plan, sequence = stage.data.train, stage.data.train.sequence_after(progress.tokens)
    if progress.windows != plan.fingerprint and progress.sequences != sequence:
        log.warning(
            "the windows are others than those of %s (another corpus, context or overlap); they go on at sequence %d, as far into the "
            "corpus as its %d tokens", resume, sequence, progress.tokens,
        )  # fmt: skip


def _data(config: Config, store: TokenStore) -> Data:
    corpus, training = config.corpus, config.training
    learnt, kept_back = held_out(store, corpus.held_out, training.seed)
    fim = Fim(corpus.fim_rate, corpus.fim_spm_rate) if corpus.fim_rate else None
    if fim is not None:
        template(store.tokenizer)
    times = repeats(store, learnt, corpus.upsample) if corpus.upsample is not None else None
    plan = lambda documents, **how: WindowPlan(store, training.context, corpus.overlap, training.seed, documents, corpus.positions, **how)
    train = plan(learnt, repeats=times, rewriter=fim)
    if not corpus.held_out or not corpus.held_out_windows or not document_lengths(store)[kept_back].any():
        return Data(train)
    held = plan(kept_back)
    return Data(train, held, min(corpus.held_out_windows, len(held)))
