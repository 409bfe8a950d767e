from pipelines.literature_analysis.same import Known, duplicates
from pipelines.literature_analysis.similarity import Vectors, terms

RINGS = "rings attend over documents whose length exceeds every window " * 5
MICE = "mice received treatment twice weekly until measurement showed improvement " * 5


def known(name, format="pdf", title="", text=RINGS, start="", characters=100, **identifiers):
    return Known(name, format, f"{name}-{text}", title, start, identifiers, terms(text), characters)


def test_one_paper_as_pdf_and_latex():  # C11
    papers = [
        known("a.pdf", title="On the Rings of It"),
        known("b.tex", "latex", title="On the rings of it"),
        known("c.txt", "text", text=MICE, title="On the rings of it"),
        known("d.pdf", doi="10.1000/x"),
        known("e.xml", "jats", text=RINGS + "more", doi="10.1000/x", title="Another title it has"),
    ]
    assert duplicates(papers) == {0: 1, 3: 4}


def test_different_identifiers_are_different_papers():
    versions = [known("a", title="A title of words", pep="1"), known("b", title="A title of words", pep="2")]
    assert duplicates(versions) == {}


def test_a_beginning_tells_where_there_is_no_title():
    start = "we look at many rings " * 4
    assert duplicates([known("a", start=start), known("b", "text", start=start)]) == {1: 0}


def test_of_equals_the_longer_stays_and_empty_ones_all():  # C1
    same = [known("a", title="A title of words", characters=10), known("b", title="A title of words", characters=20)]
    assert duplicates(same) == {0: 1}
    empty = [Known(name, "text", "0", "", "", {}, [], 0) for name in "ab"]
    assert duplicates(empty) == {}


def test_cosine():
    vectors = Vectors([terms(RINGS), terms(RINGS), terms(MICE), terms("")])
    assert abs(vectors.cosine(0, 1) - 1) < 1e-9 and vectors.cosine(0, 2) == 0 and vectors.cosine(0, 3) == 0
