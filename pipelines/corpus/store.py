"""The token store: Arrow IPC shards that are read through the memory map, and a manifest that vouches for them.

A store is one folder:

    manifest.json      schema version, tokenizer, counts, a row for each shard; written last, so a folder without it
                       is an unfinished ingest, never half a store
    tokenizer.json     the tokenizer that made the ids
    skipped.jsonl      one line for each file that was left out: path and reason
    shard-00000.arrow  a row a file or paper: path, collection (its repository or shelf), source (the file's bytes),
                       encoding, licence, details (JSON: what else is known of it), tokens

Nothing in these files depends on the time, the machine or the number of CPUs: the same input gives the same bytes.
Tokens are `large_list`, whose offsets are 64-bit: one row may exceed 2³¹ tokens. A shard holds several record
batches of a few MiB, so a writer's memory does not grow with the shard; a reader maps the file, and reading a slice
touches only the pages under it.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.corpus.tokenizer import FILE_NAME, Tokenizer, load_tokenizer

SCHEMA_VERSION = 2
MANIFEST, SKIPPED = "manifest.json", "skipped.jsonl"
_BATCH_BYTES = 8 << 20


class StoreError(ValueError):
    """A store that must not be read: one line that names the file and the difference."""


@dataclass(frozen=True)
class Shard:
    """The manifest's row for a shard. `source_bytes` counts the rows' bytes, `size` the file's."""

    name: str
    size: int
    rows: int
    tokens: int
    source_bytes: int
    checksum: str


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.arrow"


class ShardWriter:
    """Writes one shard under a temporary name; `close` puts it in place whole and returns its manifest row.

    Use as a context manager: an exception inside removes the temporary file. Memory is one record batch, 8 MiB or
    the largest document.
    """

    def __init__(self, folder, index: int, tokenizer: Tokenizer):
        self._path = Path(folder) / shard_name(index)
        self._temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        self._schema = _schema(tokenizer.dtype, tokenizer.fingerprint, index)
        self._dtype = tokenizer.dtype
        self._rows: list[tuple[str, str, bytes, str, str | None, str | None, np.ndarray]] = []
        self._pending = self._count = self._tokens = self._source_bytes = 0
        self._file = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(
        self, path: str, source: bytes, encoding: str, licence: str | None, tokens: np.ndarray,
        collection: str | None = None, details: dict | None = None,
    ) -> None:  # fmt: skip
        """Appends a row; `tokens` is [L] of the tokenizer's dtype; its collection is by default its root folder."""
        assert tokens.dtype == self._dtype and tokens.ndim == 1
        collection = path.partition("/")[0] if collection is None else collection
        details = None if details is None else json.dumps(details, ensure_ascii=False)
        self._rows.append((path, collection, source, encoding, licence, details, tokens))
        self._pending += len(source) + tokens.nbytes + len(details or "")
        self._count += 1
        self._tokens += len(tokens)
        self._source_bytes += len(source)
        if self._pending >= _BATCH_BYTES:
            self._flush()

    def close(self) -> Shard:
        self._flush()
        self._writer.close()
        self._file.close()
        checksum, size = file_checksum(self._temporary), self._temporary.stat().st_size
        os.replace(self._temporary, self._path)
        return Shard(self._path.name, size, self._count, self._tokens, self._source_bytes, checksum)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._rows:
            return
        paths, collections, sources, encodings, licences, details, tokens = zip(*self._rows)
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens], dtype=np.int64)])
        columns = [
            pa.array(paths, pa.string()),
            pa.array(collections, pa.string()),
            pa.array(sources, pa.large_binary()),
            pa.array(encodings, pa.string()),
            pa.array(licences, pa.string()),
            pa.array(details, pa.large_string()),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(tokens))),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows, self._pending = [], 0


def write_manifest(
    folder, tokenizer: Tokenizer, shards: list[Shard], skipped: list[dict],
    unit: str = "row", held_out: Sequence[str] = (), counts: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Completes a store whose shards are in place: the tokenizer, the skipped files, and last the manifest.

    `skipped` has `path` and `reason`; a reason is counted by its part before the first colon. `unit` is what windows
    take as one document, `held_out` the patterns of what is kept from training, `counts` what else was counted.
    """
    folder = Path(folder)
    tokenizer.save(folder)
    lines = [json.dumps({"path": row["path"], "reason": row["reason"]}) + "\n" for row in skipped]
    write_whole(folder / SKIPPED, "".join(lines))
    kinds = [row["reason"].partition(":")[0] for row in skipped]
    told = json.dumps([SCHEMA_VERSION, tokenizer.fingerprint, unit, list(held_out)])
    identity = hashlib.blake2b(told.encode(), digest_size=16)
    for shard in shards:
        identity.update(shard.checksum.encode())
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": identity.hexdigest(),
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "unit": unit,
        "held_out": list(held_out),
        "counts": counts or {},
        "rows": sum(shard.rows for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "bytes": sum(shard.source_bytes for shard in shards),
        "skipped": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "shards": [asdict(shard) for shard in shards],
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Puts a text file in place at once: a reader sees the old one or all of the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="ascii")
    os.replace(temporary, path)


class TokenStore:
    """Rows as token arrays, read through the memory map.

    `len(store)` rows; `store[i]` is a read-only view [L] of row i's ids, no copy; `store.lengths` is int64 [rows].
    `store.unit` says what windows take as one document, a "row" or a "collection". An instance pickles as its `address`,
    the folder or URI, and maps the files anew where it arrives.
    """

    @classmethod
    def open(cls, folder) -> TokenStore:
        """Opens and checks a store without reading its tokens: schema version, file sizes, footers, counts.

        `folder` may be a URI, `s3://bucket/store`: see `remote`, which brings it to this machine.

        Raises StoreError (a ValueError) in one line that names the file and the difference. `verify` reads it all.
        """
        if "://" in str(folder):
            from pipelines.corpus import remote  # which knows what a store is

            return cls(remote.fetch(str(folder)), address=str(folder))
        return cls(folder)

    def __init__(self, folder, address: str | None = None):
        self.folder = Path(folder).resolve()
        self.address = address or str(self.folder)
        self.manifest = read_manifest(self.folder)
        self.fingerprint: str = self.manifest["fingerprint"]
        self.vocab_size: int = self.manifest["tokenizer"]["vocab_size"]
        self.unit: str = self.manifest["unit"]
        self.shards = [Shard(**row) for row in self.manifest["shards"]]
        self._batches: list[pa.RecordBatch] = []
        for index, shard in enumerate(self.shards):
            self._batches += self._open_shard(index, shard)
        self._offsets = [batch.column("tokens").offsets.to_numpy() for batch in self._batches]
        self._values = [batch.column("tokens").values.to_numpy(zero_copy_only=True) for batch in self._batches]
        self._first = list(accumulate((batch.num_rows for batch in self._batches), initial=0))  # row of each batch
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(offsets) for offsets in self._offsets)])
        self.lengths.flags.writeable = False
        self.tokens = int(self.lengths.sum())
        for field, found in (("rows", len(self.lengths)), ("tokens", self.tokens)):
            if self.manifest[field] != found:
                said = self.manifest[field]
                raise StoreError(f"{self.folder / MANIFEST}: says {said:,} {field}, its shards hold {found:,}")

    def __reduce__(self):
        return TokenStore.open, (self.address,)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        batch, row = self._locate(i)
        offsets = self._offsets[batch]
        return self._values[batch][offsets[row] : offsets[row + 1]]

    def paths(self, i: int) -> str:
        """Path of row i inside the corpus, with `/`, beginning with the name of its root folder."""
        return self._cell("path", i)

    def collection(self, i: int) -> str:
        """The repository or shelf that row i belongs to."""
        return self._cell("collection", i)

    def details(self, i: int) -> dict | None:
        """What is known of row i beside its text, or None."""
        details = self._cell("details", i)
        return None if details is None else json.loads(details)

    def source(self, i: int) -> bytes:
        """The bytes of row i's file, as they were."""
        return self._cell("source", i)

    def encoding(self, i: int) -> str:
        """The codec that turns `source(i)` into text; `utf-8-sig` and `utf-16` take a byte order mark off."""
        return self._cell("encoding", i)

    def licence(self, i: int) -> str | None:
        """The SPDX expression that row i is under, by its own line or by the nearest licence file, or None."""
        return self._cell("licence", i)

    def text(self, i: int) -> str:
        """The text of row i as it was encoded: line ends and form feeds kept, without a byte order mark."""
        return self.source(i).decode(self.encoding(i))

    @cached_property
    def documents(self) -> np.ndarray:
        """int64 [documents + 1]: to windows, document d is the rows documents[d] to documents[d + 1] − 1."""
        if self.unit == "row" or not len(self):
            return np.arange(len(self) + 1, dtype=np.int64)
        collections = self.column("collection")
        changes = pc.not_equal(collections[1:], collections[:-1]).to_numpy()
        return np.concatenate([[0], 1 + np.flatnonzero(changes), [len(self)]]).astype(np.int64)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self.folder, self.manifest["tokenizer"])

    @cached_property
    def skipped(self) -> list[dict]:
        """`{path, reason}` of every file that was left out."""
        lines = (self.folder / SKIPPED).read_text(encoding="ascii").splitlines()
        return [json.loads(line) for line in lines]

    def verify(self, progress: Callable[[int, int, int], None] | None = None) -> None:
        """Reads every byte; raises StoreError in one line that names every shard whose checksum is another."""
        if faults := bad_shards(self.folder, progress):
            raise StoreError("; ".join(faults))

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of all rows, not copied: a string a row of path, collection, encoding, licence; bytes of source."""
        kind = _schema(_dtype(self.vocab_size), "", 0).field(name).type
        return pa.chunked_array([batch.column(name) for batch in self._batches], kind)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [rows + 1]: the tokens of the store before each row, and all."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def rows_between(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Tokens [start, stop), counted through all rows, as (row, first, last + 1 in that row); no empty parts."""
        found, row = [], int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(self.starts[row]), min(stop, int(self.starts[row + 1]))
            if start < end:
                found.append((row, start - begin, end - begin))
            start, row = end, row + 1
        return found

    def _locate(self, i: int) -> tuple[int, int]:
        count, i = self._first[-1], operator.index(i)
        if not -count <= i < count:
            raise IndexError(f"row {i} of {count:,}")
        i += count if i < 0 else 0
        batch = bisect_right(self._first, i) - 1
        return batch, i - self._first[batch]

    def _cell(self, column: str, i: int):
        batch, row = self._locate(i)
        return self._batches[batch].column(column)[row].as_py()

    def _open_shard(self, index: int, shard: Shard) -> list[pa.RecordBatch]:
        path = self.folder / shard.name
        if not path.is_file():
            raise StoreError(f"{path}: missing, the manifest lists it with {shard.rows:,} rows")
        size = path.stat().st_size
        if size != shard.size:
            raise StoreError(f"{path}: {size:,} bytes, the manifest says {shard.size:,}")
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except pa.ArrowInvalid as error:
            raise StoreError(f"{path}: not a readable Arrow file ({' '.join(str(error).split())})") from error
        expected = _schema(_dtype(self.vocab_size), self.manifest["tokenizer"]["fingerprint"], index)
        if not reader.schema.equals(expected):
            columns = ", ".join(reader.schema.names)
            raise StoreError(f"{path}: columns {columns} or their types are not of schema version {SCHEMA_VERSION}")
        for key, value in expected.metadata.items():
            found = (reader.schema.metadata or {}).get(key)
            if found != value:
                found = (found or b"?").decode()
                raise StoreError(f"{path}: written as {key.decode()} {found}, expected {value.decode()}")
        rows = sum(batch.num_rows for batch in batches)
        offsets = [batch.column("tokens").offsets for batch in batches]
        tokens = sum(o[-1].as_py() - o[0].as_py() for o in offsets)
        for field, found, said in (("rows", rows, shard.rows), ("tokens", tokens, shard.tokens)):
            if found != said:
                raise StoreError(f"{path}: holds {found:,} {field}, the manifest says {said:,}")
        return batches


def bad_shards(folder, progress: Callable[[int, int, int], None] | None = None) -> list[str]:
    """What is wrong with each shard of the store in `folder`, one line each, in order, after reading every byte; and with
    its tokenizer.

    Also of a store that doesn't open. `progress` is called with (shards done, shards in all, bytes done).
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    shards = [Shard(**row) for row in manifest["shards"]]
    faults, size = [], 0
    for done, shard in enumerate(shards, start=1):
        path = folder / shard.name
        if not path.is_file():
            faults.append(f"{path}: missing, the manifest lists it with {shard.rows:,} rows")
        elif (found := path.stat().st_size) != shard.size:
            faults.append(f"{path}: {found:,} bytes, the manifest says {shard.size:,}")
        elif (checksum := file_checksum(path)) != shard.checksum:
            faults.append(f"{path}: checksum {checksum}, the manifest says {shard.checksum}")
        size += shard.size
        if progress:
            progress(done, len(shards), size)
    try:
        _tokenizer(folder, manifest["tokenizer"])
    except ValueError as error:
        faults.append(str(error))
    return faults


def _tokenizer(folder: Path, recorded: dict) -> Tokenizer:
    tokenizer = load_tokenizer(folder, name=recorded["name"])
    if tokenizer.fingerprint != recorded["fingerprint"]:
        raise StoreError(f"{folder / FILE_NAME}: fingerprint {tokenizer.fingerprint}, the store was made with {recorded['fingerprint']}")
    return tokenizer


def file_checksum(path) -> str:
    """BLAKE2b of a file, 128 bits, read in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict:
    """A store's manifest; StoreError in one line where there is none of this version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise StoreError(f"{folder}: no {MANIFEST}, so no finished token store; run `ringspan ingest` into this folder")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["schema_version"]
        if version == SCHEMA_VERSION:
            _check_types(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: not a manifest ({error})") from error
    if version != SCHEMA_VERSION:
        raise StoreError(f"{path}: schema version {version}, this program reads {SCHEMA_VERSION}; ingest again")
    return manifest


_TYPES = {
    "fingerprint": str, "tokenizer": dict, "unit": str, "held_out": list, "counts": dict, "rows": int, "tokens": int, "bytes": int,
    "skipped": dict, "shards": list,
}  # fmt: skip


def _check_types(manifest: dict) -> None:
    def check(row: dict, types: dict[str, type]) -> None:
        for name, kind in types.items():
            if type(row[name]) is not kind:
                raise TypeError(f"{name} is {row[name]!r}")

    check(manifest, _TYPES)
    check(manifest["tokenizer"], {"name": str, "fingerprint": str, "vocab_size": int})
    for row in manifest["shards"]:
        check(asdict(Shard(**row)), {field.name: {"str": str, "int": int}[field.type] for field in fields(Shard)})


def _schema(dtype: np.dtype, fingerprint: str, index: int) -> pa.Schema:
    # The shard's number and tokenizer stand in its footer, so that a shard in another's place is seen on opening.
    return pa.schema(
        [
            ("path", pa.string()),
            ("collection", pa.string()),
            ("source", pa.large_binary()),
            ("encoding", pa.string()),
            ("licence", pa.string()),
            ("details", pa.large_string()),
            ("tokens", pa.large_list(pa.from_numpy_dtype(dtype))),
        ],
        metadata={"shard": str(index), "tokenizer": fingerprint},
    )


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
