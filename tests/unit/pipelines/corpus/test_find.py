import os
import socket
import subprocess

import pytest

from pipelines.corpus.find import find_code
from tests.unit.pipelines.corpus.trees import names, reasons, tree


def test_sorted_named_by_root_and_everything_else_listed(tmp_path):
    files = {"b.py": "b", "a/z.c": "", "a-b/x.rs": "x", "Makefile": "m", "logo.png": "p", "data": "d"}
    root = tree(tmp_path / "repo", files)
    found = find_code([root])
    assert names(found) == ["repo/Makefile", "repo/a-b/x.rs", "repo/a/z.c", "repo/b.py"]
    file = found[0][2]
    assert file.path == str(root / "a/z.c") and file.size == 0 and file.mtime_ns == os.stat(file.path).st_mtime_ns
    assert reasons(found) == {
        "repo/data": "not a source file: no extension",
        "repo/logo.png": "binary: .png",
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
        ([root], r"no source file in .*/r: 3 entries seen \(2 binary, 1 excluded folder\)"),
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


def test_what_may_not_be_read_is_listed(tmp_path):
    root = tree(tmp_path / "r", {"a.py": "", "s/b.py": "", "t/.gitignore/x": "", "t/c.py": ""})
    os.mkfifo(root / "s" / ".gitignore")  # which must not be waited for
    assert names(find_code([root])) == ["r/a.py", "r/s/b.py", "r/t/c.py"]


def test_a_tree_that_excludes_itself(tmp_path):
    root = tree(tmp_path / "r", {"a.py": "", ".gitignore": "/*\n!/debian/\n"})
    with pytest.raises(ValueError, match=r"2 entries seen \(2 ignored\); --no-gitignore takes what .gitignore files exclude"):
        find_code([root])
    assert names(find_code([root], gitignore=False)) == ["r/a.py"]


# Repositories -------------------------------------------------------------------------------------------------------


def collections(found) -> dict[str, str]:
    return {file.name: file.collection for file in found[0]}


def test_a_path_is_a_repository_and_a_folder_of_work_trees_is_as_many(tmp_path):
    tree(tmp_path / "src", {"one/a.py": "", "one/deep/b.py": "", "two/.git/x": "", "two/c.py": "", "loose.py": "", "notes/d.py": ""})
    assert set(collections(find_code([tmp_path / "src" / "one"])).values()) == {"one"}
    (tmp_path / "src" / "one" / ".git").write_text("gitdir: elsewhere")
    assert collections(find_code([tmp_path / "src"])) == {
        "src/loose.py": "src", "src/notes/d.py": "src", "src/one/a.py": "src/one", "src/one/deep/b.py": "src/one", "src/two/c.py": "src/two",
    }  # fmt: skip
    (tmp_path / "src" / ".git").mkdir()  # then what is below are its submodules
    assert set(collections(find_code([tmp_path / "src"])).values()) == {"src"}
    assert collections(find_code([tmp_path / "src/loose.py"])) == {"loose.py": "loose.py"}


def test_licence_files_are_found_where_they_are_wanted(tmp_path):
    root = tree(tmp_path / "r", {"a.py": "", "LICENSE": "", "sub/COPYING.LESSER": "", "License.png": "", "vendor/LICENSE": ""})
    assert names(find_code([root])) == ["r/a.py"]
    assert names(find_code([root], terms=True)) == ["r/LICENSE", "r/a.py", "r/sub/COPYING.LESSER"]
