"""Which files make up a corpus of papers.

Folders are walked in sorted order; version control, caches and hidden folders are not entered, symbolic links never
followed, and token stores passed over in silence. A file is taken by its extension (what is in it decides the format),
a file named on its own always. A LaTeX paper is one input, its main file; what stands beside and below that is part of
it. Everything else is listed with its reason.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pipelines.corpus.sources import Skipped, SourceFile, printable
from pipelines.literature_analysis import latex
from pipelines.literature_analysis.formats import EXTENSIONS

_TEX = (".tex", ".ltx")
_PARTS = (*_TEX, ".bbl", ".bib", ".sty", ".cls", ".bst", ".eps", ".pdf", ".png", ".jpg", ".jpeg", ".tikz", ".clo", ".aux")
_NO_PAPERS = frozenset("readme license licence copying notice changelog changes contributing authors security".split())
_HEAD = 1 << 20  # of a TeX file, in which a main one says so


def find_papers(paths) -> tuple[list[SourceFile], list[Skipped]]:
    """Papers under `paths` (files or folders), sorted by name, and all that was left out.

    A name begins with the name of its root folder. Raises ValueError, in one line, for a path that doesn't exist, for
    two roots of one name and for an input without a single paper.
    """
    files: dict[str, SourceFile] = {}
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
        if root.is_file():
            found, left_out = [_input(root, name, [root])], []
        else:
            found, left_out = _walk(root)
        skipped += left_out
        for file in found:
            if file.path in files:
                skipped.append(Skipped(file.name, f"taken already: as {files[file.path].name}"))
            else:
                files[file.path] = file
    if not files:
        kinds = [entry.kind for entry in skipped]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        inputs = ", ".join(printable(str(root)) for root in roots.values())
        raise ValueError(f"no paper in {inputs or 'no input'}: {len(skipped)} entries seen ({counts or 'an empty folder'})")
    return sorted(files.values(), key=lambda file: file.name), sorted(skipped, key=lambda s: (s.path, s.reason))


def sibling(main: str):
    """Reads the files of the LaTeX paper whose main file is `main`: those in its folder or below, and no others."""
    folder = Path(main).parent.resolve()

    def read(name: str) -> bytes | None:
        try:
            path = (folder / name).resolve()
            inside = path.is_relative_to(folder) and path.is_file() and path.stat().st_size <= 64 << 20
            return path.read_bytes() if inside else None
        except (OSError, ValueError):  # a name that is none, a NUL in it, no permission
            return None

    return read


def _walk(root: Path) -> tuple[list[SourceFile], list[Skipped]]:
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    waiting: list[tuple[str, str, str]] = [("", "", "")]  # path below the root, "" or ending in "/"; main file; its TeX
    parts: dict[str, list[str]] = {}
    while waiting:
        folder, main, source = waiting.pop()
        try:
            with os.scandir(root / folder) as scan:
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            skipped.append(Skipped(printable(f"{root.name}/{folder}"), f"unreadable: {error.strerror}"))
            continue
        if folder and any(entry.name == ".ingest.json" for entry in entries):
            continue
        texts = {entry.name: _head(entry) for entry in entries if entry.name.lower().endswith(_TEX)}
        mains = [name for name, text in texts.items() if latex.is_main(text)]
        if mains:
            main, source = folder + mains[0], "".join(texts.values())
        for entry in entries:
            below = folder + entry.name
            name = f"{root.name}/{below}"
            is_folder = entry.is_dir(follow_symlinks=False)
            stem, extension = os.path.splitext(entry.name.lower())
            if reason := _why_not(entry, is_folder):
                skipped.append(Skipped(printable(name) + "/" * is_folder, reason))
            elif is_folder:
                waiting.append((below + "/", main, source))
            elif entry.name in mains:
                parts[below] = [below]
            # a PDF beside TeX is a figure if that speaks of it, and else the printed paper or another one
            elif main and extension in _PARTS and (extension != ".pdf" or stem in source.lower()):
                parts[main].append(below)
                skipped.append(Skipped(name, f"part of a paper: {root.name}/{main}"))
            elif extension not in EXTENSIONS:
                skipped.append(Skipped(name, f"not a paper: {extension or 'no extension'}"))
            elif stem in _NO_PAPERS:
                skipped.append(Skipped(name, "not a paper: by its name"))
            else:
                files.append(_input(root / below, name, [root / below]))
    files += [_input(root / main, f"{root.name}/{main}", [root / part for part in all_]) for main, all_ in parts.items()]
    return files, skipped


def _head(entry: os.DirEntry) -> str:
    if not entry.is_file(follow_symlinks=False):
        return ""
    try:
        with open(entry.path, "rb") as file:
            return file.read(_HEAD).decode("latin-1")
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


def _input(path: Path, name: str, parts: list[Path]) -> SourceFile:
    """An input of several files has their size in all, and changes when the last of them does."""
    states = [os.stat(part) for part in parts]
    return SourceFile(str(path), name, sum(s.st_size for s in states), max(s.st_mtime_ns for s in states))
