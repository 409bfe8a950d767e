"""Words seen before: the ids of ASCII text from a table, several times faster than encoding it anew.

A byte-level tokenizer first splits a text into words by a pattern and encodes each word by itself, so a word has the
same ids wherever it stands. Code repeats its words endlessly: 20 MB of C headers hold six million, of which 62,000
differ. A table of words therefore answers nearly all, and splitting is what is left to do.

Only patterns known here are split here, and only in ASCII, where Python's `re` needs no Unicode classes and the two
engines cannot disagree about what a letter is. All else is the library's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# How published byte-level tokenizers split text, by their text in a tokenizer.json, and the same for ASCII. The order
# of alternatives differs only where two of them can't begin with the same character; letters come first, being most.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (  # as tiktoken splits: white space that ends the text stays whole
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s+\z|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _CL100K.replace(r"|\s+\z", "")
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": _GPT2, "cl100k": _CL100K, "llama3": _LLAMA3, "qwen": _QWEN, "o200k": _O200K}

_SHORT = r"(?:[sdmtSDMT]|ll|lL|Ll|LL|ve|vE|Ve|VE|re|rE|Re|RE)"
_SIGNS_LINES = r" ?[^\sA-Za-z0-9]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII = {
    _GPT2: r" ?[A-Za-z]+|'(?:[sdmt]|ll|ve|re)| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    _CL100K: rf"'{_SHORT}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}|{_SIGNS_LINES}|\s+\Z|{_BLANKS}",
    _LLAMA3: rf"'{_SHORT}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}|{_SIGNS_LINES}|{_BLANKS}",
    _QWEN: rf"'{_SHORT}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]|{_SIGNS_LINES}|{_BLANKS}",
    _O200K: rf"[^\r\nA-Za-z0-9]?(?:[A-Z]*[a-z]+|[A-Z]+[a-z]*)(?:'{_SHORT})?|[0-9]{{1,3}}"
    rf"| ?[^\sA-Za-z0-9]+[\r\n/]*|{_BLANKS}",
}
# StarCoder and SmolLM set every digit apart before they split by GPT-2's pattern; a digit then ends the text before it.
_DIGITS_GPT2 = r" ?[A-Za-z]+|'(?:[sdmt]|ll|ve|re)|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+"

_LONGEST_WORD, _MOST_WORDS = 64, 1 << 18  # at most some 80 MB


class Words(dict):
    """Word → the bytes of its ids; `encode(word)` fills in what is missing. Starts afresh when it is full."""

    def __init__(self, encode: Callable[[str], bytes], most: int = _MOST_WORDS):
        super().__init__()
        self._encode, self._most = encode, most

    def __missing__(self, word: str) -> bytes:
        ids = self._encode(word)
        if len(word) <= _LONGEST_WORD:
            if len(self) >= self._most:
                self.clear()
            self[word] = ids
        return ids


def ascii_words(tree: dict) -> re.Pattern | None:
    """The pattern whose matches are the words of any ASCII text under this `tokenizer.json`; None if not known."""
    first = tree["pre_tokenizer"]
    steps = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    match steps:
        case [{"type": "ByteLevel"}] if steps[0].get("use_regex", True):
            found = _ASCII[_GPT2]
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}] if steps[1].get("use_regex", True):
            found = _DIGITS_GPT2
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False},
        ]:
            found = _ASCII.get(pattern)
        case _:
            found = None
    return found and re.compile(found, re.ASCII)
