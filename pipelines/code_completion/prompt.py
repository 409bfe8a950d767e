"""The prompt of a completion: the file up to the cursor, behind as much of its repository as the context holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.code_completion.fim import Template
from pipelines.code_completion.select import SMALLEST_FILE, Files, Write, choose, named, titled
from pipelines.corpus.decode import Unreadable, read_text
from pipelines.corpus.find import find_code
from pipelines.corpus.tokenizer import Tokenizer


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


@dataclass(frozen=True)
class Form:
    """How a run was told its text: a document a file ("row") or a repository ("collection"), and its template for filling
    in the middle if it learnt that."""

    unit: str = "row"
    infill: Template | None = None


def parse_cursor(text: str, repo: Path) -> Cursor:
    """``FILE:LINE:COL``, FILE relative to the repository (or absolute). Raises ValueError in one line."""
    file, (line, column) = _parse(text, repo, 2, "FILE:LINE:COL, as in src/parser.py:120:9 (both count from 1)")
    return Cursor(file, line, column)


def parse_place(text: str, repo: Path) -> tuple[Path, int]:
    """The same for ``FILE:LINE``."""
    file, (line,) = _parse(text, repo, 1, "FILE:LINE, as in src/parser.py:120 (it counts from 1)")
    return file, line


def _parse(text: str, repo: Path, numbers: int, form: str) -> tuple[Path, list[int]]:
    name, *counts = text.rsplit(":", numbers)
    if not name or len(counts) < numbers or not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"--at {text!r} is not {form}")
    path = repo / name
    if not path.is_file():
        raise ValueError(f"--at names {name!r}, but {path} is not a file")
    return path, [int(count) for count in counts]


def text_around(cursor: Cursor) -> tuple[str, str, str]:
    """The text before the cursor and behind it, byte for byte, and the file's line end.

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
    return before, text[len(before) :], "\r\n" if crlf else "\n"


def build_prompt(repo: Path, cursor: Cursor, tokenizer: Tokenizer, budget: int, form: Form = Form(), gitignore: bool = True) -> Prompt:
    """At most ``budget`` ids: other files of the repository as ``select`` chooses them, and last the cursor's file.

    Its text is cut at its head if need be. A model that learnt to fill in the middle is told what stands behind the
    cursor, too: at most a fourth of the room. In a run on single files the model sees across files here, which it did
    not while it learnt: there each file was a document of its own.
    """
    before, after, newline = text_around(cursor)
    try:
        found, _ = find_code([repo], gitignore=gitignore)
    except ValueError:  # nothing but the cursor's file, which need not be source code
        found = []
    files = Files(repo, cursor.file, found)
    head, write = _writer(repo, tokenizer, form.unit)
    head = head if len(head) + SMALLEST_FILE <= budget else []
    own = _own(files.own, write, before, after, tokenizer, budget - len(head), form)
    chosen = choose(files, before + after, cursor.line, budget - len(head) - len(own), write)
    others = [token for choice in chosen for token in write(choice.path, choice.text)]
    return Prompt(head + others + own, [*(choice.path for choice in chosen), files.own], newline)


def _writer(repo: Path, tokenizer: Tokenizer, unit: str) -> tuple[list[int], Write]:
    """What stands before all files, and how a file is written."""
    end = tokenizer.end_of_text
    if unit == "row":
        return [], lambda path, text: [end, *tokenizer.encode(text).tolist()]
    return [end, *titled(repo.resolve().name, tokenizer)], lambda path, text: named(path, text, tokenizer)


def _own(path: str, write: Write, before: str, after: str, tokenizer: Tokenizer, room: int, form: Form) -> list[int]:
    """The cursor's file, in at most ``room`` ids."""
    mark, told = write(path, ""), tokenizer.encode(before).tolist()
    left = room - len(mark)
    if form.infill is not None and after.strip() and left > SMALLEST_FILE:
        left -= 3
        behind = tokenizer.encode(after).tolist()[: left // 4]
        return [*mark, *form.infill.infill(told[-(left - len(behind)) :], behind)]
    if form.unit == "collection" and left > SMALLEST_FILE:
        return mark + told[-left:]
    return (mark + told)[-room:]  # a text without its beginning doesn't stand behind end-of-text
