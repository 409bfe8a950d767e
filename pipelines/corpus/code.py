"""Source code as a corpus: a row is a file, a collection is a repository."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.code_completion.links import links
from pipelines.code_completion.order import order
from pipelines.corpus.decode import Text, Unreadable, decode, with_line_feeds
from pipelines.corpus.duplicates import NearDuplicates, signature
from pipelines.corpus.find import find_code
from pipelines.corpus.holdout import held_out_part
from pipelines.corpus.kind import END, Document, Facts, Part, Place, Special, checksum
from pipelines.corpus.licences import Allowed, by_folder, declared, is_licence_file, nearest, recognise
from pipelines.corpus.rules import is_source_name, unwanted
from pipelines.corpus.sources import Skipped, SourceFile

_RULES = 1  # of what is source code, what copies are, how files are ordered; a change makes earlier stores out of date
HELD_OUT_SIMILARITY = 0.85  # from which a training file counts as a copy of a held-out one, where nothing else is said


@dataclass(frozen=True)
class Code:
    """The files that `find_code` finds and the rules let through, by repository.

    Args:
        unit: what windows take as one document, a file ("row") or a repository ("collection").
        order: of the files in their repository, one of `order.STRATEGIES`.
        line_ends: "keep", or "lf" to have CR LF and CR as LF.
        licences: SPDX ids; where there are some, a file under no licence that they allow is left out.
        near_duplicates: Jaccard similarity from which the later of two files is left out; None leaves out exact
            duplicates only.
        held_out: patterns (`held_out_part`) of repositories, folders and files to keep from training. What equals or
            nearly equals one of these files is left out of the rest. In a corpus of repositories a held-out folder is
            a repository of its own.
        gitignore: whether `.gitignore` files in folders count. They speak of what git does not know yet, and a tree that
            was unpacked may exclude itself: Debian's kernel does.
    """

    unit: str = "row"
    order: str = "path"
    line_ends: str = "keep"
    licences: tuple[str, ...] = ()
    near_duplicates: float | None = None
    held_out: tuple[str, ...] = ()
    gitignore: bool = True

    def __post_init__(self):
        if self.licences:
            Allowed(self.licences)
        if self.near_duplicates is not None:
            NearDuplicates(self.near_duplicates)

    def identity(self) -> list:
        options = [
            self.unit,
            self.order,
            self.line_ends,
            sorted(self.licences),
            self.near_duplicates,
            sorted(self.held_out),
            self.gitignore,
        ]
        return ["code", _RULES, *options]

    def find(self, paths) -> tuple[list[SourceFile], list[Skipped]]:
        return find_code(paths, terms=True, gitignore=self.gitignore)

    def survey(self, file: SourceFile, data: bytes) -> Facts:
        text = self._text(file, data).text
        more = {}
        if _holds_terms(file):
            more["terms"] = recognise(text)
        if not _only_terms(file) and (reason := unwanted(text, file.name)):
            raise Unreadable(reason)
        if self.near_duplicates is not None or self.held_out:
            more["signature"] = signature(text)
        if self.order == "dependency":
            more["links"] = links(file.name, text)
        return Facts(checksum(text), len(data), declared(text), more)

    def arrange(self, files: list[SourceFile], facts: list[Facts]) -> tuple[list[Place], list[Skipped]]:
        terms = by_folder((file.name, fact.more["terms"]) for file, fact in zip(files, facts) if "terms" in fact.more)
        allowed = Allowed(self.licences) if self.licences else None
        skipped: list[Skipped] = []
        rows: list[_Row] = []
        for file, fact in zip(files, facts):
            licence = fact.licence or nearest(file.name, terms)
            reason = "licence text: read for its terms" if _only_terms(file) else allowed and allowed.why_not(licence)
            if reason:
                skipped.append(Skipped(file.name, reason))
            else:
                rows.append(_Row(file, fact, licence, held_out_part(file.name, file.collection, self.held_out)))
        kept, copies = self._distinct(rows)
        return self._places(kept), skipped + copies

    def read(self, place: Place, data: bytes) -> Document:
        text = self._text(place.file, data)
        return Document(text.text, text.source, text.encoding, place.licence)

    def parts(self, place: Place, document: Document) -> list[Part]:
        if self.unit == "row":
            return [document.text, END] if document.text else []
        name = [Special("<|repo_name|>"), place.collection] if place.first else []
        path = place.name.removeprefix(place.collection + "/")
        return [*name, Special("<|file_sep|>"), path + "\n", document.text, *([END] if place.last else [])]

    def counts(self, facts: list[Facts]) -> dict[str, int]:
        return {}

    def _text(self, file: SourceFile, data: bytes) -> Text:
        text = decode(data, file.name)
        return with_line_feeds(text) if self.line_ends == "lf" else text

    def _distinct(self, rows: list[_Row]) -> tuple[list[_Row], list[Skipped]]:
        """The rows without copies: held-out ones are taken first, else the first by name stays. Empty ones all stay."""
        kept: list[_Row] = []
        skipped: list[Skipped] = []
        exact: dict[str, _Row] = {}
        near = NearDuplicates(self.near_duplicates or HELD_OUT_SIMILARITY)
        remembered: list[_Row] = []
        for row in sorted(rows, key=lambda row: (row.held_out is None, row.file.name)):
            sign = row.facts.more.get("signature")
            same, how = exact.setdefault(row.facts.checksum, row), "the same text as"
            if same is row and sign:
                number = near.earlier(sign)
                same, how = (row, "") if number is None else (remembered[number], "nearly the same text as")
                if self.near_duplicates is None and row.held_out:
                    same = row  # only copies of what is held out are looked for
            if same is not row and row.facts.bytes:
                is_leak = same.held_out and not row.held_out
                kind = "held out" if is_leak else "near duplicate" if how.startswith("nearly") else "duplicate"
                skipped.append(Skipped(row.file.name, f"{kind}: {how} {same.file.name}"))
                continue
            kept.append(row)
            if sign and (row.held_out or self.near_duplicates is not None):
                near.add(sign)
                remembered.append(row)
        return kept, skipped

    def _places(self, rows: list[_Row]) -> list[Place]:
        repositories: dict[str, list[_Row]] = {}
        for row in sorted(rows, key=lambda row: row.file.name):
            repositories.setdefault(self._repository(row), []).append(row)
        places = []
        for name, members in sorted(repositories.items()):
            last = len(members) - 1
            paths = [row.file.name.removeprefix(name + "/") for row in members]
            for i, at in enumerate(order(paths, [row.facts.more.get("links", []) for row in members], self.order)):
                row = members[at]
                places.append(Place(row.file, row.file.name, name, i == 0, i == last, row.licence))
        return places

    def _repository(self, row: _Row) -> str:
        part = row.held_out
        inside = part and part.startswith(row.file.collection + "/")
        return part if inside and self.unit == "collection" else row.file.collection


@dataclass(frozen=True)
class _Row:
    file: SourceFile
    facts: Facts
    licence: str | None
    held_out: str | None


def _holds_terms(file: SourceFile) -> bool:
    return is_licence_file(file.name.rpartition("/")[2])


def _only_terms(file: SourceFile) -> bool:
    return _holds_terms(file) and not is_source_name(file.name) and file.name != file.collection
