"""Papers as a corpus: a row is a paper, a collection is a shelf."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pipelines.corpus.holdout import held_out_part
from pipelines.corpus.kind import END, Document, Facts, Part, Place, Special, checksum
from pipelines.corpus.sources import Skipped, SourceFile
from pipelines.literature_analysis import formats, same, shelves
from pipelines.literature_analysis.find import find_papers, sibling
from pipelines.literature_analysis.paper import Paper
from pipelines.literature_analysis.references import normal
from pipelines.literature_analysis.same import Known
from pipelines.literature_analysis.shelves import Member
from pipelines.literature_analysis.similarity import terms

_DOCUMENT, _SECTION = Special("<|document|>"), Special("<|section|>")
_RULES = 1  # of reading, comparing and shelving papers; a change makes earlier stores out of date
_REFERENCE_CHARACTERS = 400  # of a reference's text, in which its title is looked for


@dataclass(frozen=True)
class Papers:
    """Papers, on shelves.

    Args:
        shelves: what brings papers together, one of `shelves.WAYS`; "none" makes every paper a document of its own.
        shelf_papers: most papers on a shelf.
        shelf_bytes: most bytes of text on a shelf, None for no such bound; a larger paper has one to itself.
        held_out: patterns of paths and folders whose papers are kept from training: they have shelves of their own.
    """

    shelves: str = "citation"
    shelf_papers: int = 16
    shelf_bytes: int | None = None
    held_out: tuple[str, ...] = ()

    def __post_init__(self):
        if self.shelves not in shelves.WAYS:
            raise ValueError(f"--shelves is {self.shelves!r}; it must be one of {', '.join(shelves.WAYS)}")
        if self.shelf_papers < 1:
            raise ValueError(f"--shelf-papers is {self.shelf_papers}; a shelf holds at least 1")
        if self.shelf_bytes is not None and self.shelf_bytes < 1:
            raise ValueError(f"--shelf-bytes is {self.shelf_bytes}; a shelf holds at least 1")

    @property
    def unit(self) -> str:
        return "row" if self.shelves == "none" else "collection"

    def identity(self) -> list:
        return ["papers", _RULES, self.shelves, self.shelf_papers, self.shelf_bytes, sorted(self.held_out)]

    def find(self, paths) -> tuple[list[SourceFile], list[Skipped]]:
        return find_papers(paths)

    def survey(self, file: SourceFile, data: bytes) -> Facts:
        paper = _read(file, data)
        cites = [
            [entry.identifiers, normal(" ".join(filter(None, (entry.title, entry.text[:_REFERENCE_CHARACTERS]))))]
            for entry in paper.references
        ]
        more = {
            "format": paper.format,
            "title": paper.title,
            "start": same.start_of(paper.text, paper.sections),
            "year": paper.year,
            "identifiers": paper.identifiers,
            "characters": len(paper.text),
            "bytes": len(paper.text.encode()),
            "terms": terms(paper.text),
            "cites": cites,
            "sections": len(paper.sections),
            "citations": len(paper.citations),
            "resolved": sum(bool(citation.references) for citation in paper.citations),
        }
        return Facts(checksum(paper.text), len(data), paper.licence, more)

    def arrange(self, files: list[SourceFile], facts: list[Facts]) -> tuple[list[Place], list[Skipped]]:
        doubles = same.duplicates([_known(file, fact) for file, fact in zip(files, facts)])
        left_out = [Skipped(files[i].name, f"duplicate: the same paper as {files[j].name}") for i, j in doubles.items()]
        kept = [i for i in range(len(files)) if i not in doubles]
        if self.shelves == "none":
            return [Place(files[i], files[i].name, files[i].name.partition("/")[0]) for i in kept], left_out
        places: list[Place] = []
        # What is held out stands on no shelf with what isn't: windows hold out whole documents.
        for name, members in (("held-out", [i for i in kept if _matches(files[i].name, self.held_out)]),
                              ("shelf", [i for i in kept if not _matches(files[i].name, self.held_out)])):  # fmt: skip
            papers = [_member(files[i], facts[i]) for i in members]
            for number, shelf in enumerate(shelves.shelved(papers, self.shelves, self.shelf_papers, self.shelf_bytes)):
                rows = [files[members[at]] for at in shelf]
                places += [Place(file, file.name, f"{name}-{number:05d}", first=file is rows[0], last=file is rows[-1]) for file in rows]
        return places, left_out

    def read(self, place: Place, data: bytes) -> Document:
        paper = _read(place.file, data)
        return Document(paper.text, paper.text.encode(), "utf-8", paper.licence, paper.details())

    def parts(self, place: Place, document: Document) -> list[Part]:
        """`<|document|>` title, then `<|section|>` heading and text; the end after a paper, or after a shelf's last."""
        alone = self.unit == "row" or (place.first and place.last)
        if alone and not document.text:
            return []
        cuts = [0, *(section["start"] for section in document.details["sections"]), len(document.text)]
        pieces = [document.text[start:stop] for start, stop in zip(cuts, cuts[1:])]
        marked = [part for piece in pieces[1:] for part in (_SECTION, piece)]
        return [_DOCUMENT, pieces[0], *marked, *([END] if alone or place.last else [])]

    def counts(self, facts: list[Facts]) -> dict[str, int]:
        known = [fact.more for fact in facts]
        found = Counter(f"format {more['format']}" for more in known)
        totals = {
            "papers": len(known),
            "sections": sum(more["sections"] for more in known),
            "references": sum(len(more["cites"]) for more in known),
            "citations": sum(more["citations"] for more in known),
            "citations resolved": sum(more["resolved"] for more in known),
        }
        return {**totals, **dict(sorted(found.items()))}


def _matches(name: str, patterns) -> bool:
    return held_out_part(name, "", patterns) is not None


def _read(file: SourceFile, data: bytes) -> Paper:
    return formats.read(data, file.name, sibling(file))


def _known(file: SourceFile, facts: Facts) -> Known:
    more = facts.more
    return Known(
        file.name, more["format"], facts.checksum, more["title"], more["start"], more["identifiers"], more["terms"],
        more["characters"],
    )  # fmt: skip


def _member(file: SourceFile, facts: Facts) -> Member:
    more = facts.more
    cites = [(identifiers, text) for identifiers, text in more["cites"]]
    return Member(file.name, more["year"], more["bytes"], more["title"], more["identifiers"], more["terms"], cites)
