"""What a source file refers to: its imports and includes, read by pattern, and the files of the repository they mean.

`links` reads one file and needs no other, so it runs beside the reading of files; `Repository.find` knows only names.
A link is a target as its language writes it, with `/` between the parts:

    C, C++            `"x.h`  beside the file first      `<linux/x.h`  on an include path
    Python            `a/b/c`                            `./c`, `../c`  relative to the file
    JavaScript, TS    `./c`                              `app/c`  from a root
    Java, Kotlin      `com/x/Foo`                        `com/x/*`  a package
    Go                `host/owner/repo/pkg`
    Rust              `./c`  a module of this one        `crate/a/b`

Include paths and module roots aren't known, so a target is looked for in each folder above the file (and in `include`
there), the nearest first, then anywhere in the repository by the end of its path: the shortest such path, then the first
by name. Text in comments and strings may be taken for an import; the order of files, for which this is, stands that.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterator

_C = frozenset(".c .h .cc .cpp .cxx .hh .hpp .hxx .inl .cu .cuh .m .mm .s .asm".split())
_PYTHON = frozenset(".py .pyi .pyx .pxd".split())
_SCRIPT = frozenset(".js .jsx .mjs .cjs .ts .tsx .vue .svelte".split())
_JVM = frozenset(".java .kt .kts .scala .groovy".split())
LANGUAGE = {
    **dict.fromkeys(_C, "c"), **dict.fromkeys(_PYTHON, "python"), **dict.fromkeys(_SCRIPT, "script"),
    **dict.fromkeys(_JVM, "jvm"), ".go": "go", ".rs": "rust",
}  # fmt: skip
_ENDINGS = {
    "python": (".py", ".pyi", ".pyx", ".pxd", "/__init__.py", "/__init__.pyi"),
    "script": ("", *(end for stem in ("", "/index") for end in (f"{stem}{e}" for e in (".ts", ".tsx", ".d.ts", ".js", ".jsx", ".mjs", ".cjs", ".vue", ".svelte")))),
    "jvm": (".java", ".kt", ".scala", ".groovy"),
    "rust": (".rs", "/mod.rs"),
}  # fmt: skip
_MOST_ENDS = 12  # parts of a path by whose end a file is found: keeps the index linear for paths of any depth

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*(["<][^">\n]{1,400})[">]', re.M)
_IMPORT = re.compile(r"^[ \t]*(?:c?import)[ \t]+([\w. \t,]+)", re.M)
_FROM = re.compile(r"^[ \t]*from[ \t]+(\.*[\w.]*)[ \t]+c?import[ \t]+(?:\(([^()]*)\)|([^\n]*))", re.M)
_MODULE = re.compile(r"""(?:\bfrom|\bimport|\brequire[ \t]*\(|\bimport[ \t]*\()[ \t]*(['"])([^'"\n]{1,400})\1""")
_JVM_IMPORT = re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?(\w+(?:\.\w+)*(?:\.\*)?)", re.M)
_GO_IMPORT = re.compile(r'^[ \t]*import[ \t]+(?:\(([^()]*)\)|(?:[\w.]+[ \t]+)?("[^"\n]+"))', re.M)
_QUOTED = re.compile(r'"([^"\n]+)"')
_RUST_MOD = re.compile(r"^[ \t]*(?:pub(?:\([^()\n]*\))?[ \t]+)?mod[ \t]+(\w+)[ \t]*;", re.M)
_RUST_USE = re.compile(r"^[ \t]*(?:pub(?:\([^()\n]*\))?[ \t]+)?use[ \t]+(crate|self|super)((?:::\w+)*)(?:::\{([^{};]*))?", re.M)
_WORD = re.compile(r"\w+")


def language(name: str) -> str | None:
    """The language whose imports are understood: c, python, script, jvm, go, rust; None for any other file."""
    _, dot, ending = name.rpartition(".")
    return LANGUAGE.get(dot + ending.lower())


def links(name: str, text: str) -> list[str]:
    """The targets that the file `name` refers to, each once, in the order of the text. O(length)."""
    found = _READERS.get(language(name))
    return list(dict.fromkeys(found(name, text))) if found else []


def _c(name: str, text: str) -> Iterator[str]:
    yield from _INCLUDE.findall(text)


def _python(name: str, text: str) -> Iterator[str]:
    for names in _IMPORT.findall(text):
        for part in names.split(","):
            if words := part.split():
                yield words[0].replace(".", "/")
    for module, inside, rest in _FROM.findall(text):
        dots = len(module) - len(module.lstrip("."))
        base = {0: "", 1: "./"}.get(dots, "../" * (dots - 1)) + module[dots:].replace(".", "/")
        if module[dots:]:
            yield base
        for part in re.sub(r"#[^\n]*", "", inside or rest).split(","):
            if (words := part.split()) and _WORD.fullmatch(words[0]):
                yield posixpath.join(base, words[0])


def _script(name: str, text: str) -> Iterator[str]:
    for _, target in _MODULE.findall(text):
        yield target


def _jvm(name: str, text: str) -> Iterator[str]:
    for target in _JVM_IMPORT.findall(text):
        yield re.sub(r"/_$", "/*", target.replace(".", "/"))


def _go(name: str, text: str) -> Iterator[str]:
    for several, one in _GO_IMPORT.findall(text):
        yield from _QUOTED.findall(several or one)


def _rust(name: str, text: str) -> Iterator[str]:
    stem = posixpath.basename(name)[: -len(".rs")]
    inner = "./" if stem in ("mod", "lib", "main") else f"./{stem}/"
    for module in _RUST_MOD.findall(text):
        yield inner + module
    for root, path, several in _RUST_USE.findall(text):
        start = {"crate": "crate/", "self": inner, "super": "../" if inner == "./" else "./"}[root]
        parts = path.split("::")[1:]
        while parts[:1] == ["super"]:
            start, parts = posixpath.normpath(start + "..") + "/", parts[1:]
        for last in [part.split() for part in several.split(",")] if several else [[]]:
            yield start + "/".join(parts + last[:1]).replace("::", "/")


_READERS = {"c": _c, "python": _python, "script": _script, "jvm": _jvm, "go": _go, "rust": _rust}


class Repository:
    """The names of a repository's files, `/` between the parts; finds which of them a link means.

    `find(name, link)` gives a file, or a folder (its name with a closing `/`) where the language imports those, or None.
    """

    def __init__(self, names: list[str]):
        self._files = set(names)
        self._folders: dict[str, list[str]] = {}
        self._by_end: dict[str, str] = {}
        self._found: dict[tuple[str, str, str | None], str | None] = {}
        for name in sorted(names, key=lambda name: (name.count("/"), name)):
            folder, base = posixpath.split(name)
            self._folders.setdefault(folder, []).append(name)
            parts = name.split("/")
            for depth in range(1, min(len(parts), _MOST_ENDS) + 1):
                self._by_end.setdefault("/".join(parts[-depth:]), name)

    def files_in(self, folder: str) -> list[str]:
        """The files directly in a folder that `find` gave, by name."""
        return self._folders[folder[:-1]]

    def find(self, name: str, link: str) -> str | None:
        """What `link` of the file `name` means; the file itself where it refers to itself."""
        kind = language(name)
        folder = name.rpartition("/")[0]
        key = (folder, link, kind)
        if key not in self._found:
            self._found[key] = _FINDERS[kind](self, folder, link) if kind else None
        return self._found[key]

    def _c(self, folder: str, link: str) -> str | None:
        target = _plain(link[1:].strip())
        if link[0] == '"' and (beside := _plain(f"{folder}/{target}" if folder else target)) in self._files:
            return beside
        if target.startswith(("/", "..")):
            return self._by_end.get(target.lstrip("./"))
        for above in _above(folder):
            for path in (f"{above}{target}", f"{above}include/{target}"):
                if path in self._files:
                    return path
        return self._by_end.get(target)

    def _python(self, folder: str, link: str) -> str | None:
        # `from a import b` names a module b of a, or a name that a defines.
        for target in (link, posixpath.dirname(link)):
            if link.startswith("."):
                found = self._with_ending(posixpath.normpath(posixpath.join(folder, target)), "python") if target else None
            else:
                found = self._absolute(folder, target) if target else None
            if found:
                return found
        return None

    def _absolute(self, folder: str, target: str) -> str | None:
        for above in _above(folder):
            if not self._is_package(above) and (found := self._with_ending(above + target, "python")):
                return found
        for ending in _ENDINGS["python"]:
            found = self._by_end.get(target + ending)
            if found and not self._is_package(found[: -len(target + ending)]):
                return found
        return None

    def _is_package(self, above: str) -> bool:
        return f"{above}__init__.py" in self._files

    def _script(self, folder: str, link: str) -> str | None:
        if link.startswith("."):
            return self._script_file(posixpath.normpath(posixpath.join(folder, link)))
        return next(filter(None, (self._script_file(above + link.removeprefix("@/")) for above in _above(folder))), None)

    def _script_file(self, target: str) -> str | None:
        # TypeScript imports ./x.js and means x.ts.
        stem = re.sub(r"\.[cm]?jsx?$", "", target)
        return self._with_ending(target, "script") or (self._with_ending(stem, "script") if stem != target else None)

    def _jvm(self, folder: str, link: str) -> str | None:
        if link.endswith("/*"):
            package = link[:-2]
            tops = [posixpath.join(above, package) for above in _above(folder)]
            return next((f"{top}/" for top in tops if top in self._folders), None) or self._with_end(package, "jvm")
        # `import static a.B.method` and inner classes: the class is one part up.
        return self._with_end(link, "jvm") or self._with_end(posixpath.dirname(link), "jvm")

    def _go(self, folder: str, link: str) -> str | None:
        # The module's own path, host/owner/repo, stands in front of the folder.
        parts = link.split("/")
        for first in range(len(parts) if "." in parts[0] else min(2, len(parts))):
            target = "/".join(parts[first:])
            for above in _above(folder):
                if any(file.endswith(".go") for file in self._folders.get(above + target, ())):
                    return f"{above}{target}/"
        return None

    def _rust(self, folder: str, link: str) -> str | None:
        root = folder
        if link.startswith("crate/"):
            above = [a for a in _above(folder) if f"{a}lib.rs" in self._files or f"{a}main.rs" in self._files]
            if not above:
                return None
            root, link = above[0], link.removeprefix("crate/")
        path = posixpath.normpath(posixpath.join(root, link))
        while path not in ("", ".", root.rstrip("/")):  # the last parts are what a module defines
            if found := self._with_ending(path, "rust"):
                return found
            path = posixpath.dirname(path)
        return None

    def _with_ending(self, target: str, kind: str) -> str | None:
        return next((target + ending for ending in _ENDINGS[kind] if target + ending in self._files), None)

    def _with_end(self, target: str, kind: str) -> str | None:
        return next((self._by_end[target + e] for e in _ENDINGS[kind] if target + e in self._by_end), None) if target else None


_FINDERS = {kind: getattr(Repository, f"_{kind}") for kind in ("c", "python", "script", "jvm", "go", "rust")}


@functools.lru_cache(maxsize=1 << 16)
def _above(folder: str) -> tuple[str, ...]:
    """The folder and those above it, each with a closing `/`, the root as the empty string last."""
    found = []
    while folder:
        found.append(f"{folder}/")
        folder = folder.rpartition("/")[0]
    return (*found, "")


def _plain(path: str) -> str:
    return posixpath.normpath(path) if "./" in path or "//" in path else path
