"""One configuration tree: defaults < preset or YAML file < ``--set section.key=value``; ``stages`` change it as a run goes on.

Each section is the dataclass of the room that reads it; nothing is declared twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.launch import ClusterConfig
from pipelines.code_completion.fim import Fim
from pipelines.corpus.mix import Upsample
from pipelines.paths import absolute, read_mapping
from workers.attention.block import BACKENDS
from workers.mesh import LAYOUTS, MeshSpec, split_context
from workers.model.adapter import AdapterConfig
from workers.model.config import WEIGHTLESS, ModelConfig
from workers.model.huggingface import from_huggingface, read_config
from workers.parallel.memory import MemoryConfig
from workers.training.config import CheckpointConfig, TrainingConfig

PRESETS = Path(__file__).parent / "presets"


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """store: the folder that ``ringspan ingest`` wrote. overlap: tokens of a long document's window that the window
    before has learnt; null is context / 8. held_out: share of the documents kept from training; held_out_windows: how
    many of their windows an evaluation reads. positions: "restart" at each document, or "continue" through the window.
    fim_rate: share of the files' pieces that are learnt as fill-in-the-middle; fim_spm_rate: of these, with the suffix first.
    upsample: long documents more often, within each source; null takes each document once an epoch.
    """

    store: str | None = None
    overlap: int | None = None
    held_out: float = 0.05
    held_out_windows: int = 16
    positions: str = "restart"
    fim_rate: float = 0.0
    fim_spm_rate: float = 0.5
    upsample: Upsample | None = None

    def __post_init__(self):
        Fim(self.fim_rate, self.fim_spm_rate)
        if self.overlap is not None and self.overlap < 0:
            raise ValueError(f"corpus.overlap is {self.overlap}; it must not be negative")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"corpus.held_out is {self.held_out}; it must be at least 0 and less than 1")
        if self.held_out_windows < 0:
            raise ValueError(f"corpus.held_out_windows is {self.held_out_windows}; it must not be negative")
        if self.positions not in ("restart", "continue"):
            raise ValueError(f"corpus.positions is {self.positions!r}; it must be restart or continue")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The mesh's axes; dp -1 takes the workers that the others leave. pp: pipeline stages, which wait less
    the more micro-batches a step has (training.batch / dp / training.micro_batch).

    replicate: whole copies of the weights, each sharded over dp × cp / replicate ranks; it must divide dp.
    sync_every_blocks: blocks whose weights and gradients travel in one message; more is for slow networks.
    cp: ranks that share a sequence, in place of ring and ulysses, which are then chosen: ulysses as large as heads and a
    node of ``ranks_per_node`` allow, the rest a ring.
    """

    dp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    pp: int = 1
    replicate: int = 1
    sync_every_blocks: int = 1
    cp: int | None = None
    ranks_per_node: int = 8

    def __post_init__(self):
        if self.cp is not None and (self.ring, self.ulysses) != (1, 1):
            raise ValueError(f"mesh.cp = {self.cp} chooses ring and ulysses; leave them out, or leave out cp")
        for name in ("cp", "ranks_per_node"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"mesh.{name} is {getattr(self, name)}; it must be at least 1")

    def spec(self, model: ModelConfig, layout: str) -> MeshSpec:
        ring, ulysses = self.ring, self.ulysses
        if self.cp is not None:
            ring, ulysses = split_context(self.cp, model.heads, model.kv_heads, self.tp, self.ranks_per_node)
        return MeshSpec(self.dp, ring, ulysses, self.tp, layout, self.pp, self.replicate, self.sync_every_blocks)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """layout: which tokens a context rank holds: zigzag, contiguous or striped; auto takes what suits the model's pattern.

    backend: the kernel of a tile; auto takes the fastest. verify_ring: compare a checksum of whatever arrives on a hop.
    """

    layout: str = "auto"
    backend: str = "auto"
    verify_ring: bool = False

    def __post_init__(self):
        if self.layout not in ("auto", *LAYOUTS):
            raise ValueError(f"attention.layout is {self.layout!r}; it must be one of auto, {', '.join(LAYOUTS)}")
        if self.backend != "auto" and self.backend not in BACKENDS:
            raise ValueError(f"attention.backend is {self.backend!r}; it must be one of auto, {', '.join(BACKENDS)}")


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """uri: an MLflow tracking URI; null is MLFLOW_TRACKING_URI, else mlflow.db beside the run. experiment: its name there."""

    uri: str | None = None
    experiment: str = "ringspan"


class Config(BaseModel):
    """Everything a training run is told.

    ``stages``: a list, for a context that grows. Each stage changes keys of the sections above it (not of the stage before)
    and runs for its ``training.steps``, or for ``tokens``: windows × context, whole steps. Its schedule is its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    corpus: CorpusConfig = CorpusConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()
    stages: list[dict] = []

    def mesh_spec(self) -> MeshSpec:
        """The mesh with its layout, settled for the number of workers. Raises ValueError when it does not fit them."""
        layout = self.model.pattern().best_layout if self.attention.layout == "auto" else self.attention.layout
        return self.mesh.spec(self.model, layout).resolve(self.cluster.workers)

    def each_stage(self) -> list[Config]:
        """What is in force in each stage, in order; of a run without stages this configuration. Raises ValueError."""
        found = []
        for number, stage in enumerate(self.stages, 1):
            with naming_stage(number, len(self.stages)):
                found.append(self._with(stage))
        return found or [self]

    def at(self, step: int) -> Config:
        """What is in force at a step: the configuration of its stage."""
        end = 0
        for stage in self.each_stage():
            end += stage.training.steps
            if step <= end:
                break
        return stage

    def check_meshes(self) -> None:
        """Raise ValueError for a stage whose mesh does not fit its workers, model or batch."""
        for number, stage in enumerate(self.each_stage(), 1):
            with naming_stage(number, len(self.stages)):
                mesh = stage.mesh_spec()
                mesh.check_model(stage.model)
                stage.training.micro_steps(mesh.dp)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)

    def _with(self, stage: dict) -> Config:
        tree = self.model_dump(exclude={"stages"})
        config = _validated(_changed(tree, {section: keys for section, keys in stage.items() if section != "tokens"}))
        if name := self.model.other_weights(config.model):
            raise ValueError(
                f"model.{name} is {getattr(config.model, name)} here and {getattr(self.model, name)} above; "
                f"a stage changes only what has no weights: {', '.join(sorted(WEIGHTLESS))}"
            )
        if "tokens" not in stage:
            return config
        steps = math.ceil(stage["tokens"] / (config.training.batch * config.training.context))
        return config.model_copy(update={"training": dataclasses.replace(config.training, steps=steps)})


def _changed(tree: dict, changes: dict) -> dict:
    """``tree`` with other values for the keys that ``changes`` names, at any depth. Another ``rope_type`` is another scaling as a whole."""

    def merged(old, new):
        both = isinstance(new, dict) and isinstance(old, dict)
        return _changed(old, new) if both and new.get("rope_type", old.get("rope_type")) == old.get("rope_type") else new

    return {**tree, **{key: merged(tree.get(key), value) for key, value in changes.items()}}


SECTIONS = [section for section, info in Config.model_fields.items() if dataclasses.is_dataclass(info.annotation)]
# What holds for all stages: another value would let a later stage learn what an earlier one was evaluated on, or start it anew.
ONE_A_RUN = {"corpus.store", "corpus.held_out", "training.seed", "checkpoint.init", "tracking", "adapter"}


@contextlib.contextmanager
def naming_stage(number: int, count: int):
    """What is wrong in a stage says in which; a run without stages (count 0) has none to name."""
    try:
        yield
    except ValueError as error:
        if not count:
            raise
        raise ValueError(f"stage {number}: {error}") from error


def presets() -> list[str]:
    """Names of the presets, as ``code_completion/tiny``."""
    return sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in PRESETS.rglob("*.yaml"))


def preset_named(source: str) -> str | None:
    """The preset that ``source`` means: its name, with - for _ or not, or the job whose smallest preset it is, as ``literature-analysis``."""
    plain = {name.replace("-", "_"): name for name in presets()}
    asked = source.replace("-", "_")
    return plain.get(asked) or plain.get(f"{asked}/tiny")


def load_config(source: str | None, assignments: tuple[str, ...] = ()) -> Config:
    """The configuration of a preset or a YAML file, changed by ``section.key=value`` assignments (or ``stages=[…]``).

    Raises ValueError, one line, for a source that does not exist, a key that does not exist (with the nearest one that
    does), a value that is not allowed, in any stage, and an assignment that every stage overrides.
    """
    tree = _read(source) if source is not None else {}
    preset = tree.pop("model", {}) if source is not None and preset_named(source) else {}
    assigned, whole = [], set(tree.get("model", {}))
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        *sections, name = key.strip().split(".")
        if not (equals and all(sections) and (sections and name or name == "stages")):
            raise ValueError(f"--set {assignment!r} is not section.key=value, as in --set training.steps=200")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {assignment!r}: the value is not valid YAML ({' '.join(str(error).split())[:100]})") from error
        keys = tree
        for section in sections:
            if keys.get(section) is None:
                keys[section] = {}
            keys = keys[section]
            if not isinstance(keys, dict):
                raise ValueError(f"section {section!r} is {keys!r}; it must hold keys")
        keys[name] = parsed
        assigned.append([*sections, name])
        if sections == ["model"]:
            whole.add(name)
    stages = tree.pop("stages", [])
    _check_keys(tree)
    _check_stages(stages)
    for section, name, *_ in (key for key in assigned if key != ["stages"]):
        if stages and all(name in stage.get(section, ()) or (name == "steps" and "tokens" in stage) for stage in stages):
            raise ValueError(
                f"--set {section}.{name} has no effect, for every stage has its own; change the stages (--set 'stages=[…]'), "
                "or leave them out (--set 'stages=[]')"
            )
    starting, own = _starting_model(tree, preset), tree.get("model", {})
    for name in {key[1] for key in assigned if key[0] == "model" and len(key) > 2} - whole:
        own[name] = {**(starting.get(name) or {}), **own[name]}  # a key of a key changes that alone
    tree["model"] = {**starting, **own}
    config = _validated({**tree, "stages": stages})
    config.each_stage()
    return config


def _validated(tree: dict) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError(_first_error(error)) from error


def _read(source: str) -> dict:
    preset = preset_named(source)
    path = PRESETS / f"{preset}.yaml" if preset else Path(source)
    if not preset:
        if not path.is_file():
            near = difflib.get_close_matches(source, presets(), 1, 0.3)
            hint = f"; did you mean the preset {near[0]}?" if near else ""
            raise ValueError(f"{source!r} is neither a preset ({', '.join(presets())}) nor a file{hint}")
    tree = read_mapping(path)
    if not all(isinstance(section, dict) for name, section in tree.items() if name != "stages"):
        raise ValueError(f"{path} must hold sections of keys, as `ringspan config` prints them")
    return tree


def _starting_model(tree: dict, preset: dict) -> dict:
    """The model's keys before those that the user has set. Of a model folder that the run starts from, and of the preset what
    a recipe chooses (positions, what a token sees); without such a folder the preset's.
    """
    init = tree.get("checkpoint", {}).get("init")
    if not isinstance(init, str):
        return preset
    if tree.get("model", {}).keys() >= {field.name for field in dataclasses.fields(ModelConfig)}:
        return {}  # a run's own config.yaml says it all; the folder may be gone by then
    folder = absolute(init, "checkpoint.init")
    found = dataclasses.asdict(from_huggingface(read_config(folder), str(folder / "config.json")))
    return found | {key: value for key, value in preset.items() if key in WEIGHTLESS - {"norm_eps"}}  # that goes with the weights


def _check_keys(tree: dict) -> None:
    known = {name: kind for section in SECTIONS for name, kind in _kinds(section, Config.model_fields[section].annotation)}
    for section, keys in tree.items():
        for name, value in _given(section, keys):
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.0)
                same_name = [other for other in known if other.split(".")[-1] == name.split(".")[-1]]
                raise ValueError(f"unknown configuration key {name}; the nearest is {(same_name or near)[0]} (see: ringspan config)")
            types = _types(known[name])
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, bool) and bool not in types and types & {int, float}:  # Python takes True for 1
                    raise ValueError(f"{name} is {str(part).lower()} (as YAML reads yes, no, on and off, too); it must be a number")
        if section not in SECTIONS:
            raise ValueError(f"unknown configuration section {section!r}; there are {', '.join(SECTIONS)}")


def _check_stages(stages) -> None:
    if not (isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)):
        raise ValueError(
            f"stages is {stages!r}; it must be a list, each entry with sections of keys, as [{{training: {{steps: 200, context: 8192}}}}]"
        )
    for number, stage in enumerate(stages, 1):
        with naming_stage(number, len(stages)):
            sections = {section: keys for section, keys in stage.items() if section != "tokens"}
            for section, keys in sections.items():
                if not isinstance(keys, dict):
                    raise ValueError(f"{section} is {keys!r}; it must hold keys (or be tokens, the stage's length)")
            _check_keys(sections)
            for fixed in ONE_A_RUN:
                section, _, key = fixed.partition(".")
                if key in sections.get(section, ()) or (not key and section in sections):
                    raise ValueError(f"{fixed} holds for the whole run; set it outside the stages")
            tokens = stage.get("tokens", 1)
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise ValueError(f"tokens is {tokens!r}; it must be a whole number, at least 1, as 4_000_000_000")
            if "tokens" in stage and "steps" in stage.get("training", ()):
                raise ValueError("tokens and training.steps both say how long it is; leave one of them out")


def _kinds(prefix: str, section) -> Iterator[tuple[str, object]]:
    """The keys of a section's dataclass with their types, and those of a dataclass that one of its fields may be, as ``model.rope_scaling.factor``."""
    for name, kind in typing.get_type_hints(section).items():
        yield f"{prefix}.{name}", kind
        for inner in filter(dataclasses.is_dataclass, typing.get_args(kind)):
            yield from _kinds(f"{prefix}.{name}", inner)


def _types(kind) -> set:
    """The plain types in an annotation: {float, None's, …} for ``tuple[float, ...] | None``."""
    inner = typing.get_args(kind)
    return set().union(*map(_types, inner)) if inner else {kind}


def _given(prefix: str, keys: dict) -> Iterator[tuple[str, object]]:
    for key, value in keys.items():
        yield f"{prefix}.{key}", value
        if isinstance(value, dict):
            yield from _given(f"{prefix}.{key}", value)


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{key} is not set, and has no default"
    return f"{key} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
