"""A `tokenizer.json` run by the `tokenizers` library, its words looked up where they were seen before."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator

import numpy as np
import tokenizers

from pipelines.corpus.tokenizer.base import SPECIAL, Tokenizer
from pipelines.corpus.tokenizer.byte import added_token
from pipelines.corpus.tokenizer.words import Words, ascii_words

# The library keeps about 250 bytes a token while it encodes; a 24 MB header in one call takes 6 GB. Long texts are
# therefore encoded in pieces, cut where none of the published byte-level patterns joins the two sides: after a letter
# or digit, before white space or these signs (not before an apostrophe: some keep "it's" whole).
_PIECE_CHARACTERS = 1 << 18
_SAFE_CUT = re.compile(r"[A-Za-z0-9](?=[ \t\r\n,;=(){}\[\]])")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_NEAR = 200  # characters before one that isn't ASCII, in which a cut is looked for

# What a tokenizer must give back unchanged to be accepted: capitals, indentation, both line ends, composed and wide
# characters.
_PROBE = "class F(X):\r\n\treturn  x  # naïve i ⭢ j ﬁ 👩‍🚀\n\n    y = 1234\n"
# What the table of words must agree on with the library: every pair of ASCII characters, and each way in which letters,
# digits, signs and white space follow one another.
_ASCII_PROBE = "".join(itertools.chain(*itertools.product(map(chr, range(128)), repeat=2))) + "".join(
    itertools.chain(*itertools.product("aBs1 \n\r\t'/_", repeat=3))
)


class LibraryTokenizer(Tokenizer):
    """A `tokenizer.json` run by the `tokenizers` library.

    1. Control tokens that the file lacks are added after its last id.
    2. Tokens of `SPECIAL` count as control tokens even where the file says they don't (Qwen's `<|fim_prefix|>`).
    3. Truncation, padding and automatic begin/end tokens in the file are switched off: a store holds the text, and
       whoever builds a window decides what stands around it.
    4. Words that it has seen it looks up (`words`), with the library's own ids; the table's memory is bounded.

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
        tree = json.loads(self.document)
        self._plain = [token for token in tree["added_tokens"] if not token["special"]]
        self._cuts_are_safe = _cuts_are_safe(tree, self._plain)
        self._words = self._table_of_words(tree)
        self._check()

    def __reduce__(self):
        return library_tokenizer, (self.document, self.name)

    def encode(self, text: str) -> np.ndarray:
        ids = bytearray().join(map(self._piece, (text[a:b] for a, b in self._pieces(text))))
        return np.frombuffer(ids, self.dtype)

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

    def _piece(self, text: str) -> bytes:
        # The file's own added tokens that aren't control tokens (Qwen's `<tool_call>`) are found before any splitting.
        if self._words is None or any(token["content"] in text for token in self._plain):
            return self._by_library(text)
        if text.isascii():
            return b"".join(map(self._words.__getitem__, self._ascii_words.findall(text)))
        ids, done = [], 0
        while other := _NOT_ASCII.search(text, done):
            start = done
            for cut in _SAFE_CUT.finditer(text, max(done, other.start() - _NEAR), other.start()):
                start = cut.end()
            cut = _SAFE_CUT.search(text, other.end())
            stop = cut.end() if cut else len(text)
            ids += map(self._words.__getitem__, self._ascii_words.findall(text, done, start))
            ids.append(self._words[text[start:stop]])
            done = stop
        ids += map(self._words.__getitem__, self._ascii_words.findall(text, done))
        return b"".join(ids)

    def _by_library(self, text: str) -> bytes:
        encoding = self._library.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.asarray(encoding.ids, dtype=self.dtype).tobytes()

    def _table_of_words(self, tree: dict) -> Words | None:
        """The table, where a word's ids depend on nothing else and its pattern, tried out, splits as the library does."""
        self._ascii_words = ascii_words(tree) if self._cuts_are_safe else None
        alone = not tree["model"].get("dropout") and all(token["content"].isascii() for token in self._plain)
        if self._ascii_words is None or not alone:
            return None
        words = Words(self._by_library)
        found = b"".join(map(words.__getitem__, self._ascii_words.findall(_ASCII_PROBE)))
        return words if found == self._by_library(_ASCII_PROBE) else None

    def _check(self) -> None:
        back = self.decode(self.encode(_PROBE))
        if back != _PROBE:
            raise ValueError(f"tokenizer {self.name} loses text: {_PROBE!r} becomes {back!r}; use a byte-level one")
        control = {i: t.content for i, t in self._library.get_added_tokens_decoder().items() if t.special}
        for content in control.values():
            found = control.keys() & set(self.encode(content).tolist())
            if found:
                raise ValueError(f"tokenizer {self.name} turns the plain text {content!r} into control id {min(found)}")


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
            added[content] = added_token(vocabulary.get(content, next_id), content)
            next_id += added[content]["id"] == next_id
            changed = True
        elif not added[content]["special"]:
            added[content]["special"] = changed = True
        special[content] = added[content]["id"]
    if not changed:
        return document, special
    tree["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    return json.dumps(tree, ensure_ascii=False), special


def _cuts_are_safe(tree: dict, plain: list[dict]) -> bool:
    """True where a text may be encoded in pieces: it is first split by a pattern, nothing is put before a piece, and no
    added token of the file's own stretches over a cut or looks across it."""
    steps = [tree["pre_tokenizer"]] if tree["pre_tokenizer"] else []
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["pretokenizers"]
    level = [step for step in steps if step["type"] == "ByteLevel"]
    splits = any(step["type"] == "Split" for step in steps) or any(step.get("use_regex", True) for step in level)
    composes_only = tree["normalizer"] is None or tree["normalizer"]["type"] == "NFC"
    whole = not any(token["single_word"] or _SAFE_CUT.search(token["content"]) for token in plain)
    return composes_only and splits and bool(level) and whole and not any(step["add_prefix_space"] for step in level)


@functools.lru_cache(maxsize=2)
def library_tokenizer(document: str, name: str) -> LibraryTokenizer:
    """One instance for all the tasks that arrive in a process: a vocabulary of 150,000 takes a second to build."""
    return LibraryTokenizer(document, name)
