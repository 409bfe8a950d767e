from hypothesis import given
from hypothesis import strategies as st

from pipelines.literature_analysis.references import (
    Reference,
    doi_name,
    identifiers_in,
    identifiers_of_file,
    merged,
    normal,
    reference,
    title_in,
    year_in,
)


def test_identifiers():
    assert identifiers_in("see doi:10.1000/Ab(c)d). And") == {"doi": "10.1000/ab(c)d"}
    assert identifiers_in("arXiv preprint arXiv:1706.03762v5") == {"arxiv": "1706.03762"}
    assert identifiers_in("https://arxiv.org/abs/cs.CL/0102003") == {"arxiv": "cs.cl/0102003"}
    assert identifiers_in("https://doi.org/10.1/x") == {}
    assert doi_name("https://doi.org/10.1000/X.") == "10.1000/x"
    assert [doi_name(f"10.1000/{end}") for end in ("a(b)c]))", "a(b", "(a)", "]]")] == [
        "10.1000/a(b)c",
        "10.1000/a(b",
        "10.1000/(a)",
        "10.1000/",
    ]
    assert identifiers_of_file("pep-0008") == {"pep": "8"}


def test_years_and_titles():
    assert year_in("Doe (2001), pages 1990-1999") == 2001
    assert year_in("Doe. In Proc. of 1999, 2003.") == 2003
    assert year_in("nothing 12345") is None
    assert title_in("Doe, J. (2001). Mouse rings are round. Nature.") == "Mouse rings are round"
    assert title_in("J. Doe, “Mouse rings are round,” Nature 1, 2001") == "Mouse rings are round"


def test_duplicates_are_one_reference_with_stable_numbers():  # C11
    entries = [
        reference("a", "Doe. 2001. Rings. doi:10.1000/x"),
        reference("b", "Roe. 2002. More."),
        reference("c", "J. Doe, Rings, https://doi.org/10.1000/X"),
        reference("d", "Roe, 2002: “More”"),
        reference("e", "Nobody has this."),
    ]
    found, numbers = merged(entries)
    assert [entry.number for entry in found] == [1, 2, 3]
    assert numbers == {"a": 1, "b": 2, "c": 1, "d": 2, "e": 3}
    assert merged(found)[0] == found


def test_what_a_later_entry_knows_is_kept():
    found, _ = merged([Reference("a", "Same words"), Reference("b", "same WORDS.", year=2001, identifiers={"doi": "10.1000/x"})])
    assert len(found) == 1 and found[0].year == 2001 and found[0].identifiers == {"doi": "10.1000/x"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "X.", "y", "z z", ""]), st.sampled_from(["", "10.1000/a"]))))
def test_numbers_count_works_in_their_order(rows):
    entries = [Reference(key, text, identifiers={"doi": doi} if doi else {}) for key, text, doi in rows]
    found, numbers = merged(entries)
    assert [entry.number for entry in found] == list(range(1, len(found) + 1))
    assert set(numbers) == {key for key, _, _ in rows}
    assert all(1 <= number <= len(found) for number in numbers.values())


def test_normal():
    assert normal("Gödel's  “Rings”: ﬁne!") == "godel s rings fine"
