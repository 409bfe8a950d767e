"""How the bytes of a file become text.

Strictly, and in this order:

1. a UTF-8 byte order mark: UTF-8, and a coding cookie that says otherwise is a contradiction → skipped;
2. a UTF-16 byte order mark: UTF-16, same rule. UTF-16 without a mark is not guessed;
3. a NUL byte: binary → skipped;
4. a coding cookie as in PEP 263, in Python and Ruby files: that codec, if it gives the same bytes back;
5. otherwise UTF-8.

What none of these reads without error is skipped; U+FFFD appears only where the file itself has it. Text is kept as
it stands: line ends, form feeds, a missing last newline. A byte order mark is a property of the encoding
(`utf-8-sig`, `utf-16`) and not part of the text.

`with_line_feeds` is for a corpus that wants one kind of line end.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

_COOKIE = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*([-_.a-zA-Z0-9]+)")
_BLANK_OR_COMMENT = re.compile(r"[ \t\f]*(?:#.*)?$")
_COOKIE_EXTENSIONS = (".py", ".pyi", ".pyx", ".pxd", ".rb")
_OF_HOST_NAMES = ("punycode", "idna")  # text encodings to Python, but of domain names, and quadratic in their length


@dataclass(frozen=True)
class Text:
    """`text == source.decode(encoding)`; the source is the file's bytes, so nothing of it is lost."""

    text: str
    encoding: str
    source: bytes


class Unreadable(Exception):
    """A file whose bytes don't become text; the message is the reason, `kind: detail`."""


def read_text(path) -> Text:
    """The text of a file, by the policy at the top. Raises Unreadable with the reason."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise Unreadable(f"unreadable: {error.strerror}") from error
    return decode(data, str(path))


def decode(data: bytes, name: str) -> Text:
    """The text of a file's bytes; `name` tells by its extension whether a coding cookie counts. Raises Unreadable."""
    has_cookie = name.lower().endswith(_COOKIE_EXTENSIONS)
    if data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        encoding = "utf-8-sig" if data.startswith(b"\xef") else "utf-16"
        text = _strictly(data, encoding)
        _refuse_nul(text.find("\0"))
        declared = _cookie(text) if has_cookie else None
        if declared and not declared.startswith(encoding.removesuffix("-sig")):
            raise Unreadable(f"contradiction: the byte order mark says {encoding}, the coding cookie {declared}")
        return Text(text, encoding, data)
    _refuse_nul(data.find(b"\0"))
    declared = _cookie(data[:8192].decode("latin-1")) if has_cookie else None
    if declared and declared not in ("utf-8", "utf-8-sig"):
        return Text(_by_cookie(data, declared), declared, data)
    return Text(_strictly(data, "utf-8"), "utf-8", data)


def with_line_feeds(text: Text) -> Text:
    """CR LF and lone CR as LF. What changes is no more the file's own bytes, and its source is the new text in UTF-8."""
    if "\r" not in text.text:
        return text
    changed = text.text.replace("\r\n", "\n").replace("\r", "\n")
    return Text(changed, "utf-8", changed.encode())


def _refuse_nul(at: int) -> None:
    if at >= 0:
        raise Unreadable(f"binary: NUL at position {at:,}")


def _strictly(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise Unreadable(f"undecodable: not {encoding} at byte {error.start:,}") from error


def _by_cookie(data: bytes, declared: str) -> str:
    try:
        if declared in _OF_HOST_NAMES:
            raise LookupError
        text = data.decode(declared)
        same = text.encode(declared) == data
        text.encode("utf-8")  # some codecs give lone surrogates, which no tokenizer takes
    except LookupError as error:
        raise Unreadable(f"undecodable: the coding cookie names {declared!r}, no text encoding here") from error
    except ValueError as error:
        raise Unreadable(f"undecodable: not {declared}, which the coding cookie declares ({error})") from error
    if not same:
        raise Unreadable(f"undecodable: {declared}, which the coding cookie declares, doesn't give the same bytes back")
    return text


def _cookie(text: str) -> str | None:
    """The codec that one of the first two lines declares, the second only after a blank or comment line.

    Python's own name for it (`latin-1` → `iso8859-1`), or the name as written where Python knows none.
    """
    first, second, *_ = [*re.split(r"\r\n|\r|\n", text[:8192], maxsplit=2), "", ""]
    found = _COOKIE.match(first) or (_BLANK_OR_COMMENT.match(first) and _COOKIE.match(second))
    if not found:
        return None
    written = re.sub(r"-(unix|dos|mac)$", "", found[1].lower())  # Emacs adds the line ends to the name
    try:
        return codecs.lookup(written).name
    except LookupError:
        return written
