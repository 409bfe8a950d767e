"""Bibliographies of LaTeX: the list that BibTeX writes (`\\bibitem`, `.bbl`) and its databases (`.bib`)."""

from __future__ import annotations

import re
from collections.abc import Callable

from pipelines.literature_analysis import tex
from pipelines.literature_analysis.paper import one_line
from pipelines.literature_analysis.references import Reference, doi_name, reference

_ENTRY = re.compile(r"@[ \t]*([A-Za-z]+)[ \t\n]*\{[ \t\n]*([^,\s{}\"#%]{1,200})[ \t\n]*,")
_STRING = re.compile(r"@[ \t]*string[ \t\n]*\{[ \t\n]*([\w:-]+)[ \t\n]*=[ \t\n]*", re.I)
_FIELD = re.compile(r"[\s,]*([A-Za-z][\w-]*)\s*=\s*")
_ORDER = ("author", "editor", "title", "booktitle", "journal", "volume", "number", "pages", "publisher", "school",
          "institution", "year", "date", "eprint", "doi", "url", "note", "howpublished")  # fmt: skip

Plain = Callable[[str], str]


def read_bbl(source: str, plain: Plain) -> list[Reference]:
    """The entries after `\\bibitem`, in their order; `plain` makes text of TeX."""
    source = source.partition("\\end{thebibliography}")[0]
    found = []
    marks = list(re.finditer(r"\\bibitem(?![A-Za-z])", source))
    for mark, end in zip(marks, [m.start() for m in marks[1:]] + [len(source)]):
        _, position = tex.option(source, mark.end())
        if (read := tex.argument(source, position)) is None:
            continue
        text = plain(re.split(r"\n[ \t]*\n", source[read[1] : end].strip())[0])
        if text:
            found.append(reference(read[0].strip(), text))
    return found


def read_bib(source: str, plain: Plain) -> list[Reference]:
    """The entries of a BibTeX database, in their order; those without a field are none."""
    strings = {}
    for found in _STRING.finditer(source):
        value, _ = _value(source, found.end(), strings)
        strings[found[1].lower()] = value
    entries, end = [], 0
    for found in _ENTRY.finditer(source):
        if found[1].lower() in ("comment", "preamble", "string") or found.start() < end:
            continue
        fields, end = _fields(source, found.end(), strings)
        known = {name: plain(fields[name]) for name in _ORDER if fields.get(name)}
        if not known:
            continue
        if "author" in known:
            known["author"] = known["author"].replace(" and ", ", ")
        year = re.search(r"\d{4}", known.get("year") or known.get("date") or "")
        identifiers = {"doi": doi_name(known["doi"])} if "doi" in known else {}
        if re.fullmatch(r"\d{4}\.\d{4,5}(?:v\d+)?|[a-z-]+(?:\.[A-Z]{2})?/\d{7}", known.get("eprint", "")):
            identifiers["arxiv"] = known["eprint"].partition("v")[0].lower()
        entries.append(
            reference(
                found[2],
                one_line(". ".join(known.values())),
                title=known.get("title"),
                year=int(year[0]) if year else None,
                identifiers=identifiers,
            )
        )
    return entries


def _fields(source: str, position: int, strings: dict[str, str]) -> tuple[dict[str, str], int]:
    """The fields of an entry, and the position after them."""
    fields: dict[str, str] = {}
    while found := _FIELD.match(source, position):
        value, position = _value(source, found.end(), strings)
        fields.setdefault(found[1].lower(), value)
    return fields, position


def _value(source: str, position: int, strings: dict[str, str]) -> tuple[str, int]:
    """A field's value, whose parts `#` joins: {groups}, "strings", numbers and the names of strings."""
    parts = []
    while True:
        if source[position : position + 1] == "{":
            end = tex.group(source, position)
            if end is None:  # a brace is missing: the value ends with the entry
                end = source.find("\n@", position)
                end = end if end >= 0 else len(source)
                return "".join(parts) + source[position + 1 : end], end
            parts.append(source[position + 1 : end - 1])
        elif source[position : position + 1] == '"':
            end = position + 1
            while end < len(source) and source[end] != '"':
                inner = tex.group(source, end) if source[end] == "{" else None
                end = inner or end + 1
            parts.append(source[position + 1 : end])
            end += 1
        else:
            word = re.compile(r"[\w:.-]*").match(source, position)
            parts.append(strings.get(word[0].lower(), word[0]))
            end = word.end()
        joined = re.compile(r"\s*#\s*").match(source, end)
        if not joined:
            return "".join(parts), end
        position = joined.end()
