"""Papers in PDF, by PDFium: characters to lines, lines in reading order, lines to headings and paragraphs.

1. A page's characters become lines where the text jumps: back, to another height, or over a gap as wide as a gutter.
2. Two columns: where lines stand left and right of a gutter in the middle, the page is cut in bands at the lines that
   cross it; each band is read down its left column and then its right one.
3. Running heads and page numbers are dropped by what repeats over pages, ligatures and hyphens are mended.
4. The title is what is set largest on the first page. A line alone, larger than the text or numbered or known by
   name, is a heading; space above a line or an indent begins a paragraph.

The work is bounded by the characters on a page and in all, not by the clock, so that a file gives the same text on any
machine: pages may share their content, and a small file be a long book.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass, replace
from statistics import median

import pypdfium2
import pypdfium2.raw as pdfium

from pipelines.corpus.decode import Unreadable
from pipelines.literature_analysis import mend, prose
from pipelines.literature_analysis.paper import Draft, Paper, one_line
from pipelines.literature_analysis.references import identifiers_in

_MOST_CHARACTERS = 400_000  # on a page; a densely set one of a newspaper has some 30,000
_MOST_IN_ALL = 40_000_000  # the proceedings of a large conference have some 20,000,000; minutes of work
_ITEM = re.compile(r"[•▪◦‣]|\[[^\]\s]{1,30}\][ \t]+\S")
_HYPHENS = ("\u00ad", "\x02", "\ufffe")  # what PDFium gives for a hyphen at a line's end


@dataclass(frozen=True)
class Line:
    """A line of a column; y grows upwards, `size` is the height of the font's box, all in points."""

    text: str
    left: float
    right: float
    bottom: float
    top: float
    size: float


def read_pdf(data: bytes) -> Paper:
    """A paper in PDF. Raises Unreadable for one that is damaged, encrypted, or has no text."""
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("encrypted: it opens only with a password") from error
        raise Unreadable(f"not a readable PDF: {one_line(str(error))}") from error
    try:
        pages, room = [], _MOST_IN_ALL
        for number in range(len(document)):
            lines, characters = _lines(document, number)
            if (room := room - characters) < 0:
                raise Unreadable(f"too long: more than {_MOST_IN_ALL:,} characters on the first {number + 1:,} of {len(document):,} pages")
            pages.append(reading_order(lines))
    finally:
        document.close()
    return _paper(pages)


def reading_order(lines: list[Line]) -> list[Line]:
    """The lines of a page, from the first that is read to the last."""
    if not lines:
        return []
    left, right = min(line.left for line in lines), max(line.right for line in lines)
    gutter = _gutter(lines, left, right)
    if gutter is None:
        return sorted(lines, key=lambda line: (-line.bottom, line.left))
    ordered: list[Line] = []
    columns: tuple[list[Line], list[Line]] = ([], [])
    for line in sorted(lines, key=lambda line: (-line.bottom, line.left)):
        if line.left < gutter < line.right:
            ordered += columns[0] + columns[1] + [line]
            columns = ([], [])
        else:
            columns[line.left >= gutter].append(line)
    return ordered + columns[0] + columns[1]


def _gutter(lines: list[Line], left: float, right: float) -> float | None:
    """Where two columns part: the x in the middle third that the fewest lines cross, if enough stand on both sides."""
    width = right - left
    best = None
    for step in range(41):
        x = left + width * (0.35 + 0.3 * step / 40)
        on_left = [line for line in lines if line.right <= x and line.right - line.left > width / 5]
        on_right = [line for line in lines if line.left >= x and line.right - line.left > width / 5]
        crossing = sum(line.left < x < line.right for line in lines)
        if min(len(on_left), len(on_right)) >= 3 and crossing < min(len(on_left), len(on_right)):
            # side by side, not one above the other: the columns share heights
            top = min(max(line.top for line in side) for side in (on_left, on_right))
            bottom = max(min(line.bottom for line in side) for side in (on_left, on_right))
            cost = (crossing, abs(step - 20))
            if top > bottom and (best is None or cost < best[0]):
                best = (cost, x)
    return best and best[1]


def _lines(document: pypdfium2.PdfDocument, number: int) -> tuple[list[Line], int]:
    """The lines of a page, as PDFium has them, and the number of its characters."""
    try:
        page = document[number]
        text = page.get_textpage()
    except pypdfium2.PdfiumError as error:
        raise Unreadable(f"not a readable PDF: page {number + 1}: {one_line(str(error))}") from error
    count = text.count_chars()
    if count > _MOST_CHARACTERS:
        raise Unreadable(f"too dense: page {number + 1} has {count:,} characters, more than {_MOST_CHARACTERS:,}")
    lines: list[Line] = []
    letters: list[str] = []
    boxes: list[tuple[float, float, float, float]] = []

    def end() -> None:
        line = "".join(letters).strip()
        if line and boxes:
            bottom, top = median(box[1] for box in boxes), median(box[3] for box in boxes)
            left, right = min(box[0] for box in boxes), max(box[2] for box in boxes)
            lines.append(Line(line, left, right, bottom, top, round(top - bottom, 1)))
        letters.clear()
        boxes.clear()

    box = pdfium.FS_RECTF()
    for i in range(count):
        code = pdfium.FPDFText_GetUnicode(text, i)
        letter = chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"
        if letter in _HYPHENS:
            letters.append("-")
            end()
            continue
        if letter in "\r\n":
            end()
            continue
        if letter.isspace() or pdfium.FPDFText_IsGenerated(text, i) == 1:
            letters.append(letter)
            continue
        pdfium.FPDFText_GetLooseCharBox(text, i, ctypes.byref(box))
        place = (box.left, box.bottom, box.right, box.top)
        if boxes:
            last, height = boxes[-1], max(place[3] - place[1], boxes[-1][3] - boxes[-1][1], 1.0)
            jumps = place[0] - last[2] > 1.2 * height or place[0] < boxes[0][0] - height
            off = place[1] > last[3] or place[3] < last[1]
            if jumps or off:
                end()
        letters.append(letter)
        boxes.append(place)
    end()
    text.close()
    page.close()
    return _joined(lines), count


def _joined(lines: list[Line]) -> list[Line]:
    """Pieces of one line that PDFium gave apart, such as sub- and superscripts, with the line they stand in."""
    joined: list[Line] = []
    for line in lines:
        last = joined[-1] if joined else None
        if last and _overlap(last, line) > 0.4 * min(last.size, line.size) and -2 < line.left - last.right < 0.6 * last.size:
            larger = max(last, line, key=lambda part: part.size)
            gap = " " if line.left - last.right > 0.15 * larger.size else ""
            joined[-1] = Line(last.text + gap + line.text, last.left, line.right, larger.bottom, larger.top, larger.size)
        else:
            joined.append(line)
    return joined


def _overlap(first: Line, second: Line) -> float:
    return min(first.top, second.top) - max(first.bottom, second.bottom)


def _paper(pages: list[list[Line]]) -> Paper:
    # Signs without a Unicode name come as control characters; a line of nothing else is none.
    pages = [[replace(line, text=one_line(mend.clean(line.text))) for line in page] for page in pages]
    pages = [[line for line in page if line.text] for page in pages]
    if not any(pages):
        raise Unreadable(f"no text: its {len(pages)} pages hold none, as scanned ones don't")
    by_height = [sorted(page, key=lambda line: -line.top) for page in pages]
    dropped = mend.running_heads([[line.text for line in page] for page in by_height])
    heads = [{id(page[i]) for i in places} for page, places in zip(by_height, dropped)]
    pages = [[line for line in page if id(line) not in drop] for page, drop in zip(pages, heads)]
    if not any(pages):  # nothing but what repeats: then that is the text
        pages = by_height
    lines = [line for page in pages for line in page]
    sizes = Counter()
    for line in lines:
        sizes[line.size] += len(line.text)
    body = max(sizes, key=lambda size: (sizes[size], -size))
    leading = _leading(pages, body)
    draft = Draft("pdf")
    title = _title(pages[0] if pages else [], body)
    draft.title(mend.hyphens(mend.ligatures("\n".join(line.text for line in title))))
    blocks = _blocks([line for line in lines if not any(line is part for part in title)], body, leading)
    # Whether a hyphen at a line's end belongs to the word is asked of the whole paper, so all blocks go at once.
    mended = mend.hyphens(mend.ligatures("\n\n\n".join("\n".join(b[1]) for b in blocks)))
    for (level, _), text in zip(blocks, mended.split("\n\n\n")):
        if level is not None:
            draft.heading(text, level)
        else:
            draft.paragraph()
            draft.words(text)
    paper = prose.with_references(draft.finish())
    head = identifiers_in(paper.text[:3000])
    return Paper(**{**vars(paper), "identifiers": head})


def _leading(pages: list[list[Line]], body: float) -> float:
    """The usual distance from one line of the text to the next."""
    steps = [
        upper.bottom - lower.bottom
        for page in pages
        for upper, lower in zip(page, page[1:])
        if upper.size == lower.size == body and 0 < upper.bottom - lower.bottom < 3 * body
    ]
    return median(steps) if steps else 1.2 * body


def _title(page: list[Line], body: float) -> list[Line]:
    largest = max((line.size for line in page), default=0.0)
    if largest < 1.15 * body:
        return page[:1] if page and len(page[0].text) < 200 and prose.heading_level(page[0].text) is None else []
    first = next(i for i, line in enumerate(page) if line.size > 0.97 * largest)
    last = first
    while last + 1 < len(page) and page[last + 1].size > 0.97 * largest:
        last += 1
    return page[first : last + 1]


def _blocks(lines: list[Line], body: float, leading: float) -> list[tuple[int | None, list[str]]]:
    """(level, lines) of every heading, (None, lines) of every paragraph."""
    blocks: list[tuple[int | None, list[str]]] = []
    last: Line | None = None
    for line in lines:
        text = line.text
        level = _level(line, last, body, leading)
        if last is None or level is not None or blocks[-1][0] is not None:
            # a heading may go on in the next line, if that is of its size
            goes_on = level is not None and last is not None and blocks[-1][0] == level and line.size == last.size > body
            if goes_on and 0 < last.bottom - line.bottom < 1.6 * line.size and not re.match(r"[\dA-Z]+\.? ", text):
                blocks[-1][1].append(text)
            else:
                blocks.append((level, [text]))
        elif _begins(line, last, leading):
            blocks.append((None, [text]))
        else:
            blocks[-1][1].append(text)
        last = line
    return blocks


def _level(line: Line, last: Line | None, body: float, leading: float) -> int | None:
    level = prose.heading_level(line.text)
    if level is not None and (line.size > 1.03 * body or not line.text[:1].isdigit()):
        return level
    if level is not None:  # a number at the start of a line of the text's own size: only after some space
        apart = last is None or not 0 < last.bottom - line.bottom < 1.25 * leading
        return level if apart and not line.text.startswith("0") else None
    larger = line.size > 1.08 * body and len(line.text) < 120 and re.search(r"[^\W\d_]{3}", line.text)
    return 1 if larger and not line.text.endswith((".", ",", ";")) else None


def _begins(line: Line, last: Line, leading: float) -> bool:
    """Whether a line begins a paragraph: after a space, with a bullet or a reference's number, or indented (or, in a
    list, outdented) while the line before it ends a sentence."""
    if _ITEM.match(line.text):
        return True
    step, ended = last.bottom - line.bottom, last.text.endswith((".", ":", "!", "?", ")", "”"))
    if 0 < step:
        indented = 0.5 * line.size < abs(line.left - last.left) < 4 * line.size
        return step > 1.45 * leading or (indented and ended)
    # In another column or on another page a sentence goes on unless it has ended.
    return ended and line.text[:1].isupper()
