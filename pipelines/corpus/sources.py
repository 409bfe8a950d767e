"""Which files make up a code corpus, and how their bytes become text.

**Finding.** Folders are walked in sorted order. Not entered, but listed: folders that `.gitignore` files at or below
the given folder exclude (nested ones honoured, as git applies them; git's per-user and per-clone excludes are not,
because they differ between machines), version control, caches, installed and vendored packages, virtual
environments. To take such a folder nevertheless, name it itself. Token stores are passed over in silence: the same
input must give the same list before and after its store came to stand in it. Symbolic links are never followed
below a given folder: a target inside is found by its own path, and one outside is not part of the corpus. A file
named on its own is taken whatever its extension. Every other file that is left out is listed with its reason.

**Decoding**, strict and in this order:

1. a UTF-8 byte order mark: UTF-8, and a coding cookie that says otherwise is a contradiction → skipped;
2. a UTF-16 byte order mark: UTF-16, same rule. UTF-16 without a mark is not guessed;
3. a NUL byte: binary → skipped;
4. a coding cookie as in PEP 263, in Python and Ruby files: that codec, if it gives the same bytes back;
5. otherwise UTF-8.

What none of these reads without error is skipped; U+FFFD appears only where the file itself has it. Text is kept as
it stands: line ends, form feeds, a missing last newline. A byte order mark is a property of the encoding
(`utf-8-sig`, `utf-16`) and not part of the text.

**Unwanted**, by content: a file that says in its first twenty lines that it was generated (`@generated`, or
"generated" and "do not edit" on one line), and minified text: a line of more than 65,536 characters, or more than
512 a line on average in a text over 16,384. A large file is no reason.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec, RegexPattern

_EXTENSIONS = frozenset(
    ".py .pyi .pyx .pxd .rb .pl .pm .lua .tcl .r .jl .php "
    ".c .h .cc .cpp .cxx .hh .hpp .hxx .inl .cu .cuh .m .mm .asm .s "
    ".rs .go .zig .nim .d .v .sv .vhd .vhdl .f .f90 .f95 .for .ada .adb .ads .pas "
    ".java .kt .kts .scala .groovy .clj .cljs .cs .fs .fsi .vb .swift .dart "
    ".hs .ml .mli .elm .ex .exs .erl .hrl .lisp .el .scm .rkt .lean .coq .agda "
    ".js .jsx .mjs .cjs .ts .tsx .vue .svelte .html .css .scss .less "
    ".sh .bash .zsh .fish .ps1 .bat .awk .sql .graphql .proto .thrift .glsl .hlsl .wgsl .metal "
    ".cmake .mk .gradle .bzl .nix .tf .toml .yaml .yml .ini .cfg .md .rst .tex".split()
)
_NAMES = frozenset(
    "Makefile makefile GNUmakefile CMakeLists.txt Dockerfile Containerfile Jenkinsfile Vagrantfile Rakefile Gemfile "
    "Justfile justfile BUILD WORKSPACE Kconfig Kbuild SConstruct SConscript meson.build configure.ac go.mod".split()
)
_EXCLUDED_FOLDERS = {
    **dict.fromkeys((".git", ".hg", ".svn"), "version control"),
    **dict.fromkeys(("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox", ".eggs"), "cache"),
    **dict.fromkeys(("node_modules", "site-packages", "dist-packages", "bower_components"), "installed packages"),
    **dict.fromkeys(("vendor", "_vendor", "third_party"), "vendored packages"),
}

_COOKIE = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*([-_.a-zA-Z0-9]+)")
_BLANK_OR_COMMENT = re.compile(r"[ \t\f]*(?:#.*)?$")
_COOKIE_EXTENSIONS = (".py", ".pyi", ".pyx", ".pxd", ".rb")
_LICENCE = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+()\- ]*[\w.+)])")
# The `.gitignore` files on the way to a folder, outermost first: where each stands below the root, and its patterns.
_Rules = tuple[tuple[str, list[RegexPattern]], ...]
_LONGEST_LINE, _MEAN_LINE, _SMALL_TEXT = 65_536, 512, 16_384


@dataclass(frozen=True)
class SourceFile:
    """An input: absolute path; name in the corpus, `root/relative/path` with `/`; bytes; modification time; and the
    `member` of the container `path` that it is, None where it is the whole file."""

    path: str
    name: str
    size: int
    mtime_ns: int
    member: str | None = None


@dataclass(frozen=True)
class Skipped:
    """A file or folder (with a `/` at the end) that was left out. The reason's part before the colon is its kind."""

    path: str
    reason: str

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


@dataclass(frozen=True)
class Text:
    """`text == source.decode(encoding)`; the source is the file's bytes, so nothing of it is lost."""

    text: str
    encoding: str
    source: bytes


class Unreadable(Exception):
    """A file whose bytes don't become text; the message is the reason, `kind: detail`."""


def find_code(paths) -> tuple[list[SourceFile], list[Skipped]]:
    """Source files under `paths` (files or folders), sorted by name, and all that was left out.

    A name begins with the name of its root folder; roots of the same name get as many parent folders as set them
    apart. A file under two roots is taken once. Raises ValueError, in one line, for a path that doesn't exist and
    for an input without a single source file.
    """
    roots = list(dict.fromkeys(_root(path) for path in paths))
    if not roots:
        raise ValueError("no input: name at least one file or folder")
    files: dict[str, SourceFile] = {}
    skipped: list[Skipped] = []
    for root, name in zip(roots, _root_names(roots)):
        found, left_out = _walk(root, name) if root.is_dir() else ([_source_file(root, name)], [])
        skipped += left_out
        for file in found:
            if file.path in files:
                skipped.append(Skipped(file.name, f"taken already: as {files[file.path].name}"))
            else:
                files[file.path] = file
    if not files:
        kinds = [entry.kind for entry in skipped]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        inputs = ", ".join(printable(str(root)) for root in roots)
        raise ValueError(f"no source file in {inputs}: {len(skipped)} entries seen ({counts or 'an empty folder'})")
    return sorted(files.values(), key=lambda file: file.name), sorted(skipped, key=lambda s: (s.path, s.reason))


@contextlib.contextmanager
def reading() -> Iterator[Callable[[SourceFile], bytes]]:
    """Yields the function that gives an input's bytes; it raises Unreadable with the reason."""

    def read(file: SourceFile) -> bytes:
        try:
            return Path(file.path).read_bytes()
        except OSError as error:
            raise Unreadable(f"unreadable: {error.strerror}") from error

    yield read


def read_text(path) -> Text:
    """The text of a file, by the policy at the top. Raises Unreadable with the reason."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise Unreadable(f"unreadable: {error.strerror}") from error
    return decode(data, str(path))


def decode(data: bytes, name: str) -> Text:
    """The text of a file's bytes; `name` tells by its extension whether a coding cookie counts. Raises Unreadable."""
    has_cookie = name.lower().endswith(_COOKIE_EXTENSIONS)
    if data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        encoding = "utf-8-sig" if data.startswith(b"\xef") else "utf-16"
        text = _strictly(data, encoding)
        _refuse_nul(text.find("\0"))
        declared = _cookie(text) if has_cookie else None
        if declared and not declared.startswith(encoding.removesuffix("-sig")):
            raise Unreadable(f"contradiction: the byte order mark says {encoding}, the coding cookie {declared}")
        return Text(text, encoding, data)
    _refuse_nul(data.find(b"\0"))
    declared = _cookie(data[:8192].decode("latin-1")) if has_cookie else None
    if declared and declared not in ("utf-8", "utf-8-sig"):
        return Text(_by_cookie(data, declared), declared, data)
    return Text(_strictly(data, "utf-8"), "utf-8", data)


def unwanted(text: str) -> str | None:
    """Why a readable text has no place in a corpus, as `kind: detail`, or None."""
    for number, line in enumerate(text[: 1 << 14].splitlines()[:20], start=1):
        lower = line.lower()
        if "@generated" in lower or ("generated" in lower and "do not edit" in lower):
            return f"generated: line {number} says so"
    lines = text.splitlines()
    longest = max(map(len, lines), default=0)
    if longest > _LONGEST_LINE:
        return f"minified: a line of {longest:,} characters, more than {_LONGEST_LINE:,}"
    if len(text) > _SMALL_TEXT and len(text) > _MEAN_LINE * len(lines):
        return f"minified: {len(text) // len(lines):,} characters a line on average, more than {_MEAN_LINE}"
    return None


def licence(text: str) -> str | None:
    """The SPDX expression in the first 4,096 characters, or None."""
    found = _LICENCE.search(text, 0, 4096)
    return found and found[1]


def printable(name: str) -> str:
    """A file name as text that any file or terminal takes: bytes that aren't UTF-8 appear as `\\xff`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _root(path) -> Path:
    root = Path(path)
    if not root.exists():
        raise ValueError(f"{printable(str(path))}: no such file or folder")
    if not (root.is_dir() or root.is_file()):
        raise ValueError(f"{printable(str(path))}: neither a file nor a folder")
    return root.resolve()


def _root_names(roots: list[Path]) -> list[str]:
    parts = [root.parts[1:] or ("root",) for root in roots]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    for name in names:
        if not _is_utf8(name):
            raise ValueError(f"{printable(name)}: this name is not UTF-8; rename it, or name the folder above it")
    return names


def _source_file(path, name: str) -> SourceFile:
    status = os.stat(path)
    return SourceFile(str(path), name, status.st_size, status.st_mtime_ns)


def _walk(root: Path, root_name: str) -> tuple[list[SourceFile], list[Skipped]]:
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    # A folder waits with its path below the root ("" or ending in "/") and the ignore rules from the root down to it.
    waiting: list[tuple[str, _Rules]] = [("", ())]
    while waiting:
        folder, rules = waiting.pop()
        try:
            with os.scandir(root / folder) as scan:
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            skipped.append(Skipped(f"{root_name}/{folder}", f"unreadable: {error.strerror}"))
            continue
        names = {entry.name for entry in entries}
        if folder and ".ingest.json" in names:
            continue
        if folder and not names.isdisjoint(("pyvenv.cfg", "conda-meta")):
            skipped.append(Skipped(f"{root_name}/{folder}", "excluded folder: virtual environment"))
            continue
        if ".gitignore" in names and not os.path.islink(root / folder / ".gitignore"):
            rules = (*rules, (folder, _ignore_patterns(root / folder / ".gitignore")))
        for entry in entries:
            below = folder + entry.name
            name = f"{root_name}/{below}"
            is_folder = entry.is_dir(follow_symlinks=False)
            reason = _why_not(entry, below, is_folder, root, rules)
            if reason:
                skipped.append(Skipped(printable(name) + "/" * is_folder, reason))
            elif is_folder:
                waiting.append((below + "/", rules))
            else:
                files.append(_source_file(entry.path, name))
    return files, skipped


def _why_not(entry: os.DirEntry, below: str, is_folder: bool, root: Path, rules: _Rules) -> str | None:
    if not _is_utf8(entry.name):
        return "name not UTF-8: rename it to have it read"
    if is_folder and entry.name in _EXCLUDED_FOLDERS:
        return f"excluded folder: {_EXCLUDED_FOLDERS[entry.name]}"
    deciding = _deciding_rule(below + "/" * is_folder, rules)
    if deciding is not None:
        return f"ignored: by {deciding}.gitignore"
    if entry.is_symlink():
        return f"symbolic link: {_where_to(entry.path, root)}"
    if is_folder:
        return None
    if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
        return "not a regular file: a pipe, socket or device"
    extension = os.path.splitext(entry.name)[1].lower()
    if extension not in _EXTENSIONS and entry.name not in _NAMES:
        return f"not a source file: {extension or 'no extension'}"
    return None


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


def _deciding_rule(below: str, rules: _Rules) -> str | None:
    """The folder whose `.gitignore` excludes this entry, or None. The last pattern of the deepest file decides."""
    for base, patterns in reversed(rules):
        for pattern in reversed(patterns):
            if _matches_itself(pattern.regex, below.removeprefix(base)):
                return base if pattern.include else None
    return None


def _matches_itself(regex: re.Pattern, path: str) -> bool:
    # pathspec lets a pattern for a folder match all inside it. The walk has asked about the folders on the way
    # already, and to git a pattern speaks of the entry alone: with "*.py" above, "!*/" brings back no file. The two
    # short expressions are pathspec's for "everything" and "every folder".
    if regex.pattern == ".":
        return True
    if regex.pattern == "(?P<ps_d>/)":
        return path.endswith("/")
    return regex.fullmatch(path) is not None


def _ignore_patterns(path: Path) -> list[RegexPattern]:
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    patterns = []
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        # "c/**" is all inside c, not c itself. For pathspec it is c, too, but "c/**/*" is the same to both.
        line = line + "/*" if line.endswith("/**") else line
        try:
            patterns += GitIgnoreSpec.from_lines([line]).patterns
        except (ValueError, re.error):
            continue  # git, too, passes over a pattern that can match nothing, such as "!" or "[z-a]"
    return [pattern for pattern in patterns if pattern.regex is not None]


def _is_utf8(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _refuse_nul(at: int) -> None:
    if at >= 0:
        raise Unreadable(f"binary: NUL at position {at:,}")


def _strictly(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise Unreadable(f"undecodable: not {encoding} at byte {error.start:,}") from error


def _by_cookie(data: bytes, declared: str) -> str:
    try:
        text = data.decode(declared)
        same = text.encode(declared) == data
        text.encode("utf-8")  # some codecs give lone surrogates, which no tokenizer takes
    except LookupError as error:
        raise Unreadable(f"undecodable: the coding cookie names {declared!r}, no text encoding here") from error
    except ValueError as error:
        raise Unreadable(f"undecodable: not {declared}, which the coding cookie declares ({error})") from error
    if not same:
        raise Unreadable(f"undecodable: {declared}, which the coding cookie declares, doesn't give the same bytes back")
    return text


def _cookie(text: str) -> str | None:
    """The codec that one of the first two lines declares, the second only after a blank or comment line.

    Python's own name for it (`latin-1` → `iso8859-1`), or the name as written where Python knows none.
    """
    first, second, *_ = [*re.split(r"\r\n|\r|\n", text[:8192], maxsplit=2), "", ""]
    found = _COOKIE.match(first) or (_BLANK_OR_COMMENT.match(first) and _COOKIE.match(second))
    if not found:
        return None
    written = re.sub(r"-(unix|dos|mac)$", "", found[1].lower())  # Emacs adds the line ends to the name
    try:
        return codecs.lookup(written).name
    except LookupError:
        return written
