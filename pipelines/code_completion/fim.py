"""Fill-in-the-middle: a piece of a file is cut at two characters and told as prefix, suffix, middle.

Bavarian et al. 2022, "Efficient training of language models to fill in the middle". A piece is the part of one file that
a window teaches, without the line that names the file. It becomes

    PSM   <prefix> P <suffix> S <middle> M
    SPM   <prefix> <suffix> S <middle> P M

where P, M, S are its three parts, tokenised each for itself: cut at characters, not at tokens, so that a model learns to
go on inside a word. Each character is learnt once, as without it. A piece grows by three control tokens and what the cuts
cost; one that would not fit in what is left of its window stays plain, and so does one whose ids begin or end inside a
character: nothing is ever cut off.
"""

from __future__ import annotations

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


def reserve(context: int) -> int:
    """Tokens of a window that the plan leaves free, for pieces to grow into."""
    return max(LEAST_ROOM, context // 64)


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


class Fim:
    """Rewrites pieces for one tokenizer: `rate` of them, of which `spm_rate` as SPM. Deterministic in (seed, epoch, place)."""

    def __init__(self, tokenizer: Tokenizer, rate: float, spm_rate: float, seed: int):
        for name, value in (("fim_rate", rate), ("fim_spm_rate", spm_rate)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must lie in 0–1")
        self.tokenizer, self.rate, self.spm_rate, self.seed = tokenizer, rate, spm_rate, seed
        self.template = template(tokenizer)
        self._control = np.array(sorted({*tokenizer.special.values(), *self._ids()}))
        self._file_sep = tokenizer.special["<|file_sep|>"]

    def rewrite(self, ids: np.ndarray, epoch: int, row: int, start: int, room: int, named: bool) -> np.ndarray:
        """The ids of one file's piece, rewritten where chance has it and `room` more tokens hold it; else as they are.

        Args:
            ids: the piece; control ids stand only at its ends, and stay there.
            epoch, row, start: where it is: the place in its row of the store.
            named: a first line that stands behind `<|file_sep|>` is the file's name, which stays in front.
        """
        control = np.isin(ids, self._control)
        head, tail = int(np.argmin(control)), int(np.argmin(control[::-1]))
        if control.all() or control[head : len(ids) - tail].any():
            return ids
        chance, order, one, two = _uniform(self.seed, epoch, row, start)
        if chance >= self.rate * 2**64:
            return ids
        body = ids[head : len(ids) - tail]
        text = self.tokenizer.decode(body)
        if "\ufffd" in text:
            return ids
        name, text = _first_line(text) if named and head and ids[head - 1] == self._file_sep else ("", text)
        cuts = sorted(place * (len(text) + 1) >> 64 for place in (one, two))
        prefix, middle, suffix = text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]
        if not text:
            return ids
        encode, (begin, hole, end) = self.tokenizer.encode, self._ids()
        if order < self.spm_rate * 2**64:
            parts = [[begin, hole], encode(suffix), [end], encode(prefix), encode(middle)]
        else:
            parts = [[begin], encode(prefix), [hole], encode(suffix), [end], encode(middle)]
        parts = [ids[:head], encode(name), *parts, ids[len(ids) - tail :]]
        if sum(map(len, parts)) > len(ids) + room:
            return ids
        return np.concatenate([np.asarray(part, dtype=ids.dtype) for part in parts])

    def _ids(self) -> tuple[int, int, int]:
        return self.template.prefix, self.template.suffix, self.template.middle


def _first_line(text: str) -> tuple[str, str]:
    line, newline, rest = text.partition("\n")
    return line + newline, rest


def _uniform(*place: int) -> tuple[int, ...]:
    """Four whole numbers below 2⁶⁴ that the place alone decides, on any machine."""
    digest = hashlib.blake2b(" ".join(map(str, place)).encode(), digest_size=32).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "big") for i in range(0, 32, 8))
