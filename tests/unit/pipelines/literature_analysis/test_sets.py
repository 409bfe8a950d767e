import json

from pipelines.literature_analysis import sets
from tests.unit.pipelines.literature_analysis import papers


def headings(paper):
    return [(section.level, section.heading) for section in paper.sections]


def test_sentences():
    paper = sets.read_sentences(papers.SENTENCES)
    assert paper.title == "Rings & Things"
    assert headings(paper) == [(1, "Abstract"), (1, "Introduction."), (1, 'On "quotes".')]
    assert "for R & D where a < b.\nIt identifies rings; identifies, too; pre- and post-.\n" in paper.text
    assert paper.text.endswith("Never closed.\n")
    assert [paper.text[c.start : c.stop] for c in paper.citations] == ["(Pedersen, 2001)"]
    assert paper.citations[0].unresolved == ("Pedersen 2001",)


def test_sentences_without_a_title():
    paper = sets.read_sentences('<PAPER><ABSTRACT><S sid="1">One.</S></ABSTRACT></PAPER>')
    assert paper.title == "" and paper.text == "Abstract\nOne.\n"


def test_labelled():
    paper = sets.read_labelled(papers.LABELLED)
    assert paper.title == "Rings in women"
    assert headings(paper) == [(1, "ABSTRACT.RESULTS"), (1, "METHODS"), (1, "BODY")]
    assert paper.text.endswith("METHODS\nTwice a week.\nAs before.\n\nBODY\nThe rest.\n")


def test_scirex():
    paper = sets.read_scirex(sets.scirex(json.dumps(papers.SCIREX)))
    assert paper.title == "Ring Nets" and headings(paper) == [(1, "Method"), (2, "A"), (3, "B")]
    assert paper.text == "Ring Nets\nWe look at rings .\n\nMethod\ntheorem : Let x be .\nIt is .\n\nA\nB\nEnd .\n"


def test_other_json_is_not_scirex():
    for tree in ([], {}, {"words": 1}, {**papers.SCIREX, "sections": [[0, 1, 2]]}, {**papers.SCIREX, "words": [1]}, {**papers.SCIREX, "sections": 3},
                 {**papers.SCIREX, "sections": [[0, 30]]}, {**papers.SCIREX, "sentences": [[-1, 2]]}):  # fmt: skip
        assert sets.scirex(json.dumps(tree)) is None
