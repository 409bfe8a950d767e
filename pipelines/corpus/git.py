"""A git repository at a commit, without a checkout: what is in the commit, no more and no less.

Nothing that the repository could have git run is run: no hook, filter, text conversion or monitor, no fetch of what a
partial clone lacks. Names and bytes are as committed (no line end conversion), and `.gitignore` has no say.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.corpus.decode import Unreadable

_GIT = ["git", "--no-pager", "--no-optional-locks", "--no-replace-objects", "--literal-pathspecs"]
for _setting in ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.directory=*"):
    _GIT += ["-c", _setting]


@dataclass(frozen=True)
class Blob:
    """An entry of a commit: name, object id, bytes; `reason`, `kind: detail`, if it isn't a file."""

    name: str
    id: str
    size: int
    reason: str | None


def split(path: str) -> tuple[str, str] | None:
    """`REPO@COMMIT` apart, or None for a path that exists as it is, or whose part before no `@` is a folder."""
    if os.path.lexists(path):
        return None
    parts = path.split("@")
    for count in range(1, len(parts)):
        if os.path.isdir(folder := "@".join(parts[:count])):
            return folder, "@".join(parts[count:])
    return None


def commit_id(repository: str, revision: str) -> str:
    """The id of the commit that a branch, tag or abbreviated id names. Raises ValueError in one line."""
    if not revision:
        raise ValueError(f"{repository}@: name a commit, branch or tag after the @")
    if _run(repository, "rev-parse", "--git-dir").returncode:
        raise ValueError(f"{repository}@{revision}: {repository} is not a git repository")
    found = _run(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    if found.returncode:
        raise ValueError(f"{repository}@{revision}: this repository has no commit {revision!r}")
    return found.stdout.decode().split()[-1]


def blobs(repository: str, commit: str) -> list[Blob]:
    """All entries of a commit, by name; of the folder `repository` alone if it is one inside a repository."""
    listing = _run(repository, "ls-tree", "-r", "-z", "-l", commit)
    if listing.returncode:
        raise ValueError(f"{repository}@{commit}: {' '.join(listing.stderr.decode(errors='replace').split())}")
    entries = []
    for line in listing.stdout.split(b"\0")[:-1]:
        told, _, name = line.partition(b"\t")
        mode, kind, id, size = told.decode().split()
        reason = None
        if kind == "commit":
            reason = f"submodule: another repository at {id}; name it itself"
        elif mode == "120000":
            reason = "symbolic link: in a commit, where its target is found by itself"
        elif size == "BAD":
            reason = "unreadable: the repository lacks this object"
        entries.append(Blob(os.fsdecode(name), id, int(size) if size.isdecimal() else 0, reason))
    return entries


@contextlib.contextmanager
def reader(repository: str) -> Iterator[_Reader]:
    """An object whose `read(id)` gives the bytes of a blob; raises Unreadable."""
    with subprocess.Popen(
        [*_GIT, "-C", repository, "cat-file", "--batch"], env=_environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            yield _Reader(process)
        finally:
            process.stdin.close()


class _Reader:
    def __init__(self, process: subprocess.Popen):
        self._process = process

    def read(self, id: str) -> bytes:
        try:
            self._process.stdin.write(id.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Unreadable("unreadable: git ended before it gave this object") from error
        told = self._process.stdout.readline().split()
        if len(told) != 3:
            raise Unreadable("unreadable: the repository lacks this object")
        data = self._process.stdout.read(int(told[2]))
        if len(data) != int(told[2]):  # it tells the size before it finds the object damaged, and then ends
            raise Unreadable(f"unreadable: the object is damaged after {len(data):,} of {int(told[2]):,} bytes")
        self._process.stdout.read(1)
        return data


def is_repository(folder: Path) -> bool:
    """Whether a folder is a work tree: it has `.git`, a folder or (in a linked work tree or submodule) a file."""
    return (folder / ".git").exists()


def _run(repository: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*_GIT, "-C", repository, *arguments], env=_environment(), stdin=subprocess.DEVNULL, capture_output=True)


def _environment() -> dict[str, str]:
    ours = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | ours | {"LC_ALL": "C"}
