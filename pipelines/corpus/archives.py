"""Tar and zip archives, member by member, in memory: nothing is extracted, so no name in one can lead anywhere.

A member is known by its place in the archive, because names may occur twice; the last of a name stands, as unpacking
would leave it. Refused before any of it is decompressed:

- the whole archive: more than 200 times its size in all, beyond the first 64 MiB (source code shrinks 4 to 10 times,
  zeros 1,000 times), or more than a million members;
- a member: absolute or with `..`, a link, a device, a sparse file, encrypted. `find` refuses one of more than 256 MiB.

A compressed tar has no index. `TarReader` is told what will be asked of it and takes that in one pass.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import posixpath
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pipelines.corpus.decode import Unreadable

MOST_TIMES, MOST_BYTES, MOST_MEMBERS, LARGEST_MEMBER = 200, 64 << 20, 1_000_000, 256 << 20
_OPENERS = {
    ".tar": lambda path: open(path, "rb"),
    **dict.fromkeys((".tar.gz", ".tgz"), gzip.open),
    **dict.fromkeys((".tar.bz2", ".tbz2"), bz2.open),
    **dict.fromkeys((".tar.xz", ".txz"), lzma.open),
}
EXTENSIONS = (*_OPENERS, ".zip")
# What the standard library raises for a damaged archive, by experience with cut and changed ones.
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, OverflowError,
    struct.error, NotImplementedError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A member by its place in the archive; `reason`, `kind: detail`, is why it is left out, None if it isn't."""

    place: str
    name: str
    size: int
    reason: str | None


def is_archive(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def stem(name: str) -> str:
    """The name without what makes it an archive's."""
    return name[: -max(len(end) for end in EXTENSIONS if name.lower().endswith(end))]


def members(path: str) -> list[Member]:
    """Everything in an archive that is not a folder. Raises Unreadable for one that is refused or damaged."""
    with _damage_told():
        found = list(_zip_members(path) if _is_zip(path) else _tar_members(path))
    last = {member.name: member.place for member in found}
    return [
        replace(member, reason=member.reason or "name twice in the archive: the last of that name stands")
        if last[member.name] != member.place else member
        for member in found
    ]  # fmt: skip


@contextlib.contextmanager
def reader(path: str, wanted: Iterable[str]) -> Iterator:
    """An object whose `read(place)` gives the bytes of any of the wanted members, each once; raises Unreadable."""
    with _damage_told():
        opened = _ZipReader(path) if _is_zip(path) else _TarReader(path, set(wanted))
    try:
        yield opened
    finally:
        opened.close()


class _ZipReader:
    def __init__(self, path: str):
        self._zip = zipfile.ZipFile(path)
        self._infos = self._zip.infolist()

    def read(self, place: str) -> bytes:
        info = self._infos[int(place)]
        with _damage_told(), self._zip.open(info) as file:
            data = file.read(LARGEST_MEMBER + 1)
            if len(data) != info.file_size:  # which the library lets pass where the checksum holds
                raise zipfile.BadZipFile(f"{len(data):,} bytes where {info.file_size:,} are promised")
            return data

    def close(self) -> None:
        self._zip.close()


class _TarReader:
    """Holds the wanted members from the first that is asked for until each has been read."""

    def __init__(self, path: str, wanted: set[str]):
        self._path, self._wanted = path, wanted
        self._held: dict[str, bytes] | None = None

    def read(self, place: str) -> bytes:
        if self._held is None:
            self._held = {}
            with _damage_told(), _open_tar(self._path) as tar:
                for number, member in _each(tar):
                    if number in self._wanted:
                        self._held[number] = tar.extractfile(member).read()
                        if len(self._held) == len(self._wanted):
                            break
        if place not in self._held:
            raise Unreadable(f"unreadable: {self._path} has no member {place} any more")
        return self._held.pop(place)

    def close(self) -> None:
        self._held = None


class _Bounded(io.RawIOBase):
    """The decompressed side of a tar, which ends at a limit. A seek beyond it is refused and not decompressed.

    The library goes back one byte before each header, which for a compressed file can mean to begin anew: seeks wait
    for the next read, and the last byte is kept.
    """

    def __init__(self, file, limit: int):
        self._file, self._limit = file, limit
        self._at, self._last = 0, b""

    def read(self, size: int = -1) -> bytes:
        # Long names and extended headers are read in one piece, of whatever size they say they have.
        if not 0 <= size <= LARGEST_MEMBER:
            raise _Refused(f"a header of {size:,} bytes")
        self._check(self._at + size)
        if size == 1 and self._last and self._at == self._file.tell() - 1:
            data = self._last
        else:
            self._file.seek(self._at)
            data = self._file.read(size)
            self._last = data[-1:]
        self._at += len(data)
        return data

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._check(position)
        self._at = position
        return position

    def tell(self) -> int:
        return self._at

    def _check(self, position: int) -> None:
        if position < 0:
            raise _Refused("a header that leads backwards")
        if position > self._limit:
            raise _Refused(f"it holds more than {self._limit:,} bytes, {MOST_TIMES} times its size")


class _Refused(Exception):
    pass


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except _Refused as error:
        raise Unreadable(f"archive refused: {error}") from error
    except FileNotFoundError as error:
        raise Unreadable(f"unreadable: {error.strerror}") from error
    except _DAMAGE as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(f"archive damaged: {said}") from error


@contextlib.contextmanager
def _open_tar(path: str) -> Iterator[tarfile.TarFile]:
    opener = next(_OPENERS[end] for end in sorted(_OPENERS, key=len, reverse=True) if path.lower().endswith(end))
    with opener(path) as file, open(path, "rb") as packed:
        limit = packed.seek(0, io.SEEK_END) * MOST_TIMES + MOST_BYTES
        with tarfile.open(fileobj=_Bounded(file, limit), mode="r:") as tar:
            yield tar


def _each(tar: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    number = at = 0
    while (member := tar.next()) is not None:
        if number >= MOST_MEMBERS:
            raise _Refused(f"more than {MOST_MEMBERS:,} members")
        if tar.offset <= at:
            raise _Refused("a header that leads backwards")
        yield str(number), member
        tar.members.clear()  # the library's own list of all it has seen
        number, at = number + 1, tar.offset
    # To the library a damaged header is the end, too. The end is a block of zeros, or nothing.
    tar.fileobj.seek(tar.offset)
    block = tar.fileobj.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0") or 0 < len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"no header at byte {tar.offset:,}")
    while tar.fileobj.read(1 << 20):
        pass  # the checksum of a compressed file stands at its end


def _tar_members(path: str) -> Iterator[Member]:
    with _open_tar(path) as tar:
        for number, member in _each(tar):
            if not member.isdir():
                yield _member(number, member.name, member.size, _why_not_tar(member))


def _why_not_tar(member: tarfile.TarInfo) -> str | None:
    if member.issym() or member.islnk():
        return f"link: to {member.linkname}, in an archive"
    if not member.isreg():
        return "not a regular file: a pipe or device"
    return "sparse: a file with holes, in an archive" if member.issparse() else None


def _zip_members(path: str) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive, open(path, "rb") as packed:
        infos = archive.infolist()
        limit = packed.seek(0, io.SEEK_END) * MOST_TIMES + MOST_BYTES
    if len(infos) > MOST_MEMBERS:
        raise _Refused(f"more than {MOST_MEMBERS:,} members")
    if (total := sum(info.file_size for info in infos)) > limit:
        raise _Refused(f"it holds {total:,} bytes, more than {MOST_TIMES} times its size")
    for number, info in enumerate(infos):
        if not info.is_dir():
            yield _member(str(number), info.filename, info.file_size, _why_not_zip(info))


def _why_not_zip(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "link: in an archive"
    if kind not in (0, stat.S_IFREG):
        return "not a regular file: a pipe or device"
    return "encrypted: a member with a password" if info.flag_bits & 1 else None


def _member(place: str, name: str, size: int, reason: str | None) -> Member:
    if name.startswith("/") or ".." in name.split("/"):
        reason = "unsafe name: it leads out of the archive"
    elif "\0" in name or posixpath.normpath(name) in ("", "."):
        reason = "unsafe name: empty, or with a NUL"
    return Member(place, name if reason else posixpath.normpath(name), size, reason)


def _is_zip(path: str) -> bool:
    return path.lower().endswith(".zip")
