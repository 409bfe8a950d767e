"""Parquet files and Hugging Face folders as a corpus."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.corpus.ingest import in_process, ingest
from pipelines.corpus.records import Records
from pipelines.corpus.store import TokenStore
from tests.allocations import growth

TEXTS = ["", "a", "naïve ﬁ 👩‍🚀", "<|endoftext|>\r\n", None, "b" * 3000, *(f"row {i}\n" for i in range(1500))]


def take(tmp_path, *paths, column=None, **options):
    ingest(Records(column), paths, tmp_path / "store", shard_bytes=4000, run=in_process, **options)
    return TokenStore.open(tmp_path / "store")


def arrow_folder(folder, texts, name="text"):
    """As `datasets.Dataset.save_to_disk` leaves it: Arrow streams and two JSON files."""
    folder.mkdir(parents=True)
    table = pa.table({name: texts, "stars": list(range(len(texts)))})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=500)
    (folder / "cache-1a2b.arrow").write_bytes(b"what map() left")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_every_row_is_one_of_the_store(tmp_path, kind):
    if kind == "parquet":
        pq.write_table(pa.table({"id": range(len(TEXTS)), "content": TEXTS}), tmp_path / "t.parquet", row_group_size=700)
        root, name = tmp_path / "t.parquet", "t.parquet"
    else:
        root, name = arrow_folder(tmp_path / "set" / "train", TEXTS).parent, "set/train/data-00000-of-00001.arrow"
    store = take(tmp_path, root, tokenizer="bpe:300")
    kept = {f"{name}/{i}": text for i, text in enumerate(TEXTS) if text is not None}
    assert {store.paths(i): store.text(i) for i in range(len(store))} == kept and list(kept)[0] == store.paths(0)
    assert store.skipped == [{"path": f"{name}/4", "reason": f"no text: {'content' if kind == 'parquet' else 'text'} is null"}]
    at = list(kept.values()).index("<|endoftext|>\r\n")  # C8
    assert store.tokenizer.decode(store[at][:-1]) == "<|endoftext|>\r\n" and store.tokenizer.end_of_text not in store[at][:-1]
    assert store[0].tolist() == [] and len(store.shards) > 3  # C1


def test_both_arrow_formats_large_strings_and_a_named_column(tmp_path):
    table = pa.table({"text": [1, 2], "body": pa.array(["x", "y"], pa.large_string())})
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as out:
        out.write_table(table)
    store = take(tmp_path, tmp_path / "t.arrow", column="body")
    assert [store.text(i) for i in range(2)] == ["x", "y"]


def test_two_runs_give_the_same_bytes(tmp_path):  # C13
    root = arrow_folder(tmp_path / "set", TEXTS)
    one = take(tmp_path, root).fingerprint
    (tmp_path / "store").rename(tmp_path / "first")
    assert take(tmp_path, root).fingerprint == one


def test_memory_is_a_batch_not_the_table(tmp_path):
    with pq.ParquetWriter(tmp_path / "t.parquet", pa.schema([("text", pa.string())])) as out:
        for i in range(16):
            out.write_table(pa.table({"text": [f"{i}{j}" * 2000 for j in range(500)]}))
    grown = growth(lambda: ingest(Records(), [tmp_path / "t.parquet"], tmp_path / "store", run=in_process))
    store = TokenStore.open(tmp_path / "store")
    assert store.manifest["bytes"] > 60e6
    assert grown < 60 << 20


def test_what_is_no_table_is_refused_in_one_line(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not")
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"n": [1], "text": [2]}), tmp_path / "n.parquet")
    (tmp_path / "n.feather").write_bytes(b"any")
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), tmp_path / "null.parquet")
    for name, column, said in (
        ("bad.parquet", None, "not a readable table"),
        ("empty", None, "no .parquet or .arrow file below it"),
        ("none", None, "no such file or folder"),
        ("n.feather", None, "not called .parquet or .arrow"),
        ("n.parquet", None, "column text is int64, not a string; name another with --column"),
        ("n.parquet", "body", "no column body; it has n, text: name one with --column"),
        ("null.parquet", None, "no row with a text under .*: 1 rows seen"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            Records(column).find([tmp_path / name])
        assert "\n" not in str(error.value)
