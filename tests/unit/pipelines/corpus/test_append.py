"""More inputs for a store that is there."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from pipelines.corpus import append as appending
from pipelines.corpus.append import append
from pipelines.corpus.code import Code
from pipelines.corpus.ingest import in_process, ingest
from pipelines.corpus.store import TokenStore

SHARD = 600


@pytest.fixture
def trees(tmp_path):
    for root in ("one", "two"):
        for i in range(12):
            path = tmp_path / root / f"f{i:02d}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"def {root}{i}():\n    return '{'x' * 9 * i}'\n")
        (tmp_path / root / "nul.py").write_bytes(b"a\0b")
    return tmp_path


def make(trees, out, *roots, **options):
    return ingest(Code(), [trees / root for root in roots], trees / out, shard_bytes=SHARD, run=in_process, **options)


def add(trees, out, *roots, **options):
    return append(Code(), [trees / root for root in roots], trees / out, shard_bytes=SHARD, run=in_process, **options)


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(store) -> dict[str, str]:
    return {store.paths(i): store.text(i) for i in range(len(store))}


def test_new_inputs_stand_behind_the_old_ones(trees):
    make(trees, "store", "one", tokenizer="bpe:300")
    make(trees, "both", "one", "two")
    old = {path: path.stat().st_mtime_ns for path in (trees / "store").glob("shard-*")}
    before = TokenStore.open(trees / "store")
    report = add(trees, "store", "two", tokenizer="bpe:300")
    store = TokenStore.open(trees / "store")
    store.verify()
    assert not report.reused and report.files == len(store) == 24 and len(store.shards) > len(before.shards) > 1
    assert texts(store) == texts(TokenStore.open(trees / "both"))
    assert [store.paths(i) for i in range(12)] == [before.paths(i) for i in range(12)]
    assert all(path.stat().st_mtime_ns == at for path, at in old.items())
    assert store.tokenizer.fingerprint == before.tokenizer.fingerprint and store.fingerprint != before.fingerprint
    assert store.manifest["skipped"] == {"binary": 2} and len(store.skipped) == 2
    assert sorted(path.name for path in trees.iterdir()) == ["both", "one", "store", "two"]


def test_what_is_there_is_passed_over_and_what_differs_refused(trees):
    make(trees, "store", "one")
    first = contents(trees / "store")
    assert add(trees, "store", "one").reused and contents(trees / "store") == first
    assert add(trees, "store", "one", "two").files == 24
    assert add(trees, "store", "two").reused
    (trees / "two" / "f03.py").write_text("changed = True\n")
    with pytest.raises(ValueError, match="two/f03.py is in .*store with other contents"):
        add(trees, "store", "two")
    assert make(trees, "store", "one").files == 12  # not taken for the store of `one` alone


def test_other_options_are_refused_by_name(trees, tmp_path):
    make(trees, "store", "one", tokenizer="bpe:300")
    with pytest.raises(ValueError, match="made with the tokenizer bpe:300, not byte"):
        add(trees, "store", "two", tokenizer="byte")
    with pytest.raises(ValueError, match="made with unit 'row', not 'collection'"):
        append(Code(unit="collection"), [trees / "two"], trees / "store", run=in_process)
    add(trees, "store", "two", tokenizer=str(trees / "store"))
    with pytest.raises(ValueError, match="no manifest.json"):
        add(trees, "nowhere", "two")


def test_killed_at_any_point_it_leaves_the_old_store_and_then_goes_on(trees):  # C13
    make(trees, "store", "one")
    make(trees, "undisturbed", "one")
    add(trees, "undisturbed", "two")
    before = contents(trees / "store")
    program = """
import os, signal, sys
from pipelines.corpus import append as appending
from tests.unit.pipelines.corpus.test_append import add
from pathlib import Path
at, count, replace = int(sys.argv[2]), 0, os.replace
def replacing(*paths):
    global count
    count += 1
    if count == at: os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = replacing
add(Path(sys.argv[1]), "store", "two")
"""
    at = kills = swapped = 0
    while not swapped:
        at += 3
        run = subprocess.run([sys.executable, "-c", program, str(trees), str(at)], capture_output=True, text=True)
        assert run.returncode in (0, -signal.SIGKILL), run.stderr
        store = TokenStore.open(trees / "store")
        store.verify()
        swapped = len(store) == 24
        if not swapped:
            kills += 1
            assert len(store) == 12 and all(contents(trees / "store")[name] == before[name] for name in before if "shard" in name)
    assert kills >= 2
    add(trees, "store", "two")
    ours, theirs = contents(trees / "store"), contents(trees / "undisturbed")
    assert {n: ours[n] for n in ours if n != ".ingest.json"} == {n: theirs[n] for n in theirs if n != ".ingest.json"}


def test_a_killed_swap(trees, monkeypatch):
    make(trees, "store", "one")

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(appending.unfinished, "record_moved", fail)
    with pytest.raises(KeyboardInterrupt):
        add(trees, "store", "two")
    assert len(TokenStore.open(trees / "store")) == 12
    monkeypatch.undo()
    assert add(trees, "store", "two").files == 24
    assert not (trees / ".store.partial").exists() and os.path.exists(trees / "store" / ".ingest.json")


def test_a_killed_record(trees, monkeypatch):
    make(trees, "store", "one")

    @contextlib.contextmanager
    def killed(partial, out):
        (out / ".ingest.json").unlink()
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(appending.unfinished, "record_moved", killed)
    with pytest.raises(KeyboardInterrupt):
        add(trees, "store", "two")
    monkeypatch.undo()
    assert len(TokenStore.open(trees / "store")) == 24
    assert add(trees, "store", "two").reused
    with pytest.raises(ValueError, match="made with options"):
        append(Code(line_ends="lf"), [trees / "two"], trees / "store", run=in_process)
    assert not (trees / ".store.partial").exists() and os.path.exists(trees / "store" / ".ingest.json")


def test_nothing_of_use_is_an_error_as_in_an_ingest(trees):
    make(trees, "store", "one")
    (trees / "three").mkdir()
    (trees / "three" / "nul.py").write_bytes(b"a\0b")
    with pytest.raises(ValueError, match="nothing to ingest: all 1 inputs were left out, three/nul.py as binary"):
        add(trees, "store", "three")


def test_an_append_that_ends_while_another_looks_for_its_inputs_loses_nothing(trees, monkeypatch):
    make(trees, "store", "one")
    (trees / "three").mkdir()
    (trees / "three" / "a.py").write_text("three = 3\n")
    find = appending.find

    def slowly(*arguments, **options):
        found = find(*arguments, **options)
        monkeypatch.undo()
        add(trees, "store", "two")
        return found

    monkeypatch.setattr(appending, "find", slowly)
    add(trees, "store", "three")
    store = TokenStore.open(trees / "store")
    store.verify()
    assert sorted({store.paths(i).partition("/")[0] for i in range(len(store))}) == ["one", "three", "two"] and len(store) == 25


@pytest.mark.parametrize("unit", ["row", "collection"])
def test_what_is_held_out_stays_so(trees, unit):
    kind = Code(unit=unit, held_out=("one", "*/tests"))
    (trees / "two" / "tests").mkdir()
    (trees / "two" / "tests" / "test_two.py").write_text("assert two\n")
    ingest(kind, [trees / "one", trees / "two"], trees / "store", run=in_process)
    more = trees / "more"
    (more / "tests").mkdir(parents=True)
    (more / "new.py").write_text("new = 1\n")
    (more / "leak.py").write_text((trees / "one" / "f03.py").read_text())
    (more / "tests" / "known.py").write_text((trees / "two" / "f03.py").read_text())
    (more / "tests" / "same_side.py").write_text((trees / "one" / "f04.py").read_text())
    if unit == "collection":
        with pytest.raises(ValueError, match="more/leak.py is the same text as one/f03.py in .*; leave it out"):
            append(kind, [more], trees / "store", run=in_process)
        (more / "leak.py").unlink()
        (more / "tests" / "known.py").unlink()
    append(kind, [more], trees / "store", run=in_process)
    store = TokenStore.open(trees / "store")
    assert {path for path in texts(store) if path.startswith("more/")} == {"more/new.py", "more/tests/same_side.py"}
    assert {row["path"]: row["reason"] for row in store.skipped if row["reason"].startswith("held out")} == (
        {
            "more/leak.py": "held out: the same text as one/f03.py in the store",
            "more/tests/known.py": "held out: the same text as two/f03.py in the store",
        }
        if unit == "row" else {}
    )  # fmt: skip
    assert append(kind, [more], trees / "store", run=in_process).reused
    (trees / "plain").mkdir()
    (trees / "plain" / "p.py").write_text("nothing of it is held out\n")
    append(kind, [trees / "plain"], trees / "store", run=in_process)
    assert "plain/p.py" in texts(TokenStore.open(trees / "store"))
