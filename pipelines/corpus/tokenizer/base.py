"""What every tokenizer offers, and the control tokens that all of them have."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

SPECIAL = (
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|document|>",
    "<|section|>",
)
FILE_NAME = "tokenizer.json"


class Tokenizer:
    """What every tokenizer offers; see `ByteTokenizer` and `LibraryTokenizer`.

    Attributes:
        name: how a person asks for it: `byte`, `bpe:4096`, `file:folder/tokenizer.json`, `tiktoken:cl100k`.
        vocab_size: number of ids, control ids included.
        fingerprint: hash of everything that decides ids.
        special: id of each control token in `SPECIAL`.
        dtype: `uint16` where the ids fit, else `int32`; what `encode` returns and the store holds.
        document: its `tokenizer.json`, control tokens included.
    """

    def __init__(self, document: str, name: str, vocab_size: int, special: dict[str, int]):
        self.document = document
        self.name = name
        self.vocab_size = vocab_size
        self.special = special
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
        canonical = json.dumps(json.loads(document), sort_keys=True, ensure_ascii=True)
        self.fingerprint = hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    @property
    def end_of_text(self) -> int:
        return self.special["<|endoftext|>"]

    def encode(self, text: str) -> np.ndarray:
        """Ids [T] of `text`, dtype `self.dtype`; never a control id."""
        raise NotImplementedError

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids [T] and int64 [T, 2] character offsets: `text[start:end]` is what a token covers.

        A token that holds only part of a character's bytes covers that whole character, so neighbouring tokens of
        one character have equal offsets, and the slices of all other tokens join up to the text.
        """
        raise NotImplementedError

    def decode(self, ids, skip_special: bool = False) -> str:
        """Text of `ids` [T]. Control ids appear by name unless `skip_special`. Ids that end inside a character give
        U+FFFD there: a stream must wait for the rest of it."""
        raise NotImplementedError

    def save(self, folder) -> None:
        """Writes `folder/tokenizer.json`."""
        (Path(folder) / FILE_NAME).write_text(self.document, encoding="utf-8")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.vocab_size} ids, {self.fingerprint})"
