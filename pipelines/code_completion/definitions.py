"""Names in source code, by pattern: which are used near a line, and where one is defined.

No parser stands behind this: a line that looks like a definition of the name is taken for one, in the manner of grep. It
reads some hundred megabytes a second, and understands code that no compiler would.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from pipelines.code_completion.links import language

NEAR = 30  # lines on either side of the cursor whose names count
_MOST_LINES, _LONGEST_LINE = 200, 1000
_ABOVE = re.compile(r"[ \t]*(?://|/?\*|@|#(?![ \t]*(?:include|if|ifdef|ifndef|else|elif|endif|define|undef|pragma)\b))")
_NAME = re.compile(r"[^\W\d]\w{2,}")
_COMMON = frozenset(
    "and any array args assert async await bool boolean break byte case catch char class config const continue data def default "
    "defer define defined del dict double elif else endif enum error except export extends extern false final finally float fn "
    "for foreach from func function global goto guard ifdef ifndef impl implements import include inline instanceof int "
    "interface kwargs lambda len let list long loop map match mod module mut namespace new nil none None not null NULL object "
    "package pass print private protected protocol public raise range register require restrict return self short signed size "
    "sizeof static str string String struct super switch template the this This throw throws trait true True False try type "
    "typedef typename typeof undef undefined union unsafe unsigned use using value var virtual void volatile where while with yield".split()
)

# What the line of a definition looks like. In C a function's line begins in the first column or ends in a brace.
_DEFINES = {
    "c": r"#[ \t]*define[ \t]+NAME\b"
    r"|(?:typedef[ \t]+)?(?:struct|union|enum|class|namespace)[ \t]+(?:[A-Z_]+[ \t]+)?NAME\b[^;()=]*$"
    r"|\}[ \t]*NAME[ \t]*;|typedef\b[^;]*\bNAME[ \t]*;"
    r"|(?:[A-Za-z_][\w \t*&:<>,]*[ \t*&:])?NAME[ \t]*\([^;]*$"
    r"|[ \t]+(?!return\b|else\b|if\b|while\b|for\b|switch\b)[A-Za-z_][\w \t*&:<>,]*[ \t*&]NAME[ \t]*\([^;]*\{[ \t]*$"
    r"|[A-Z]\w*DEFINE\w*\([ \t]*NAME\b",
    "python": r"[ \t]*(?:async[ \t]+)?(?:c?def|class)[ \t]+NAME\b|NAME[ \t]*(?::[^=]*)?=[^=]",
    "script": r"[ \t]*(?:export[ \t]+)?(?:default[ \t]+)?(?:declare[ \t]+)?(?:abstract[ \t]+)?(?:async[ \t]+)?"
    r"(?:function\b[ \t]*\*?|class|interface|type|enum|const|let|var|namespace)[ \t]+NAME\b",
    "jvm": r"[^;={}()]*\b(?:class|interface|enum|record|object|trait|fun|def|val)[ \t]+NAME\b"
    r"|[ \t]+(?!return\b|new\b|else\b)[\w<>\[\], \t.@]*[\w>\]][ \t]+NAME[ \t]*\([^;]*$",
    "go": r"func[ \t]+(?:\([^)]*\)[ \t]*)?NAME\b|type[ \t]+NAME\b|(?:var|const)[ \t]+NAME\b",
    "rust": r"[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?(?:default[ \t]+|const[ \t]+|async[ \t]+|unsafe[ \t]+|extern[ \t]+\"[^\"]*\"[ \t]+)*"
    r"(?:fn|struct|enum|trait|type|mod|const|static(?:[ \t]+mut)?|union|macro_rules!)[ \t]+NAME\b",
}


def names_near(text: str, line: int) -> list[str]:
    """The names used around a line (from 1), those nearest to it first; without words that every file has."""
    lines = text.split("\n")
    distance: dict[str, int] = {}
    for number in range(max(0, line - 1 - NEAR), min(len(lines), line + NEAR)):
        for name in _NAME.findall(lines[number][:_LONGEST_LINE]):
            if name not in _COMMON:
                distance[name] = min(distance.get(name, NEAR), abs(number + 1 - line))
    return sorted(distance, key=distance.__getitem__)


def called_or_type(text: str, name: str) -> bool:
    """Whether a name is worth a search through a whole repository: it is called, or written as types and constants are."""
    return name[0].isupper() or re.search(rf"\b(?:struct|union|enum)[ \t]+{name}\b|\b{name}(?:\(|::|!)", text) is not None


def definition(data: bytes, name: str, kind: str) -> int | None:
    """The line (from 0) on which a file of this language defines a name, or None. A name without its definition costs
    a search for its bytes."""
    needle = name.encode()
    at = data.find(needle)
    if at < 0:
        return None
    looks_like = _pattern(name, kind)
    while at >= 0:
        start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        end = len(data) if end < 0 else end
        if end - start <= _LONGEST_LINE and looks_like.match(data[start:end].rstrip(b"\r")):
            return data.count(b"\n", 0, start)
        at = data.find(needle, end)
    return None


def block(lines: list[str], first: int, kind: str) -> int:
    """Where the definition that begins at line `first` (from 0) ends: the line behind it, at most 200 further."""
    last = min(len(lines), first + _MOST_LINES)
    if kind == "python":
        indent = _indent(lines[first])
        inside = (
            n for n in range(first + 1, last) if lines[n].strip() and _indent(lines[n]) <= indent and not lines[n].lstrip().startswith(")")
        )
        end = next(inside, last)
        while end > first + 1 and not lines[end - 1].strip():
            end -= 1
        return end
    if lines[first].lstrip().startswith("#"):
        return next((n + 1 for n in range(first, last) if not lines[n].rstrip().endswith("\\")), last)
    if lines[first].startswith("}"):  # typedef struct { … } name;
        return first + 1
    depth, opened = 0, False
    for number, change in _braces(lines, first, last):
        depth += change
        opened = opened or change > 0
        if depth <= 0 and (opened or lines[number].rstrip().endswith(";")):
            return number + 1
    return last


def head(lines: list[str], first: int) -> int:
    """Where the comments and decorators above a definition begin."""
    while first and _ABOVE.match(lines[first - 1]):
        first -= 1
    return first


def _braces(lines: list[str], first: int, last: int) -> Iterator[tuple[int, int]]:
    for number in range(first, last):
        yield number, lines[number].count("{") - lines[number].count("}")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@functools.lru_cache(maxsize=4096)
def _pattern(name: str, kind: str) -> re.Pattern[bytes]:
    return re.compile(_DEFINES[kind].replace("NAME", rf"\b{re.escape(name)}\b").encode())


def definable(name: str) -> str | None:
    """The language of a file in which definitions can be found, or None."""
    kind = language(name)
    return kind if kind in _DEFINES else None
