import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.decode import Unreadable
from pipelines.literature_analysis.formats import decode, read
from tests.unit.pipelines.literature_analysis import papers

FILES = {"method.tex": papers.METHOD.encode(), "refs.bib": papers.BIB.encode()}
EVERY = {
    "main.tex": papers.LATEX.encode(),
    "a.nxml": papers.JATS.encode(),
    "a.tei.xml": papers.TEI.encode(),
    "a.md": papers.MARKDOWN.encode(),
    "a.rst": papers.RST.encode(),
    "a.txt": papers.PLAIN.encode(),
    "sentences.xml": papers.SENTENCES.encode(),
    "labelled.txt": papers.LABELLED.encode(),
    "scirex.json": json.dumps(papers.SCIREX).encode(),
    "a.pdf": papers.pdf([papers.column(72, 100, ["Rings", "1 Introduction", "As in [1].", "References", "[1] Doe. 2001. Rings."])]),
}


def check(paper):
    """Every position is exact, and the text is the sections one after the other."""
    text = paper.text
    assert text == "" or text.endswith("\n")
    assert text.startswith(paper.title)
    assert "".join(paper.pieces()) == text
    last = 0
    for section in paper.sections:
        assert section.start >= last and text[section.start : section.stop] == section.heading
        assert text[section.stop] == "\n" and section.level >= 1
        last = section.stop
    for number, entry in enumerate(paper.references, start=1):
        assert entry.number == number
        assert entry.start is None or " ".join(text[entry.start : entry.stop].split()) == entry.text
    last = 0
    for citation in paper.citations:
        assert last <= citation.start < citation.stop <= len(text)
        assert text[citation.start : citation.stop].strip() == text[citation.start : citation.stop]
        assert all(1 <= number <= len(paper.references) for number in citation.references)
        last = citation.stop
    json.dumps(paper.details())
    text.encode()


@pytest.mark.parametrize("name", EVERY)
def test_every_format_with_exact_positions(name):
    paper = read(EVERY[name], name, FILES.get)
    check(paper)
    assert paper.text and (paper.sections or name == "a.pdf")
    assert read(EVERY[name], name, FILES.get) == paper


def test_the_content_decides():
    formats = {name: read(data, name, FILES.get).format for name, data in EVERY.items()}
    assert formats == {
        "main.tex": "latex", "a.nxml": "jats", "a.tei.xml": "tei", "a.md": "markdown", "a.rst": "rst", "a.txt": "text",
        "sentences.xml": "sentences", "labelled.txt": "labelled text", "scirex.json": "scirex", "a.pdf": "pdf",
    }  # fmt: skip
    assert read(EVERY["a.pdf"], "a.txt").format == "pdf"
    assert read(EVERY["a.rst"], "a.txt").format == "rst"
    assert read(EVERY["a.md"], "a.txt").format == "markdown"
    assert read(EVERY["main.tex"], "a.txt").format == "latex"
    assert read(EVERY["scirex.json"], "a.txt").format == "scirex"
    assert read(EVERY["sentences.xml"], "a.txt").format == "sentences"


def test_a_text_about_tex_is_no_tex():
    text = "# Notes\n\nBegin so:\n\n    \\documentclass{a}\n    \\begin{document}x\\end{document}\n\nAll of this stays.\n"
    for name, form in (("a.md", "markdown"), ("a.txt", "text"), ("a.rst", "rst")):
        paper = read(text.encode(), name)
        assert paper.format == form and "All of this stays." in paper.text


def test_a_title_field_is_one_at_a_lines_start():
    assert "(title: b" in read(b"Author: a\n(title: b\n\nText.\n", "a.rst").text


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.xml", b"<html><p>x</p></html>", "not a paper: XML of html"),
        ("a.json", b'{"a": 1}', "not a paper: JSON"),
        ("a.json", b"[" * 100_000, "not a paper: JSON"),
        ("a.tex", b"\\section{x}", "not a paper: TeX without"),
        ("a.pdf", b"no", "not a readable PDF"),
        ("a.pdf", b"%PDF-1.4 cut", "not a readable PDF"),
        ("a.txt", b"Citance Number: 1 | Reference", "not a paper: annotations"),
        ("a.txt", b"a\0b", "binary: NUL at position 1"),
        ("a.xml", b"<article><front>", "not well-formed"),
    ],
)
def test_what_is_no_paper_says_why(name, data, reason):
    with pytest.raises(Unreadable) as error:
        read(data, name)
    assert str(error.value).startswith(reason) and "\n" not in str(error.value)


def test_encodings():  # C3
    assert decode(b"\xef\xbb\xbfna\xc3\xafve") == ("naïve", "utf-8-sig")
    assert decode("naïve".encode("utf-16")) == ("naïve", "utf-16")
    assert decode(b"na\xefve \x93x\x94") == ("naïve “x”", "cp1252")
    assert decode(b"\\usepackage[latin9]{inputenc} \xa4") == ("\\usepackage[latin9]{inputenc} €", "iso8859-15")
    assert decode("\\usepackage[latin1]{inputenc} naïve".encode())[0].endswith("naïve")  # converted, or a text about TeX
    assert decode(b"a\r\nb\rc\x0cd\x01") == ("a\nb\nc\nd", "utf-8")
    with pytest.raises(Unreadable, match="undecodable"):
        decode(b"\x81\xff")
    assert "\ufffd" not in read(papers.SENTENCES.encode("cp1252", "ignore"), "a.xml").text


def test_nothing_in_a_paper_is_an_empty_paper():  # C1
    for name in ("a.txt", "a.md", "a.rst"):
        assert read(b"", name).text == ""
    assert read(b"<PAPER>\n</PAPER>\n", "a.xml").text == ""


def test_text_that_looks_like_a_special_token_stays():  # C8, C9
    text = "# T\n\ni ⭢ j <|section|> <|endoftext|> naïve 👩‍👩‍👧\n"
    assert read(text.encode(), "a.md").text == text.removeprefix("# ").replace("\n\n", "\n", 1)


def test_files_are_known_by_their_names():
    assert read(b"A title\n\nText", "set/PMC123456.txt").identifiers == {"pmcid": "PMC123456"}
    assert read(b"A title\n\nText", "1706.03762v5.txt").identifiers == {"arxiv": "1706.03762"}
    assert read(b"A title\n\nText", "N01-1011.txt").identifiers == {"acl": "N01-1011"}


# Fuzzing: what is no paper is Unreadable, and nothing takes long -----------------------------------------------------

NOISE = (
    [*"{}[]\\$%&~^_#@<>/\"'-=*`:.;,()!?\n\t \0\x01\ufb01\u00ad\ud7ff", "\n\n", "\\begin{", "\\end{", "\\section{", "\\cite{a}", "\\input{method}",
     "\\newcommand{\\x}[1]{#1#1}", "\\x", "\\bibitem{a}", "\\documentclass{a}", "\\begin{document}", "<S sid=\"0\">", "</S>", "<SECTION title=\"",
     "<PAPER>", "<article>", "<sec>", "<title>", "<xref ref-type=\"bibr\" rid=\"a\">", "&lt;", "&x;", "<TEI>", "[1]", "[1]_", ".. [1] ", "====", "----",
     "References\n", "(Doe, 2001)", "Doe et al. (2001)", "10.1000/x", ":pep:`8`", "[^1]", "[^1]: ", "[@a]", "```", "TITLE:\n", "BODY.A:\n", "word", "é"]
)  # fmt: skip
SOURCE = st.lists(st.sampled_from(NOISE), max_size=60).map("".join)


@settings(max_examples=200)
@given(
    st.sampled_from(["a.tex", "a.md", "a.rst", "a.txt", "a.xml", "a.json", "a.pdf"]),
    SOURCE,
    st.sampled_from(list(EVERY.values())),
    st.data(),
)
def test_any_text_is_a_paper_or_says_why(name, noise, real, data):
    at = data.draw(st.integers(0, len(real)))
    for content in (noise.encode(), real[:at] + noise.encode() + real[at:]):
        try:
            check(read(content, name, FILES.get))
        except Unreadable as error:
            assert re.match(r"[a-zA-Z- ]+: \S", str(error)) and "\n" not in str(error)


@pytest.mark.parametrize("name", ["a.tex", "a.md", "a.rst", "a.txt", "a.xml"])
@pytest.mark.parametrize(
    "piece",
    [
        "{",
        "[",
        "\\section{",
        "$",
        "\\begin{a}",
        "[1, ",
        "(Doe, 2001; ",
        "A, B, C, ",
        "<S",
        "- a-\n",
        "\\x{",
        "> ",
        "* ",
        "a_",
        ".. [1]\n",
        "\n===\n",
    ],
)
def test_long_nonsense_takes_no_time(name, piece):
    start = {"a.tex": "\\documentclass{a}\n", "a.xml": "<PAPER><S sid='0'>"}.get(name, "T\n\n")
    before = time.process_time()
    read((start + piece * (60_000 // len(piece))).encode(), name)
    assert time.process_time() - before < 10


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.xml", "<?xml version='1.0'?>" + "<!---->" * 60 + "!"),
        ("a.txt", "T\n\n" + "acgt" * 25_000),
        ("a.txt", "T\n\nReferences\n\n[1] arxiv" + "-" * 60_000),
        ("a.txt", "T\n\nReferences\n\n[1] " + "arxiv" * 12_000),
        ("a.txt", "T\n\nReferences\n\n[1] 10.1000/a" + ")" * 300_000),
        ("a.tex", "\\documentclass{a}\\newcommand{\\x}" + " " * 20_000 + "x"),
        ("a.tex", "\\documentclass{a}" + "\\begin{verbatim}\\end{verbatim}" * 10_000),
        ("a.md", "SPDX-License-Identifier:" + " " * 60_000 + "\n"),
        ("a.rst", "Title: x\n" + "word " * 20_000),
    ],
    ids=lambda value: value[:40],
)
def test_one_long_thing_takes_no_time(name, text):
    before = time.process_time()
    try:
        read(text.encode(), name)
    except Unreadable:
        assert name == "a.xml"
    assert time.process_time() - before < 5
