"""`.gitignore` files, as git applies them.

Nested ones are honoured; git's per-user and per-clone excludes are not, because they differ between machines.
"""

from __future__ import annotations

import re
from pathlib import Path

from pathspec import GitIgnoreSpec, RegexPattern

# The `.gitignore` files on the way to a folder, outermost first: where each stands below the root, and its patterns.
Rules = tuple[tuple[str, list[RegexPattern]], ...]


def deciding_rule(below: str, rules: Rules) -> str | None:
    """The folder whose `.gitignore` excludes this entry, or None. The last pattern of the deepest file decides."""
    for base, patterns in reversed(rules):
        for pattern in reversed(patterns):
            if _matches_itself(pattern.regex, below.removeprefix(base)):
                return base if pattern.include else None
    return None


def _matches_itself(regex: re.Pattern, path: str) -> bool:
    # pathspec lets a pattern for a folder match all inside it. The walk has asked about the folders on the way
    # already, and to git a pattern speaks of the entry alone: with "*.py" above, "!*/" brings back no file. The two
    # short expressions are pathspec's for "everything" and "every folder".
    if regex.pattern == ".":
        return True
    if regex.pattern == "(?P<ps_d>/)":
        return path.endswith("/")
    return regex.fullmatch(path) is not None


def patterns_of(path: Path) -> list[RegexPattern]:
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    patterns = []
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        # "c/**" is all inside c, not c itself. For pathspec it is c, too, but "c/**/*" is the same to both.
        line = line + "/*" if line.endswith("/**") else line
        try:
            patterns += GitIgnoreSpec.from_lines([line]).patterns
        except (ValueError, re.error):
            continue  # git, too, passes over a pattern that can match nothing, such as "!" or "[z-a]"
    return [pattern for pattern in patterns if pattern.regex is not None]
