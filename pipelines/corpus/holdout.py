"""Which rows are held out: those of which the path, a folder above it, or the collection matches a pattern."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from pipelines.corpus.sources import SourceFile


def check_matched(files: list[SourceFile], patterns: Iterable[str]) -> None:
    """ValueError, in one line, for a pattern that holds nothing out."""
    for pattern in patterns:
        if not any(held_out_part(file.name, file.collection or "", [pattern]) for file in files):
            raise ValueError(f"--hold-out {pattern!r} matches none of {len(files):,} files; their names begin like {files[0].name!r}")


def held_out_part(path: str, collection: str, patterns: Iterable[str]) -> str | None:
    """The repository, shortest folder, or file of a row that a pattern (as in a shell; `*` crosses `/`) matches, or None.

    Paths begin with the name of their root: `project`, `project/tests`, `*/tests`.
    """
    parts = path.split("/")
    names = [collection, *("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))]
    return next((name for name in names if any(fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns)), None)
