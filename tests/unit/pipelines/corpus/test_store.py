import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from pipelines.corpus.store import _BATCH_BYTES, ShardWriter, StoreError, TokenStore, write_manifest
from pipelines.corpus.tokenizer import ByteTokenizer, Tokenizer

SKIPPED = [
    {"path": "r/a.bin", "reason": "binary: NUL at position 3"},
    {"path": "r/b\\xff.py", "reason": "name not UTF-8: rename it to have it read"},
    {"path": "r/ü\n.o", "reason": "binary: NUL at position 9"},
]


def build(folder, shards: list[list[str]], tokenizer: Tokenizer | None = None, skipped=SKIPPED) -> TokenStore:
    """A store with one document for each text; texts that aren't empty end in end_of_text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or ByteTokenizer()
    rows = []
    for index, texts in enumerate(shards):
        with ShardWriter(folder, index, tokenizer) as writer:
            for i, text in enumerate(texts):
                ids = tokenizer.encode(text)
                ids = np.append(ids, ids.dtype.type(tokenizer.end_of_text)) if text else ids
                writer.add(f"r/{index}/{i}.py", text.encode(), "utf-8", "MIT" if text == "b" else None, ids)
            rows.append(writer.close())
    write_manifest(folder, tokenizer, rows, skipped)
    return TokenStore.open(folder)


def test_empty_documents_keep_their_row(tmp_path):
    store = build(tmp_path, [["", "a"], ["", "b", ""]])
    end = store.tokenizer.end_of_text
    assert [document.tolist() for document in store] == [[], [97, end], [], [98, end], []]
    assert store.lengths.dtype == np.int64 and store.lengths.tolist() == [0, 2, 0, 2, 0]
    assert (len(store), store.tokens, store.manifest["bytes"]) == (5, 4, 2)
    assert [store.paths(i) for i in range(5)] == ["r/0/0.py", "r/0/1.py", "r/1/0.py", "r/1/1.py", "r/1/2.py"]
    assert [store.text(i) for i in range(5)] == ["", "a", "", "b", ""]
    assert [store.licence(i) for i in (1, 3)] == [None, "MIT"]
    assert store[-2].tolist() == [98, end]
    for wrong in (5, -6):
        with pytest.raises(IndexError, match=f"row {wrong} of 5"):
            store[wrong]


def test_store_without_documents_or_skipped_files(tmp_path):
    store = build(tmp_path, [[]], skipped=[])
    assert (len(store), store.tokens, store.lengths.tolist(), store.skipped) == (0, 0, [], [])


def test_collections_and_details(tmp_path):
    encoder, rows = ByteTokenizer(), []
    where = [["r/a", "r/a"], ["r/a", "r/b", "s"], [], ["s"]]
    for index, shard in enumerate(where):
        with ShardWriter(tmp_path, index, encoder) as writer:
            for i, collection in enumerate(shard):
                writer.add(f"{collection}/{i}", b"x", "utf-8", None, encoder.encode("x"), collection, {"title": f"ü {i}"} if i else None)
            rows.append(writer.close())
    write_manifest(tmp_path, encoder, rows, [], unit="collection", held_out=["s"], counts={"papers": 6})
    store = TokenStore.open(tmp_path)
    assert store.unit == "collection" and store.documents.tolist() == [0, 3, 4, 6] and store.documents.dtype == np.int64
    assert [store.collection(i) for i in range(6)] == ["r/a", "r/a", "r/a", "r/b", "s", "s"]
    assert [store.details(i) for i in (0, 1)] == [None, {"title": "ü 1"}]
    assert store.manifest["held_out"] == ["s"] and store.manifest["counts"] == {"papers": 6}
    by_row = build(tmp_path / "rows", [["a", ""], ["b"]])
    assert by_row.unit == "row" and by_row.documents.tolist() == [0, 1, 2, 3]
    assert by_row.collection(0) == "r" and by_row.details(0) is None
    (tmp_path / "none").mkdir()
    write_manifest(tmp_path / "none", encoder, [], [], unit="collection")
    assert TokenStore.open(tmp_path / "none").documents.tolist() == [0]


def test_skipped_files_are_listed_and_counted(tmp_path):
    store = build(tmp_path, [["a"]])
    assert store.skipped == SKIPPED
    assert store.manifest["skipped"] == {"binary": 2, "name not UTF-8": 1}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_text_is_kept_byte_for_byte(tmp_path, encoding):
    text = "a\r\nb\rc\n\f naïve \x0b\t no newline"
    with ShardWriter(tmp_path, 0, ByteTokenizer()) as writer:
        writer.add("r/x.py", text.encode(encoding), encoding, None, ByteTokenizer().encode(text))
        write_manifest(tmp_path, ByteTokenizer(), [writer.close()], [])
    store = TokenStore.open(tmp_path)
    assert store.text(0) == text and store.source(0) == text.encode(encoding) and store.encoding(0) == encoding
    assert store.tokenizer.decode(store[0]) == text


def test_documents_are_views_of_the_map_across_batches(tmp_path):
    texts = [chr(97 + i) * (_BATCH_BYTES // 8) for i in range(7)]
    store = build(tmp_path, [texts[:5], texts[5:]])
    assert len(store._batches) == 3
    before = pa.total_allocated_bytes()
    for i, text in enumerate(texts):
        document = store[i]
        assert not document.flags.owndata and not document.flags.writeable
        assert document[:3].tolist() == [ord(text[0])] * 3 and len(document) == len(text) + 1
    assert pa.total_allocated_bytes() == before  # nothing was copied into Arrow's memory
    with pytest.raises(ValueError, match="read-only"):
        store[0][0] = 1


def test_large_vocabulary_is_stored_as_int32(tmp_path):
    class Wide(ByteTokenizer):
        def __init__(self):
            super().__init__()
            self.vocab_size, self.dtype = 1 << 17, np.dtype(np.int32)

    assert build(tmp_path / "wide", [["abc"]], Wide())[0].dtype == np.int32
    assert build(tmp_path / "narrow", [["abc"]])[0].dtype == np.uint16


def test_offsets_are_64_bit(tmp_path):
    store = build(tmp_path, [["abc"]])
    assert store._batches[0].schema.field("tokens").type == pa.large_list(pa.uint16())
    assert store._offsets[0].dtype == np.int64


def test_pickles_as_its_path_and_opens_in_another_process(tmp_path):
    store = build(tmp_path, [["x" * 100_000]])
    data = pickle.dumps(store)
    assert len(data) < 500
    program = "import pickle, sys; s = pickle.load(sys.stdin.buffer); print(s.fingerprint, len(s), s.tokens, s.text(0)[:3])"
    run = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
    assert run.stdout.decode().split() == [store.fingerprint, "1", "100001", "xxx"]


def test_same_documents_give_the_same_bytes(tmp_path):
    shards = [["", "a"], ["naïve"]]
    a, b = build(tmp_path / "a", shards), build(tmp_path / "b", shards)
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == ["manifest.json", "shard-00000.arrow", "shard-00001.arrow", "skipped.jsonl", "tokenizer.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert a.fingerprint == b.fingerprint != build(tmp_path / "c", [["", "a"], ["naive"]]).fingerprint


def refused(folder, *words: str) -> None:
    with pytest.raises(StoreError) as error:
        TokenStore.open(folder)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def edit(folder, change) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def pair(tmp_path):
    """Two shards alike in size, documents and tokens; only what they hold differs."""
    build(tmp_path, [["aaaa", "e"], ["cccc", "d"]])
    assert len({(tmp_path / f"shard-0000{i}.arrow").stat().st_size for i in (0, 1)}) == 1
    return tmp_path


def test_a_shard_cut_by_one_byte(pair):
    shard = pair / "shard-00001.arrow"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    refused(pair, "shard-00001.arrow", f"{size - 1:,} bytes", f"{size:,}")


def test_a_cut_shard_whose_size_was_corrected_in_the_manifest(pair):
    shard = pair / "shard-00000.arrow"
    os.truncate(shard, shard.stat().st_size - 1)
    edit(pair, lambda manifest: manifest["shards"][0].update(size=shard.stat().st_size))
    refused(pair, "shard-00000.arrow", "not a readable Arrow file")


@pytest.mark.parametrize("field, found, said", [("rows", 2, 3), ("tokens", 7, 6)])
def test_a_count_off_by_one(pair, field, found, said):
    edit(pair, lambda manifest: manifest["shards"][1].update({field: said}))
    refused(pair, "shard-00001.arrow", f"holds {found} {field}", f"says {said}")


@pytest.mark.parametrize("field, found", [("rows", 4), ("tokens", 14)])
def test_a_total_off_by_one(pair, field, found):
    edit(pair, lambda manifest: manifest.update({field: found + 1}))
    refused(pair, "manifest.json", f"says {found + 1} {field}", f"hold {found}")


def test_shards_in_each_others_place(pair):
    shutil.move(pair / "shard-00000.arrow", pair / "x")
    shutil.move(pair / "shard-00001.arrow", pair / "shard-00000.arrow")
    shutil.move(pair / "x", pair / "shard-00001.arrow")
    refused(pair, "shard-00000.arrow", "written as shard 1, expected 0")


def test_a_shard_made_with_another_tokenizer(pair):
    edit(pair, lambda manifest: manifest["tokenizer"].update(fingerprint="0" * 32))
    refused(pair, "shard-00000.arrow", "tokenizer", "0" * 32)


def test_missing_shard_missing_manifest_other_version(pair):
    shutil.copytree(pair, pair / "b")
    (pair / "shard-00001.arrow").unlink()
    refused(pair, "shard-00001.arrow", "missing", "2 rows")
    (pair / "manifest.json").unlink()
    refused(pair, "no manifest.json")
    edit(pair / "b", lambda manifest: manifest.update(schema_version=7))
    refused(pair / "b", "schema version 7", "reads 2")
    (pair / "b" / "manifest.json").write_text("{")
    refused(pair / "b", "not a manifest")


@pytest.mark.parametrize("wrong", [None, "x", -0.5, True, [], [1], {}, {"name": 1}, [{"name": "a"}]])
def test_a_manifest_of_other_types(pair, wrong):
    whole = (pair / "manifest.json").read_text()
    for name, right in json.loads(whole).items():
        if name != "schema_version" and (name in ("tokenizer", "shards") or type(wrong) is not type(right)):
            edit(pair, lambda manifest: manifest.update({name: wrong}))
            with pytest.raises(StoreError):
                TokenStore.open(pair)
            (pair / "manifest.json").write_text(whole)


def test_verify_reads_what_opening_does_not(pair):
    TokenStore.open(pair).verify()
    shard = pair / "shard-00001.arrow"
    data = bytearray(shard.read_bytes())
    data[data.index(b"cccc")] = ord("x")
    shard.write_bytes(data)
    with pytest.raises(StoreError, match="shard-00001.arrow: checksum .* the manifest says"):
        TokenStore.open(pair).verify()


def test_another_tokenizer_file_is_refused_when_asked_for(pair):
    document = (pair / "tokenizer.json").read_text()
    (pair / "tokenizer.json").write_text(document.replace('"id": 263', '"id": 264'))
    with pytest.raises(ValueError, match="tokenizer"):
        assert TokenStore.open(pair).tokenizer


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        with ShardWriter(tmp_path, 0, ByteTokenizer()) as writer:
            writer.add("r/x.py", b"x", "utf-8", None, np.array([1], np.uint16))
            raise RuntimeError("stop")
    assert os.listdir(tmp_path) == []
