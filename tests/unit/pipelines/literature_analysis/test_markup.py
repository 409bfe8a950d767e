from pipelines.literature_analysis.markup import read_markdown, read_plain, read_rst
from tests.unit.pipelines.literature_analysis import papers


def headings(paper):
    return [(section.level, section.heading) for section in paper.sections]


def cited(paper):
    return [(paper.text[c.start : c.stop], c.references, c.unresolved) for c in paper.citations]


def test_markdown():
    paper = read_markdown(papers.MARKDOWN)
    assert paper.title == "Rings in Markdown" and paper.year == 2020
    assert headings(paper) == [(1, "Introduction"), (2, "Methods"), (2, "References")]
    assert "# no heading" in paper.text and "Written quickly." in paper.pieces()[0] and "date: 2020-05-01" in paper.text
    assert [(entry.key, entry.text) for entry in paper.references] == [
        ("1", "Jane Doe. 2001. Mouse rings are round. Journal."),
        ("^1", "A note."),
    ]
    assert cited(paper) == [("[@doe2001, p. 3]", (), ("doe2001",)), ("[^1]", (2,), ()), ("[1]", (1,), ())]


def test_a_first_heading_is_the_title():
    paper = read_markdown("# Title *x*\n\nText\n\n## One\nText\n")
    assert paper.title == "Title *x*" and paper.text == "Title *x*\nText\n\nOne\nText\n"
    assert read_markdown("Text\n\n# One\n").title == ""


def test_rst():
    paper = read_rst(papers.RST)
    assert paper.title == "Rings in reStructuredText" and paper.year == 2003 and paper.identifiers == {"pep": "9999"}
    assert paper.licence == "LicenseRef-public-domain"
    assert headings(paper) == [(1, "Abstract"), (2, "Details"), (1, "References"), (1, "Copyright")]
    assert "Not a heading\n    ====" in paper.text and paper.text.startswith("Rings in reStructuredText\nPEP: 9999\nCreated")
    assert [(e.number, e.key, e.text) for e in paper.references] == [
        (1, "1", "Jane Doe, Mouse rings, 2001."),
        (2, "#auto", "Auto note."),
        (3, "PEP 8", "PEP 8"),
    ]
    assert paper.references[2].identifiers == {"pep": "8"} and paper.references[2].start is None
    assert cited(paper) == [(":pep:`8`", (3,), ()), ("[1]_", (1,), ()), ("[#auto]_", (2,), ()), ("[missing]_", (), ("missing",))]


def test_rst_titles_and_overlines():
    paper = read_rst("=====\nTitle\n=====\n\nOne\n---\n\nx\n\nTwo\n~~~\n\n====  ====\na     b\n====  ====\n")
    assert paper.title == "Title" and headings(paper) == [(1, "One"), (2, "Two")] and "====  ====" in paper.text
    assert headings(read_rst("One\n===\n\nx\n\nTwo\n===\n")) == [(1, "One"), (1, "Two")]


def test_unnamed_footnotes_count():
    paper = read_rst("T\n=\n\nA [#]_ b [#]_.\n\n.. [#] First.\n.. [#] Second.\n")
    assert cited(paper) == [("[#]_", (1,), ()), ("[#]_", (2,), ())]


def test_rst_includes_nothing(tmp_path):
    (tmp_path / "secret").write_text("SECRET")
    paper = read_rst(f"T\n=\n\n.. include:: {tmp_path}/secret\n\n.. raw:: html\n   :file: {tmp_path}/secret\n")
    assert "SECRET" not in paper.text and ".. include::" in paper.text


def test_plain():  # C10
    paper = read_plain(papers.PLAIN)
    assert paper.title == "Rings in Plain Text"
    assert headings(paper) == [(1, "Abstract"), (1, "1. Introduction"), (1, "References")]
    assert "We define rings. A state-of-the-art is a real-world compound, as in real-world rings" in paper.text
    assert [(entry.year, entry.title) for entry in paper.references] == [(2001, "Mouse rings are round"), (2003, "More rings")]
    assert cited(paper) == [("Doe (2001)", (1,), ()), ("(Roe and Poe, 2003; Nobody, 1999)", (2,), ("Nobody 1999",))]
