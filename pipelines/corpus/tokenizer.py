"""Text to token ids and back: bytes, byte-pair encoding trained on the corpus, or any `tokenizer.json`.

Every tokenizer here obeys three rules that the rest of Ringspan leans on:

1. `decode(encode(text)) == text` for every text without lone surrogates. A file whose normaliser rewrites text is
   refused, except Unicode composition (NFC, as in Qwen), which only touches decomposed characters.
2. Text never becomes a control id. A source that contains the literal `<|endoftext|>` is encoded as those
   thirteen characters; only code that asks for `special["<|endoftext|>"]` gets the id.
3. All that decides ids is one JSON document in the Hugging Face format: it is what `save` writes, what is hashed
   into `fingerprint`, and what travels to other processes. Byte tokens have such a document too, so an exported
   model opens elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

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

# The library keeps about 250 bytes a token while it encodes; a 24 MB header in one call takes 6 GB. Long texts are
# therefore encoded in pieces, cut where none of the published byte-level patterns joins the two sides: after a letter
# or digit, before white space or these signs (not before an apostrophe: some keep "it's" whole).
_PIECE_CHARACTERS = 1 << 18
_SAFE_CUT = re.compile(r"[A-Za-z0-9](?=[ \t\r\n,;=(){}\[\]])")

# What a tokenizer must give back unchanged to be accepted: capitals, indentation, both line ends, composed and wide
# characters.
_PROBE = "class F(X):\r\n\treturn  x  # naïve i ⭢ j ﬁ 👩‍🚀\n\n    y = 1234\n"


class Tokenizer:
    """What every tokenizer offers; see `ByteTokenizer` and `LibraryTokenizer`.

    Attributes:
        name: how a person asks for it: `byte`, `bpe:4096`, `file:folder/tokenizer.json`.
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


class ByteTokenizer(Tokenizer):
    """One id a byte of UTF-8 (0–255), then the control ids. Nothing to train, nothing to download.

    The `i`-th byte of a multi-byte character has the offsets of that character.
    """

    def __init__(self):
        special = {token: 256 + i for i, token in enumerate(SPECIAL)}
        super().__init__(_byte_document(), "byte", 256 + len(SPECIAL), special)

    def __reduce__(self):
        return ByteTokenizer, ()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(self.dtype)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + sum((code_points >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
        start = np.repeat(np.arange(len(code_points), dtype=np.int64), widths)
        return self.encode(text), np.stack([start, start + 1], axis=1)

    def decode(self, ids, skip_special: bool = False) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(f"ids must lie in 0–{self.vocab_size - 1}, got {ids.min()}–{ids.max()}")
        parts, last = [], 0
        for at in np.flatnonzero(ids >= 256):
            parts.append(ids[last:at].astype(np.uint8).tobytes())
            if not skip_special:
                parts.append(SPECIAL[ids[at] - 256].encode())
            last = at + 1
        parts.append(ids[last:].astype(np.uint8).tobytes())
        return b"".join(parts).decode("utf-8", errors="replace")


class LibraryTokenizer(Tokenizer):
    """A `tokenizer.json` run by the `tokenizers` library.

    1. Control tokens that the file lacks are added after its last id.
    2. Tokens of `SPECIAL` count as control tokens even where the file says they don't (Qwen's `<|fim_prefix|>`).
    3. Truncation, padding and automatic begin/end tokens in the file are switched off: a store holds the text, and
       whoever builds a window decides what stands around it.

    Raises ValueError for a file that isn't a tokenizer, loses text, or turns text into control ids.
    """

    def __init__(self, document: str, name: str):
        document, special = _with_special_tokens(document, name)
        try:
            self._library = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # the library raises bare Exception for every malformed document
            raise ValueError(f"tokenizer {name}: not a tokenizer.json ({error})") from error
        self._library.no_truncation()
        self._library.no_padding()
        self._library.post_processor = None
        self._library.encode_special_tokens = True
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        super().__init__(document, name, 1 + max(vocabulary.values()), special)
        self._cuts_are_safe = _cuts_are_safe(json.loads(document))
        self._check()

    def __reduce__(self):
        return _library_tokenizer, (self.document, self.name)

    def encode(self, text: str) -> np.ndarray:
        encode = self._library.encode_batch_fast
        pieces = [encode([text[a:b]], add_special_tokens=False)[0].ids for a, b in self._pieces(text)]
        return np.concatenate([np.asarray(ids, dtype=self.dtype) for ids in pieces])

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = [], []
        for a, b in self._pieces(text):
            encoding = self._library.encode(text[a:b], add_special_tokens=False)
            ids.append(np.asarray(encoding.ids, dtype=self.dtype))
            offsets.append(np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2) + a)
        return np.concatenate(ids), np.concatenate(offsets)

    def decode(self, ids, skip_special: bool = False) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(f"ids must lie in 0–{self.vocab_size - 1}, got {ids.min()}–{ids.max()}")
        return self._library.decode(ids.tolist(), skip_special_tokens=skip_special)

    def _pieces(self, text: str) -> Iterator[tuple[int, int]]:
        start = 0
        while self._cuts_are_safe and len(text) - start > _PIECE_CHARACTERS:
            cut = _SAFE_CUT.search(text, start + _PIECE_CHARACTERS)
            if cut is None:
                break
            yield start, cut.end()
            start = cut.end()
        yield start, len(text)

    def _check(self) -> None:
        back = self.decode(self.encode(_PROBE))
        if back != _PROBE:
            raise ValueError(f"tokenizer {self.name} loses text: {_PROBE!r} becomes {back!r}; use a byte-level one")
        control = {i: t.content for i, t in self._library.get_added_tokens_decoder().items() if t.special}
        for content in control.values():
            found = control.keys() & set(self.encode(content).tolist())
            if found:
                raise ValueError(f"tokenizer {self.name} turns the plain text {content!r} into control id {min(found)}")


@functools.lru_cache(maxsize=2)
def _library_tokenizer(document: str, name: str) -> LibraryTokenizer:
    """One instance for all the tasks that arrive in a process: a vocabulary of 150,000 takes a second to build."""
    return LibraryTokenizer(document, name)


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
    if document == _byte_document():
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


@functools.cache
def _byte_document() -> str:
    """Byte tokens in the Hugging Face format: byte-pair encoding without a single merge, ids in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(256 + i, token) for i, token in enumerate(SPECIAL)],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {letter[byte]: byte for byte in range(256)}, "merges": []},
        }
    )


def _added(token_id: int, content: str) -> dict:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _with_special_tokens(document: str, name: str) -> tuple[str, dict[str, int]]:
    """The document with every token of `SPECIAL` as a control token, untouched where it has them already."""
    try:
        tree = json.loads(document)
        vocabulary = tree["model"]["vocab"]
        added = {token["content"]: token for token in tree["added_tokens"]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"tokenizer {name}: not a tokenizer.json ({type(error).__name__}: {error})") from error
    if isinstance(vocabulary, list):  # Unigram: [piece, score] in order of ids
        vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
    next_id = 1 + max([*vocabulary.values(), *(token["id"] for token in added.values())], default=-1)
    special, changed = {}, False
    for content in SPECIAL:
        if content not in added:
            added[content] = _added(vocabulary.get(content, next_id), content)
            next_id += added[content]["id"] == next_id
            changed = True
        elif not added[content]["special"]:
            added[content]["special"] = changed = True
        special[content] = added[content]["id"]
    if not changed:
        return document, special
    tree["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    return json.dumps(tree, ensure_ascii=False), special


def _cuts_are_safe(tree: dict) -> bool:
    """True where a text may be encoded in pieces: it is first split by a pattern, and nothing is put before a piece."""
    steps = [tree["pre_tokenizer"]] if tree["pre_tokenizer"] else []
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["pretokenizers"]
    level = [step for step in steps if step["type"] == "ByteLevel"]
    splits = any(step["type"] == "Split" for step in steps) or any(step.get("use_regex", True) for step in level)
    composes_only = tree["normalizer"] is None or tree["normalizer"]["type"] == "NFC"
    return composes_only and splits and bool(level) and not any(step["add_prefix_space"] for step in level)
