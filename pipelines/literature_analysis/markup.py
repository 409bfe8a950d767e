"""Papers in Markdown, reStructuredText and plain text: the headings are found, the rest is kept as it is written.

Markup stays in the text, which is then the author's own; only a heading's marks are taken off. Headings of Markdown
are found by markdown-it, so that those inside code are none. reStructuredText has a light reader of its own: docutils
gives a tree that has lost where things stood in the source and that puts error messages into a text with directives
it doesn't know (Sphinx's), and it reads or includes other files. Nothing is included here, nothing is executed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from markdown_it import MarkdownIt

from pipelines.literature_analysis import mend, prose
from pipelines.literature_analysis.paper import Citation, Draft, Paper, one_line
from pipelines.literature_analysis.references import Reference, identifiers_in, merged, reference

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1{2,}[ \t]*")
_FIELD = re.compile(r"^:?([A-Za-z][\w -]*):[ \t]+(\S.*(?:\n[ \t]+\S.*)*)", re.M)
_FOOTNOTE = re.compile(r"(?m)^\.\. \[([^\]\n]{1,60})\][ \t]*((?:\S.*)?(?:\n(?:[ \t]*\n)*[ \t]+\S.*)*)")
_RST_MARK = re.compile(r"\[([#*]?[\w.:+-]*)\]_(?!_)|:(pep|rfc):`(?:[^`<\n]*<)?(\d{1,5})[^`\n]*`", re.I)
_MD_NOTE = re.compile(r"(?m)^\[(\^[^\]\s]{1,60})\]:[ \t]*(\S.*(?:\n(?: {4}|\t)\S.*)*)")
_MD_MARK = re.compile(r"\[(\^[^\]\s]{1,60})\](?!:)|\[([^\[\]]{0,80}@[^\[\]]{1,200})\]")
_FRONT = re.compile(r"---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|$)", re.S)
_LICENCE = re.compile(r"SPDX-License-Identifier:[ \t]{0,9}([\w.+()\- ]{0,99}[\w.+)])")
_PUBLIC = re.compile(r"placed in the public domain( or under the\s+CC0-1\.0-Universal license)?", re.I)


def read_markdown(text: str) -> Paper:
    """A paper in CommonMark. Footnotes, `[@key]` and numbers in brackets cite."""
    draft = Draft("markdown")
    fields: dict[str, str] = {}
    front = _FRONT.match(text)
    if front:
        fields = _fields(front[1])
    lines = text.split("\n")
    first = text.count("\n", 0, front.end()) if front else 0
    headings = [  # (first line, line after the last, level, heading)
        (token.map[0] + first, token.map[1] + first, int(token.tag[1]), inline.content)
        for token, inline in _pairs(MarkdownIt("commonmark").disable(["reference", "inline"]).parse("\n".join(lines[first:])))
        if token.type == "heading_open" and token.level == 0
    ]
    title = fields.get("title", "").strip("\"'")
    if not title and headings and not any("".join(lines[first : headings[0][0]]).split()):
        title, first = headings[0][3], headings.pop(0)[1]
    _write(draft, title, lines, 0 if front and fields.get("title") else first, headings)
    paper = _known(draft, fields, text)
    notes = [reference(m[1], one_line(m[2]), start=m.start(2), stop=m.end(2)) for m in _MD_NOTE.finditer(paper.text)]
    return _cited(paper, notes, _markdown_marks)


def read_rst(text: str) -> Paper:
    """A paper in reStructuredText. Footnotes, citations and the roles `:pep:` and `:rfc:` cite."""
    draft = Draft("rst")
    lines = text.split("\n")
    head = text[: min(at for at in (text.find("\n\n"), len(text)) if at >= 0)]
    fields = _fields(head) if re.match(r":?[A-Za-z][\w -]*:[ \t]", head) else {}
    headings = list(_rst_headings(lines))
    first, title = 0, one_line(fields.get("title", ""))
    if title:
        # The line becomes the title; the other fields stay, in front of the first section.
        at = next(i for i, line in enumerate(lines) if re.match(r":?title:", line, re.I))
        del lines[at]
        while at < len(lines) and lines[at][:1] in (" ", "\t") and lines[at].strip():
            del lines[at]
        headings = list(_rst_headings(lines))
    elif headings and all(level > 1 for _, _, level, _ in headings[1:]):
        before = headings[0][0]
        title = headings[0][3]
        lines = lines[:before] + lines[headings[0][1] :]
        headings = [(start, stop, level - 1, name) for start, stop, level, name in _rst_headings(lines, 2)]
    _write(draft, title, lines, first, headings)
    if "pep" in fields and fields["pep"].strip().isdecimal():
        draft.identifiers["pep"] = str(int(fields["pep"]))
    paper = _known(draft, fields, text)
    notes = []
    for i, note in enumerate(_FOOTNOTE.finditer(paper.text)):
        key = note[1] if note[1] not in ("#", "*") else f"{note[1]}{i}"
        if words := note[2].strip():
            start = note.end(2) - len(note[2].lstrip())
            notes.append(reference(key, one_line(words), start=start, stop=note.end(2)))
    return _cited(paper, notes, _rst_marks)


def read_plain(text: str) -> Paper:
    """A paper as plain text: its first paragraph is the title, a line that stands alone may be a heading."""
    text = mend.parted_words(mend.hyphens(mend.ligatures(text)))
    draft = Draft("text")
    blocks = [block for block in re.split(r"\n[ \t]*\n", text) if block.strip()]
    if blocks and len(title := one_line(blocks[0])) <= 300 and prose.heading_level(title) is None:
        draft.title(title)
        blocks = blocks[1:]
    for block in blocks:
        start = block.lstrip("\n")
        line, _, rest = start.partition("\n")
        level = prose.heading_level(line)
        if level is not None and (not rest.strip() or line.strip().casefold() in ("abstract", "references")):
            draft.heading(line, level)
            start = rest
        if start.strip():
            draft.add(start)
            draft.paragraph()
    return prose.with_references(draft.finish())


def _pairs(tokens):
    return zip(tokens, [*tokens[1:], None])


def _fields(text: str) -> dict[str, str]:
    return {found[1].lower(): found[2] for found in _FIELD.finditer(text)}


def _write(draft: Draft, title: str, lines: list[str], first: int, headings) -> None:
    if title:
        draft.title(title)
    for start, stop, level, heading in headings:
        draft.add("\n".join(lines[first:start]) + "\n")
        draft.heading(heading, level)
        first = stop
    draft.add("\n".join(lines[first:]))


def _known(draft: Draft, fields: dict[str, str], text: str) -> Paper:
    draft.identifiers |= identifiers_in(fields.get("doi", "") + " " + fields.get("arxiv", ""))
    year = re.search(r"\b(?:19|20)\d\d\b", fields.get("created") or fields.get("date") or fields.get("year") or "")
    draft.year = int(year[0]) if year else None
    if spdx := _LICENCE.search(text):
        draft.licence = spdx[1]
    elif public := _PUBLIC.search(text):
        draft.licence = "CC0-1.0" if public[1] else "LicenseRef-public-domain"
    return draft.finish()


def _cited(paper: Paper, notes: list[Reference], marks) -> Paper:
    """The paper with its footnotes and reference lists as references, and every kind of marker."""
    lists = prose.reference_lists(paper)
    spans = [(note.start, note.stop) for note in notes]
    plain = [entry for span in lists for entry in prose.entries(paper.text, *span, paragraphs=False)]
    listed = sorted(notes + plain, key=lambda entry: entry.start)
    # What a role names is a reference without an entry; those come after the list, in the order of the text.
    found = list(marks(paper.text))
    named = [entry for _, _, _, entry in found if entry is not None]
    references, numbers = merged([*listed, *named])
    cited = [_citation(start, stop, keys, numbers) for start, stop, keys, _ in found]
    taken = sorted([(c.start, c.stop) for c in cited] + lists + spans)
    others = prose.outside(prose.citations(paper.text, references, numbers), _disjoint(taken))
    starts = [citation.start for citation in cited]
    others = [o for o in others if bisect_left(starts, o.start) == bisect_left(starts, o.stop)]  # none around a marker
    cited = sorted([*cited, *others], key=lambda citation: citation.start)
    return replace(paper, references=tuple(references), citations=tuple(cited))


def _disjoint(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _citation(start: int, stop: int, keys: list[str], numbers: dict[str, int]) -> Citation:
    known = tuple(dict.fromkeys(numbers[key] for key in keys if key in numbers))
    return Citation(start, stop, known, tuple(key for key in keys if key not in numbers))


def _rst_marks(text: str) -> Iterator[tuple[int, int, list[str], Reference | None]]:
    counts = {"#": 0, "*": 0}
    anonymous = {sign: [i for i, n in enumerate(_FOOTNOTE.finditer(text)) if n[1] == sign] for sign in counts}
    for mark in _RST_MARK.finditer(text):
        if mark[2]:
            name = f"{mark[2].upper()} {int(mark[3])}"
            yield mark.start(), mark.end(), [name], Reference(name, name, identifiers={mark[2].lower(): str(int(mark[3]))})
        elif mark[1] in counts:  # the first unnamed mark is of the first unnamed footnote
            at, counts[mark[1]] = counts[mark[1]], counts[mark[1]] + 1
            places = anonymous[mark[1]]
            yield mark.start(), mark.end(), [f"{mark[1]}{places[at]}" if at < len(places) else mark[1]], None
        elif mark[1]:
            yield mark.start(), mark.end(), [mark[1]], None


def _markdown_marks(text: str) -> Iterator[tuple[int, int, list[str], Reference | None]]:
    for mark in _MD_MARK.finditer(text):
        keys = [mark[1]] if mark[1] else re.findall(r"(?<!\w)@([\w:.#$%&+?<>~/-]*\w)", mark[2])
        if keys:
            yield mark.start(), mark.end(), keys, None


def _rst_headings(lines: list[str], skip: int = 1) -> Iterator[tuple[int, int, int, str]]:
    """First line, line after the last, level, heading. A style's level is the order in which styles appear."""
    styles: list[tuple[str, bool]] = [("", False)] * (skip - 1)
    i = 0
    while i + 1 < len(lines):
        over = _ADORNMENT.fullmatch(lines[i]) and i + 2 < len(lines) and lines[i + 2].rstrip() == lines[i].rstrip()
        at = i + 1 if over else i
        line = lines[at].rstrip()
        under = _ADORNMENT.fullmatch(lines[at + 1])
        alone = i == 0 or not lines[i - 1].strip() or lines[i - 1].startswith(".. ")
        long_enough = under and len(lines[at + 1].rstrip()) >= min(len(line.strip()), 4)
        if not (line.strip() and long_enough and alone and (over or line[0] not in " \t")):
            i += 1
        elif _ADORNMENT.fullmatch(line):
            i += 1
        else:
            style = (under[1], bool(over))
            if style not in styles:
                styles.append(style)
            yield i, at + 2, styles.index(style) + 1, line.strip()
            i = at + 2
