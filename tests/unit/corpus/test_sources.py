import os
import socket
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.sources import Unreadable, decode, find_code, licence, read_text, unwanted


def tree(root, files: dict[str, str | bytes]):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def names(found) -> list[str]:
    return [file.name for file in found[0]]


def reasons(found) -> dict[str, str]:
    return {entry.path: entry.reason for entry in found[1]}


def reason(data: bytes, name: str = "x.py") -> str:
    with pytest.raises(Unreadable) as error:
        decode(data, name)
    assert "\n" not in str(error.value)
    return str(error.value)


# Finding ------------------------------------------------------------------------------------------------------------


def test_sorted_named_by_root_and_everything_else_listed(tmp_path):
    files = {"b.py": "b", "a/z.c": "", "a-b/x.rs": "x", "Makefile": "m", "logo.png": "p", "data": "d"}
    root = tree(tmp_path / "repo", files)
    found = find_code([root])
    assert names(found) == ["repo/Makefile", "repo/a-b/x.rs", "repo/a/z.c", "repo/b.py"]
    file = found[0][2]
    assert file.path == str(root / "a/z.c") and file.size == 0 and file.mtime_ns == os.stat(file.path).st_mtime_ns
    assert reasons(found) == {
        "repo/data": "not a source file: no extension",
        "repo/logo.png": "not a source file: .png",
    }
    assert find_code([root]) == found


def test_excluded_folders_are_listed_once_and_can_be_named(tmp_path):
    inside = [".git", "__pycache__", "node_modules", "lib/site-packages", "env", "vendor"]
    root = tree(tmp_path / "r", {"a.py": "", **{f"{folder}/deep/x.py": "" for folder in inside}, "env/pyvenv.cfg": ""})
    found = find_code([root])
    assert names(found) == ["r/a.py"]
    assert reasons(found) == {
        "r/.git/": "excluded folder: version control",
        "r/__pycache__/": "excluded folder: cache",
        "r/env/": "excluded folder: virtual environment",
        "r/lib/site-packages/": "excluded folder: installed packages",
        "r/node_modules/": "excluded folder: installed packages",
        "r/vendor/": "excluded folder: vendored packages",
    }
    assert names(find_code([root / "vendor"])) == ["vendor/deep/x.py"]


def test_a_token_store_in_the_tree_changes_nothing(tmp_path):
    root = tree(tmp_path / "r", {"a.py": ""})
    before = find_code([root])
    tree(root, {"store/.ingest.json": "{}", "store/x.py": ""})
    assert find_code([root]) == before


def test_links_are_listed_and_never_followed(tmp_path):  # C6
    root = tree(tmp_path / "r", {"a/real.py": "x"})
    tree(tmp_path, {"outside/secret.py": "s"})
    targets = {
        "file.py": "real.py",
        "own": ".",
        "up": "..",
        "out": "../../outside",
        "out.py": "../../outside/secret.py",
        "none.py": "no/such",
        "self.py": "self.py",
    }
    for name, target in targets.items():
        os.symlink(target, root / "a" / name)
    found = find_code([root])
    assert names(found) == ["r/a/real.py"]
    assert reasons(found) == {
        "r/a/file.py": "symbolic link: inside the root, where its target is found by itself (real.py)",
        "r/a/own": "symbolic link: to a folder it stands in (.)",
        "r/a/up": "symbolic link: to a folder it stands in (..)",
        "r/a/out": "symbolic link: out of the root (../../outside)",
        "r/a/out.py": "symbolic link: out of the root (../../outside/secret.py)",
        "r/a/none.py": "symbolic link: to nothing (no/such)",
        "r/a/self.py": "symbolic link: to nothing (self.py)",
    }
    os.symlink(root, tmp_path / "alias")
    assert names(find_code([tmp_path / "alias"])) == ["r/a/real.py"]  # a link that the user names is what they mean


def test_a_name_that_is_not_utf8_is_listed_in_print(tmp_path):  # C7
    root = tree(tmp_path / "r", {"a.py": "", "naïve 👩‍🚀.py": ""})
    for name in (b"bad\xff.py", b"dir\xfe"):
        path = os.path.join(os.fsencode(root), name)
        os.mkdir(path) if name.startswith(b"dir") else open(path, "w").close()
    open(os.path.join(os.fsencode(root), b"dir\xfe", b"inner.py"), "w").close()
    found = find_code([root])
    assert names(found) == ["r/a.py", "r/naïve 👩‍🚀.py"]
    assert reasons(found) == {
        "r/bad\\xff.py": "name not UTF-8: rename it to have it read",
        "r/dir\\xfe/": "name not UTF-8: rename it to have it read",
    }
    with pytest.raises(ValueError, match=r"dir\\xfe: this name is not UTF-8"):
        find_code([os.fsdecode(os.path.join(os.fsencode(root), b"dir\xfe"))])


def test_pipes_and_sockets_are_not_opened(tmp_path):
    root = tree(tmp_path / "r", {"a.py": ""})
    os.mkfifo(root / "pipe.py")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s.py"))
        found = find_code([root])
    assert names(found) == ["r/a.py"]
    assert reasons(found) == dict.fromkeys(("r/pipe.py", "r/s.py"), "not a regular file: a pipe, socket or device")


def test_roots_of_one_name_are_told_apart_and_files_taken_once(tmp_path):
    tree(tmp_path, {"one/src/a.py": "1", "two/src/a.py": "2"})
    assert names(find_code([tmp_path / "one/src", tmp_path / "two/src"])) == ["one/src/a.py", "two/src/a.py"]
    found = find_code([tmp_path / "one", tmp_path / "one/src", tmp_path / "one/src/a.py", tmp_path / "one"])
    assert names(found) == ["one/src/a.py"]
    assert set(reasons(found).values()) == {"taken already: as one/src/a.py"}


def test_a_named_file_is_taken_whatever_its_extension(tmp_path):
    tree(tmp_path, {"notes.xyz": "n"})
    assert names(find_code([tmp_path / "notes.xyz"])) == ["notes.xyz"]


def test_inputs_without_source_are_refused_in_one_line(tmp_path):
    root = tree(tmp_path / "r", {"a.png": "", "b.png": "", "__pycache__/c.py": ""})
    (tmp_path / "empty").mkdir()
    cases = [
        ([tmp_path / "nowhere"], "nowhere: no such file or folder"),
        ([], "no input"),
        ([root], r"no source file in .*/r: 3 entries seen \(1 excluded folder, 2 not a source file\)"),
        ([tmp_path / "empty"], r"no source file in .*/empty: 0 entries seen \(an empty folder\)"),
        (["/dev/null"], "/dev/null: neither a file nor a folder"),
    ]
    for paths, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            find_code(paths)
        assert "\n" not in str(error.value)


def test_a_tree_deeper_than_the_recursion_limit(tmp_path):
    depth = 1200
    here = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("r", dir_fd=here)
    folder = os.open("r", os.O_RDONLY, dir_fd=here)
    for _ in range(depth):
        os.mkdir("d", dir_fd=folder)
        folder, old = os.open("d", os.O_RDONLY, dir_fd=folder), folder
        os.close(old)
    os.close(folder)
    tree(tmp_path / "r", {"a.py": ""})
    try:
        assert names(find_code([tmp_path / "r"])) == ["r/a.py"]
    finally:
        subprocess.run(["rm", "-r", tmp_path / "r"], check=True)  # shutil, which cleans up after a test, recurses


# .gitignore ---------------------------------------------------------------------------------------------------------

PATTERNS = st.sampled_from(
    "*.py !a.py a.py /a.py b/ b !b b/* b/** **/a.py b/c !b/c/ c/a.py *.o [ab].py ?.py \\!x.py # ! / \\ [z-a] b/**/a.py"
    " *  !*/ /b/c/ **/c/** d.py\\  a.py\\".split(" ")
)
FILES = ["a.py", "b/a.py", "b/c/a.py", "b/c/d.py", "c/a.py", "c/b/a.py", "d.py", "!x.py", "b/x.o.py", "c/c/c.py"]


@given(
    st.dictionaries(st.sampled_from(["", "b/", "b/c/", "c/"]), st.lists(PATTERNS, max_size=5), max_size=3),
    st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=60, deadline=None)
def test_ignored_as_git_ignores(tmp_path_factory, rules, newline):
    root = tree(tmp_path_factory.mktemp("git") / "r", dict.fromkeys(FILES, "") | {"z.rs": ""})
    tree(root, {folder + ".gitignore": newline.join(lines).encode() for folder, lines in rules.items()})
    git = ["git", "-c", "core.excludesFile=/dev/null", "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "-q", "."], cwd=root, check=True)
    listing = subprocess.run([*git, "ls-files", "-zo", "--exclude-standard"], cwd=root, capture_output=True, check=True)
    expected = sorted(n for n in listing.stdout.decode().split("\0") if n.endswith((".py", ".rs")))
    try:
        found = sorted(name.removeprefix("r/") for name in names(find_code([root])))
    except ValueError:
        found = []
    assert found == expected, rules


def test_an_ignored_folder_is_listed_with_the_file_that_says_so(tmp_path):
    root = tree(tmp_path / "r", {"a.py": "", "s/build/x.py": "", "s/b.py": "", "s/keep.py": ""})
    tree(root, {"s/.gitignore": b"\xef\xbb\xbfbuild/\n!keep.py\n*.py"})
    found = find_code([root])
    assert names(found) == ["r/a.py"]
    assert {p: r for p, r in reasons(found).items() if r.startswith("ignored")} == {
        "r/s/b.py": "ignored: by s/.gitignore",
        "r/s/build/": "ignored: by s/.gitignore",
        "r/s/keep.py": "ignored: by s/.gitignore",
    }


# Decoding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, encoding, text",
    [
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", "iso8859-1", "# -*- coding: latin-1 -*-\nx = 'é'\n"),
        (b"#!/bin/x\n# vim: set fileencoding=cp1252 :\n\x80", "cp1252", "#!/bin/x\n# vim: set fileencoding=cp1252 :\n€"),
        (b"# coding: utf-8-unix\n\xc3\xa9", "utf-8", "# coding: utf-8-unix\né"),
        (b"\xef\xbb\xbfx\r\n", "utf-8-sig", "x\r\n"),
        (b"\xef\xbb\xbf# coding: utf8\n", "utf-8-sig", "# coding: utf8\n"),
        (b"\xef\xbb\xbf\xef\xbb\xbfx", "utf-8-sig", "\ufeffx"),
        ("né\n".encode("utf-16"), "utf-16", "né\n"),
        (b"\xfe\xff" + "né\n".encode("utf-16-be"), "utf-16", "né\n"),
        (b"a\r\nb\rc\n\fno end", "utf-8", "a\r\nb\rc\n\fno end"),
        ("\ufffd is here".encode(), "utf-8", "\ufffd is here"),
        (b"", "utf-8", ""),
        (b"x = 1\n# coding: latin-1\n\xc3\xa9", "utf-8", "x = 1\n# coding: latin-1\né"),  # too late to count
    ],
)
def test_decoded_and_nothing_lost(data, encoding, text):  # C3, C4
    got = decode(data, "x.py")
    assert (got.text, got.encoding, got.source) == (text, encoding, data)
    assert data.decode(got.encoding) == text


def test_a_cookie_counts_only_where_the_language_has_cookies():
    data = b"# notes on encoding: latin-1\n\xc3\xa9"
    assert decode(data, "notes.md").text.endswith("é")
    assert decode(data, "notes.py").text.endswith("Ã©")


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"\xef\xbb\xbf# coding: latin-1\n", "contradiction: the byte order mark says utf-8-sig, the coding cookie iso8859-1"),
        ("# coding: utf-8\n".encode("utf-16"), "contradiction: the byte order mark says utf-16, the coding cookie utf-8"),
        (b"a = 1\0", "binary: NUL at position 5"),
        ("x".encode("utf-32"), "binary: NUL at position 0"),
        ("ab".encode("utf-16-le"), "binary: NUL at position 1"),
        (b"caf\xe9", "undecodable: not utf-8 at byte 3"),
        (b"\xef\xbb\xbfcaf\xe9", "undecodable: not utf-8-sig at byte"),
        (b"\xff\xfea", "undecodable: not utf-16 at byte"),
        ("\ud800".encode("utf-8", "surrogatepass"), "undecodable: not utf-8 at byte 0"),
        (b"# coding: no-such\n", "undecodable: the coding cookie names 'no-such'"),
        (b"# coding: rot13\n", "undecodable: the coding cookie names 'rot-13'"),
        (b"# coding: ascii\n\xe9", "undecodable: not ascii"),
        (b"# coding: unicode_escape\n\\ud800", "undecodable: not unicode-escape"),
        (b"# coding: unicode_escape\n\\x41", "doesn't give the same bytes back"),
    ],
)
def test_refused_with_the_reason(data, expected):
    assert expected in reason(data)


@given(st.binary(max_size=200) | st.text(max_size=80).map(lambda t: b"# coding: " + t.encode("utf-8", "replace")))
@settings(max_examples=400)
def test_any_bytes_become_text_that_gives_them_back_or_a_reason(data):
    try:
        got = decode(data, "x.py")
    except Unreadable as error:
        assert ":" in str(error)
        return
    got.text.encode("utf-8")
    assert got.text.count("\ufffd") <= data.count(b"\xef\xbf\xbd") + data.count(b"\xfd\xff") + data.count(b"\xff\xfd")
    if got.encoding not in ("utf-16",):
        assert got.text.encode(got.encoding) == data


def test_read_text_gives_the_systems_reason(tmp_path):
    with pytest.raises(Unreadable, match="unreadable: No such file or directory"):
        read_text(tmp_path / "gone.py")
    (tmp_path / "x.py").write_bytes(b"x\r\n")
    assert read_text(tmp_path / "x.py").text == "x\r\n"


# Unwanted -----------------------------------------------------------------------------------------------------------


def test_generated_and_minified_text():
    assert unwanted("x = 1\n" * 5000) is None
    assert unwanted("") is None
    assert unwanted("// Code generated by protoc. DO NOT EDIT.\npackage x\n") == "generated: line 1 says so"
    assert unwanted("\n# @" + "generated\n") == "generated: line 2 says so"
    assert unwanted("\n" * 20 + "# @" + "generated\n") is None
    assert unwanted("do not edit\ngenerated\n") is None
    assert unwanted("a\n" * 10 + "x" * 65_536) is None or "average" in unwanted("a\n" * 10 + "x" * 65_536)
    assert unwanted("a\n" * 1000 + "x" * 65_537) == "minified: a line of 65,537 characters, more than 65,536"
    assert unwanted(("y" * 600 + "\n") * 30) == "minified: 601 characters a line on average, more than 512"
    assert unwanted(("y" * 600 + "\n") * 20) is None  # a small text


def test_large_files_take_linear_time():  # C5
    def seconds(lines: int) -> float:
        data = b"#define REGISTER_NAME_OF_SOME_LENGTH 0x00000000\n" * lines
        start = time.process_time()
        assert unwanted(decode(data, "registers.h").text) is None
        return time.process_time() - start

    seconds(10_000)
    small, large = seconds(50_000), seconds(500_000)  # 2.4 MB and 24 MB
    assert large < 40 * small + 0.5
    start = time.process_time()
    assert unwanted(decode(b"x" * 1_000_000, "x.js").text).startswith("minified: a line of 1,000,000")
    assert time.process_time() - start < 1


def test_licence_is_the_declared_expression():
    assert licence("# SPDX-License-Identifier: MIT\n") == "MIT"
    assert licence("/* SPDX-License-Identifier: (GPL-2.0-only WITH Linux-syscall-note) OR MIT */\n") == (
        "(GPL-2.0-only WITH Linux-syscall-note) OR MIT"
    )
    assert licence("\n" * 5000 + "SPDX-License-Identifier: MIT") is None
    assert licence("All rights reserved.") is None
