import pytest

from pipelines.corpus.decode import Unreadable
from pipelines.literature_analysis import jats, tei, tree
from tests.unit.pipelines.literature_analysis import papers


def cited(paper):
    return [(paper.text[c.start : c.stop], c.references, c.unresolved) for c in paper.citations]


def test_jats():
    paper = jats.read_jats(tree.parse(papers.JATS.encode()))
    assert paper.title == "Rings in vivo" and paper.year == 2011 and paper.licence == "CC-BY-4.0"
    assert paper.identifiers == {"doi": "10.1000/jats.1", "pmcid": "PMC123456"}
    assert [(s.level, s.heading) for s in paper.sections] == [
        (1, "Abstract"),
        (1, "Methods"),
        (2, "Mice"),
        (1, "Acknowledgements"),
        (1, "References"),
    ]
    assert "We gave rings α to mice." in paper.text and "Ten.\n\na | 1\n" in paper.text and "in Figure 1." in paper.text
    assert cited(paper) == [("[1,2]", (1, 2), ())]
    assert [(e.number, e.key, e.year, e.identifiers) for e in paper.references] == [
        (1, "B1", 2001, {"pmid": "77"}),
        (2, "B2", 2003, {"doi": "10.1000/x"}),  # and B3, the same DOI (C11)
    ]
    assert paper.references[1].text.startswith("Roe R, More rings, 2003")


def test_what_others_wrote_below_an_article_is_kept():
    part = "<sub-article><front-stub><title-group><article-title>Letter</article-title></title-group></front-stub><body><p>We doubt it.</p></body></sub-article>"
    paper = jats.read_jats(tree.parse(papers.JATS.replace("</article>", f"{part}</article>").encode()))
    assert "Letter\nWe doubt it." in paper.text and (1, "Letter") in [(s.level, s.heading) for s in paper.sections]


def test_tei():
    paper = tei.read_tei(tree.parse(papers.TEI.encode()))
    assert paper.title == "Rings by machine" and paper.year == 2019 and paper.licence == "CC0-1.0"
    assert paper.identifiers == {"arxiv": "1903.00001"}
    assert [(s.level, s.heading) for s in paper.sections] == [(1, "Abstract"), (1, "1 Introduction"), (1, "References")]
    assert cited(paper) == [("(Doe, 2001)", (1,), ()), ("[9]", (), ())]
    assert paper.references[0].title == "Mouse rings" and paper.text.endswith("[1] J Doe. Mouse rings. 2001\n")


LAUGHS = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))


@pytest.mark.parametrize(
    ("dtd", "content"),
    [
        (f'<!ENTITY l0 "lol">{LAUGHS}', "&l9;"),
        ('<!ENTITY x SYSTEM "file:///etc/passwd">', "&x;"),
        ('<!ENTITY x "y">', "&x;"),
    ],
)
def test_entities_of_the_file_are_not_expanded(dtd, content):
    with pytest.raises(Unreadable, match="^(entity|not well-formed): "):
        jats.read_jats(tree.parse(f"<!DOCTYPE article [{dtd}]><article><body><p>{content}</p></body></article>".encode()))


def test_no_dtd_is_loaded(tmp_path):
    (tmp_path / "x.dtd").write_text('<!ENTITY x "SECRET">')
    with pytest.raises(Unreadable, match="^entity: &x;"):
        jats.read_jats(tree.parse(f'<!DOCTYPE article SYSTEM "{tmp_path}/x.dtd"><article><body><p>&x;</p></body></article>'.encode()))


def test_huge_trees_are_refused():
    with pytest.raises(Unreadable, match="^not well-formed: "):
        tree.parse(b"<a>" * 100_000)
    with pytest.raises(Unreadable, match="^not well-formed: "):
        tree.parse(f"<!DOCTYPE a [<!ENTITY l0 'lol'>{LAUGHS}]><a b='&l9;'/>".encode())
