"""TeX source as text to work on: comments, balanced groups, macros of the paper, accents and signs.

Everything here is linear in the text, or bounded: macros are expanded only where they are simple (no conditionals, no
definitions, arguments that are there), at most so many times and so deep, and what isn't expanded stays as source.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

VERBATIM = ("verbatim", "verbatim*", "lstlisting", "minted", "Verbatim", "alltt")
_VERBATIM = re.compile(r"\\(begin|end)\{(verbatim\*?|lstlisting|minted|Verbatim|alltt|comment|filecontents\*?)\}")
_COMMENT = re.compile(r"((?<!\\)(?:\\\\)*)%[^\n]*(?:\n(?![ \t]*\n)[ \t]*)?")
_PERCENT = re.compile(r"(?<!\\)(?:\\\\)*%")
_SIGN = re.compile(r"\\.|[{}\[\]]", re.S)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_DEFINITION = re.compile(
    r"\\(?:(?:re|provide)?newcommand|renewcommand|providecommand|DeclareRobustCommand)\*?[ \t\n]{0,9}\{?[ \t]{0,9}\\([A-Za-z]+)[ \t]{0,9}\}?"
    r"[ \t\n]{0,9}(?:\[(\d)\])?[ \t\n]{0,9}(?:\[([^\[\]\n]{0,200})\])?[ \t\n]{0,9}(?=\{)"
    r"|\\def[ \t]*\\([A-Za-z]+)[ \t]*(?=\{)"
    r"|\\DeclareMathOperator(\*?)[ \t]{0,9}\{?[ \t]{0,9}\\([A-Za-z]+)[ \t]{0,9}\}?[ \t]{0,9}(?=\{)"
)
_HARD = re.compile(r"\\(?:def|newcommand|renewcommand|let|if\w*|else|fi|csname|expandafter|begingroup|catcode|futurelet)\b|@|##")
_MOST_EXPANSIONS, _MOST_TEXT, _DEEPEST, _LONGEST_BODY = 20_000, 8 << 20, 16, 2_000

_ACCENTS = {
    "`": "\u0300", "'": "\u0301", "^": "\u0302", "~": "\u0303", '"': "\u0308", "=": "\u0304", ".": "\u0307",
    "c": "\u0327", "v": "\u030c", "u": "\u0306", "H": "\u030b", "k": "\u0328", "r": "\u030a", "d": "\u0323", "b": "\u0331",
}  # fmt: skip
_ACCENT = re.compile(
    r"\\(?:([`'^~\"=.])[ \t]*(?:\{[ \t]*(\\[ij]|[^\W\d_])[ \t]*\}|(\\[ij](?![A-Za-z])|[^\W\d_]))"
    r"|([cvuHkrdb])(?:[ \t]*\{[ \t]*(\\[ij]|[^\W\d_])[ \t]*\}|[ \t]+([^\W\d_])(?![^\W\d_])))"
)
SIGNS = {
    "ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø", "O": "Ø", "l": "ł", "L": "Ł", "aa": "å", "AA": "Å",
    "i": "ı", "j": "ȷ", "dots": "…", "ldots": "…", "textellipsis": "…", "S": "§", "P": "¶", "copyright": "©", "dag": "†",
    "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textbar": "|", "textless": "<", "pounds": "£",
    "textgreater": ">", "textquotedblleft": "“", "textquotedblright": "”", "textquoteleft": "‘", "textquoteright": "’",
    "textendash": "–", "textemdash": "—", "textregistered": "®", "texttrademark": "™", "LaTeX": "LaTeX", "TeX": "TeX",
    "BibTeX": "BibTeX", "quad": " ", "qquad": " ", "space": " ", "slash": "/", "textdegree": "°", "euro": "€",
}  # fmt: skip


@dataclass(frozen=True)
class Macro:
    """`body` with `#1` … `#n`; `default` is the first argument's where it isn't given."""

    arguments: int
    default: str | None
    body: str


def without_comments(tex: str) -> str:
    """TeX without its comments, as TeX reads lines: what follows a comment continues its line, but for a blank line."""
    pieces, position, environment = [], 0, None
    for mark in _VERBATIM.finditer(tex):
        if environment is None and mark[1] == "begin" and not _commented(tex, position, mark.start()):
            pieces.append(_COMMENT.sub(r"\1", tex[position : mark.start()]))
            position, environment = mark.start(), mark[2]
        elif environment == mark[2] and mark[1] == "end":
            if environment != "comment":
                pieces.append(tex[position : mark.end()])
            position, environment = mark.end(), None
    rest = tex[position:]
    return "".join(pieces) + (rest if environment in VERBATIM else _COMMENT.sub(r"\1", rest))


def group(tex: str, start: int) -> int | None:
    """The position after the group, `{…}` or `[…]`, that opens at `start`, or None where none does or it never closes."""
    return _groups(tex).get(start)


@lru_cache(maxsize=8)
def _groups(tex: str) -> dict[int, int]:
    """Start → end of every group. Found once for a text, as looking from each start anew is quadratic."""
    ends: dict[int, int] = {}
    braces: list[list[int]] = [[]]  # for every open brace its start and those of the brackets open inside it
    for mark in _SIGN.finditer(tex):
        sign, at = mark[0], mark.start()
        if sign == "{":
            braces.append([at])
        elif sign == "[":
            braces[-1].append(at)
        elif sign == "}" and len(braces) > 1:
            ends[braces.pop()[0]] = at + 1
        elif sign == "]" and len(braces[-1]) > (len(braces) > 1):
            ends[braces[-1].pop()] = at + 1
    return ends


def argument(tex: str, position: int) -> tuple[str, int] | None:
    """The next mandatory argument from `position` on and the position after it: a group, a command or a letter."""
    position = _skip_space(tex, position)
    if position >= len(tex) or tex[position] == "}":
        return None
    if tex[position] == "{":
        end = group(tex, position)
        return None if end is None else (tex[position + 1 : end - 1], end)
    if command := _COMMAND.match(tex, position):
        return command[0], command.end()
    return tex[position], position + 1


def option(tex: str, position: int) -> tuple[str | None, int]:
    """The optional argument at `position`, or None, and the position after it."""
    start = _skip_space(tex, position)
    end = group(tex, start) if tex[start : start + 1] == "[" else None
    return (None, position) if end is None else (tex[start + 1 : end - 1], end)


def definitions(tex: str) -> tuple[dict[str, Macro], str]:
    """The simple macros that a text defines, and the text without any definition."""
    macros: dict[str, Macro] = {}
    pieces, position = [], 0
    for found in _DEFINITION.finditer(tex):
        if found.start() < position or (end := group(tex, found.end())) is None:
            continue
        pieces.append(tex[position : found.start()])
        position, body = end, tex[found.end() + 1 : end - 1]
        name = found[1] or found[4] or found[6]
        if found[6]:
            body = rf"\operatorname{found[5]}{{{body}}}"
        if not _HARD.search(body) and len(body) <= _LONGEST_BODY:
            macros[name] = Macro(int(found[2] or 0), found[3], body)
        else:
            macros.pop(name, None)
    return macros, "".join(pieces) + tex[position:]


def expanded(tex: str, macros: dict[str, Macro]) -> str:
    """The text with its macros expanded."""
    return _Expansion(macros).run(tex, 0) if macros else tex


class _Expansion:
    def __init__(self, macros: dict[str, Macro]):
        self.macros, self.left = macros, _MOST_EXPANSIONS
        self.room = _MOST_TEXT

    def run(self, tex: str, depth: int) -> str:
        pieces, position = [], 0
        for found in _COMMAND.finditer(tex):
            macro = self.macros.get(found[1])
            if macro is None or found.start() < position or self.left <= 0 or depth >= _DEEPEST or _escaped(tex, found.start()):
                continue
            if (read := self._arguments(tex, found.end(), macro)) is None:
                continue
            given, end = read
            self.left -= 1
            self.room -= len(macro.body) + sum(map(len, given)) * macro.body.count("#")
            if self.room < 0:
                continue
            body = re.sub(r"#(\d)", lambda hole: given[int(hole[1]) - 1] if 0 < int(hole[1]) <= len(given) else "", macro.body)
            body = self.run(body, depth + 1)
            if body.rstrip().endswith("\\xspace"):
                end = end if macro.arguments else found.end()
                body = body.rstrip().removesuffix("\\xspace") + (" " if tex[end : end + 1].isalnum() else "")
            elif re.search(r"\\[A-Za-z]+$", body) and tex[end : end + 1].isalpha():
                body += " "
            pieces += [tex[position : found.start()], body]
            position = end
        return "".join(pieces) + tex[position:]

    def _arguments(self, tex: str, position: int, macro: Macro) -> tuple[list[str], int] | None:
        given: list[str] = []
        if macro.default is not None and macro.arguments:
            first, position = option(tex, position)
            given.append(macro.default if first is None else first)
        while len(given) < macro.arguments:
            if (read := argument(tex, position)) is None:
                return None
            given.append(read[0])
            position = read[1]
        if not macro.arguments:  # TeX takes the spaces after a command's name
            position = re.compile(r"[ \t]*(?:\n[ \t]*(?!\s))?").match(tex, position).end()
        return given, position


def accents(tex: str) -> str:
    """Letters with accents as single characters: `\\"o`, `{\\'e}`, `\\v{s}`."""

    def letter(found: re.Match) -> str:
        mark = found[1] or found[4]
        base = (found[2] or found[3] or found[5] or found[6]).lstrip("\\")
        return unicodedata.normalize("NFC", base + _ACCENTS[mark])

    return _ACCENT.sub(letter, tex)


def _skip_space(tex: str, position: int) -> int:
    return re.compile(r"[ \t]*\n?[ \t]*").match(tex, position).end()


def _escaped(tex: str, position: int) -> bool:
    """Whether the backslash at `position` is the second of a `\\\\`."""
    start = position
    while start and tex[start - 1] == "\\":
        start -= 1
    return (position - start) % 2 == 1


def _commented(tex: str, start: int, position: int) -> bool:
    """Whether what stands at `position` is inside a comment; none that begins before `start` is still open."""
    start = max(start, tex.rfind("\n", start, position) + 1)
    return _PERCENT.search(tex, start, position) is not None
