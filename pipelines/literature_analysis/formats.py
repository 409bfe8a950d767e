"""From a file's bytes to a paper: what format it is in, by its content, and which reader reads it.

**Decoding**, in this order: a byte order mark of UTF-8 or UTF-16; UTF-8; the encoding that a TeX file's inputenc names;
Windows-1252, which is what papers that aren't UTF-8 are in as a rule, unless it gives a control character. The paper
keeps the encoding's name. (UTF-8 goes before inputenc: text that merely speaks of inputenc is UTF-8, and so are many TeX
files that were converted and still name what they were in; Latin-1 with accents is hardly ever valid UTF-8.) NUL bytes
are no text. U+FFFD appears only where the file itself has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from pipelines.corpus.decode import Unreadable
from pipelines.literature_analysis import jats, latex, markup, mend, pdf, sets, tei, tree
from pipelines.literature_analysis.paper import Paper
from pipelines.literature_analysis.references import identifiers_of_file, year_of

EXTENSIONS = frozenset(".pdf .tex .ltx .xml .nxml .md .markdown .rst .txt .text .json".split())
_INPUTENC = re.compile(rb"\\usepackage\[(latin1|latin9|ansinew|cp1252|utf8)\]\{inputenc\}")
_TEX_ENCODINGS = {
    b"latin1": "latin-1", b"latin9": "iso8859-15", b"ansinew": "cp1252", b"cp1252": "cp1252", b"utf8": "utf-8",
}  # fmt: skip
_ATX = re.compile(r"(?m)^#{1,6}[ \t]+\S")
_UNDERLINED = re.compile(r"(?m)^\S[^\n]*\n([=\-~^*#+\"])\1{3,}[ \t]*$")


def read(data: bytes, name: str, sibling: Callable[[str], bytes | None] | None = None) -> Paper:
    """The paper in a file called `name`. Raises Unreadable, `kind: detail`.

    Args:
        sibling: gives the bytes of another file of a LaTeX paper by its path from the main file's folder, or None.
    """
    paper = _read(data, name, sibling)
    stem = name.rpartition("/")[2].rpartition(".")[0] or name
    identifiers = {**identifiers_of_file(stem), **paper.identifiers}
    year = paper.year if paper.year is not None else year_of(identifiers)
    return replace(paper, identifiers=identifiers, year=year)


def decode(data: bytes) -> tuple[str, str]:
    """The text, with line feeds and without control characters, and the encoding. Raises Unreadable."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        encoding = "utf-8-sig" if data.startswith(b"\xef") else "utf-16"
        text = _strictly(data, encoding)
    elif (at := data.find(b"\0")) >= 0:
        raise Unreadable(f"binary: NUL at position {at:,}")
    else:
        try:
            text, encoding = data.decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            declared = _INPUTENC.search(data, 0, 1 << 16)
            encoding = _TEX_ENCODINGS[declared[1]] if declared else "cp1252"
            text = _strictly(data, encoding)
    return mend.clean(text), encoding


def _strictly(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise Unreadable(f"undecodable: neither UTF-8 nor {encoding}, at byte {error.start:,}") from error


def _read(data: bytes, name: str, sibling) -> Paper:
    if b"%PDF-" in data[:1024]:
        return pdf.read_pdf(data)
    extension = "." + name.rpartition(".")[2].lower()
    if extension == ".pdf":
        raise Unreadable("not a readable PDF: its first bytes are none's")
    text, encoding = decode(data)
    return replace(_read_text(text, data, extension, name, sibling), encoding=encoding)


def _read_text(text: str, data: bytes, extension: str, name: str, sibling) -> Paper:
    start = text[:100_000].lstrip()[:1]
    if start == "<" and sets.is_sentences(text):
        return sets.read_sentences(text)
    if start == "<" and (extension in (".xml", ".nxml") or text.lstrip()[:5] == "<?xml"):
        return _read_xml(data)
    if extension == ".json" or (start == "{" and extension in (".txt", ".text")):
        if (tree := sets.scirex(text)) is not None:
            return sets.read_scirex(tree)
        if extension == ".json":
            raise Unreadable("not a paper: JSON without words, sections and sentences")
    if sets.is_labelled(text):
        return sets.read_labelled(text)
    # TeX by another name begins as TeX does: prose that shows a \documentclass is prose
    if extension in (".tex", ".ltx") or (start in ("\\", "%") and latex.is_main(text[:20_000])):
        if not latex.is_main(text):
            raise Unreadable("not a paper: TeX without \\documentclass")
        return latex.read_latex(text, name.rpartition("/")[2], _reader(sibling))
    if text.lstrip().startswith("Citance Number:"):
        raise Unreadable("not a paper: annotations of citations")
    if extension in (".md", ".markdown"):
        return markup.read_markdown(text)
    if extension == ".rst":
        return markup.read_rst(text)
    if len(_UNDERLINED.findall(text)) > 1:
        return markup.read_rst(text)
    if len(_ATX.findall(text)) > 1:
        return markup.read_markdown(text)
    return markup.read_plain(text)


def _read_xml(data: bytes) -> Paper:
    root = tree.parse(data)
    if tree.local(root) == "article":
        return jats.read_jats(root)
    if tree.local(root) == "TEI":
        return tei.read_tei(root)
    raise Unreadable(f"not a paper: XML of {tree.local(root)}, neither JATS nor TEI")


def _reader(sibling) -> Callable[[str], str | None]:
    def read(name: str) -> str | None:
        data = sibling(name) if sibling else None
        if data is None:
            return None
        try:
            return decode(data)[0]
        except Unreadable:
            return None  # the command that asked for it stays in the text

    return read
