"""More inputs for a store that is there."""

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
from tests.unit.corpus.test_append import add
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
