import pytest

from pipelines.literature_analysis import prose
from pipelines.literature_analysis.paper import Draft


def paper(body: str, references: str):
    draft = Draft("text")
    draft.title("T")
    draft.add(body)
    draft.heading("References", 1)
    draft.add(references)
    return prose.with_references(draft.finish())


def cited(paper):
    return {paper.text[c.start : c.stop]: (c.references, c.unresolved) for c in paper.citations}


@pytest.mark.parametrize(
    ("line", "level"),
    [("Introduction", 1), ("REFERENCES", 1), ("1 Method", 1), ("2.1. The Details of It", 2), ("3.1.4 Pi", 3), ("IV. Results", 1), ("A.1 Proof", 1),
     ("1 method", None), ("2001 was a year.", None), ("1. Take the ring,", None), ("We do it", None), ("", None)],
)  # fmt: skip
def test_headings(line, level):
    assert prose.heading_level(line) == level


def test_numbers_cite_what_the_list_has():
    found = cited(
        paper("As in [1], [2, 3], [1–3], [1-2; 4], [9] and the interval [0, 1].", "[1] Doe. 2001.\n[2] Roe. 2002.\n\n[3] Poe. 2003.")
    )
    assert found == {
        "[1]": ((1,), ()),
        "[2, 3]": ((2, 3), ()),
        "[1–3]": ((1, 2, 3), ()),
        "[1-2; 4]": ((1, 2), ("4",)),
    }


def test_authors_and_years():
    found = cited(
        paper(
            "Doe (2001) and (see Roe and Poe, 2003; Nobody et al., 1999) but Doe et al. (2001) in (May 2001) and\n(Doe,\n2001).",
            "Doe, J. 2001. Rings by Roe.\n\nRoe, R. and P. Poe. 2003.\nMore\n\nrings by Doe.\n",
        )
    )
    assert found == {
        "Doe (2001)": ((1,), ()),
        "(see Roe and Poe, 2003; Nobody et al., 1999)": ((2,), ("Nobody et al. 1999",)),
        "Doe et al. (2001)": ((1,), ()),
        "(Doe,\n2001)": ((1,), ()),
    }


def test_a_citation_without_an_entry_and_an_entry_without_a_citation_stay():  # C11
    found = paper("As Nobody (1999) says.", "[1] Doe. 2001.")
    assert cited(found) == {"Nobody (1999)": ((), ("Nobody 1999",))} and len(found.references) == 1


def test_in_the_list_itself_nothing_is_cited():
    assert cited(paper("Text.", "[1] Answer to [2].\n[2] Doe (2001).")) == {}


def test_duplicates_in_the_list():  # C11
    found = paper("As in [1] and [2] and [3].", "[1] Doe. Rings. 2001.\n[2] Doe: Rings, 2001\n[3] Roe. 2003.")
    assert [entry.key for entry in found.references] == ["1", "3"]
    assert cited(found) == {"[1]": ((1,), ()), "[2]": ((1,), ()), "[3]": ((2,), ())}
