import pytest

from pipelines.corpus.decode import Unreadable
from pipelines.literature_analysis import pdf as reader
from pipelines.literature_analysis.pdf import Line, read_pdf
from tests.unit.pipelines.literature_analysis.papers import column, pdf, set_in

LEFT = "The left column tells of an exam- ple in which we define a real-world task and go on for some lines until the end."


def pages():
    """Two pages in two columns, with running heads, the right column written first."""
    left = ["1 Introduction", *["" for _ in range(0)]]
    body = set_in(220, "Left " * 60 + "we de\ufb01ne an efficient method [1].")
    right = set_in(220, "Right " * 70 + "end.")
    head = [(60, 40, 8, "Journal of Rings")]
    first = (
        head
        + [(60, 90, 18, "Two Columns and"), (60, 112, 18, "Their Order")]
        + column(305, 160, right)
        + column(60, 160, left, 12)
        + column(60, 180, body)
    )
    second = (
        head
        + column(60, 90, ["2 Results"], 12)
        + column(60, 110, ["We see an exam-", "ple of a real-", "world task, as real-world examples do."])
    )
    second += column(60, 200, ["References"], 12) + column(60, 220, ["[1] Doe. 2001. Rings.", "[2] Roe. 2003. More rings. doi:10.1000/x"])
    third = head + column(60, 90, ["The end of it."])
    return [page + [(290, 800, 9, str(number))] for number, page in enumerate((first, second, third), start=1)]


def test_two_columns_in_reading_order():  # C10
    paper = read_pdf(pdf(pages()))
    assert paper.title == "Two Columns and Their Order"
    assert [s.heading for s in paper.sections] == ["1 Introduction", "2 Results", "References"]
    introduction = paper.pieces()[1]
    assert introduction.rindex("Left") < introduction.index("Right") and "efficient method [1]." in introduction
    assert introduction.count("Left") == 60 and introduction.count("Right") == 70


def test_heads_hyphens_and_references():  # C10
    paper = read_pdf(pdf(pages()))
    assert "Journal of Rings" not in paper.text and not any(f"\n{number}\n" in paper.text for number in (1, 2, 3))
    assert "We see an example of a real-world task, as real-world examples do." in paper.text
    assert [(e.key, e.year) for e in paper.references] == [("1", 2001), ("2", 2003)]
    assert [(paper.text[c.start : c.stop], c.references) for c in paper.citations] == [("[1]", (1,))]


def test_one_column_stays_one():
    lines = set_in(450, "word " * 200 + "end.")
    paper = read_pdf(pdf([column(72, 90, ["A Title of One Column"], 16) + column(72, 130, lines)]))
    assert paper.title == "A Title of One Column" and paper.text.count("word") == 200


def test_what_repeats_on_every_page_is_the_text_if_nothing_else_is():
    assert read_pdf(pdf([column(72, 90, ["All rights reserved."])] * 2)).text.count("All rights reserved.") == 2


def test_signs_without_a_name_move_no_text():
    texts = ["A Title", "First line of it", "\x01", "\x03", "goes on here", "2 Results", "The last words"]
    lines = [Line(text, 72, 300, 700 - 12 * i - 30 * (i > 4), 710 - 12 * i - 30 * (i > 4), 10.0) for i, text in enumerate(texts)]
    paper = reader._paper([lines])
    assert [section.heading for section in paper.sections] == ["2 Results"] and paper.text.endswith("The last words\n")
    with pytest.raises(Unreadable, match="^no text: "):
        reader._paper([[Line("\x01", 72, 80, 700, 710, 10.0)]])


def test_a_book_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(reader, "_MOST_IN_ALL", 900)
    with pytest.raises(Unreadable, match="^too long: more than 900 characters on the first 2 of 3 pages"):
        read_pdf(pdf([column(72, 90, set_in(450, "word " * 100))] * 3))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf([[], []]), "no text: its 2 pages hold none"),
        (pdf([[(72, 72, 10, "secret")]], encrypt="password"), "encrypted: "),
        (pdf(pages())[:300], "not a readable PDF: "),
    ],
)
def test_what_cannot_be_read_says_why(data, reason):  # C10
    with pytest.raises(Unreadable, match=f"^{reason}"):
        read_pdf(data)
