"""Which files make up a code corpus.

**Folders** are walked in sorted order. Not entered, but listed: folders that `.gitignore` files at or below the given
folder exclude, and those of `rules`. To take such a folder nevertheless, name it itself. Token stores are passed over
in silence: the same input must give the same list before and after its store came to stand in it. Symbolic links are
never followed below a given folder: a target inside is found by its own path, and one outside is not part of the
corpus. A file named on its own is taken whatever its extension.

**Archives** (`archives`) and **repositories at a commit**, `REPO@COMMIT` (`git`), are read in place by the same rules of
names; what is in them was chosen by somebody, and `.gitignore` has no say. Only an archive that is named itself is
opened; one in a folder or in another archive is listed.

Every other file that is left out is listed with its reason.

**Repositories**: each path is one; a folder that is no work tree itself, but has work trees directly below it, is as many.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.corpus import archives, git
from pipelines.corpus.decode import Unreadable
from pipelines.corpus.gitignore import Rules, deciding_rule, patterns_of
from pipelines.corpus.licences import is_licence_file
from pipelines.corpus.rules import excluded_folder, unwanted_name
from pipelines.corpus.sources import Skipped, SourceFile, printable

_LONGEST_NAME, _SHOWN = 4096, 200  # of a member of a container, as on a disk


@dataclass(frozen=True)
class _Root:
    """A path that was given: its parts, of which the last ones name it; `sure` is the last where no number of parts tells
    two apart. `commit` is the id of REPO@COMMIT."""

    path: Path
    parts: tuple[str, ...]
    sure: str
    commit: str | None = None


def find_code(paths, terms: bool = False, gitignore: bool = True) -> tuple[list[SourceFile], list[Skipped]]:
    """Source files under `paths` (files, folders, archives, REPO@COMMIT), sorted by name, and all that was left out.

    A name begins with the name of its root folder, archive or repository; roots of the same name get as many parent
    folders as set them apart. A file under two roots is taken once. With `terms`, licence files are found, too,
    whatever their extension; without `gitignore`, what `.gitignore` files exclude. Raises ValueError, in one line, for
    a path that doesn't exist and for an input without a single source file.
    """
    roots = list(dict.fromkeys(_root(path) for path in paths))
    if not roots:
        raise ValueError("no input: name at least one file or folder")
    files: dict[str, SourceFile] = {}
    skipped: list[Skipped] = []
    for root, name in zip(roots, _root_names(roots)):
        found, left_out = _below(root, name, terms, gitignore)
        skipped += left_out
        for file in found:
            # The members of a container are apart by name: in a commit, equal files are one blob.
            taken = files.setdefault(file.path if file.member is None else file.name, file)
            if taken is not file:
                skipped.append(Skipped(file.name, f"taken already: as {taken.name}"))
    if not files:
        kinds = [entry.kind for entry in skipped]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        inputs = ", ".join(printable(str(root.path)) for root in roots)
        hint = "; --no-gitignore takes what .gitignore files exclude" if "ignored" in kinds else ""
        raise ValueError(f"no source file in {inputs}: {len(skipped)} entries seen ({counts or 'an empty folder'}){hint}")
    return sorted(files.values(), key=lambda file: file.name), sorted(skipped, key=lambda s: (s.path, s.reason))


def _below(root: _Root, name: str, terms: bool, gitignore: bool) -> tuple[list[SourceFile], list[Skipped]]:
    if root.commit:
        blobs = git.blobs(str(root.path), root.commit)
        entries = [(blob.name, f"{root.commit}:{blob.id}", blob.size, blob.reason) for blob in blobs]
        return _listed(root, name, entries, 0, terms)
    if root.path.is_dir():
        return _walk(root.path, name, terms, gitignore)
    status = root.path.stat()
    if not archives.is_archive(root.path.name):
        return [SourceFile(str(root.path), name, status.st_size, status.st_mtime_ns, collection=name)], []
    try:
        entries = [(m.name, m.place, m.size, m.reason) for m in archives.members(str(root.path))]
    except Unreadable as error:
        return [], [Skipped(name, str(error))]
    return _listed(root, name, entries, status.st_mtime_ns, terms)


def _root(path) -> _Root:
    if (repository := git.split(str(path))) is not None:
        folder = Path(repository[0]).resolve()
        commit = git.commit_id(str(folder), repository[1])
        parts = folder.parent.parts if folder.name == ".git" else folder.parts
        last = parts[-1].removesuffix(".git") or parts[-1]
        return _Root(folder, (*parts[1:-1], last), f"{last}@{commit[:12]}", commit)
    given = Path(path)
    if not given.exists():
        raise ValueError(f"{printable(str(path))}: no such file or folder")
    if not (given.is_dir() or given.is_file()):
        raise ValueError(f"{printable(str(path))}: neither a file nor a folder")
    given = given.resolve()
    last = given.name
    if given.is_file() and archives.is_archive(last):
        last = archives.stem(last) or last
    return _Root(given, (*given.parts[1:-1], last or "root"), given.name)


def _root_names(roots: list[_Root]) -> list[str]:
    for depth in range(1, max(len(root.parts) for root in roots) + 1):
        names = ["/".join(root.parts[-depth:]) for root in roots]
        if len(set(names)) == len(names):
            break
    else:
        names = [root.sure if names.count(name) > 1 else name for root, name in zip(roots, names)]
    for name in names:
        if not _is_utf8(name):
            raise ValueError(f"{printable(name)}: this name is not UTF-8; rename it, or name the folder above it")
    return names


def _listed(root: _Root, root_name: str, entries: list[tuple], mtime_ns: int, terms: bool) -> tuple[list[SourceFile], list[Skipped]]:
    """What of a container is taken; `entries` are (name, member, size, reason to leave it out or None)."""
    files: list[SourceFile] = []
    skipped: dict[Skipped, None] = {}  # an excluded folder is met with each of its files
    folders: dict[str, Skipped | None] = {"": None}
    for below, member, size, reason in entries:
        if len(below) > _LONGEST_NAME:
            below, reason = below[:_SHOWN] + "…", f"name too long: {len(below):,} characters, more than {_LONGEST_NAME:,}"
        name = f"{root_name}/{below}"
        shut = None if reason else _shut(below.rpartition("/")[0], root_name, folders)
        if shut is None:
            if size > archives.LARGEST_MEMBER:
                reason = reason or f"too large: {size:,} bytes, more than {archives.LARGEST_MEMBER:,} for a member"
            reason = reason or _why_not_name(below, terms)
            if reason is None:
                files.append(SourceFile(str(root.path), name, size, mtime_ns, member, root_name))
                continue
            shut = Skipped(printable(name), printable(reason))
        skipped[shut] = None
    return files, list(skipped)


def _shut(folder: str, root_name: str, known: dict[str, Skipped | None]) -> Skipped | None:
    """The outermost folder on the way to this one, itself included, that is not entered."""
    way = []
    while folder not in known:
        way.append(folder)
        folder = folder.rpartition("/")[0]
    for inner in reversed(way):
        above = known[inner.rpartition("/")[0]]
        reason = None if above else excluded_folder(inner)
        known[inner] = Skipped(printable(f"{root_name}/{inner}/"), reason) if reason else above
    return known[way[0] if way else folder]


def _walk(root: Path, root_name: str, terms: bool, gitignore: bool) -> tuple[list[SourceFile], list[Skipped]]:
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    # A folder waits with its path below the root ("" or ending in "/") and the ignore rules from the root down to it.
    waiting: list[tuple[str, Rules]] = [("", ())]
    while waiting:
        folder, rules = waiting.pop()
        try:
            with os.scandir(root / folder) as scan:
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
            names = {entry.name: entry for entry in entries}
            ignore = names.get(".gitignore")
            if gitignore and ignore and ignore.is_file(follow_symlinks=False):
                rules = (*rules, (folder, patterns_of(Path(ignore.path))))
        except OSError as error:
            skipped.append(Skipped(f"{root_name}/{folder}", f"unreadable: {error.strerror}"))
            continue
        if folder and ".ingest.json" in names:
            continue
        if folder and not names.keys().isdisjoint(("pyvenv.cfg", "conda-meta")):
            skipped.append(Skipped(f"{root_name}/{folder}", "excluded folder: virtual environment"))
            continue
        for entry in entries:
            below = folder + entry.name
            name = f"{root_name}/{below}"
            is_folder = entry.is_dir(follow_symlinks=False)
            reason = _why_not(entry, below, is_folder, root, rules, terms)
            if reason:
                skipped.append(Skipped(printable(name) + "/" * is_folder, reason))
            elif is_folder:
                waiting.append((below + "/", rules))
            else:
                status = entry.stat(follow_symlinks=False)
                files.append(SourceFile(entry.path, name, status.st_size, status.st_mtime_ns))
    repositories = _repositories(root)
    return [replace(file, collection=_collection(file.name, root_name, repositories)) for file in files], skipped


def _repositories(root: Path) -> set[str]:
    """The work trees directly below a folder that is none itself."""
    if git.is_repository(root):
        return set()
    return {entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False) and git.is_repository(Path(entry.path))}


def _collection(name: str, root_name: str, repositories: set[str]) -> str:
    first, slash, _ = name.removeprefix(root_name + "/").partition("/")
    return f"{root_name}/{first}" if slash and first in repositories else root_name


def _why_not(entry: os.DirEntry, below: str, is_folder: bool, root: Path, rules: Rules, terms: bool) -> str | None:
    if not _is_utf8(entry.name):
        return "name not UTF-8: rename it to have it read"
    if is_folder and (reason := excluded_folder(below)):
        return reason
    deciding = deciding_rule(below + "/" * is_folder, rules)
    if deciding is not None:
        return f"ignored: by {deciding}.gitignore"
    if entry.is_symlink():
        return f"symbolic link: {_where_to(entry.path, root)}"
    if is_folder:
        return None
    if not entry.is_file(follow_symlinks=False):
        return "not a regular file: a pipe, socket or device"
    return _why_not_name(below, terms)


def _where_to(link: str, root: Path) -> str:
    written = printable(os.readlink(link))
    if not os.path.exists(link):
        return f"to nothing ({written})"
    target = Path(os.path.realpath(link))
    if not target.is_relative_to(root):
        return f"out of the root ({written})"
    if Path(link).is_relative_to(target):
        return f"to a folder it stands in ({written})"
    return f"inside the root, where its target is found by itself ({written})"


def _why_not_name(below: str, terms: bool) -> str | None:
    if not _is_utf8(below):
        return "name not UTF-8: rename it to have it read"
    name = below.rpartition("/")[2]
    if terms and is_licence_file(name):
        return None
    if archives.is_archive(name):
        return "archive: inside another input; name it itself to have it read"
    return unwanted_name(below)


def _is_utf8(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)
