"""Which rows are held out: those of which the path, a folder above it, or the collection matches a pattern."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def held_out_part(path: str, collection: str, patterns: Iterable[str]) -> str | None:
    """The repository, shortest folder, or file of a row that a pattern (as in a shell; `*` crosses `/`) matches, or None.

    Paths begin with the name of their root: `project`, `project/tests`, `*/tests`.
    """
    parts = path.split("/")
    names = [collection, *("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))]
    return next((name for name in names if any(fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns)), None)
