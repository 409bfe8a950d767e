"""What extraction breaks, mended: ligatures, control characters, hyphens at line ends, running heads.

A hyphen at a line's end is taken away only on evidence, so that a real compound keeps its own (C10): the paper itself
has the joined word elsewhere, or hasn't both halves as words of their own.
"""

from __future__ import annotations

import re
from collections import Counter

_LIGATURES = dict(zip("\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06", ("ff", "fi", "fl", "ffi", "ffl", "st", "st")))
_LIGATURE = re.compile("[\ufb00-\ufb06]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
_BREAK = re.compile("[\f\v\x85\u2028\u2029]")
_LINE_END = re.compile(r"\r\n?")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_BROKEN = re.compile(r"(?<![^\W\d_])([^\W\d_]+)[-\u2010\u00ad\x02][ \t]*\n[ \t]*([^\W\d_]+)")
_GOES_ON = re.compile(r"-[^\W\d_]")
_PARTED = re.compile(r"\b([^\W\d_]{2,})- ([a-z]{2,})\b")
_STANDS_ALONE = frozenset("and or to nor but versus und oder".split())


def clean(text: str) -> str:
    """Text without control characters and lone surrogates; line ends, page and paragraph breaks are `\\n`."""
    text = _BREAK.sub("\n", _CONTROL.sub("", _LINE_END.sub("\n", text)))
    return text.encode("utf-8", "replace").decode()


def ligatures(text: str) -> str:
    """The letters that the Latin ligatures U+FB00–U+FB06 stand for."""
    return _LIGATURE.sub(lambda found: _LIGATURES[found[0]], text)


def words(text: str) -> Counter[str]:
    """How often each word stands in a text, in lower case; a compound counts as itself, not as its parts."""
    return Counter(word.lower() for word in _WORD.findall(text.replace("\u00ad", "")))


def hyphens(text: str) -> str:
    """Words that a line's end broke, in one piece and on the line where they began; soft hyphens taken away."""
    known = words(_BROKEN.sub(" ", text))

    def mend(broken: re.Match) -> str:
        left, right = broken.groups()
        inside = broken.string[broken.start() - 1 : broken.start()] == "-" or _GOES_ON.match(broken.string, broken.end())
        return f"{left}-{right}" if inside else join_broken(left, right, known)

    # A word may be broken twice in a row, in very narrow columns; the second pass sees what the first one joined.
    return _BROKEN.sub(mend, _BROKEN.sub(mend, text)).replace("\u00ad", "")


def join_broken(left: str, right: str, known: Counter[str]) -> str:
    """The word whose halves stand at a line's end and at the next one's start, with its hyphen if it is a compound."""
    joined, compound = (left + right).lower(), f"{left}-{right}".lower()
    if known[compound] or known[joined]:
        return left + right if known[joined] >= known[compound] else f"{left}-{right}"
    halves = known[left.lower()] and known[right.lower()] and len(left) > 2 and len(right) > 2
    compounds = halves or left.lower() in ("self", "well") or not right[0].islower() or left.isupper()
    return f"{left}-{right}" if compounds else left + right


def parted_words(text: str) -> str:
    """`iden- tified` in one piece, where the paper has the joined word elsewhere; `pre- and post-` stays."""
    if "- " not in text:
        return text
    known = words(_PARTED.sub(" ", text))

    def mend(parted: re.Match) -> str:
        left, right = parted.groups()
        return left + right if right not in _STANDS_ALONE and known[(left + right).lower()] else parted[0]

    return _PARTED.sub(mend, text)


def running_heads(pages: list[list[str]], edge: int = 2) -> list[set[int]]:
    """For every page, given as its lines from top to bottom, the indices of running heads and page numbers.

    A running head is one of the first or last `edge` lines and stands, but for its digits, in that place on three
    pages at least (on two of two or three). A page number is a first or last line that is only a number.
    """
    edges = [{i for i in (*range(edge), *range(len(page) - edge, len(page))) if 0 <= i < len(page)} for page in pages]
    seen = Counter(head for page, places in zip(pages, edges) for head in {_head(page[i]) for i in places})
    needed = 2 if len(pages) < 4 else 3
    dropped = []
    for page, places in zip(pages, edges):
        heads = {i for i in places if len(pages) > 1 and _head(page[i]) and seen[_head(page[i])] >= needed}
        left = [i for i in range(len(page)) if i not in heads]
        numbers = {i for i in {*left[:1], *left[-1:]} if re.fullmatch(r"\W*(?:\d{1,4}|[ivxl]{1,6})\W*", page[i])}
        dropped.append(heads | numbers if len(left) > 1 else heads)
    return dropped


def _head(line: str) -> str:
    return re.sub(r"\d+", "#", line).strip().casefold()
