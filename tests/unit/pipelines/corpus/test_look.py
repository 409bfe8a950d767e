import numpy as np
import pytest

from pipelines.corpus.look import overview, sample_documents, sample_windows, text
from tests.unit.pipelines.corpus.test_store import build

SHARDS = [["", "a" * 90], ["b", "naïve " * 30]]


def test_overview_counts_add_up(tmp_path):
    store = build(tmp_path, SHARDS)
    found = overview(store)
    for kind in ("collections", "licences", "extensions"):
        for field, total in (("rows", len(store)), ("bytes", store.manifest["bytes"]), ("tokens", store.tokens)):
            assert sum(row[field] for row in found[kind].values()) == total == found[field]
    assert found["licences"]["MIT"] == {"rows": 1, "bytes": 1, "tokens": 2} and list(found["licences"])[0] == "(none)"
    assert found["extensions"].keys() == {".py"} and found["collections"].keys() == {"r"}
    assert found["skipped"] == {"binary": 2, "name not UTF-8": 1} and found["longest_row"] == 211
    shown = text(found, most=1)
    assert "4 rows in 4 documents" in shown and "tokenizer byte, 264 ids" in shown and "and 1 more" in shown


def test_an_empty_store_has_an_overview_and_no_sample(tmp_path):
    store = build(tmp_path, [["", ""]], skipped=[])  # C1
    assert "skipped: nothing" in text(overview(store), 5) and overview(store)["bytes_per_token"] is None
    with pytest.raises(ValueError, match="holds no token to show"):
        sample_documents(store, 1, 10)


def test_samples_are_seeded_and_are_what_the_store_says(tmp_path):
    store = build(tmp_path, SHARDS)
    rows = {store.paths(i): store[i] for i in range(len(store))}
    samples = sample_documents(store, 40, 8, seed=3)
    assert samples == sample_documents(store, 40, 8, seed=3) != sample_documents(store, 40, 8, seed=4)
    for sample in samples:
        ids = rows[sample["path"]][sample["start"] : sample["stop"]]
        assert len(ids) == min(8, len(rows[sample["path"]])) and sample["text"] == store.tokenizer.decode(ids)
    assert any("<|endoftext|>" in sample["text"] for sample in samples)  # control tokens are seen
    assert len({sample["path"] for sample in samples}) > 1
    windows = sample_windows(store, 2, 32)
    assert len(windows) == 2 and sum(len(store.tokenizer.encode(w["text"])) for w in windows) >= 2 * 28
    with pytest.raises(ValueError, match="0 samples of 8 tokens"):
        sample_documents(store, 0, 8)
    assert np.isfinite(overview(store)["bytes_per_token"])
