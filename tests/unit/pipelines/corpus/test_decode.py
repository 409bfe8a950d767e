import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.decode import Unreadable, decode, read_text, with_line_feeds


def reason(data: bytes, name: str = "x.py") -> str:
    with pytest.raises(Unreadable) as error:
        decode(data, name)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "data, encoding, text",
    [
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", "iso8859-1", "# -*- coding: latin-1 -*-\nx = 'é'\n"),
        (b"#!/bin/x\n# vim: set fileencoding=cp1252 :\n\x80", "cp1252", "#!/bin/x\n# vim: set fileencoding=cp1252 :\n€"),
        (b"# coding: utf-8-unix\n\xc3\xa9", "utf-8", "# coding: utf-8-unix\né"),
        (b"\xef\xbb\xbfx\r\n", "utf-8-sig", "x\r\n"),
        (b"\xef\xbb\xbf# coding: utf8\n", "utf-8-sig", "# coding: utf8\n"),
        (b"\xef\xbb\xbf\xef\xbb\xbfx", "utf-8-sig", "\ufeffx"),
        ("né\n".encode("utf-16"), "utf-16", "né\n"),
        (b"\xfe\xff" + "né\n".encode("utf-16-be"), "utf-16", "né\n"),
        (b"a\r\nb\rc\n\fno end", "utf-8", "a\r\nb\rc\n\fno end"),
        ("\ufffd is here".encode(), "utf-8", "\ufffd is here"),
        (b"", "utf-8", ""),
        (b"x = 1\n# coding: latin-1\n\xc3\xa9", "utf-8", "x = 1\n# coding: latin-1\né"),  # too late to count
    ],
)
def test_decoded_and_nothing_lost(data, encoding, text):  # C3, C4
    got = decode(data, "x.py")
    assert (got.text, got.encoding, got.source) == (text, encoding, data)
    assert data.decode(got.encoding) == text


def test_a_cookie_counts_only_where_the_language_has_cookies():
    data = b"# notes on encoding: latin-1\n\xc3\xa9"
    assert decode(data, "notes.md").text.endswith("é")
    assert decode(data, "notes.py").text.endswith("Ã©")


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"\xef\xbb\xbf# coding: latin-1\n", "contradiction: the byte order mark says utf-8-sig, the coding cookie iso8859-1"),
        ("# coding: utf-8\n".encode("utf-16"), "contradiction: the byte order mark says utf-16, the coding cookie utf-8"),
        (b"a = 1\0", "binary: NUL at position 5"),
        ("x".encode("utf-32"), "binary: NUL at position 0"),
        ("ab".encode("utf-16-le"), "binary: NUL at position 1"),
        (b"caf\xe9", "undecodable: not utf-8 at byte 3"),
        (b"\xef\xbb\xbfcaf\xe9", "undecodable: not utf-8-sig at byte"),
        (b"\xff\xfea", "undecodable: not utf-16 at byte"),
        ("\ud800".encode("utf-8", "surrogatepass"), "undecodable: not utf-8 at byte 0"),
        (b"# coding: no-such\n", "undecodable: the coding cookie names 'no-such'"),
        (b"# coding: rot13\n", "undecodable: the coding cookie names 'rot-13'"),
        (b"# coding: ascii\n\xe9", "undecodable: not ascii"),
        (b"# coding: unicode_escape\n\\ud800", "undecodable: not unicode-escape"),
        (b"# coding: unicode_escape\n\\x41", "doesn't give the same bytes back"),
    ],
)
def test_refused_with_the_reason(data, expected):
    assert expected in reason(data)


@given(st.binary(max_size=200) | st.text(max_size=80).map(lambda t: b"# coding: " + t.encode("utf-8", "replace")))
@settings(max_examples=400)
def test_any_bytes_become_text_that_gives_them_back_or_a_reason(data):
    try:
        got = decode(data, "x.py")
    except Unreadable as error:
        assert ":" in str(error)
        return
    got.text.encode("utf-8")
    assert got.text.count("\ufffd") <= data.count(b"\xef\xbf\xbd") + data.count(b"\xfd\xff") + data.count(b"\xff\xfd")
    if got.encoding not in ("utf-16",):
        assert got.text.encode(got.encoding) == data


def test_read_text_gives_the_systems_reason(tmp_path):
    with pytest.raises(Unreadable, match="unreadable: No such file or directory"):
        read_text(tmp_path / "gone.py")
    (tmp_path / "x.py").write_bytes(b"x\r\n")
    assert read_text(tmp_path / "x.py").text == "x\r\n"


def test_codecs_of_domain_names_are_no_encodings_of_files():
    assert "undecodable: the coding cookie names 'punycode'" in reason(b"# coding: punycode\n" + b"a" * 500_000)
    assert "undecodable: the coding cookie names 'idna'" in reason(b"# coding: idna\n")


def test_line_feeds_on_request():  # C4
    assert with_line_feeds(decode(b"a\r\nb\rc\n\r\n\x0cd", "x.c")).text == "a\nb\nc\n\n\x0cd"
    changed = with_line_feeds(decode("é\r\n".encode("utf-16"), "x.c"))
    assert (changed.encoding, changed.source) == ("utf-8", "é\n".encode())
    kept = decode("é\n".encode("utf-16"), "x.c")
    assert with_line_feeds(kept) is kept
