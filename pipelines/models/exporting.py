"""A run, a checkpoint or a model folder → a folder that transformers opens: weights, architecture, tokenizer. Or an adapter, for PEFT."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import torch

from pipelines.corpus.tokenizer import FILE_NAME, load_tokenizer
from pipelines.models.source import ORIGIN, open_source
from workers.inference.generate import load_decoder
from workers.model.huggingface import (
    check_weights,
    from_huggingface,
    is_model_folder,
    model_tensors,
    new_folder,
    read_config,
    to_huggingface,
    write_folder,
)  # fmt: skip
from workers.model.huggingface.config import ARCHITECTURES
from workers.model.huggingface.peft import save_adapter
from workers.training import checkpoint as checkpoints

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Exported:
    folder: str
    architecture: str
    parameters: int
    dtype: str
    weights: str


def export_model(path: Path, out: Path, dtype: str | None = None) -> Exported:
    """Write what ``path`` means to the new folder ``out``; a run's adapter is merged into its base.

    ``dtype`` None keeps what is there: a model folder's own types, the float32 in which a run trains.
    Raises ValueError, one line, for a model that no architecture of transformers computes.
    """
    source = open_source(path, "the path")
    if is_model_folder(source.folder):
        raw, like, files = read_config(source.folder), source.folder, {}
        tensors = check_weights(source.folder, source.model)
        sizes, read = tensors.sizes, tensors.read
        if dtype is not None:
            sizes = {name: (shape, DTYPES[dtype]) for name, (shape, _) in sizes.items()}
            raw = {key: value for key, value in raw.items() if key != "dtype"} | {"torch_dtype": dtype}
    else:
        like = source.folder / ORIGIN if is_model_folder(source.folder / ORIGIN) else None
        wanted = DTYPES[dtype or "float32"]
        raw = to_huggingface(source.model, wanted, like=read_config(like) if like else None, context=source.context)
        files = _tokenizer_files(source.folder, with_config=like is None)
        if like is None:
            raw |= json.loads(files["generation_config.json"])
        sizes, read = model_tensors(load_decoder(source.weights), wanted)
    with new_folder(out) as partial:
        write_folder(partial, raw, sizes, read, like=like)
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
    written = {str(kind).removeprefix("torch.") for _, kind in sizes.values()}
    return Exported(str(out), ARCHITECTURES[raw["model_type"]], source.model.parameters, ", ".join(sorted(written)), str(source.weights))


def export_adapter(path: Path, out: Path, dtype: str | None = None) -> Exported:
    """Write the adapter that ``path``, a run or a checkpoint, trained to the new folder ``out``, without its base.

    Raises ValueError, one line, for what has no adapter, and for one whose base is not the model folder that it was.
    """
    source = open_source(path, "the path")
    if is_model_folder(source.folder):
        raise ValueError(f"{path} is a model folder and has no adapter; leave out --adapter-only")
    adapter, base = checkpoints.read_adapter(source.weights)
    if base is None:
        raise ValueError(f"{source.weights} has no adapter, all its weights were trained; leave out --adapter-only")
    if base.folder is None:
        raise ValueError(f"the adapter's base is {base}, which no folder holds; leave out --adapter-only")
    base.check()
    wanted = DTYPES[dtype or "float32"]
    theirs = read_config(Path(base.folder))
    raw = to_huggingface(source.model, wanted, like=theirs, context=source.context)
    for name, value in dataclasses.asdict(from_huggingface(theirs)).items():
        if (ours := dataclasses.asdict(source.model)[name]) != value:
            log.warning("the adapter was trained with model.%s = %s, its base says %s: set it when the two are loaded, or export them merged",
                        name, ours, value)  # fmt: skip
    trained = checkpoints.read_weights(source.weights)
    save_adapter(out, trained, adapter, source.model, Path(base.folder), wanted)
    count = sum(tensor.numel() for tensor in trained.values())
    return Exported(
        str(out), f"adapter of {ARCHITECTURES[raw['model_type']]}", count, str(wanted).removeprefix("torch."), str(source.weights)
    )


def _tokenizer_files(run: Path, with_config: bool) -> dict[str, str]:
    """The run's tokenizer; where its model did not come with them, also what transformers asks of a tokenizer."""
    tokenizer = load_tokenizer(run)
    files = {FILE_NAME: tokenizer.document}
    if with_config:
        end = "<|endoftext|>"
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "pad_token": end,
            "clean_up_tokenization_spaces": False,
        }  # fmt: skip
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end_of_text)
        files |= {"tokenizer_config.json": json.dumps(config, indent=1), "generation_config.json": json.dumps(ids, indent=1)}
    return files
