"""Which files are source code that somebody wrote: rules by name, by folder and by content, each a row of a table.

After github/linguist, which decides what counts in a repository's language bar (its vendor.yml, generated.rb). Not
taken over from there, because they are somebody's work here: documentation, tests and their data, `tools/`, `debian/`.
What a rule leaves out is listed as `kind: rule`. A large file is no reason.
"""

from __future__ import annotations

import os
import re

SOURCE_EXTENSIONS = frozenset(
    ".py .pyi .pyx .pxd .rb .pl .pm .lua .tcl .r .jl .php "
    ".c .h .cc .cpp .cxx .hh .hpp .hxx .inl .cu .cuh .m .mm .asm .s "
    ".rs .go .zig .nim .d .v .sv .vhd .vhdl .f .f90 .f95 .for .ada .adb .ads .pas "
    ".java .kt .kts .scala .groovy .clj .cljs .cs .fs .fsi .vb .swift .dart "
    ".hs .ml .mli .elm .ex .exs .erl .hrl .lisp .el .scm .rkt .lean .coq .agda "
    ".js .jsx .mjs .cjs .ts .tsx .vue .svelte .html .css .scss .less "
    ".sh .bash .zsh .fish .ps1 .bat .awk .sql .graphql .proto .thrift .glsl .hlsl .wgsl .metal "
    ".dts .dtsi .l .ll .y .yy .g4 .ld .lds .cocci .cl .sol "
    ".cmake .mk .gradle .bzl .nix .tf .toml .yaml .yml .ini .cfg .md .rst .tex".split()
)
SOURCE_NAMES = frozenset(
    "Makefile makefile GNUmakefile CMakeLists.txt Dockerfile Containerfile Jenkinsfile Vagrantfile Rakefile Gemfile "
    "Justfile justfile BUILD WORKSPACE Kconfig Kbuild SConstruct SConscript meson.build configure.ac go.mod".split()
)
BINARY = frozenset(
    ".png .jpg .jpeg .gif .bmp .ico .webp .tif .tiff .psd .mp3 .mp4 .wav .ogg .flac .avi .mov .mkv .webm .ttf .otf .woff .woff2 .eot "
    ".pdf .doc .docx .xls .xlsx .ppt .pptx .odt .o .a .so .dll .dylib .exe .lib .obj .ko .class .jar .war .pyc .pyo .pyd .whl .wasm "
    ".bin .dat .db .sqlite .sqlite3 .npy .npz .pkl .pt .pth .onnx .safetensors .gguf .h5 .parquet .arrow .iso .img .dmg .deb .rpm "
    ".gz .bz2 .xz .zst .7z .rar .nib".split()
)

# A folder of this name, wherever it stands, is not entered.
FOLDERS = {
    **dict.fromkeys((".git", ".hg", ".svn"), "version control"),
    **dict.fromkeys(("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox", ".eggs"), "cache"),
    **dict.fromkeys(("node_modules", "site-packages", "dist-packages", "bower_components", "Pods", "Godeps"), "installed packages"),
    **dict.fromkeys(("vendor", "vendors", "_vendor", "third_party", "third-party", "thirdparty"), "vendored packages"),
    **dict.fromkeys(("3rdparty", "3rd_party", "3rd-party", "extern", "external"), "vendored packages"),
    **dict.fromkeys((".idea", ".vs", "xcuserdata", "__generated__"), "written by tools"),
}
_FOLDER_PATHS = (
    ("vendored packages", r"^(deps|[Dd]ependencies)$"),
    ("installed packages", r"(^|/)Carthage/Build$|(^|/)\.yarn/(releases|plugins|sdks|cache)$"),
    ("vendored packages", r"(^|/)(ace-builds|MathJax|extjs|tiny_mce|bootstrap-datepicker|admin_media)$"),
    ("vendored packages", r"(^|/)[Cc]ode[Mm]irror/(\d[\d.]*/)?(lib|mode|theme|addon|keymap|demo)$"),
    ("written by tools", r"(^|/)docs?/_?build$|(^|/)gradle/wrapper$"),
)

# kind, rule, and what of a path below the root it speaks of.
_NAME_RULES = (
    ("generated", "lock file", r"(^|/)(package-lock\.json|npm-shrinkwrap\.json|pnpm-lock\.yaml|go\.sum|[^/]+\.lock)$"),
    ("generated", "source map", r"\.(js|css|mjs)\.map$"),
    ("generated", "protocol buffers", r"(\.pb\.(go|h|cc|c|swift|rb|dart)|_pb2(_grpc)?\.pyi?|_pb\.(js|d\.ts|rb)|\.pb-c\.[ch])$"),
    ("generated", "Visual Studio designer", r"(?i)\.(designer\.(cs|vb)|feature\.cs)$"),
    ("generated", "Dart build", r"\.(g|freezed|mocks|gr)\.dart$"),
    ("generated", "Yarn loader", r"(^|/)\.pnp\.[cm]?js$"),
    ("generated", "Kubernetes code generator", r"(^|/)zz_generated\.[^/]*\.go$"),
    ("generated", "Zephir", r"\.zep\.(c|h|php)$"),
    ("generated", "autotools", r"(^|/)(configure|aclocal\.m4|(lt[a-z~]+|libtool)\.m4|ltmain\.sh|config\.(guess|sub)|install-sh|depcomp|missing)$"),
    ("minified", "by name", r"[.-]min\.(js|mjs|css)$"),
    ("vendored", "jQuery", r"(^|/)jquery([^/.]*|[-.]\d[\d.]*|[.-](ui|effects|fancybox|fileupload|validate|fn)[^/]*)\.(js|css)$"),
    ("vendored", "Bootstrap", r"(^|/)(custom\.)?bootstrap[^/.]*\.(js|css|less|scss)$"),
    ("vendored", "style sheet", r"(^|/)(font-?awesome|normalize|animate|foundation|fontello[^/]*|octicons)\.(css|less|scss)$"),
    ("vendored", "Prototype", r"(^|/)(prototype[^/]*|scriptaculous)\.js$"),
    ("vendored", "framework", r"(^|/)(angular|mootools|dojo|MochiKit|yui|yahoo|knockout|modernizr|cordova|react|ember|backbone|d3)([.-]v?\d[^/]*)?\.js$"),
    ("vendored", "editor", r"(^|/)(ckeditor|tiny_mce[^/.]*|shCore|shLegacy|shBrush[^/.]*)\.js$"),
    ("vendored", "library", r"(^|/)(html5shiv|underscore|lodash|moment|Chart|leaflet|raphael|fuelux)([.-]\d[^/]*)?\.js$"),
    ("vendored", "Visual Studio", r"(-vsdoc|\.intellisense)\.js$|(^|/)[Mm]icrosoft([Mm]vc)?([Aa]jax|[Vv]alidation)(\.debug)?\.js$"),
    ("vendored", "build tool", r"(^|/)(gradlew(\.bat)?|mvnw(\.cmd)?|erlang\.mk|cpplint\.py|ppport\.h)$"),
)  # fmt: skip

# rule, and what it looks for in the first lines. Each holds one of the words in _HINT, by which most files are done.
_CONTENT_RULES = (
    ("protocol buffers", r"generated by the protocol buffer compiler|this file was autogenerated by go-to-protobuf"),
    ("Thrift", r"autogenerated by (apache )?thrift compiler"),
    ("Cython", r"\A/\* generated by cython"),
    ("Go", r"^// code generated "),
    ("SWIG", r"automatically generated by swig"),
    ("Bison", r"^/\* a bison parser, made by"),
    ("flex", r"^/\* a lexical scanner generated by flex|^#define\s+flex_scanner"),
    ("JFlex", r"^/\* .*generated by (jflex|cup|grammarkit)|code was generated by (jflex|cup)"),
    ("ANTLR", r"^// (\$antlr|generated from .* by antlr)|^// .*generated by xtest"),
    ("Racc", r"^# this file is automatically generated by racc"),
    ("PEG.js", r"^[/* ]*generated by (peg\.js|peggy|jison)|^/\* parser generated by jison"),
    ("CoffeeScript", r"\A// generated by (coffeescript|livescript|icedcoffeescript)"),
    ("JNI", r"^/\* do not edit this file - it is machine generated"),
    ("gRPC", r"^// generated by the grpc"),
    ("roxygen2", r"^[#%] generated by roxygen2"),
    ("jOOQ", r"this (file|class) is generated by jooq"),
    ("Haxe", r"^// generated by haxe"),
    ("CMake", r"^# cmake generated file"),
    ("autoconf", r"^(#|dnl|/\*) ?.*generated (automatically )?(from \S+ )?by (gnu )?(autoconf|autoheader|automake|aclocal)"),
    ("Django", r"^# generated by django "),
    ("OpenAPI", r"generated by: https?://(github\.com/)?openapi-generator|^ ?[#*/]+ ?auto-generated by swagger"),
    ("Unity", r"^%tag !u! tag:unity3d"),
    ("web page", r"<meta name=\"generator\" |<!-- generated by (doxygen|javadoc)"),
    ("says so", r"@generated|generated.*do not (edit|modify)|do not (edit|modify).*generated"),
)  # fmt: skip
_HINT = re.compile(r"generat|bison|flex_scanner|unity3d|openapi|\$antlr")
_HEAD_LINES, _HEAD, _HEAD_LINE = 20, 1 << 14, 512

_SOURCE_MAP = re.compile(r"^/[*/][#@] ?source(Mapping)?URL=", re.M)
_LONGEST_LINE, _MEAN_LINE, _SMALL_TEXT = 65_536, 512, 16_384
_MEAN_STYLE_LINE, _SMALL_STYLE = 110, 4096  # of JavaScript and CSS: linguist's limit

_NAME_RULES = [(kind, rule, re.compile(pattern)) for kind, rule, pattern in _NAME_RULES]
_CONTENT_RULES = [(rule, re.compile(pattern, re.M)) for rule, pattern in _CONTENT_RULES]
_FOLDER_PATHS = [(rule, re.compile(pattern)) for rule, pattern in _FOLDER_PATHS]


def excluded_folder(below: str) -> str | None:
    """Why a folder, by its path below the root, is not entered, or None."""
    rule = FOLDERS.get(below.rpartition("/")[2])
    rule = rule or next((rule for rule, pattern in _FOLDER_PATHS if pattern.search(below)), None)
    return rule and f"excluded folder: {rule}"


def is_source_name(path: str) -> bool:
    """Whether a file's last part is the name of a source file, or ends like one."""
    name = path.rpartition("/")[2]
    return os.path.splitext(name)[1].lower() in SOURCE_EXTENSIONS or name in SOURCE_NAMES


def unwanted_name(below: str) -> str | None:
    """Why a file, by its path below the root, is no source file to keep, or None."""
    for kind, rule, pattern in _NAME_RULES:
        if pattern.search(below):
            return f"{kind}: {rule}"
    if is_source_name(below):
        return None
    extension = os.path.splitext(below)[1].lower()
    if extension in BINARY:
        return f"binary: {extension}"
    return f"not a source file: {extension or 'no extension'}"


def unwanted(text: str, name: str = "") -> str | None:
    """Why a readable text has no place in a corpus, as `kind: detail`, or None. Linear in the length."""
    head = "\n".join(line[:_HEAD_LINE] for line in text[:_HEAD].splitlines()[:_HEAD_LINES]).lower()
    if _HINT.search(head):
        for rule, pattern in _CONTENT_RULES:
            if found := pattern.search(head):
                return f"generated: {rule}, line {head.count(chr(10), 0, found.end()) + 1}"
    lines = text.splitlines()
    longest = max(map(len, lines), default=0)
    if longest > _LONGEST_LINE:
        return f"minified: a line of {longest:,} characters, more than {_LONGEST_LINE:,}"
    limit, small = _MEAN_LINE, _SMALL_TEXT
    if name.lower().endswith((".js", ".mjs", ".css")):
        limit, small = _MEAN_STYLE_LINE, _SMALL_STYLE
        if _SOURCE_MAP.search(text, max(0, len(text) - 1024)):
            return "generated: it names its source map"
    if len(text) > small and len(text) > limit * len(lines):
        return f"minified: {len(text) // len(lines):,} characters a line on average, more than {limit}"
    return None
