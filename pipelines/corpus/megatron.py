"""Megatron-LM's indexed datasets, `PREFIX.bin` and `PREFIX.idx`, out of a token store and into one.

`.bin` is the ids of all sequences, one after the other. `.idx`, all little-endian:

    b"MMIDIDX\\0\\0"  magic           sequence lengths  int32 [S], in tokens
    uint64 1        version         pointers          int64 [S], bytes from the start of .bin
    uint8           dtype code      document indices  int64 [D + 1]: document d is the sequences
    uint64 S        sequences                         from the d-th to before the next; the first is 0
    uint64 D + 1

A store's documents are Megatron's documents and its rows the sequences; rows without tokens have no sequence, as
Megatron trips over one. Lengths are int32 there: a longer row is written as several sequences of its document.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.corpus.store import Shard, ShardWriter, TokenStore, write_manifest
from pipelines.corpus.tokenizer import Tokenizer
from pipelines.corpus.unfinished import check_replaceable, locked, put_in_place

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes; 6 and 7 are floats.
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_LONGEST = (1 << 31) - 1
_SHARD_TOKENS = 32 << 20


@dataclass(frozen=True)
class Exported:
    prefix: str
    sequences: int
    documents: int
    tokens: int
    dtype: str


def export_megatron(store: TokenStore, prefix) -> Exported:
    """Writes `PREFIX.bin` and `PREFIX.idx`, in that order and each whole; reads the store through its map, row by row.

    Ids are uint16 where the vocabulary is under 65,500, else int32: Megatron's own choice.
    """
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(np.uint16 if store.vocab_size < 65500 else np.int32)
    lengths, documents = sequences(store.lengths, store.documents)
    temporary = _beside(prefix, ".bin.tmp")
    with open(temporary, "wb") as out:
        for ids in store:
            ids.astype(dtype, copy=False).tofile(out)
    os.replace(temporary, _beside(prefix, ".bin"))
    temporary = _beside(prefix, ".idx.tmp")
    with open(temporary, "wb") as out:
        write_index(out, dtype, lengths, documents)
    os.replace(temporary, _beside(prefix, ".idx"))
    return Exported(str(prefix), len(lengths), len(documents) - 1, int(lengths.sum()), str(dtype))


def sequences(lengths: np.ndarray, documents: np.ndarray, longest: int = _LONGEST) -> tuple[np.ndarray, np.ndarray]:
    """Of rows' lengths int64 [R] and document bounds int64 [D + 1] in rows: sequence lengths [S], and bounds in sequences.

    An empty row gives no sequence, a document of such rows no document, a row over `longest` several sequences.
    """
    counts = -(-lengths // longest)
    starts = np.concatenate([[0], np.cumsum(counts)])
    result = np.full(starts[-1], longest, np.int64)
    filled = counts > 0
    result[starts[1:][filled] - 1] = lengths[filled] - (counts[filled] - 1) * longest
    return result, np.unique(starts[documents])


def write_index(out, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray) -> None:
    """The `.idx` of sequences int64 [S], each under 2³¹, and document bounds [D + 1]."""
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]) * dtype.itemsize if len(lengths) else lengths
    out.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(documents)))
    for array, kind in ((lengths, "<i4"), (pointers, "<i8"), (documents, "<i8")):
        out.write(array.astype(kind).tobytes())


@dataclass(frozen=True)
class Index:
    """What an `.idx` says: dtype of the ids, lengths [S], pointers in bytes [S], document bounds [D + 1], as int64."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray


def read_index(prefix) -> Index:
    """Raises ValueError, in one line, for files that are no indexed dataset or don't belong together."""
    path, data = _beside(prefix, ".idx"), _beside(prefix, ".bin")
    for file in (path, data):
        if not file.is_file():
            raise ValueError(f"{file}: no such file; an indexed dataset is PREFIX.bin and PREFIX.idx, named by PREFIX")
    told = path.read_bytes()
    if len(told) < _HEADER.size or not told.startswith(_MAGIC):
        raise ValueError(f"{path}: not the index of a Megatron dataset (it doesn't begin with MMIDIDX)")
    _, version, code, count, bounds = _HEADER.unpack_from(told)
    if version != _VERSION or code not in _DTYPES:
        raise ValueError(f"{path}: version {version} with ids of type {code}; only version 1 with integer ids is read")
    if len(told) not in (_HEADER.size + 12 * count + 8 * bounds, _HEADER.size + 13 * count + 8 * bounds):  # with modes
        raise ValueError(f"{path}: {len(told):,} bytes do not fit its {count:,} sequences and {bounds:,} document bounds")
    dtype, at, arrays = np.dtype(_DTYPES[code]).newbyteorder("<"), _HEADER.size, []
    for kind, length in (("<i4", count), ("<i8", count), ("<i8", bounds)):
        arrays.append(np.frombuffer(told, kind, length, at).astype(np.int64))
        at += arrays[-1].size * np.dtype(kind).itemsize
    lengths, pointers, documents = arrays
    size = data.stat().st_size
    if count and (lengths.min() < 0 or pointers.min() < 0 or (pointers + lengths * dtype.itemsize).max() > size):
        raise ValueError(f"{data}: {size:,} bytes, but {path.name} points beyond them")
    if bounds and (documents[0] != 0 or documents[-1] != count or (np.diff(documents) < 0).any()):
        raise ValueError(f"{path}: its document bounds do not go from 0 to its {count:,} sequences")
    return Index(dtype, lengths, pointers, documents)


def import_megatron(prefix, tokenizer: Tokenizer, out) -> TokenStore:
    """Makes the store `out` of an indexed dataset: a row a document, its ids as they are, its text what they decode to.

    `tokenizer` is the one that made the ids; they say nothing of it but their range, which is checked.
    """
    prefix, out = Path(prefix), Path(out).resolve()
    index = read_index(prefix)
    check_replaceable(out)
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial, out):
        for file in partial.iterdir():
            file.unlink()
        write_manifest(partial, tokenizer, list(_shards(prefix, index, tokenizer, partial)), [])
        put_in_place(partial, out)
    return TokenStore.open(out)


def _shards(prefix: Path, index: Index, tokenizer: Tokenizer, folder: Path) -> Iterator[Shard]:
    data = np.memmap(_beside(prefix, ".bin"), np.uint8, "r") if index.lengths.any() else np.zeros(0, np.uint8)
    bounds = index.documents if len(index.documents) else np.zeros(1, np.int64)
    sums = np.concatenate([[0], np.cumsum(index.lengths)])[bounds]
    document = shard = 0
    while document < len(bounds) - 1 or shard == 0:
        stop = max(document + 1, int(np.searchsorted(sums, sums[document] + _SHARD_TOKENS, "right")) - 1)
        with ShardWriter(folder, shard, tokenizer) as writer:
            for d in range(document, min(stop, len(bounds) - 1)):
                ids = _document(data, index, bounds[d], bounds[d + 1])
                if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
                    worst = ids.min() if ids.min() < 0 else ids.max()
                    has = f"{tokenizer.name} has {tokenizer.vocab_size:,} ids"
                    raise ValueError(f"{prefix}: id {worst} in document {d:,}, but {has}; name the tokenizer that made them")
                text = tokenizer.decode(ids, skip_special=True)
                writer.add(f"{prefix.name}/{d:09d}", text.encode(), "utf-8", None, ids.astype(tokenizer.dtype))
            yield writer.close()
        document, shard = stop, shard + 1


def _document(data: np.ndarray, index: Index, first: int, stop: int) -> np.ndarray:
    size = index.dtype.itemsize
    spans = zip(index.pointers[first:stop].tolist(), index.lengths[first:stop].tolist())
    return np.concatenate([np.zeros(0, index.dtype), *(data[at : at + length * size].view(index.dtype) for at, length in spans)])


def _beside(prefix, suffix: str) -> Path:
    return Path(f"{prefix}{suffix}")
