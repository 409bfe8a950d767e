"""Megatron's indexed datasets, against a reader written from the published layout alone."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.corpus import megatron
from pipelines.corpus.megatron import export_megatron, import_megatron, read_index, sequences, write_index
from pipelines.corpus.store import TokenStore
from pipelines.corpus.tokenizer import ByteTokenizer
from tests.unit.pipelines.corpus.test_store import build


class PublishedReader:
    """As megatron/core/datasets/indexed_dataset.py lays it out: 34 bytes of header, then the arrays back to back."""

    TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

    def __init__(self, prefix):
        told = open(f"{prefix}.idx", "rb").read()
        assert told[:9] == b"MMIDIDX\x00\x00" and struct.unpack("<Q", told[9:17]) == (1,)
        self.dtype = np.dtype(self.TYPES[told[17]])
        count, bounds = struct.unpack("<QQ", told[18:34])
        at = 34
        self.lengths = np.frombuffer(told, "<i4", count, at)
        self.pointers = np.frombuffer(told, "<i8", count, at + 4 * count)
        self.documents = np.frombuffer(told, "<i8", bounds, at + 12 * count)
        assert len(told) == at + 12 * count + 8 * bounds
        self.data = open(f"{prefix}.bin", "rb").read()

    def __getitem__(self, i) -> list[int]:
        return np.frombuffer(self.data, self.dtype, self.lengths[i], self.pointers[i]).tolist()


def write(prefix, documents: list[list[list[int]]], dtype="<u2", code=8, modes=False):
    """Sequences by document, as Megatron's own builder writes them."""
    flat = [sequence for document in documents for sequence in document]
    pointers = np.cumsum([0] + [len(s) * np.dtype(dtype).itemsize for s in flat])[:-1]
    bounds = np.cumsum([0] + [len(document) for document in documents])
    with open(f"{prefix}.idx", "wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(flat), len(bounds)))
        out.write(np.array([len(s) for s in flat], "<i4").tobytes() + pointers.astype("<i8").tobytes() + bounds.astype("<i8").tobytes())
        out.write(bytes(len(flat)) if modes else b"")
    open(f"{prefix}.bin", "wb").write(b"".join(np.array(s, dtype).tobytes() for s in flat))


def test_a_store_as_megatron_reads_it(tmp_path):
    store = build(tmp_path / "store", [["", "a", "naïve"], ["b", ""]])
    result = export_megatron(store, tmp_path / "out" / "corpus")
    theirs = PublishedReader(tmp_path / "out" / "corpus")
    kept = [ids.tolist() for ids in store if len(ids)]  # C1: an empty row has no sequence
    assert [theirs[i] for i in range(len(theirs.lengths))] == kept
    assert theirs.dtype == np.uint16 and theirs.documents.tolist() == [0, 1, 2, 3]
    assert (result.sequences, result.documents, result.tokens) == (3, 3, store.tokens)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["corpus.bin", "corpus.idx"]


def test_there_and_back(tmp_path):
    store = build(tmp_path / "store", [["a" * 999, "naïve ﬁ"], ["b"]])
    export_megatron(store, tmp_path / "x")
    back = import_megatron(tmp_path / "x", ByteTokenizer(), tmp_path / "back")
    back.verify()
    assert [ids.tolist() for ids in back] == [ids.tolist() for ids in store]
    assert [back.text(i) for i in range(3)] == ["a" * 999, "naïve ﬁ", "b"]
    assert back.paths(2) == "x/000000002" and back.tokenizer.fingerprint == store.tokenizer.fingerprint


@pytest.mark.parametrize("dtype, code", [("<u2", 8), ("<i4", 4), ("<i8", 5), ("<u1", 1)])
def test_what_megatron_wrote(tmp_path, dtype, code, monkeypatch):
    monkeypatch.setattr(megatron, "_SHARD_TOKENS", 4)
    documents = [[[1, 2, 3], [4]], [], [[5]], [[250] * 9]]
    write(tmp_path / "x", documents, dtype, code, modes=code == 4)
    store = import_megatron(tmp_path / "x", ByteTokenizer(), tmp_path / "store")
    assert [ids.tolist() for ids in store] == [[1, 2, 3, 4], [], [5], [250] * 9]
    assert len(store.shards) == 3 and store[0].dtype == np.uint16


def test_an_empty_dataset(tmp_path):
    write(tmp_path / "x", [])
    assert len(import_megatron(tmp_path / "x", ByteTokenizer(), tmp_path / "store")) == 0
    export_megatron(TokenStore.open(tmp_path / "store"), tmp_path / "y")
    assert PublishedReader(tmp_path / "y").documents.tolist() == [0]


def test_offsets_beyond_32_bits(tmp_path):  # lengths as they would be, without the data
    lengths = np.array([2**31 + 10, 0, 5, 2**31 - 1], np.int64)
    split, bounds = sequences(lengths, np.arange(5))
    assert split.tolist() == [2**31 - 1, 11, 5, 2**31 - 1] and bounds.tolist() == [0, 2, 3, 4]
    with open(tmp_path / "x.idx", "wb") as out:
        write_index(out, np.dtype(np.uint16), split, bounds)
    (tmp_path / "x.bin").touch()
    theirs = PublishedReader(tmp_path / "x")
    assert theirs.pointers.tolist() == [0, 2 * (2**31 - 1), 2 * (2**31 + 10), 2 * (2**31 + 15)]
    with open(tmp_path / "x.bin", "wb") as out:
        out.truncate(int(2 * lengths.sum()))  # a hole on disk
    index = read_index(tmp_path / "x")
    assert index.pointers.tolist() == theirs.pointers.tolist() and index.lengths.sum() == lengths.sum()


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 7), st.data())
def test_no_token_is_lost_or_moved_to_another_document(lengths, longest, data):
    cuts = data.draw(st.lists(st.integers(0, len(lengths)), max_size=4))
    documents = np.array(sorted({0, len(lengths), *cuts}))
    split, bounds = sequences(np.array(lengths, np.int64), documents, longest)
    assert split.sum() == sum(lengths) and (not len(split) or 1 <= split.min() and split.max() <= longest)
    there = [sum(lengths[a:b]) for a, b in zip(documents, documents[1:])]
    here = [int(split[a:b].sum()) for a, b in zip(bounds, bounds[1:])]
    assert here == [total for total in there if total]


def test_what_is_no_dataset_is_refused_in_one_line(tmp_path):
    write(tmp_path / "x", [[[1, 2]], [[300]]])
    whole, data = (tmp_path / "x.idx").read_bytes(), (tmp_path / "x.bin").read_bytes()
    cases = {
        "not the index of a Megatron dataset": (b"x" + whole, data),
        "do not fit its 2 sequences": (whole[:-1], data),
        "version 1 with ids of type 7": (whole[:17] + b"\x07" + whole[18:], data),
        "points beyond them": (whole, data[:-1]),
        "document bounds": (whole[:-8] + struct.pack("<q", 1), data),
        "id 300 in document 1, but byte has 264 ids": (whole, data),
    }
    for said, (index, ids) in cases.items():
        (tmp_path / "x.idx").write_bytes(index)
        (tmp_path / "x.bin").write_bytes(ids)
        with pytest.raises(ValueError, match=said) as error:
            import_megatron(tmp_path / "x", ByteTokenizer(), tmp_path / "store")
        assert "\n" not in str(error.value) and not (tmp_path / "store").exists()
    with pytest.raises(ValueError, match="y.idx: no such file"):
        read_index(tmp_path / "y")
