"""Readers for what data sets of papers come as: sentence-numbered XML, SciREX's JSON, and text with labelled parts.

Sentence-numbered XML (`<PAPER><S sid="0">…<SECTION title="…">`, CL-SciSumm and ScisummNet) isn't well-formed XML:
signs are not escaped and elements not closed. It is read by its tags alone. Two sentences in it never stand on one
line, so each is one here. In SciREX every section begins with its kind and, as its first sentence, its heading; words
are parted by spaces, as the set has them.
"""

from __future__ import annotations

import html
import json
import re

from pipelines.literature_analysis import mend, prose
from pipelines.literature_analysis.paper import Draft, Paper

_TAG = re.compile(r"<\s{0,9}(/?)\s{0,9}(PAPER|S|ABSTRACT|SECTION|SUBSECTION)\b([^<>]{0,2000})>")
_TITLE = re.compile(r"title\s*=\s*\"(.*?)\"\s*(?:\"|number\s*=|$)", re.S)
_LABEL = re.compile(r"(?m)^(TITLE|ABSTRACT|BODY)((?:\.[^\n]*)?):[ \t]*$")
_KINDS = {
    "document": 0, "section": 1, "appendix": 1, "bibliography": 1, "subsection": 2, "subsubsection": 3, "paragraph": 4,
    "subparagraph": 5,
}  # fmt: skip


def is_sentences(text: str) -> bool:
    return re.search(r"<PAPER\b[^>]*>\s*<(?:S|ABSTRACT|SECTION|/PAPER)\b", text[:4096]) is not None


def is_labelled(text: str) -> bool:
    return re.match(r"\s*TITLE:[ \t]*\n", text) is not None


def read_sentences(text: str) -> Paper:
    """A paper in sentence-numbered XML."""
    draft = Draft("sentences")
    text = mend.parted_words(mend.ligatures(text).replace("\u00ad", ""))
    position, titled = 0, False
    for tag in _TAG.finditer(text):
        between = _unescaped(text[position : tag.start()])
        position = tag.end()
        closing, name = tag[1], tag[2]
        if closing and name == "S" and not titled:
            draft.title(between)
            titled = True
        elif between.strip():
            draft.words(between.strip())
            draft.add("\n")
            titled = True
        if closing:
            continue
        if name in ("ABSTRACT", "SECTION", "SUBSECTION"):
            draft.paragraph()
            titled = True
        if name == "ABSTRACT":
            draft.heading("Abstract", 1)
        elif name in ("SECTION", "SUBSECTION") and (title := _TITLE.search(tag[3])):
            draft.heading(_unescaped(title[1]), 1 + (name == "SUBSECTION"))
    rest = _unescaped(text[position:]).strip()
    if rest:
        draft.words(rest)
    return prose.with_references(draft.finish())


def read_labelled(text: str) -> Paper:
    """A paper whose parts are labelled `TITLE:`, `ABSTRACT.RESULTS:`, `BODY.METHODS.Patients:` in lines of their own."""
    draft = Draft("labelled text")
    marks = list(_LABEL.finditer(text))
    for mark, end in zip(marks, [m.start() for m in marks[1:]] + [len(text)]):
        content = text[mark.end() : end].strip("\n")
        if mark[1] == "TITLE" and mark is marks[0]:
            title, _, content = content.partition("\n")
            draft.title(title)
            draft.add(content.lstrip("\n"))
            continue
        # A dot may be part of a heading, too ("Statistical analysis vs. baseline"): only the body's are levels.
        heading = mark[2][1:] if mark[1] == "BODY" and mark[2] else mark[1] + mark[2]
        draft.heading(heading, 1)
        draft.add(content + "\n")
    return prose.with_references(draft.finish())


def read_scirex(tree: dict) -> Paper:
    """A document of SciREX: `words`, and `sections` and `sentences` as spans of them."""
    draft = Draft("scirex")
    words, starts = tree["words"], dict(map(tuple, tree["sentences"]))
    for start, stop in tree["sections"]:
        while start < stop:  # a section may hold only the heading of the one below it, and that one's
            end = min(starts.get(start, stop), stop)
            marked = words[start + 1 : start + 2] == [":"] and words[start] in _KINDS
            if not marked and start:  # text, or the words "theorem :", which are part of it
                break
            level = _KINDS[words[start]] if marked else 0  # a few begin with their title alone
            heading = " ".join(words[start + 2 * marked : end])
            if level == 0:
                draft.title(heading)
            else:
                draft.heading(heading, level)
            start = end
        while start < stop:
            end = max(min(starts.get(start, stop), stop), start + 1)
            draft.add(" ".join(words[start:end]) + "\n")
            start = end
        draft.paragraph()
    return prose.with_references(draft.finish())


def scirex(text: str) -> dict | None:
    """The document of SciREX that a JSON text is, or None."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or not {"words", "sections", "sentences"} <= tree.keys():
        return None
    words, rows = tree["words"], (tree["sections"], tree["sentences"])
    whole = isinstance(words, list) and all(isinstance(word, str) for word in words)
    whole = whole and all(isinstance(row, list) and all(_is_span(span, len(words)) for span in row) for row in rows)
    return tree if whole else None


def _is_span(span, length: int) -> bool:
    is_pair = isinstance(span, list) and len(span) == 2 and all(type(at) is int for at in span)
    return is_pair and 0 <= span[0] <= span[1] <= length


def _unescaped(text: str) -> str:
    return html.unescape(text)
