"""The same paper twice, as PDF and as LaTeX say (C11): one stays, the other is listed.

Two files are the same paper if they have the same text; or the same identifier, title or beginning, no two different
identifiers of one scheme, and also the same words: a reference can carry another paper's DOI to the first page, two
versions of a standard have one title, and "Introduction" is a title, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.literature_analysis.references import normal
from pipelines.literature_analysis.similarity import Vectors

# The source that says most of the paper's structure goes before the others.
_RANKS = ("latex", "jats", "tei", "rst", "markdown", "labelled text", "scirex", "sentences", "pdf", "text")
_ALIKE = 0.5  # cosine from which papers of one title are one: two forms of one have 0.7 to 0.95, different ones rarely 0.3


@dataclass(frozen=True)
class Known:
    """What is compared of a paper. `start` is the normal form of its first words under the title."""

    name: str
    format: str
    checksum: str
    title: str
    start: str
    identifiers: dict[str, str]
    terms: list[list[int]]
    characters: int


def start_of(text: str, sections: list) -> str:
    """The first 16 words of a paper's first section, "" for fewer: how a paper is known whose title isn't there."""
    at = sections[0].stop if sections else 0
    words = normal(text[at : at + 1000]).split()[:16]
    return " ".join(words) if len(words) == 16 else ""


def duplicates(papers: list[Known]) -> dict[int, int]:
    """The index of every paper that is another's double → that of the one which stays."""
    order = sorted(range(len(papers)), key=lambda i: (_RANKS.index(papers[i].format), -papers[i].characters, papers[i].name))
    vectors = Vectors(paper.terms for paper in papers)
    kept: dict[tuple[str, str], list[int]] = {}
    doubles: dict[int, int] = {}
    for i in order:
        paper = papers[i]
        if not paper.characters:
            continue
        keys = _keys(paper)
        for key in keys:
            same = key[0] == "checksum"
            first = next((j for j in kept.get(key, ()) if same or _alike(papers, i, j, vectors)), None)
            if first is not None:
                doubles[i] = first
                break
        else:
            first = i
        for key in keys:  # what a double adds (a DOI, say) finds a third
            known = kept.setdefault(key, [])
            if first not in known and len(known) < 8:
                known.append(first)
    return doubles


def _alike(papers: list[Known], i: int, j: int, vectors: Vectors) -> bool:
    mine, other = papers[i].identifiers, papers[j].identifiers
    return all(mine[scheme] == other[scheme] for scheme in mine.keys() & other.keys()) and vectors.cosine(i, j) > _ALIKE


def _keys(paper: Known) -> list[tuple[str, str]]:
    title = normal(paper.title)
    return [
        ("checksum", paper.checksum),
        *sorted(paper.identifiers.items()),
        *([("title", title)] if len(title.split()) >= 3 else []),
        *([("start", paper.start)] if paper.start else []),
    ]
