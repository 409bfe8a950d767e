import json
import shutil
import tarfile
from dataclasses import asdict

import numpy as np
import pytest

from pipelines.corpus import TokenStore
from pipelines.corpus.code import Code
from pipelines.corpus.ingest import find, in_process, ingest
from pipelines.corpus.kind import END, Place, Special
from pipelines.corpus.sources import reading
from tests.unit.pipelines.corpus.test_duplicates import words
from tests.unit.pipelines.corpus.test_git import git
from tests.unit.pipelines.corpus.test_licences import TEXTS
from tests.unit.pipelines.corpus.trees import tree


def arranged(kind: Code, *paths):
    """The rows, by name, and all reasons, by path."""
    found, skipped = kind.find(paths)
    with reading(found) as read:
        facts = [kind.survey(file, read(file)) for file in found]
    json.dumps([asdict(fact) for fact in facts])
    places, left_out = kind.arrange(found, facts)
    return places, {entry.path: entry.reason for entry in skipped + left_out}


def names(places: list[Place]) -> list[str]:
    return [place.name for place in places]


def stored(tmp_path, kind: Code, *paths, tokenizer="byte") -> TokenStore:
    ingest(kind, paths, tmp_path / "store", tokenizer, run=in_process)
    return TokenStore.open(tmp_path / "store")


# Rows ---------------------------------------------------------------------------------------------------------------


def test_a_repository_is_one_document_with_its_files_behind_their_names(tmp_path):  # C8
    tree(
        tmp_path / "src",
        {"one/.git/x": "", "one/b.py": "<|file_sep|>x\r\n", "one/a/c.py": "", "two/.git/x": "", "two/d.py": "<|endoftext|>"},
    )
    store = stored(tmp_path, Code(unit="collection"), tmp_path / "src")
    special = store.tokenizer.special
    assert [store.paths(i) for i in range(len(store))] == ["src/one/a/c.py", "src/one/b.py", "src/two/d.py"]
    assert [store.collection(i) for i in range(len(store))] == ["src/one", "src/one", "src/two"]
    assert store.documents.tolist() == [0, 2, 3]
    text = ["<|repo_name|>", "src/one", "<|file_sep|>", "a/c.py\n", "<|file_sep|>", "b.py\n<|file_sep|>x\r\n", "<|endoftext|>"]
    expected = [ids for part in text for ids in ([special[part]] if part in special else list(part.encode()))]
    assert [*store[0].tolist(), *store[1].tolist()] == expected
    assert store[2].tolist().count(special["<|endoftext|>"]) == 1  # the mark, not the text
    assert store.text(2) == "<|endoftext|>"


def test_a_file_is_a_document_by_default(tmp_path):
    root = tree(tmp_path / "r", {"a.py": "a", "b.py": "", "c.py": ""})
    places, _ = arranged(Code(), root)
    assert names(places) == ["r/a.py", "r/b.py", "r/c.py"]  # empty ones are no copies of one another
    kind = Code()
    assert kind.parts(places[0], kind.read(places[0], b"a")) == ["a", END]
    assert kind.parts(places[1], kind.read(places[1], b"")) == []


def test_first_and_last_hold_for_each_repository(tmp_path):
    tree(tmp_path, {"one/a.py": "1", "one/b.py": "2", "two/c.py": "3"})
    places, _ = arranged(Code(unit="collection"), tmp_path / "two", tmp_path / "one")
    assert [(p.collection, p.first, p.last) for p in places] == [("one", True, False), ("one", False, True), ("two", True, True)]
    kind = Code(unit="collection")
    assert kind.parts(places[2], kind.read(places[2], b"3")) == [
        Special("<|repo_name|>"), "two", Special("<|file_sep|>"), "c.py\n", "3", Special("<|endoftext|>"),
    ]  # fmt: skip


def test_random_order_depends_on_names_alone(tmp_path):
    tree(tmp_path, {f"{root}/f{i:02d}.py": f"{root} {i}" for root in ("one", "two") for i in range(20)})
    kind = Code(unit="collection", order="random")
    places, _ = arranged(kind, tmp_path / "one", tmp_path / "two")
    one, two = names(places)[:20], names(places)[20:]
    assert one != sorted(one) and [name[4:] for name in one] == [name[4:] for name in two]
    assert all(name.startswith("one/") for name in one)
    assert arranged(kind, tmp_path / "two", tmp_path / "one")[0] == places


def test_line_ends_as_they_are_or_as_line_feeds(tmp_path):  # C4
    root = tree(tmp_path / "r", {"a.py": b"a\r\nb\r\x0cc", "b.py": b"\xef\xbb\xbfb\r\n"})
    kept = stored(tmp_path, Code(), root)
    assert [kept.source(i) for i in range(2)] == [b"a\r\nb\r\x0cc", b"\xef\xbb\xbfb\r\n"]
    changed = stored(tmp_path, Code(line_ends="lf"), root)
    assert [changed.source(i) for i in range(2)] == [b"a\nb\n\x0cc", b"b\n"]
    assert [changed.text(i) for i in range(2)] == ["a\nb\n\x0cc", "b\n"]


def test_odd_encodings_and_names_in_one_store(tmp_path):  # C3, C5, C7
    root = tree(tmp_path / "r", {
        "latin.py": b"# coding: latin-1\n\xe9", "wide.c": "é".encode("utf-16"), "nul.c": b"\0", "bad.c": b"\xff",
        "line.js": b"x" * 1_000_000, "registers.h": b"#define A 1\n" * 200_000, "pb.py": b"# @generated\n",
    })  # fmt: skip
    with open(bytes(root) + b"/\xff.py", "w"):
        pass
    store = stored(tmp_path, Code(), root)
    assert [store.text(i)[-1] for i in range(3)] == ["é", "\n", "é"]
    assert {row["path"]: row["reason"].split(":")[0] for row in store.skipped} == {
        "r/\\xff.py": "name not UTF-8", "r/nul.c": "binary", "r/bad.c": "undecodable", "r/line.js": "minified", "r/pb.py": "generated",
    }  # fmt: skip


def test_the_same_tree_as_folder_archive_and_commit_gives_the_same_text(tmp_path):  # C13
    root = tree(tmp_path / "work" / "p", {"a.py": "a = 1\r\n", "deep/b.c": "int b;", "COPYING": TEXTS["ISC"]})
    with tarfile.open(tmp_path / "p.tar.gz", "w:gz") as archive:
        for path in sorted(root.rglob("*")):
            archive.add(path, path.relative_to(root), recursive=False)
    git(root, "init", "-q", ".")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "1")
    rows = []
    for path in (root, tmp_path / "p.tar.gz", f"{root}@HEAD"):
        store = stored(tmp_path, Code(unit="collection"), path, tokenizer="bpe:270")
        rows.append([(store.paths(i), store.source(i), store.licence(i), store[i].tolist()) for i in range(len(store))])
    assert rows[0] == rows[1] == rows[2] and [row[0] for row in rows[0]] == ["p/a.py", "p/deep/b.c"]
    assert {row[2] for row in rows[0]} == {"ISC"}


# Licences -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def licensed(tmp_path):
    return tree(tmp_path / "r", {
        "LICENSE": TEXTS["MIT"], "a.py": "a", "own.c": "// SPDX-License-Identifier: GPL-2.0-only OR MIT\n", "gpl.c": "// SPDX-License-Identifier: GPL-2.0\n",
        "lib/COPYING": TEXTS["GPL-2.0-only"], "lib/b.c": "b", "lib/deep/c.c": "c", "doc/LICENSE.md": "Ask me.", "doc/d.py": "d",
    })  # fmt: skip


def test_licence_is_the_files_own_or_the_nearest_above(licensed):
    places, reasons = arranged(Code(), licensed)
    assert {place.name: place.licence for place in places} == {
        "r/a.py": "MIT", "r/own.c": "GPL-2.0-only OR MIT", "r/gpl.c": "GPL-2.0", "r/lib/b.c": "GPL-2.0-only", "r/lib/deep/c.c": "GPL-2.0-only",
        "r/doc/LICENSE.md": "MIT", "r/doc/d.py": "MIT",
    }  # fmt: skip
    assert reasons == dict.fromkeys(("r/LICENSE", "r/lib/COPYING"), "licence text: read for its terms")


def test_only_allowed_licences(licensed, tmp_path):
    places, reasons = arranged(Code(licences=("MIT",)), licensed)
    assert names(places) == ["r/a.py", "r/doc/LICENSE.md", "r/doc/d.py", "r/own.c"]
    assert reasons["r/gpl.c"] == "licence: GPL-2.0" and reasons["r/lib/b.c"] == "licence: GPL-2.0-only"
    bare = tree(tmp_path / "bare", {"a.py": "a"})
    assert arranged(Code(licences=("MIT",)), bare) == ([], {"bare/a.py": "licence: none found"})
    with pytest.raises(ValueError, match="nothing to ingest: all 1 inputs were left out, bare/a.py as licence: none found"):
        stored(tmp_path, Code(licences=("MIT",)), bare)


# Duplicates and hold-out --------------------------------------------------------------------------------------------

LONG = [" ".join(words(seed, 300)) for seed in range(4)]


def test_exact_copies_go_and_near_ones_on_request(tmp_path):
    tree(
        tmp_path,
        {
            "one/b.py": LONG[0],
            "two/a.py": LONG[0],
            "two/c.py": LONG[0] + " more",
            "two/d.py": LONG[1],
            "one/short.py": "x",
            "two/short.py": "x",
        },
    )
    paths = tmp_path / "two", tmp_path / "one"
    places, reasons = arranged(Code(), *paths)
    exact = {"two/a.py": "duplicate: the same text as one/b.py", "two/short.py": "duplicate: the same text as one/short.py"}
    assert reasons == exact and names(places) == ["one/b.py", "one/short.py", "two/c.py", "two/d.py"]
    places, reasons = arranged(Code(near_duplicates=0.85), *paths)
    assert reasons == exact | {"two/c.py": "near duplicate: nearly the same text as one/b.py"}
    assert names(places) == ["one/b.py", "one/short.py", "two/d.py"]


def test_no_copy_of_what_is_held_out_is_trained_on(tmp_path):
    tree(tmp_path, {
        "aaa/copy.py": LONG[0], "aaa/near.py": LONG[1] + " more", "aaa/other.py": LONG[2], "aaa/near2.py": LONG[2] + " more",
        "test/copied.py": LONG[0], "test/neared.py": LONG[1], "test/twin.py": LONG[1] + " twin",
    })  # fmt: skip
    places, reasons = arranged(Code(held_out=("test",)), tmp_path / "aaa", tmp_path / "test")
    assert reasons == {
        "aaa/copy.py": "held out: the same text as test/copied.py",
        "aaa/near.py": "held out: nearly the same text as test/neared.py",
    }
    assert names(places) == ["aaa/near2.py", "aaa/other.py", "test/copied.py", "test/neared.py", "test/twin.py"]


def test_a_held_out_folder_is_a_repository_of_its_own(tmp_path):
    tree(tmp_path / "r", {"a.py": "a", "tests/b.py": "b", "tests/deep/c.py": "c", "z.py": "z"})
    kind = Code(unit="collection", held_out=("*/tests",))
    places, _ = arranged(kind, tmp_path / "r")
    assert [(p.name, p.collection, p.first, p.last) for p in places] == [
        ("r/a.py", "r", True, False), ("r/z.py", "r", False, True), ("r/tests/b.py", "r/tests", True, False), ("r/tests/deep/c.py", "r/tests", False, True),
    ]  # fmt: skip
    assert kind.parts(places[2], kind.read(places[2], b"b"))[3] == "b.py\n"
    store = stored(tmp_path, kind, tmp_path / "r")
    assert store.manifest["held_out"] == ["*/tests"] and store.documents.tolist() == [0, 2, 4]


def test_wrong_options_are_one_line(tmp_path):
    root = tree(tmp_path / "r", {"a.py": "a"})
    with pytest.raises(ValueError, match=r"--hold-out 'tests' matches none of 1 files; their names begin like 'r/a.py'"):
        find(Code(held_out=("tests",)), [root])
    with pytest.raises(ValueError, match="between 0.5 and 1"):
        Code(near_duplicates=85)
    with pytest.raises(ValueError, match="--licences names"):
        Code(licences=("",))


def test_every_option_is_part_of_the_identity():
    kinds = [
        Code(),
        Code("collection"),
        Code(order="random"),
        Code(line_ends="lf"),
        Code(licences=("MIT",)),
        Code(near_duplicates=0.9),
        Code(held_out=("x",)),
        Code(gitignore=False),
    ]
    assert len({json.dumps(kind.identity()) for kind in kinds}) == len(kinds)


def test_two_runs_are_byte_identical(tmp_path):  # C13
    root = tree(tmp_path / "r", {"LICENSE": TEXTS["MIT"], **{f"f{i}.py": text for i, text in enumerate(LONG)}, "g.py": LONG[0] + " g"})
    kind = Code(unit="collection", near_duplicates=0.8, licences=("MIT",), held_out=("*/f3.py",))
    files = []
    for copy in ("one", "two"):
        shutil.copytree(root, tmp_path / copy / "r", copy_function=shutil.copy)
        ingest(kind, [tmp_path / copy / "r"], tmp_path / copy / "out", run=in_process)
        files.append({p.name: p.read_bytes() for p in (tmp_path / copy / "out").iterdir() if p.name != ".ingest.json"})
    assert files[0] == files[1]


def test_dependency_order_in_a_repository(tmp_path):  # C14
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "a.py").write_text("import b\n")
    (repo / "b.py").write_text("import a\nimport z\n")
    (repo / "c.py").write_text("import c\n")
    (repo / "z.py").write_text("x = 1\n")
    ingest(Code(unit="collection", order="dependency"), [repo], tmp_path / "out", run=in_process)
    store = TokenStore.open(tmp_path / "out")
    assert [store.paths(i) for i in range(len(store))] == ["repo/z.py", "repo/a.py", "repo/b.py", "repo/c.py"]
    assert store.documents.tolist() == [0, 4]
    text = store.tokenizer.decode(np.concatenate([store[i] for i in range(4)]))
    assert text == (
        "<|repo_name|>repo<|file_sep|>z.py\nx = 1\n<|file_sep|>a.py\nimport b\n<|file_sep|>b.py\nimport a\nimport z\n"
        "<|file_sep|>c.py\nimport c\n<|endoftext|>"
    )
