import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.literature_analysis.shelves import Member, links, shelved


def member(name, year=2000, title="", size=10, cites=(), terms=(), **identifiers):
    return Member(name, year, size, title, identifiers, [list(term) for term in terms], list(cites))


def names(papers, way, most=16, size=None):
    return [[papers[i].name for i in shelf] for shelf in shelved(papers, way, most, size)]


PAPERS = [
    member("x/new", 2010, cites=[({"doi": "1"}, ""), ({}, "doe the title of old rings 1999")], terms=[(1, 2)]),
    member("x/mid", 2005, doi="1", terms=[(2, 2)]),
    member("y/old", 1999, title="The title of old rings", terms=[(3, 2)]),
    member("y/far", None, terms=[(9, 1), (8, 1)], cites=[({"doi": "nowhere"}, "a title that nobody has here")]),
    member("y/near", 2001, terms=[(9, 1), (7, 1)]),
]


def test_references_find_papers_by_identifier_and_title():
    assert links(PAPERS) == [{1, 2}, {0}, {0}, set(), set()]
    assert links([member("a", title="Some title of it", cites=[({}, "some title of it")])]) == [set()]


def test_by_citation_the_older_first_and_the_rest_by_similarity():
    assert names(PAPERS, "citation") == [["y/near", "y/far"], ["y/old", "x/mid", "x/new"]]
    assert names(PAPERS, "citation", most=2) == [["x/mid", "x/new"], ["y/near", "y/far"], ["y/old"]]


def test_by_similarity_and_folder():
    assert names(PAPERS, "similarity") == [["x/mid"], ["x/new"], ["y/near", "y/far"], ["y/old"]]
    assert names(PAPERS, "folder") == [["x/mid", "x/new"], ["y/old", "y/near", "y/far"]]
    assert names(PAPERS, "folder", size=25) == [["x/mid", "x/new"], ["y/far"], ["y/old", "y/near"]]
    assert names([member("a", size=99), member("b", size=1)], "folder", size=10) == [["a"], ["b"]]


GRAPH = st.lists(
    st.tuples(st.lists(st.integers(0, 11), max_size=3), st.lists(st.integers(0, 5), max_size=4), st.integers(1, 30)), max_size=12
)


@settings(max_examples=100)
@given(GRAPH, st.sampled_from(["citation", "similarity", "folder"]), st.integers(1, 4), st.sampled_from([None, 20, 40]), st.randoms())
def test_every_paper_stands_once_within_bounds_whatever_the_input_order(rows, way, most, size, chance):
    papers = [
        member(
            f"{i % 3}/{i:02}",
            1990 + i % 5,
            size=b,
            cites=[({"n": str(c)}, "") for c in cites],
            terms=[(t, 1) for t in set(words)],
            n=str(i),
        )
        for i, (cites, words, b) in enumerate(rows)
    ]
    shelves = names(papers, way, most, size)
    assert sorted(name for shelf in shelves for name in shelf) == [p.name for p in sorted(papers, key=lambda p: p.name)]
    sizes = {p.name: p.bytes for p in papers}
    assert all(len(shelf) <= most and (size is None or len(shelf) == 1 or sum(sizes[n] for n in shelf) <= size) for shelf in shelves)
    chance.shuffle(papers)
    assert names(papers, way, most, size) == shelves


@pytest.mark.parametrize("way", ["citation", "similarity"])
def test_linear_in_papers(way):
    def cpu(count: int) -> float:
        chance = random.Random(0)
        papers = [
            member(
                str(i),
                cites=[({"n": str(chance.randrange(count))}, "")],
                terms=[(t, 1 + t % 3) for t in chance.sample(range(500), 20)],
                n=str(i),
            )
            for i in range(count)
        ]
        start = time.process_time()
        shelved(papers, way, 16, None)
        return time.process_time() - start

    assert cpu(6000) < 8 * cpu(2000) + 0.5
