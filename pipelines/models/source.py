"""What a path to something trained means: a run, one of its checkpoints, or a model folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipelines.config import load_config
from pipelines.paths import read_mapping
from workers.model import ModelConfig
from workers.model.huggingface import CONTEXT, from_huggingface, is_model_folder, read_config
from workers.training import checkpoint as checkpoints

ORIGIN = "init"  # in a run folder: what the model folder it started from carried beside its weights


@dataclasses.dataclass(frozen=True)
class Source:
    """``folder`` holds the tokenizer, ``weights`` is a checkpoint or the model folder itself.

    context: the tokens it was trained at. stop: ids that end a text, by the model folder's own word. unit: what its run took
    as a document, a "row" (a file or paper) or a "collection" of them. infill: whether it learnt to fill in the middle.
    """

    folder: Path
    weights: Path
    model: ModelConfig
    context: int
    stop: frozenset[int] = frozenset()
    unit: str = "row"
    infill: bool = False


def open_source(path: Path, what: str = "--checkpoint") -> Source:
    """Raises ValueError, naming the option ``what``, when ``path`` is nothing trained."""
    path = path.resolve()
    if is_model_folder(path):
        raw = read_config(path)
        model = from_huggingface(raw, str(path / "config.json"))
        ends = raw.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return Source(path, path, model, raw.get("max_position_embeddings") or CONTEXT, frozenset(ends))
    run, checkpoint = checkpoint_of(path, what)
    config = load_config(str(run / "config.yaml")).at(checkpoints.read_progress(checkpoint).step)
    unit = read_mapping(run / "corpus.json").get("unit", "row")
    return Source(
        run, checkpoint, checkpoints.read_model(checkpoint), config.training.context, unit=unit, infill=config.corpus.fim_rate > 0
    )


def checkpoint_of(path: Path, what: str = "--checkpoint") -> tuple[Path, Path]:
    """The run folder and the checkpoint that ``path`` means: a run (its latest) or one checkpoint of it.

    Raises ValueError when there is none.
    """
    path = path.resolve()
    if not path.is_dir():
        raise ValueError(f"{what} {path} is not a folder; give a run, one of its checkpoints or a model folder")
    if path.suffix == checkpoints.PARTIAL:
        raise ValueError(f"{what} {path} was never finished; give the run, or a checkpoint without {checkpoints.PARTIAL}")
    if (path / "state.json").is_file():
        return path.parent.parent, path
    latest = checkpoints.latest(path / "checkpoints")
    if latest is None:
        raise ValueError(f"{path} holds no finished checkpoint; a run writes one every checkpoint.every steps and at its end")
    return path, latest
