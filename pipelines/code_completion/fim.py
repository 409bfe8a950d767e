"""Fill-in-the-middle: a piece of a file is cut at two characters and told as prefix, suffix, middle.

Bavarian et al. 2022, "Efficient training of language models to fill in the middle". A piece is the part of one file that
a window teaches, without the line that names the file and the control tokens around it. It becomes

    PSM   <prefix> P <suffix> S <middle> M
    SPM   <prefix> <suffix> S <middle> P M

where P, M, S are its three parts, tokenised each for itself: cut at characters, not at tokens, so that a model learns to
go on inside a word. Each character is learnt once, as without it. A piece grows by three control tokens and what the cuts
cost; one that would not fit in what is left of its window stays plain, and so does one whose ids begin or end inside a
character: nothing is ever cut off.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass

import numpy as np

from pipelines.corpus.tokenizer import Tokenizer

# Names of the control tokens that say prefix, suffix, middle. The first family of which a vocabulary has any is its own;
# every tokenizer here has the last, which Qwen2.5-Coder has by itself.
TEMPLATES = {
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "ringspan": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
}
LEAST_ROOM = 16  # tokens
_LONGEST_NAME = 4096  # tokens; a path has no more bytes, and a tokenizer no more tokens than bytes


@dataclass(frozen=True)
class Template:
    """The ids of one tokenizer's control tokens."""

    name: str
    prefix: int
    suffix: int
    middle: int

    def infill(self, before: list[int], after: list[int]) -> list[int]:
        """The prompt for what stands between two encoded texts, as PSM tells it: the answer follows."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


@functools.lru_cache(maxsize=8)
def template(tokenizer: Tokenizer) -> Template:
    """The tokenizer's own template. Raises ValueError, by name, for a token of it that is not exactly one id."""
    tree = json.loads(tokenizer.document)
    vocabulary = tree["model"]["vocab"]
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {piece: i for i, (piece, _) in enumerate(vocabulary)}
    known |= {token["content"]: token["id"] for token in tree["added_tokens"]}
    name = next(name for name, tokens in TEMPLATES.items() if any(token in known for token in tokens))
    for token in TEMPLATES[name]:
        if token not in known:
            raise ValueError(
                f"tokenizer {tokenizer.name}: {token!r} of the {name} template for filling in the middle is not one id of it; "
                "use another tokenizer, or --set corpus.fim_rate=0"
            )
    return Template(name, *(known[token] for token in TEMPLATES[name]))


@dataclass(frozen=True)
class Fim:
    """Rewrites `rate` of the pieces, of these `spm_rate` as SPM; what becomes of one hangs on its place alone.

    As `corpus.windows.Rewriter` it works inside the learnt part of one row, so it never crosses a file.
    """

    rate: float
    spm_rate: float = 0.5

    def __post_init__(self):
        for name, value in (("fim_rate", self.rate), ("fim_spm_rate", self.spm_rate)):
            if not 0 <= value <= 1:
                raise ValueError(f"corpus.{name} is {value}; it must lie in 0–1")

    def reserve(self, context: int) -> int:
        """Tokens of a window that the plan leaves free, for pieces to grow into."""
        return max(LEAST_ROOM, context // 64)

    def rewrite(self, row: np.ndarray, start: int, stop: int, room: int, tokenizer: Tokenizer, place: tuple[int, ...]) -> np.ndarray:
        """What is learnt in place of row[start:stop], at most `room` tokens longer, with the same characters.

        The piece is the text behind the last control token, without those at the end and without the name that the
        first line behind a control token is: of a repository, a file, a section.
        """
        ids = row[start:stop]
        chance, order, *cuts = _uniform(place)
        if chance >= self.rate * 2**64 or room < 3:
            return ids
        control = np.isin(ids, list(tokenizer.special.values()))
        end = len(ids) - int(np.argmin(control[::-1]))
        head = int(np.flatnonzero(control[:end])[-1]) + 1 if control[:end].any() else 0
        text = "" if control.all() else tokenizer.decode(ids[head:end])
        name, text = _split_name(row, start + head, text, tokenizer)
        if not text or "\ufffd" in name + text:
            return ids
        first, last = sorted(cut * (len(text) + 1) >> 64 for cut in cuts)
        prefix, middle, suffix = map(tokenizer.encode, (text[:first], text[first:last], text[last:]))
        told = template(tokenizer)
        if order < self.spm_rate * 2**64:
            parts = [[told.prefix, told.suffix], suffix, [told.middle], prefix, middle]
        else:
            parts = [[told.prefix], prefix, [told.suffix], suffix, [told.middle], middle]
        parts = [ids[:head], tokenizer.encode(name), *parts, ids[end:]]
        if sum(map(len, parts)) > len(ids) + room:
            return ids
        return np.concatenate([np.asarray(part, dtype=ids.dtype) for part in parts])


def _split_name(row: np.ndarray, start: int, text: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """(what is left of the name, what follows it) of a text that begins at `start` of its row."""
    before = row[max(0, start - _LONGEST_NAME) : start]
    marks = np.flatnonzero(np.isin(before, list(tokenizer.special.values())))
    if not len(marks) or "\n" in tokenizer.decode(before[marks[-1] + 1 :]):
        return "", text
    name, newline, rest = text.partition("\n")
    return name + newline, rest


def _uniform(place: tuple[int, ...]) -> tuple[int, ...]:
    """Four whole numbers below 2⁶⁴ that the place alone decides, on any machine."""
    digest = hashlib.blake2b(" ".join(map(str, place)).encode(), digest_size=32).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "big") for i in range(0, 32, 8))
