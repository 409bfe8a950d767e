"""Which tokenizer: by what a person writes, from a folder or file, or trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pipelines.corpus.tokenizer.base import FILE_NAME, SPECIAL, Tokenizer
from pipelines.corpus.tokenizer.byte import ByteTokenizer, byte_document
from pipelines.corpus.tokenizer.library import LibraryTokenizer


def load_tokenizer(folder_or_file, name: str | None = None) -> Tokenizer:
    """The tokenizer in a store or model folder, or in a Hugging Face `tokenizer.json`.

    `name` is what to call it; by default `file:` and the last two parts of its path, the same on every machine.
    """
    path = Path(folder_or_file)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"no tokenizer at {path}: give a folder with a {FILE_NAME}, or such a file")
    try:
        document = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer {path}: not a tokenizer.json ({error})") from error
    if document == byte_document():
        return ByteTokenizer()
    return LibraryTokenizer(document, name or "file:" + "/".join(path.resolve().parts[-2:]))


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level byte-pair encoding of exactly `vocab_size` ids (fewer where the texts have no more pairs to merge).

    The same texts give the same tokenizer, in any order of threads: pairs are counted exactly and ties broken by id.
    """
    smallest = 256 + len(SPECIAL)
    if vocab_size < smallest:
        raise ValueError(f"bpe:{vocab_size} is too small: 256 bytes and {len(SPECIAL)} control tokens need {smallest}")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return LibraryTokenizer(library.to_str(), f"bpe:{vocab_size}")


def parse_spec(spec: str) -> tuple[str, int | Path | None]:
    """`byte` → ("byte", None); `bpe:4096` → ("bpe", 4096); a path → ("file", Path). One-line ValueError otherwise."""
    if spec == "byte":
        return "byte", None
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        smallest = 256 + len(SPECIAL)
        if not size.isascii() or not size.isdigit() or int(size) < smallest:
            raise ValueError(f"tokenizer {spec!r}: after bpe: comes the number of ids, at least {smallest}: bpe:4096")
        return "bpe", int(size)
    path = Path(spec)
    if not path.exists():
        raise ValueError(f"tokenizer {spec!r}: neither byte, nor bpe:N, nor an existing tokenizer.json")
    return "file", path
