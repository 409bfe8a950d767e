"""Which tokenizer: by what a person writes, from a folder or file, or trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pipelines.corpus.tokenizer.base import FILE_NAME, SPECIAL, Tokenizer
from pipelines.corpus.tokenizer.byte import ByteTokenizer, byte_document
from pipelines.corpus.tokenizer.library import LibraryTokenizer
from pipelines.corpus.tokenizer.ranks import PREFIX, parse_ranks, ranks_document

_MOST_IDS = 1 << 20  # the library makes room for all of them beforehand


def load_tokenizer(folder_or_file, name: str | None = None) -> Tokenizer:
    """The tokenizer in a store or model folder, in a Hugging Face `tokenizer.json`, or in `tiktoken:` a rank file.

    `name` is what to call it; by default `file:` and the last two parts of its path, the same on every machine.
    """
    if str(folder_or_file).startswith(PREFIX):
        encoding, path = parse_ranks(str(folder_or_file))
        return LibraryTokenizer(ranks_document(encoding, path), name or f"{PREFIX}{encoding}")
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


def parse_spec(spec: str) -> tuple[str, int | Path | str | None]:
    """`byte` → ("byte", None); `bpe:4096` → ("bpe", 4096); a path → ("file", Path); `tiktoken:…` → ("file", itself).

    What comes with "file" is for `load_tokenizer`. One-line ValueError otherwise.
    """
    if spec == "byte":
        return "byte", None
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        smallest = 256 + len(SPECIAL)
        if not size.isascii() or not size.isdigit() or not smallest <= int(size[:20]) <= _MOST_IDS:
            raise ValueError(f"tokenizer {spec!r}: after bpe: comes the number of ids, {smallest:,} to {_MOST_IDS:,}: bpe:4096")
        return "bpe", int(size)
    if spec.startswith(PREFIX):
        parse_ranks(spec)
        return "file", spec
    path = Path(spec)
    if not path.exists():
        raise ValueError(f"tokenizer {spec!r}: neither byte, nor bpe:N, nor an existing tokenizer.json, nor tiktoken:FILE")
    return "file", path
