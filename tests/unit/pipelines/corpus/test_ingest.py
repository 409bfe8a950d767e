"""The steps of an ingest, in this process; the same over a cluster stands in tests/cluster/test_ingest.py."""

from dataclasses import dataclass, replace

import pytest

from pipelines.corpus import TokenStore
from pipelines.corpus import ingest as ingesting
from pipelines.corpus.code import Code
from pipelines.corpus.ingest import find, in_process, ingest, reusable
from pipelines.corpus.sources import SourceFile
from tests.unit.pipelines.corpus.trees import tree


@pytest.mark.parametrize("content", ["b = 3\n", "# other, and longer\n", b"a\0b"])
@pytest.mark.parametrize("unit", ["row", "collection"])
def test_what_changes_after_it_was_let_in_is_not_taken(tmp_path, unit, content):
    root = tree(tmp_path / "r", {"a.py": "a = 1\n", "b.py": "b = 2\n"})
    steps = []

    def run(task, rows):
        steps.append(task)
        if len(steps) == 2:
            tree(root, {"b.py": content})
        return in_process(task, rows)

    kind = Code(unit=unit)
    if unit == "collection":
        with pytest.raises(ValueError, match="r/b.py changed while it was ingested .*; run the same command again"):
            ingest(kind, [root], tmp_path / "store", run=run)
        assert not (tmp_path / "store").exists()
    else:
        report = ingest(kind, [root], tmp_path / "store", run=run)
        assert report.files == 1 and sum(report.skipped.values()) == 1
    assert not ingest(kind, [root], tmp_path / "store", run=in_process).reused
    store = TokenStore.open(tmp_path / "store")
    taken = {store.paths(i): store.source(i) for i in range(len(store))}
    assert taken == {"r/a.py": b"a = 1\n"} | ({"r/b.py": content.encode()} if isinstance(content, str) else {})


def test_what_was_found_is_handed_on(tmp_path):
    calls = []

    @dataclass(frozen=True)
    class Counted(Code):
        def find(self, paths):
            calls.append(paths)
            return super().find(paths)

    root = tree(tmp_path / "r", {"a.py": "a = 1\n"})
    found = find(Counted(), [root])
    assert reusable(found, tmp_path / "store") is None
    ingest(Counted(), [root], tmp_path / "store", run=in_process, found=found)
    assert len(calls) == 1 and reusable(found, tmp_path / "store").files == 1


@pytest.mark.parametrize("field", ["name", "size", "mtime_ns", "member", "collection"])
def test_all_that_decides_a_row_is_in_the_identity(tmp_path, monkeypatch, field):
    file = SourceFile("/p", "r/a.py", 1, 1)
    other = replace(file, **{field: 2 if field in ("size", "mtime_ns") else "other"})
    identities = []
    for one in (file, other):
        monkeypatch.setattr(Code, "find", lambda self, paths, one=one: ([one], []))
        identities.append(find(Code(), ["/p"]).identity)
    assert identities[0] != identities[1]


def test_a_tokenizer_is_not_trained_on_what_is_held_out(tmp_path, monkeypatch):
    seen = []
    train = ingesting.train_bpe
    monkeypatch.setattr(ingesting, "train_bpe", lambda texts, size: train(iter(seen.extend(texts) or seen), size))
    root = tree(tmp_path / "r", {"a.py": "a = 1\n", "tests/b.py": "b = 2\n"})
    ingest(Code(held_out=("r/tests",)), [root], tmp_path / "one", "bpe:264", run=in_process)
    assert seen == ["a = 1\n"]
    seen.clear()
    ingest(Code(held_out=("r",)), [root], tmp_path / "two", "bpe:264", run=in_process)  # all of it: for an evaluation alone
    assert sorted(seen) == ["a = 1\n", "b = 2\n"]
