"""References: what can be known from one as it is written, and when two of them name the same work."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

_DOI = re.compile(r"\b10\.\d{4,9}/[^\s\"<>{}|\\^`]+")
_ARXIV = re.compile(
    r"arxiv(?:\.org)?[^a-z\d]{0,9}(?:(?:abs|pdf|preprint)\b[^a-z\d]{0,9}(?:arxiv[^a-z\d]{0,9})?)?"
    r"(\d{4}\.\d{4,5}|[a-z-]{2,12}(?:\.[a-z]{2})?/\d{7})",
    re.I,
)
_YEAR = re.compile(r"(?<![\d./-])(1[6-9]\d\d|20\d\d)[a-z]?(?![\d/-])")
_QUOTED = re.compile(r"[\"“]([^\"“”]{10,300}?)[,.]?[\"”]|``(.{10,300}?)[,.]?''")
_AFTER_YEAR = re.compile(r"\(?\b(?:1[6-9]|20)\d\d[a-z]?\)?[.,:]?\s+([A-Z][^.?!]{5,300}[.?!])")
_WORDS = re.compile(r"[^\W_]+")
_FILE_NAMES = (
    ("arxiv", re.compile(r"(\d{4}\.\d{4,5})(?:v\d+)?")),
    ("pmcid", re.compile(r"(PMC\d{3,})")),
    ("acl", re.compile(r"([A-Z]\d\d-\d{4})")),
    ("pep", re.compile(r"pep-0*(\d{1,4})")),
)


@dataclass(frozen=True)
class Reference:
    """What the paper cites. `number` counts from 1 in the order of the list, duplicates once; `key` is how the paper
    calls it. [start, stop) is where its first entry stands in the text, None where the text has no such entry."""

    key: str
    text: str
    number: int = 0
    title: str | None = None
    year: int | None = None
    identifiers: dict[str, str] = field(default_factory=dict)
    start: int | None = None
    stop: int | None = None


def merged(entries: Iterable[Reference]) -> tuple[list[Reference], dict[str, int]]:
    """The entries in their order, numbered from 1, those of the same work once; and the number of every key.

    Same: the same DOI, arXiv or other identifier, or else the same words. The first entry stays, and takes from the
    later ones what it doesn't say itself. A key is of the first entry that has it.
    """
    found: list[Reference] = []
    index: dict[tuple, int] = {}
    numbers: dict[str, int] = {}
    for entry in entries:
        names = [*entry.identifiers.items(), ("words", normal(entry.text))]
        names = [name for name in names if name[1]]
        at = next((index[name] for name in names if name in index), None)
        if at is None:
            at = len(found)
            found.append(replace(entry, number=at + 1))
        else:
            first = found[at]
            identifiers = {**entry.identifiers, **first.identifiers}
            title, year = first.title or entry.title, first.year or entry.year
            found[at] = replace(first, identifiers=identifiers, title=title, year=year)
        for name in names:
            index.setdefault(name, at)
        if entry.key:
            numbers.setdefault(entry.key, at + 1)
    return found, numbers


def reference(key: str, text: str, **known) -> Reference:
    """A reference from its written form; what is `known` of it already goes before what its text seems to say."""
    identifiers = {**identifiers_in(text), **known.pop("identifiers", {})}
    title = known.pop("title", None) or title_in(text)
    year = known.pop("year", None) or year_in(text)
    return Reference(key, text, title=title, year=year, identifiers=identifiers, **known)


def identifiers_in(text: str) -> dict[str, str]:
    """The DOI and the arXiv id that a text names first."""
    found = {}
    if doi := _DOI.search(text):
        found["doi"] = doi_name(doi[0])
    if arxiv := _ARXIV.search(text):
        found["arxiv"] = arxiv[1].lower()
    return found


def doi_name(text: str) -> str:
    """A DOI as it is compared: without a resolver before it or punctuation after it, in lower case."""
    name = re.sub(r"^(?:https?://(?:dx\.)?doi\.org/|doi:\s*)", "", text.strip(), flags=re.I).rstrip(".,;:'")
    unopened = name.count(")") + name.count("]") - name.count("(") - name.count("[")
    closing = len(name) - len(name.rstrip(")]"))
    return name[: len(name) - max(0, min(unopened, closing))].lower()


def identifiers_of_file(stem: str) -> dict[str, str]:
    """What a file's name says: arXiv, PubMed Central, ACL Anthology and PEP numbers."""
    return {scheme: found[1] for scheme, pattern in _FILE_NAMES if (found := pattern.fullmatch(stem))}


def year_of(identifiers: dict[str, str]) -> int | None:
    """The year that an arXiv or ACL Anthology number begins with."""
    if found := re.match(r"\d\d(?=\d\d\.)", identifiers.get("arxiv", "")):
        return 2000 + int(found[0])
    if found := re.match(r"[A-Z](\d\d)-", identifiers.get("acl", "")):
        return (1900 if found[1] > "50" else 2000) + int(found[1])
    return None


def year_in(text: str) -> int | None:
    """The year that a reference gives: one in parentheses, or else its last."""
    years = _YEAR.findall(text)
    bracketed = re.search(r"\((?:[^()\d]*\s)?(1[6-9]\d\d|20\d\d)[a-z]?\)", text)
    return int(bracketed[1]) if bracketed else int(years[-1]) if years else None


def title_in(text: str) -> str | None:
    """The title in a written reference: what stands in quotes, or the sentence after the year."""
    if quoted := _QUOTED.search(text):
        return (quoted[1] or quoted[2]).strip()
    after = _AFTER_YEAR.search(text)
    return after[1].rstrip(".") if after else None


def normal(text: str) -> str:
    """Words alone, in lower case, without accents: how titles and references are compared."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return " ".join(_WORDS.findall("".join(c for c in plain if not unicodedata.combining(c))))
