"""What a corpus is read from: inputs, their bytes, and what is said of one that is left out.

An input is a file, or a member of a container: an archive, or a git repository at a commit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.corpus import archives, git, tables
from pipelines.corpus.decode import Unreadable


@dataclass(frozen=True)
class SourceFile:
    """An input: absolute path; name in the corpus, `root/relative/path` with `/`; bytes; modification time.

    `member` is what of the container `path` it is, None where it is the whole file: a place in an archive, or in a
    repository `commit:blob`, in a table `column:row`. `collection` is the repository that it belongs to, a leading part
    of its name, where that is known on finding it.
    """

    path: str
    name: str
    size: int
    mtime_ns: int
    member: str | None = None
    collection: str | None = None


@dataclass(frozen=True)
class Skipped:
    """A file or folder (with a `/` at the end) that was left out. The reason's part before the colon is its kind."""

    path: str
    reason: str

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


@contextlib.contextmanager
def reading(files: Iterable[SourceFile]) -> Iterator[Callable[[SourceFile], bytes]]:
    """Yields the function that gives the bytes of any of these inputs, each once; it raises Unreadable with the reason.

    A container is opened at the first of its members and stays open. The members of a compressed tar that are among
    `files` are held in memory together, so name no more of them than a shard holds.
    """
    wanted: dict[str, list[str]] = {}
    for file in files:
        if file.member is not None:
            wanted.setdefault(file.path, []).append(file.member)
    containers = {}
    with contextlib.ExitStack() as stack:

        def read(file: SourceFile) -> bytes:
            if file.member is None:
                return _bytes(file.path)
            if file.path not in containers:
                containers[file.path] = stack.enter_context(_container(file.path, wanted[file.path]))
            return containers[file.path].read(file.member.rpartition(":")[2])

        yield read


def _container(path: str, members: list[str]):
    if os.path.isdir(path):
        return git.reader(path)
    if path.endswith(tables.SUFFIXES):
        return tables.reader(path, members)
    return archives.reader(path, members)


def printable(name: str) -> str:
    """A file name as text that any file or terminal takes: bytes that aren't UTF-8 appear as `\\xff`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Unreadable(f"unreadable: {error.strerror}") from error
