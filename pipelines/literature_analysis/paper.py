"""A paper: one text, and where in it the title, sections, references and citation markers stand.

Every position is a character offset into `text`, so `text[start:stop]` is the heading, the reference or the marker
itself. The text is the title and a line end, what stands before the first section, then every section: its heading, a
line end, its text.

A `Draft` is how the parsers write one, from the front to the back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from pipelines.literature_analysis.references import Reference, merged

_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Section:
    """A heading at [start, stop); the section's text goes on to the next heading. Level 1 is the highest."""

    heading: str
    level: int
    start: int
    stop: int


@dataclass(frozen=True)
class Citation:
    """A marker at [start, stop): the numbers of the references it names, and the keys that no reference has."""

    start: int
    stop: int
    references: tuple[int, ...]
    unresolved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paper:
    """`identifiers` names the paper by scheme: doi, arxiv, pmid, pmcid, acl, pep. `encoding` is that of its file."""

    text: str
    title: str
    format: str
    sections: tuple[Section, ...]
    references: tuple[Reference, ...]
    citations: tuple[Citation, ...]
    identifiers: dict[str, str]
    year: int | None = None
    licence: str | None = None
    encoding: str = "utf-8"

    def details(self) -> dict:
        """What is known of the paper beside its text, as JSON."""
        known = asdict(self)
        for name in ("text", "licence"):
            del known[name]
        for name in ("sections", "references", "citations"):
            known[name] = list(known[name])
        return known

    def pieces(self) -> list[str]:
        """The text cut at its sections: the title and what follows it, then a piece a section."""
        cuts = [0, *(section.start for section in self.sections), len(self.text)]
        return [self.text[start:stop] for start, stop in zip(cuts, cuts[1:])]


class Draft:
    """Writes a paper from the front to the back.

    1. `title`, 2. text by `add` (as it stands) and `words` (spaces and line ends are one space), `paragraph` between
    them, `cite` for a marker and `heading` for a section, 3. `references`, once they are known; 4. `finish`.
    """

    def __init__(self, format: str):
        self.format = format
        self.identifiers: dict[str, str] = {}
        self.year: int | None = None
        self.licence: str | None = None
        self._title = ""
        self._pieces: list[str] = []
        self._length = 0
        self._floor = 0  # where the present section's text, or what follows the title, begins
        self._sections: list[Section] = []
        self._marks: list[tuple[int, int, tuple[str, ...]]] = []
        self._references: list[Reference] = []
        self._numbers: dict[str, int] = {}

    def title(self, text: str) -> None:
        """The first line; a paper without a title has none, not an empty one."""
        assert not self._pieces
        self._title = one_line(text)
        if self._title:
            self._write(self._title + "\n")
        self._floor = self._length

    def heading(self, text: str, level: int) -> None:
        """Begins a section; an empty heading is none."""
        if not (text := one_line(text)):
            return
        self.paragraph()
        start = self._length
        self._write(text)
        self._sections.append(Section(text, level, start, self._length))
        self._write("\n")
        self._floor = self._length

    def paragraph(self) -> None:
        """Ends the paragraph with a blank line; right after the title or a heading there is none to end."""
        while self._length > self._floor and not self._pieces[-1].strip():
            self._length -= len(self._pieces.pop())
        if self._length > self._floor:
            stripped = self._pieces[-1].rstrip()
            self._length -= len(self._pieces[-1]) - len(stripped)
            self._pieces[-1] = stripped
            self._write("\n\n")

    def add(self, text: str) -> None:
        """Text as it stands, but for blank lines before a section's first."""
        self._write(text.lstrip("\n") if self._length == self._floor else text)

    def words(self, text: str) -> None:
        """Text in which spaces and line ends only part words."""
        text = _SPACE.sub(" ", text)
        if text.startswith(" ") and (not self._pieces or self._pieces[-1][-1:].isspace()):
            text = text[1:]
        if text:
            self.add(text)

    def cite(self, text: str, keys: Iterable[str]) -> None:
        """A citation marker that names references by their keys; a marker without text is no marker."""
        text = one_line(text)
        start = self._length
        if text:
            self._write(text)
            self._marks.append((start, self._length, tuple(keys)))

    def references(self, entries: Iterable[Reference]) -> None:
        """The reference list, in its order; entries that name the same work are one reference with all their keys."""
        self._references, self._numbers = merged(entries)

    def write_references(self, heading: str = "References") -> None:
        """Writes the list as a section, a line a reference."""
        if self._references:
            self.heading(heading, 1)
        for i, entry in enumerate(self._references):
            self.add(f"[{entry.number}] ")
            start, text = self._length, one_line(entry.text)
            self.add(text + "\n")
            self._references[i] = replace(entry, text=text, start=start, stop=start + len(text))

    def number(self, key: str) -> int | None:
        """The number of the reference that has this key."""
        return self._numbers.get(key)

    def finish(self) -> Paper:
        text = "".join(self._pieces)
        text = text.rstrip() + "\n" if text.strip() else ""
        citations = [
            Citation(
                start,
                stop,
                tuple(dict.fromkeys(self._numbers[key] for key in keys if key in self._numbers)),
                tuple(key for key in keys if key not in self._numbers),
            )
            for start, stop, keys in self._marks
        ]
        return Paper(
            text=text,
            title=self._title,
            format=self.format,
            sections=tuple(self._sections),
            references=tuple(self._references),
            citations=tuple(citations),
            identifiers=dict(sorted(self.identifiers.items())),
            year=self.year,
            licence=self.licence,
        )

    def _write(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)


def one_line(text: str) -> str:
    """Words parted by single spaces."""
    return _SPACE.sub(" ", text).strip()
