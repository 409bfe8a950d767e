"""Which files make up a corpus of papers.

Folders are walked in sorted order, archives looked into without unpacking; version control, caches and hidden folders
are not entered, symbolic links never followed, and token stores passed over in silence. A file is taken by its extension
(what is in it decides the format), a file named on its own always. A LaTeX paper is one input, its main file; what stands
beside and below that is part of it. Everything else is listed with its reason.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipelines.corpus import archives
from pipelines.corpus.decode import Unreadable
from pipelines.corpus.sources import Skipped, SourceFile, printable
from pipelines.literature_analysis import latex
from pipelines.literature_analysis.formats import EXTENSIONS

_TEX = (".tex", ".ltx")
_PARTS = (*_TEX, ".bbl", ".bib", ".sty", ".cls", ".bst", ".eps", ".pdf", ".png", ".jpg", ".jpeg", ".tikz", ".clo", ".aux")
_READ = (*_TEX, ".bbl", ".bib")
_NO_PAPERS = frozenset("readme license licence copying notice changelog changes contributing authors security".split())
_LARGEST = 64 << 20  # of a file that a LaTeX paper includes


@dataclass(frozen=True)
class _File:
    """A file of a folder or an archive: its path in that, with `/`."""

    below: str
    size: int
    mtime_ns: int
    member: str | None = None


def find_papers(paths) -> tuple[list[SourceFile], list[Skipped]]:
    """Papers under `paths` (files, folders, archives), sorted by name, and all that was left out.

    A name begins with the name of its root folder, or that of its archive without the extension. Raises ValueError, in
    one line, for a path that doesn't exist, for two roots of one name and for an input without a single paper.
    """
    files: dict[tuple[str, str | None], SourceFile] = {}
    skipped: list[Skipped] = []
    roots: dict[str, Path] = {}
    for path in paths:
        root = Path(path)
        if not (root.is_dir() or root.is_file()):
            raise ValueError(f"{printable(str(path))}: no such file or folder")
        root = root.resolve()
        if roots.setdefault(root.name, root) != root:
            raise ValueError(f"{root} and {roots[root.name]} have one name; name the folder above them, or rename one")
    for name, root in roots.items():
        if root.is_dir():
            found, left_out = _in_folder(root)
        elif archives.is_archive(name):
            found, left_out = _in_archive(str(root), name, root.stat().st_mtime_ns)
        else:
            status = root.stat()
            found, left_out = [SourceFile(str(root), name, status.st_size, status.st_mtime_ns)], []
        skipped += left_out
        for file in found:
            if (file.path, file.member) in files:
                skipped.append(Skipped(file.name, f"taken already: as {files[file.path, file.member].name}"))
            else:
                files[file.path, file.member] = file
    if not files:
        kinds = [entry.kind for entry in skipped]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        inputs = ", ".join(printable(str(root)) for root in roots.values())
        raise ValueError(f"no paper in {inputs or 'no input'}: {len(skipped)} entries seen ({counts or 'an empty folder'})")
    return sorted(files.values(), key=lambda file: file.name), sorted(skipped, key=lambda s: (s.path, s.reason))


def sibling(main: SourceFile) -> Callable[[str], bytes | None]:
    """Reads the files of the LaTeX paper whose main file this is: those in its folder or below, and no others."""
    return _in_its_archive(main) if main.member is not None else _in_its_folder(Path(main.path).parent.resolve())


def _in_its_folder(folder: Path) -> Callable[[str], bytes | None]:
    def read(name: str) -> bytes | None:
        try:
            path = (folder / name).resolve()
            inside = path.is_relative_to(folder) and path.is_file() and path.stat().st_size <= _LARGEST
            return path.read_bytes() if inside else None
        except (OSError, ValueError):  # a name that is none, a NUL in it, no permission
            return None

    return read


def _in_its_archive(main: SourceFile) -> Callable[[str], bytes | None]:
    held: dict[str, bytes] = {}

    def read(name: str) -> bytes | None:
        if not held:  # all at once, as a compressed archive is read from its start
            members = archives.members(main.path)
            folder = next((posixpath.dirname(m.name) for m in members if m.place == main.member), "")
            held.update(_read_members(main.path, [m for m in members if m.name.lower().endswith(_READ)], folder))
        return held.get(posixpath.normpath(name))

    return read


def _read_members(path: str, members: list[archives.Member], folder: str = "") -> dict[str, bytes]:
    """Bytes by path below `folder` of the members in it that may be read."""
    inside = folder + "/" if folder else ""
    wanted = [m for m in members if m.reason is None and m.size <= _LARGEST and m.name.startswith(inside)]
    with archives.reader(path, [member.place for member in wanted]) as opened:
        return {posixpath.normpath(m.name.removeprefix(inside)): opened.read(m.place) for m in wanted}


def _in_archive(path: str, name: str, mtime_ns: int) -> tuple[list[SourceFile], list[Skipped]]:
    stem = archives.stem(name)
    try:
        members = archives.members(path)
        texts = _read_members(path, [member for member in members if member.name.lower().endswith(_TEX)])
    except Unreadable as error:
        return [], [Skipped(printable(name), str(error))]
    left_out = [Skipped(printable(f"{stem}/{member.name}"), member.reason) for member in members if member.reason]
    files = [_File(m.name, m.size, mtime_ns, m.place) for m in members if m.reason is None]
    found, skipped = _sorted_out(files, stem, lambda below: texts.get(posixpath.normpath(below), b"").decode("latin-1"))
    return [SourceFile(path, f"{stem}/{f.below}", f.size, f.mtime_ns, f.member) for f in found], left_out + skipped


def _in_folder(root: Path) -> tuple[list[SourceFile], list[Skipped]]:
    files, skipped = _walk(root)
    inputs: list[SourceFile] = []
    for file in [file for file in files if archives.is_archive(file.below)]:
        found, left_out = _in_archive(str(root / file.below), f"{root.name}/{file.below}", file.mtime_ns)
        inputs += found
        skipped += left_out
    files = [file for file in files if not archives.is_archive(file.below)]
    found, left_out = _sorted_out(files, root.name, lambda below: _text(root / below))
    inputs += [SourceFile(str(root / f.below), f"{root.name}/{f.below}", f.size, f.mtime_ns) for f in found]
    return inputs, skipped + left_out


def _sorted_out(files: list[_File], root: str, text: Callable[[str], str]) -> tuple[list[_File], list[Skipped]]:
    """The papers among files. One of several files has their size in all, and changes when the last of them does.

    Memory: the TeX of a few folders, however many there are.
    """
    beside: dict[str, list[str]] = {}  # folder → the TeX files in it
    for file in files:
        if file.below.lower().endswith(_TEX):
            beside.setdefault(posixpath.dirname(file.below), []).append(file.below)
    mains = {below for names in beside.values() for below in names if latex.is_main(text(below))}
    by_folder = {posixpath.dirname(main): main for main in sorted(mains, reverse=True)}  # the first main file there
    spoken_of = lru_cache(maxsize=4)(lambda folder: "".join(map(text, beside[folder])).lower())
    papers: dict[str, _File] = {file.below: file for file in files if file.below in mains}
    skipped: list[Skipped] = []
    for file in files:
        stem, extension = os.path.splitext(posixpath.basename(file.below).lower())
        folder = _above(posixpath.dirname(file.below), by_folder)
        main = by_folder.get(folder)
        name = f"{root}/{file.below}"
        if file.below in mains:
            continue
        # a PDF beside TeX is a figure if that speaks of it, and else the printed paper or another one
        if main and extension in _PARTS and (extension != ".pdf" or stem in spoken_of(folder)):
            whole = papers[main]
            papers[main] = _File(main, whole.size + file.size, max(whole.mtime_ns, file.mtime_ns), whole.member)
            skipped.append(Skipped(name, f"part of a paper: {root}/{main}"))
        elif extension not in EXTENSIONS:
            skipped.append(Skipped(name, f"not a paper: {extension or 'no extension'}"))
        elif stem in _NO_PAPERS:
            skipped.append(Skipped(name, "not a paper: by its name"))
        else:
            papers[file.below] = file
    return list(papers.values()), skipped


def _above(folder: str, by_folder: dict[str, str]) -> str:
    """The nearest folder, this one or one above it, that has a main file, or the root."""
    while folder not in by_folder and folder:
        folder = posixpath.dirname(folder)
    return folder


def _walk(root: Path) -> tuple[list[_File], list[Skipped]]:
    files: list[_File] = []
    skipped: list[Skipped] = []
    waiting = [""]  # paths below the root, "" or ending in "/"
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(root / folder) as scan:
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            skipped.append(Skipped(printable(f"{root.name}/{folder}"), f"unreadable: {error.strerror}"))
            continue
        if folder and any(entry.name == ".ingest.json" for entry in entries):
            continue
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if reason := _why_not(entry, is_folder):
                skipped.append(Skipped(printable(f"{root.name}/{folder}{entry.name}") + "/" * is_folder, reason))
            elif is_folder:
                waiting.append(f"{folder}{entry.name}/")
            else:
                status = entry.stat(follow_symlinks=False)
                files.append(_File(folder + entry.name, status.st_size, status.st_mtime_ns))
    return files, skipped


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_LARGEST).decode("latin-1")
    except OSError:
        return ""  # it is listed where it is read


def _why_not(entry: os.DirEntry, is_folder: bool) -> str | None:
    if any("\ud800" <= character <= "\udfff" for character in entry.name):
        return "name not UTF-8: rename it to have it read"
    if entry.is_symlink():
        return f"symbolic link: not followed, to {printable(os.readlink(entry.path))}"
    if is_folder and (entry.name.startswith(".") or entry.name == "__pycache__"):
        return "excluded folder: hidden"
    if not is_folder and not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
        return "not a regular file: a pipe, socket or device"
    return None
