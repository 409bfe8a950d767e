"""One configuration tree: defaults < preset or YAML file < ``--set section.key=value``.

Each section is the dataclass of the room that reads it; nothing is declared twice.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.launch import ClusterConfig
from pipelines.paths import read_mapping
from workers.attention.block import BACKENDS
from workers.mesh import LAYOUTS, MeshSpec, split_context
from workers.model.config import ModelConfig
from workers.parallel.memory import MemoryConfig
from workers.training.config import CheckpointConfig, TrainingConfig

PRESETS = Path(__file__).parent / "presets"


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """store: the folder that ``ringspan ingest`` wrote. overlap: tokens of a long document's window that the window
    before has learnt; null is context / 8. held_out: share of the documents kept from training; held_out_windows: how
    many of their windows an evaluation reads. positions: "restart" at each document, or "continue" through the window.
    """

    store: str | None = None
    overlap: int | None = None
    held_out: float = 0.05
    held_out_windows: int = 16
    positions: str = "restart"

    def __post_init__(self):
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
    """The mesh's axes; dp -1 takes the workers that the others leave.

    cp: ranks that share a sequence, in place of ring and ulysses, which are then chosen: ulysses as large as heads and a
    node of ``ranks_per_node`` allow, the rest a ring.
    """

    dp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
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
        return MeshSpec(self.dp, ring, ulysses, self.tp, layout)


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
    """Everything a training run is told."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    corpus: CorpusConfig = CorpusConfig()
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    def mesh_spec(self) -> MeshSpec:
        """The mesh with its layout, settled for the number of workers. Raises ValueError when it does not fit them."""
        layout = self.model.pattern().best_layout if self.attention.layout == "auto" else self.attention.layout
        return self.mesh.spec(self.model, layout).resolve(self.cluster.workers)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def presets() -> list[str]:
    """Names of the presets, as ``code_completion/tiny``."""
    return sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in PRESETS.rglob("*.yaml"))


def load_config(source: str | None, assignments: tuple[str, ...] = ()) -> Config:
    """The configuration of a preset or a YAML file, changed by ``section.key=value`` assignments.

    Raises ValueError, one line, for a source that does not exist, a key that does not exist (with the nearest one that
    does) and a value that is not allowed.
    """
    tree = _read(source) if source is not None else {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and name):
            raise ValueError(f"--set {assignment!r} is not section.key=value, as in --set training.steps=200")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {assignment!r}: the value is not valid YAML ({' '.join(str(error).split())[:100]})") from error
        if not isinstance(tree.get(section, {}), dict):
            raise ValueError(f"section {section!r} is {tree[section]!r}; it must hold keys")
        tree[section] = {**tree.get(section, {}), name: parsed}
    _check_keys(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError(_first_error(error)) from error


def _read(source: str) -> dict:
    path = PRESETS / f"{source}.yaml"
    if not path.is_file():
        path = Path(source)
        if not path.is_file():
            near = difflib.get_close_matches(source, presets(), 1, 0.3)
            hint = f"; did you mean the preset {near[0]}?" if near else ""
            raise ValueError(f"{source!r} is neither a preset ({', '.join(presets())}) nor a file{hint}")
    tree = read_mapping(path)
    if not all(isinstance(section, dict) for section in tree.values()):
        raise ValueError(f"{path} must hold sections of keys, as `ringspan config` prints them")
    return tree


def _check_keys(tree: dict) -> None:
    known = {f"{section}.{field.name}" for section, info in Config.model_fields.items() for field in dataclasses.fields(info.annotation)}
    for section, keys in tree.items():
        for key in keys:
            if f"{section}.{key}" not in known:
                near = difflib.get_close_matches(f"{section}.{key}", known, 1, 0.0)
                same_name = [name for name in known if name.split(".")[1] == str(key)]
                raise ValueError(f"unknown configuration key {section}.{key}; the nearest is {(same_name or near)[0]} (see: ringspan config)")
        if section not in Config.model_fields:
            raise ValueError(f"unknown configuration section {section!r}; there are {', '.join(Config.model_fields)}")


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    return f"{'.'.join(str(part) for part in first['loc'])} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
