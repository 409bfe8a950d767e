"""Structure in plain prose, where nothing marks it: headings, the reference list, citation markers.

Numbers in square brackets cite what the reference list has under them, so `[0, 1]` in a paper whose list begins at
[1] is an interval. Without a numbered list they are not read. Author and year in parentheses, and an author before a
year in parentheses, cite the entry with that author and year; one that no entry has is kept as unresolved.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipelines.literature_analysis.paper import Citation, Paper, one_line
from pipelines.literature_analysis.references import Reference, merged, normal, reference

_LISTS = frozenset(
    "references,bibliography,literature cited,works cited,literature,references and notes,cited references,"
    "references cited,footnotes,notes and references,references and footnotes,citations".split(",")
)
_NAMED = _LISTS | frozenset(
    "abstract,summary,introduction,background,related work,methods,method,materials and methods,"
    "methodology,results,discussion,results and discussion,conclusion,conclusions,conclusion and future work,"
    "conclusions and future work,acknowledgments,acknowledgements,acknowledgment,acknowledgement,appendix,keywords,"
    "evaluation,experiments,experimental results,future work,copyright".split(",")
)
_NUMBERED = re.compile(r"(?:(\d{1,2}(?:\.\d{1,2}){0,4})\.?|[A-Z](?:\.\d{1,2}){1,3}\.?|([IVX]{1,5})\.)[ \t]+([^\W\d_].{1,100})")
_ENTRY = re.compile(r"(?m)^[ \t]*(?:\[([^\]\s]{1,30})\]:?|(\d{1,3})[.)])[ \t]+(?=\S)")
_NAME = r"(?<![\w'’-])[^\W\d_a-zß-ÿ][\w'’-]{1,40}(?![\w'’-])"  # whole words only, or long ones take quadratic time
_AUTHOR_LINE = re.compile(rf"(?m)^[ \t]*(?=(?:{_NAME}[ -]){{0,2}}{_NAME},[ \t]{{1,3}}(?:[^\W\d_a-zß-ÿ]|and\b|et\b))")
_PARAGRAPH = re.compile(r"\S(?:.*\S)?(?:\n[ \t]*\S.*)*")

_NUMBERS = re.compile(r"\[(\d{1,4}(?:[ \t\n]{0,2}[,;–-][ \t\n]{0,2}\d{1,4}){0,40})\]")
_GAP = r"[ \n]{1,3}"
_AUTHORS = rf"{_NAME}(?:(?:,?{_GAP}(?:and|&){_GAP}|,{_GAP}){_NAME}){{0,5}}(?:,?{_GAP}et{_GAP}al\.?)?"
_BRACKETED = re.compile(r"\([^()]{3,400}\)")
_CITED = re.compile(rf"({_AUTHORS}),?{_GAP}((?:1[89]|20)\d\d[a-z]?(?:, ?(?:1[89]|20)\d\d[a-z]?)*)\b")
_NARRATIVE = re.compile(rf"({_AUTHORS})[ \n]{{0,2}}[(\[]((?:1[89]|20)\d\d[a-z]?)[)\]]")
_NO_NAMES = frozenset(
    "in since from until by january february march april may june july august september october november december "
    "the during before after between early late version python".split()
)


def heading_level(line: str) -> int | None:
    """The level of a line that stands alone and reads as a heading, or None: a known name, or a number and a title."""
    line = line.strip()
    if line.rstrip(":.").casefold() in _NAMED:
        return 1
    found = _NUMBERED.fullmatch(line)
    if not found or line.endswith((",", ";", ".")) or len(line.split()) > 14 or not found[3][0].isupper():
        return None
    return found[1].count(".") + 1 if found[1] else 1


def is_reference_list(heading: str) -> bool:
    return normal(re.sub(r"^[\d.\sIVX]+", "", heading)) in _LISTS


def entries(text: str, start: int, stop: int, paragraphs: bool = True) -> list[Reference]:
    """The entries of a reference list at [start, stop): each begins with `[key]` or `n.` at a line's start. With
    `paragraphs`, where no line begins so: with an author's name at a line's start, or else each paragraph is one."""
    marks = list(_ENTRY.finditer(text, start, stop))
    if marks and not text[start : marks[0].start()].strip():
        ends = [mark.start() for mark in marks[1:]] + [stop]
        # An entry ends with its paragraph: what follows the last one is not part of it.
        bodies = [_PARAGRAPH.match(text, mark.end(), end) for mark, end in zip(marks, ends)]
        return [_entry(mark[1] or mark[2], text, mark.end(), body.end()) for mark, body in zip(marks, bodies) if body]
    if not paragraphs:
        return []
    authors = [line.end() for line in _AUTHOR_LINE.finditer(text, start, stop) if _ended(text, start, line.start())]
    if len(authors) > 1 and not text[start : authors[0]].strip():
        return [_entry("", text, at, end) for at, end in zip(authors, [*authors[1:], stop])]
    return [_entry("", text, part.start(), part.end()) for part in _PARAGRAPH.finditer(text, start, stop)]


def _ended(text: str, start: int, at: int) -> bool:
    """Whether what stands before `at`, from `start` on, is a whole sentence or nothing."""
    return text[max(start, at - 99) : at].rstrip()[-1:] in ("", ".", ")", "]")


def reference_lists(paper: Paper) -> list[tuple[int, int]]:
    """[start, stop) of the text of each section that is a reference list."""
    ends = [section.start for section in paper.sections[1:]] + [len(paper.text)]
    return [(s.stop, end) for s, end in zip(paper.sections, ends) if is_reference_list(s.heading)]


def with_references(paper: Paper) -> Paper:
    """The paper with what its reference lists and its text say."""
    lists = reference_lists(paper)
    references, numbers = merged(entry for start, stop in lists for entry in entries(paper.text, start, stop))
    found = outside(citations(paper.text, references, numbers), lists)
    return replace(paper, references=tuple(references), citations=tuple(found))


def outside(marks: Iterable[Citation], spans: list[tuple[int, int]]) -> list[Citation]:
    """The markers that don't begin inside one of `spans`, which are sorted: in a reference list nothing is cited."""
    at = [start for start, _ in spans]
    return [m for m in marks if not (i := bisect_right(at, m.start)) or m.start >= spans[i - 1][1]]


def citations(text: str, references: list[Reference], numbers: dict[str, int]) -> Iterator[Citation]:
    """The markers in `text`, in their order, none inside another."""
    marks = []
    if any(key.isdecimal() for key in numbers):
        marks += _numeric(text, numbers)
    marks += _author_year(text, _by_author(references))
    marks.sort(key=lambda mark: (mark.start, -mark.stop))
    end = 0
    for mark in marks:
        if mark.start >= end:
            yield mark
            end = mark.stop


def _entry(key: str, text: str, start: int, stop: int) -> Reference:
    stop = start + len(text[start:stop].rstrip())
    return reference(key, one_line(text[start:stop]), start=start, stop=stop)


def _numeric(text: str, numbers: dict[str, int]) -> Iterator[Citation]:
    for found in _NUMBERS.finditer(text):
        keys: list[str] = []
        parts = re.findall(r"(\d+)|([–-])", found[1])
        for i, (number, dash) in enumerate(parts):
            if dash and 0 < int(parts[i + 1][0]) - int(parts[i - 1][0]) <= 100:
                keys += map(str, range(int(parts[i - 1][0]) + 1, int(parts[i + 1][0])))
            elif number:
                keys.append(number)
        if any(key in numbers for key in keys) and all(key != "0" for key in keys):
            yield _citation(found.start(), found.end(), [(key, numbers.get(key)) for key in keys])


def _author_year(text: str, known: dict[tuple[str, str], list[tuple[int, str]]]) -> Iterator[Citation]:
    for bracket in _BRACKETED.finditer(text):
        cited = [
            (f"{one_line(found[1])} {year}", _look_up(found[1], year, known))
            for found in _CITED.finditer(bracket[0])
            if _is_name(found[1])
            for year in re.split(", ?", found[2])
        ]
        if cited:
            yield _citation(bracket.start(), bracket.end(), cited)
    for found in _NARRATIVE.finditer(text):
        if _is_name(found[1]):
            key = f"{one_line(found[1])} {found[2]}"
            yield _citation(found.start(), found.end(), [(key, _look_up(found[1], found[2], known))])


def _is_name(authors: str) -> bool:
    first = authors.split()[0].rstrip(",")
    return first.casefold() not in _NO_NAMES and not (first.isupper() and len(first) > 3)


def _citation(start: int, stop: int, cited: list[tuple[str, int | None]]) -> Citation:
    numbers = tuple(dict.fromkeys(number for _, number in cited if number))
    return Citation(start, stop, numbers, tuple(key for key, number in cited if not number))


def _by_author(references: list[Reference]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """(surname, year) → number and text of the entries that name them; a surname stands before the year."""
    known: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for entry in references:
        if entry.year is None:
            continue
        plain = normal(entry.text)
        year = re.search(rf"{entry.year}[a-z]?", plain)
        head = plain[: year.start()] if year and year.start() > 3 else plain
        for word in dict.fromkeys(head.split()[:40]):
            known.setdefault((word, year[0] if year else str(entry.year)), []).append((entry.number, head))
            known.setdefault((word, str(entry.year)), []).append((entry.number, head))
    return known


def _look_up(authors: str, year: str, known: dict[tuple[str, str], list[tuple[int, str]]]) -> int | None:
    """The entry with these authors and year: that whose first author is the first named one goes before others."""
    names = [name for name in normal(authors).split() if name not in ("and", "et", "al")]
    found = [(n, head) for n, head in known.get((names[0], year), []) if set(names) <= set(head.split())] if names else []
    return min(found, key=lambda entry: (entry[1].find(names[0]), entry[0]))[0] if found else None
