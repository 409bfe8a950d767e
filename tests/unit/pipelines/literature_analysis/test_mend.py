from hypothesis import given
from hypothesis import strategies as st

from pipelines.literature_analysis import mend


def test_ligatures():  # C10
    assert mend.ligatures("e\ufb03cient \ufb01nd \ufb02y o\ufb00 \ufb04 \ufb06") == "efficient find fly off ffl st"


def test_hyphens_by_evidence():  # C10
    assert mend.hyphens("an exam-\nple") == "an example"
    assert mend.hyphens("a real-\nworld task, real-world") == "a real-world task, real-world"
    assert mend.hyphens("a long-\nterm, so long, a term") == "a long-term, so long, a term"
    assert mend.hyphens("self-\nattention") == "self-attention"
    assert mend.hyphens("the multi-\nlingual, multilingual") == "the multilingual, multilingual"
    assert mend.hyphens("state-\nof-the-art and state-of-\nthe-art") == "state-of-the-art and state-of-the-art"
    assert mend.hyphens("Karush-\nKuhn") == "Karush-Kuhn"
    assert mend.hyphens("un\u00ad\ndone and soft\u00adly") == "undone and softly"
    assert mend.hyphens("1990-\n2000 and x -\ny") == "1990-\n2000 and x -\ny"


def test_words_that_an_extractor_parted():
    assert mend.parted_words("iden- tified, identified") == "identified, identified"
    assert mend.parted_words("pre- and post-, preand") == "pre- and post-, preand"
    assert mend.parted_words("unknown- word") == "unknown- word"


def test_clean():
    assert mend.clean("a\r\nb\rc\x0bd\u2028e\x00\x7f\x9f\ufefff\tg") == "a\nb\nc\nd\nef\tg"
    assert mend.clean("a\ud800b") == "a?b"


@given(st.text())
def test_clean_is_stable_and_keeps_letters(text):
    once = mend.clean(text)
    assert mend.clean(once) == once
    once.encode()
    assert [c for c in once if c.isalnum()] == [c for c in text if c.isalnum()]


def test_running_heads_and_page_numbers():
    pages = [[f"Journal {i}", f"one {chr(97 + i)}", "text", f"two {chr(97 + i)}", str(i)] for i in range(1, 5)]
    assert mend.running_heads(pages) == [{0, 4}] * 4
    assert mend.running_heads([["Title", "text", "7"]]) == [{2}]
    assert mend.running_heads([["a", "b"], ["c", "d"], ["e", "f"]]) == [set(), set(), set()]
    assert mend.running_heads([]) == []
