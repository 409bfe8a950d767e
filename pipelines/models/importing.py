"""A model from elsewhere, checked and made ready: a Hugging Face folder or a GGUF file → a model folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipelines.corpus.tokenizer import FILE_NAME, LibraryTokenizer
from pipelines.models.gguf import open_gguf
from workers.model import ModelConfig
from workers.model.config import padded_vocabulary
from workers.model.huggingface import FolderTensors, check_sizes, from_huggingface, new_folder, read_config, write_folder
from workers.model.huggingface.config import ARCHITECTURES
from workers.model.huggingface.folder import Sizes
from workers.model.huggingface.weights import EMBEDDING, HEAD, check_tied

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Imported:
    """``added_rows``: rows that the embedding got for control tokens that the model did not know."""

    model: str
    architecture: str
    parameters: int
    vocab_size: int
    added_rows: int
    dtype: str


def import_model(source: Path, out: Path, special_tokens: bool = False) -> Imported:
    """Write the model of a Hugging Face folder or a GGUF file to the folder ``out``.

    Weights keep their type and every bit of their value (a GGUF's quantized ones become float32). With ``special_tokens``
    the tokenizer gets Ringspan's control tokens, and the embedding rows for them where it has none left: a multiple of 64
    rows, new ones the mean of the old, so that no new token is likelier than the average one (Hewitt 2021).

    Raises ValueError, one line, for what is not supported or not whole; then nothing is written.
    """
    if source.is_dir():
        raw, tensors, document, files = read_config(source), FolderTensors(source), _document(source), {}
    elif source.suffix == ".gguf":
        raw, tensors, document, files = open_gguf(source)
    else:
        raise ValueError(f"{source} is neither a model folder nor a .gguf file")
    where = f"{source}/config.json" if source.is_dir() else str(source)
    config = from_huggingface(raw, where)
    check_sizes(tensors.sizes, config, source)
    check_tied(tensors, config, source)
    rows = config.vocab_size
    if special_tokens:
        if document is None:
            raise ValueError(f"{source} has no {FILE_NAME}; --special-tokens needs one: save the tokenizer with transformers first")
        tokenizer = LibraryTokenizer(document, source.name)
        document = tokenizer.document
        if tokenizer.vocab_size > rows:
            rows = padded_vocabulary(tokenizer.vocab_size)
    if document is not None:
        files = {**files, FILE_NAME: document}
    else:
        log.warning("%s has no %s, so no corpus can be made with its tokenizer; save it with transformers first", source, FILE_NAME)
    sizes, read = _with_rows(tensors, config, rows)
    with new_folder(out) as partial:
        write_folder(partial, {**raw, "vocab_size": rows}, sizes, read, like=source if source.is_dir() else None)
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
    parameters = replace(config, vocab_size=rows).parameters
    dtype = str(sizes[EMBEDDING][1]).removeprefix("torch.")
    return Imported(str(out), ARCHITECTURES[raw["model_type"]], parameters, rows, rows - config.vocab_size, dtype)


def _document(folder: Path) -> str | None:
    path = folder / FILE_NAME
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _with_rows(tensors, config: ModelConfig, rows: int) -> tuple[Sizes, Callable[[str], torch.Tensor]]:
    """The tensors that the model has, embedding and head lengthened to ``rows`` by the mean of their rows."""
    kept = {name: size for name, size in tensors.sizes.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        kept.pop(HEAD, None)
    for name in {EMBEDDING, HEAD} & kept.keys():
        (_, dim), dtype = kept[name]
        kept[name] = ((rows, dim), dtype)

    def read(name: str) -> torch.Tensor:
        tensor = tensors.read(name)
        new = kept[name][0][0] - tensor.shape[0]
        if not new:
            return tensor
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(new, -1)])

    return kept, read
