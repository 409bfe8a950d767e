"""The prompt of a completion: the file up to the cursor, behind as much of its repository as the context holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.corpus.decode import Unreadable, read_text
from pipelines.corpus.find import find_code
from pipelines.corpus.rules import unwanted
from pipelines.corpus.sources import SourceFile
from pipelines.corpus.tokenizer import Tokenizer

SMALLEST_FILE = 16  # tokens; for less room than that no file is looked at
MOST_BYTES_PER_TOKEN = 16  # of ordinary code, by any tokenizer: what is larger than that cannot fit and is not read


@dataclass(frozen=True)
class Cursor:
    """A place in a file: ``line`` and ``column`` count from 1; the cursor stands before the character at ``column``."""

    file: Path
    line: int
    column: int


@dataclass(frozen=True)
class Prompt:
    """Token ids, the files they come from (the last one is the cursor's), and the line end that the file uses."""

    ids: list[int]
    files: list[str]
    newline: str


def parse_cursor(text: str, repo: Path) -> Cursor:
    """``FILE:LINE:COL``, FILE relative to the repository (or absolute). Raises ValueError in one line."""
    name, line, column = (text.rsplit(":", 2) + ["", ""])[:3]
    if not (name and line.isdecimal() and column.isdecimal() and int(line) and int(column)):
        raise ValueError(f"--at {text!r} is not FILE:LINE:COL, as in src/parser.py:120:9 (both count from 1)")
    path = repo / name
    if not path.is_file():
        raise ValueError(f"--at names {name!r}, but {path} is not a file")
    return Cursor(path, int(line), int(column))


def text_before(cursor: Cursor) -> tuple[str, str]:
    """The text before the cursor, byte for byte, and the file's line end.

    Raises ValueError when the file cannot be read or has no such place.
    """
    try:
        text = read_text(cursor.file).text
    except Unreadable as error:
        raise ValueError(f"{cursor.file} cannot be read as text: {error}") from error
    lines = text.split("\n")
    if cursor.line > len(lines):
        raise ValueError(f"{cursor.file} has {len(lines)} lines; there is no line {cursor.line}")
    line = lines[cursor.line - 1].removesuffix("\r")
    if cursor.column > len(line) + 1:
        raise ValueError(f"line {cursor.line} of {cursor.file} has {len(line)} characters; the last column is {len(line) + 1}")
    crlf = text.count("\r\n") > text.count("\n") / 2
    before = "".join(part + "\n" for part in lines[: cursor.line - 1]) + line[: cursor.column - 1]
    return before, "\r\n" if crlf else "\n"


def build_prompt(repo: Path, cursor: Cursor, tokenizer: Tokenizer, budget: int) -> Prompt:
    """At most ``budget`` ids: end-of-text before each file; the cursor's file last, cut at its head if need be.

    Other files of the repository come before it, the nearest by path last, as many as fit whole. The model sees across
    files here, which it did not while it learnt: there each file was a document of its own.
    """
    before, newline = text_before(cursor)
    ids = np.concatenate([[tokenizer.end_of_text], tokenizer.encode(before)])[-budget:].tolist()
    files = [_relative(cursor.file, repo)]
    for file in _by_distance(repo, cursor.file):
        left = budget - len(ids)
        if left < SMALLEST_FILE:
            break
        if file.size > left * MOST_BYTES_PER_TOKEN:
            continue
        try:
            text = read_text(file.path).text
        except Unreadable:
            continue  # not a file that ingest would have kept either
        if not text or unwanted(text, file.name):
            continue
        document = [tokenizer.end_of_text, *tokenizer.encode(text).tolist()]
        if len(document) <= left:
            ids = document + ids
            files.insert(0, _relative(Path(file.path), repo))
    return Prompt(ids, files, newline)


def _by_distance(repo: Path, file: Path) -> list[SourceFile]:
    """The repository's other files, those with the longest common folder first."""
    try:
        found, _ = find_code([repo])
    except ValueError:  # nothing but the cursor's file, which need not be source code
        return []
    parts = file.resolve().parts

    def distance(other: SourceFile) -> tuple:
        path = Path(other.path)
        common = len(os.path.commonpath([path, file.resolve()]).split(os.sep))
        return (len(parts) + len(path.parts) - 2 * common, path.as_posix())

    return sorted((other for other in found if Path(other.path) != file.resolve()), key=distance)


def _relative(path: Path, repo: Path) -> str:
    try:
        return path.resolve().relative_to(repo.resolve()).as_posix()
    except ValueError:
        return path.as_posix()
