"""What of a repository is worth having in a context that cannot hold it, for work at one line of one file.

In the order in which the budget is spent:

1. the file itself, or where it is more than half of the budget the part around the line;
2. where the names used near the line are defined, the nearest names first: the whole file where that is small, else the
   definitions alone. They are looked for in what is imported; those that are called or written as types and are not
   there, in the whole repository;
3. what the file imports or includes, then what these do, and so on, whole;
4. the files nearest by path.

What is chosen is then put in the order of dependencies, the most telling last, and the file itself at the very end. The
cost is linear in the repository: names of files once, and bytes once for each name whose definition is not among the
imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import rich.markup
import rich.table

from pipelines.code_completion.definitions import block, called_or_type, definable, definition, head, names_near
from pipelines.code_completion.links import Repository, links
from pipelines.code_completion.order import dependencies_first
from pipelines.corpus.decode import Unreadable, decode
from pipelines.corpus.find import find_code
from pipelines.corpus.rules import unwanted
from pipelines.corpus.sources import SourceFile
from pipelines.corpus.tokenizer import Tokenizer

SMALLEST_FILE = 16  # tokens; for less room than that no file is looked at
MOST_BYTES_PER_TOKEN = 16  # of ordinary code, by any tokenizer: what is larger than that cannot fit and is not read
_MOST_NAMES, _MOST_SOUGHT = 64, 12  # names that are looked for among imports; of these, in the whole repository
Write = Callable[[str, str], list[int]]  # the ids of a file, or of a part, from its path and text

_MOST_IMPORTS = 2000  # files
_LARGE = 4  # a file of more bytes than a fourth of the tokens that are left gives its definitions only, at first


@dataclass(frozen=True)
class Choice:
    """A file, or where `lines` has any only these (first–last, from 1), the reason to have it, and its tokens, of which
    some are its name."""

    path: str
    reason: str
    tokens: int
    lines: tuple[tuple[int, int], ...]
    text: str = field(repr=False)


@dataclass(frozen=True)
class Selection:
    """Choices in the order in which a model reads them; `tokens` ≤ `budget` counts the repository's name too."""

    repository: str
    choices: list[Choice]
    tokens: int
    budget: int

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """As a repository's document in a corpus: its name, then each file behind its path."""
        told = titled(self.repository, tokenizer)
        for choice in self.choices:
            told += named(choice.path, choice.text, tokenizer)
        return told


def table(selection: Selection) -> rich.table.Table:
    """For the terminal: a line a choice, in the order in which it is read."""
    shown = rich.table.Table("file", "lines", "tokens", "why", title=f"{selection.tokens:,} of {selection.budget:,} tokens")
    shown.columns[2].justify = "right"
    for choice in selection.choices:
        lines = ", ".join(f"{first}–{last}" for first, last in choice.lines) or "all"
        shown.add_row(*map(rich.markup.escape, (choice.path, lines, f"{choice.tokens:,}", choice.reason)))
    return shown


def titled(repository: str, tokenizer: Tokenizer) -> list[int]:
    """The head of a repository's document."""
    return [tokenizer.special["<|repo_name|>"], *tokenizer.encode(repository).tolist()]


def named(path: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """A file as it stands in a repository's document."""
    return [tokenizer.special["<|file_sep|>"], *tokenizer.encode(f"{path}\n").tolist(), *tokenizer.encode(text).tolist()]


def select(repo: Path, file: Path, line: int, budget: int, tokenizer: Tokenizer, gitignore: bool = True) -> Selection:
    """What to have for work at `line` (from 1) of `file`, in at most `budget` tokens.

    `gitignore` leaves out what the repository's .gitignore files exclude. Raises ValueError for a repository without a
    source file, a file that is no text or has no such line, and a budget that doesn't hold the line.
    """
    files = Files(repo, file, find_code([repo], gitignore=gitignore)[0])
    text = files.text(files.own)
    if text is None:
        raise ValueError(f"{file} cannot be read as text: {files.why_not(files.own)}")
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        raise ValueError(f"{file} has {len(lines)} lines; there is no line {line}")
    name = repo.resolve().name
    spent = len(titled(name, tokenizer))
    room = budget - spent
    write = lambda path, part: named(path, part, tokenizer)
    own = _around(files.own, lines, line, room // 2, write) or _around(files.own, lines, line, room, write)
    if own is None:
        raise ValueError(f"--budget is {budget} tokens, which does not hold line {line} of {file}; give more")
    chosen = choose(files, text, line, budget - spent - own.tokens, write)
    return Selection(name, [*chosen, own], spent + own.tokens + sum(choice.tokens for choice in chosen), budget)


def choose(files: Files, text: str, line: int, budget: int, write: Write) -> list[Choice]:
    """The other files, or parts of them, in the order in which they are read; `text` is the file's own."""
    taken: dict[str, Choice] = {}
    left = budget

    def take(path: str, reason: str, parts: tuple[tuple[int, int], ...] = ()) -> bool:
        nonlocal left
        before = taken.get(path)
        had = before.tokens if before is not None else 0
        if (before is not None and not before.lines) or (not parts and files.size(path) > (left + had) * MOST_BYTES_PER_TOKEN):
            return False
        found = files.text(path)
        if not found or unwanted(found):
            return False
        choice = _part(path, reason, found.split("\n"), parts, write) if parts else Choice(path, reason, len(write(path, found)), (), found)
        if choice.tokens > left + had:
            return False
        taken[path] = choice if before is None else replace(choice, reason=before.reason)  # the whole, for a part of it
        left += had - choice.tokens
        return True

    for path, names in _definitions(files, text, line).items() if left >= SMALLEST_FILE else ():
        if files.size(path) * _LARGE <= left and take(path, _defines(names)):
            continue
        lines, kind = files.text(path).split("\n"), definable(path)
        parts = [(head(lines, first) + 1, block(lines, first, kind)) for first in names.values()]
        for count in range(len(names), 0, -1):
            if take(path, _defines(list(names)[:count]), _joined(parts[:count])):
                break
    for reason, paths in (("imported", files.imports()), ("near", files.by_distance)):
        for path in paths:
            if left < SMALLEST_FILE:
                break
            take(path, reason)
    kept = list(taken.values())[::-1]
    order = dependencies_first([c.path for c in kept], [files.links(c.path) for c in kept])
    return [kept[i] for i in order]


def _defines(names) -> str:
    return f"defines {', '.join(names)}"


def _joined(parts: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The parts in order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(parts):
        if joined and first <= joined[-1][1] + 1:
            first, last = joined[-1][0], max(last, joined.pop()[1])
        joined.append((first, last))
    return tuple(joined)


def _part(path: str, reason: str, lines: list[str], parts: tuple[tuple[int, int], ...], write: Write) -> Choice:
    # The last line of a file has no line end to lose.
    text = "\n".join("\n".join(lines[first - 1 : last]) + ("\n" if last < len(lines) else "") for first, last in parts)
    return Choice(path, reason, len(write(path, text)), parts, text)


class Files:
    """A repository's files, as `find_code` found them, by their path in it; read when they are asked for. `own` is the one
    that it is all about, which need not be among them."""

    def __init__(self, repo: Path, file: Path, found: list[SourceFile]):
        self.root = repo.resolve()
        self._paths = {entry.name.partition("/")[2]: entry for entry in found}
        place = file.resolve()
        self.own = place.relative_to(self.root).as_posix() if place.is_relative_to(self.root) else place.as_posix()
        self._own_file = file
        self._texts: dict[str, str | None] = {}
        self._links: dict[str, list[str]] = {}

    def text(self, path: str) -> str | None:
        """The file's text; None where it is none."""
        if path not in self._texts:
            try:
                self._texts[path] = decode(self.data(path), path).text
            except Unreadable:
                self._texts[path] = None
        return self._texts[path]

    def why_not(self, path: str) -> str:
        try:
            decode(self.data(path), path)
        except Unreadable as error:
            return str(error)
        raise AssertionError(f"{path} can be read")

    def data(self, path: str) -> bytes:
        """The file's bytes. Raises Unreadable when it is gone."""
        place = self._own_file if path == self.own else Path(self._paths[path].path)
        try:
            return place.read_bytes()
        except OSError as error:
            raise Unreadable(f"unreadable: {error.strerror}") from error

    def size(self, path: str) -> int:
        return self._paths[path].size

    def links(self, path: str) -> list[str]:
        """What the file refers to, as its language writes it."""
        if path not in self._links:
            self._links[path] = links(path, self.text(path) or "")
        return self._links[path]

    @cached_property
    def by_distance(self) -> list[str]:
        """The other files, those with the longest common folder first."""
        own = self.own.split("/")

        def distance(path: str) -> tuple[int, str]:
            parts = path.split("/")
            common = next((i for i, (a, b) in enumerate(zip(own, parts)) if a != b), min(len(own), len(parts)))
            return len(own) + len(parts) - 2 * common, path

        return sorted((path for path in self._paths if path != self.own), key=distance)

    @cached_property
    def _repository(self) -> Repository:
        return Repository(list(self._paths.keys() | {self.own}))

    def imports(self) -> Iterator[str]:
        """The files that this one refers to, then those that these refer to, each once, at most 2,000."""
        seen, due = {self.own}, [self.own]
        for path in due:
            for link in self.links(path):
                found = self._repository.find(path, link)
                for target in self._repository.files_in(found) if found and found.endswith("/") else [found]:
                    if target and target not in seen and len(seen) <= _MOST_IMPORTS:
                        seen.add(target)
                        due.append(target)
                        yield target


def _definitions(files: Files, text: str, line: int) -> dict[str, dict[str, int]]:
    """Where names used near the line are defined: by file the names and their lines (from 0), the nearest names first."""
    kind = definable(files.own)
    if kind is None:
        return {}
    own = text.encode()
    names = [name for name in names_near(text, line) if definition(own, name, kind) is None][:_MOST_NAMES]
    found: dict[str, tuple[str, int]] = {}

    def look(paths: Iterable[str], sought: list[str]) -> None:
        for path in paths:
            sought = [name for name in sought if name not in found]
            if not sought:
                return
            if definable(path) != kind:
                continue
            try:
                data = files.data(path)
            except Unreadable:
                continue
            for name in sought:
                if (first := definition(data, name, kind)) is not None and files.text(path) is not None:
                    found[name] = path, first

    look(files.imports(), names)
    look(files.by_distance, [name for name in names if name not in found and called_or_type(text, name)][:_MOST_SOUGHT])
    by_file: dict[str, dict[str, int]] = {}
    for name in names:
        if name in found:
            by_file.setdefault(found[name][0], {})[name] = found[name][1]
    return by_file


def _around(path: str, lines: list[str], line: int, budget: int, write: Write) -> Choice | None:
    """The file, or the most lines around one that the budget holds, two above for each below; None if not even that one."""

    def part(count: int) -> tuple[int, int]:
        first = max(1, min(line - count * 2 // 3, len(lines) - count + 1))
        return first, min(len(lines), first + count - 1)

    # Never more lines than could fit, so that a huge file is not encoded for nothing.
    low, high, best = 0, len(lines), None
    while low < high:
        middle = (low + high + 1) // 2
        first, last = part(middle)
        fits = sum(map(len, lines[first - 1 : last])) <= max(0, budget) * MOST_BYTES_PER_TOKEN
        choice = _part(path, "the file itself", lines, ((first, last),), write) if fits else None
        if choice is not None and choice.tokens <= budget:
            low, best = middle, choice
        else:
            high = middle - 1
    return replace(best, lines=()) if best is not None and low == len(lines) else best
