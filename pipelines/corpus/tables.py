"""Tables as containers of texts: Parquet files, and the Arrow files of a Hugging Face `save_to_disk` folder.

One column holds the texts; the others are not read. A table is read by record batches, so memory is one batch (of
Parquet, one column of a row group).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.corpus.decode import Unreadable

SUFFIXES = (".parquet", ".arrow")
COLUMNS = ("text", "content")  # tried in this order where none is named
_BATCH_ROWS = 128


@contextlib.contextmanager
def reader(path: str, members: list[str]) -> Iterator[Rows]:
    """Yields what reads the rows that `members` name, `column:row`, in ascending order."""
    yield Rows(path, members[0].rpartition(":")[0])


class Rows:
    """Bytes of a column's rows; one after the other they cost each batch once, a leap starts at its row group."""

    def __init__(self, path: str, column: str):
        self._path, self._column = path, column
        self._first, self._batch, self._batches = 0, [], iter(())

    def read(self, row: str) -> bytes:
        at = int(row)
        end = self._first + len(self._batch)
        if end == self._first or not self._first <= at < end + _BATCH_ROWS:
            self._batches, self._batch = batches(self._path, self._column, at), []
        while not self._first <= at < self._first + len(self._batch):
            self._first, self._batch = next(self._batches, (at, None))
            if self._batch is None:
                self._batch = []
                raise Unreadable(f"unreadable: {self._path} has no row {at} any more")
        value = self._batch[at - self._first].as_buffer()
        if value is None:
            raise Unreadable(f"unreadable: row {at} of {self._path} has no text any more")
        return value.to_pybytes()


def tables(paths) -> list[tuple[Path, str]]:
    """The tables under `paths`, sorted by path, each once, with their names in the corpus."""
    found: dict[Path, str] = {}
    for path in map(Path, paths):
        path = path.resolve()
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        # Beside a saved set stand tables that `map` and `filter` cached.
        files = [file for file in files if not file.name.startswith("cache-")]
        if path.is_file() and path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: not called {' or '.join(SUFFIXES)}, which says what kind of table it is; rename it")
        if not files:
            raise ValueError(f"{path}: no {' or '.join(SUFFIXES)} file below it")
        for file in files:
            found.setdefault(file, f"{path.name}/{file.relative_to(path).as_posix()}" if path.is_dir() else file.name)
    if len(set(found.values())) != len(found):
        twice = next(name for name in found.values() if list(found.values()).count(name) > 1)
        raise ValueError(f"two tables would be called {twice!r}; give the folder above them")
    return sorted(found.items())


def text_column(path: Path, column: str | None) -> str:
    """The column to take, None for the first of COLUMNS. ValueError in one line where there is none of strings."""
    schema = _opened(path, lambda: pq.read_schema(path) if path.suffix == ".parquet" else _ipc(path).schema)
    wanted = COLUMNS if column is None else (column,)
    name = next((name for name in wanted if name in schema.names), None)
    if name is None:
        raise ValueError(f"{path}: no column {' or '.join(wanted)}; it has {', '.join(schema.names)}: name one with --column")
    kind = schema.field(name).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{path}: column {name} is {kind}, not a string; name another with --column")
    return name


def batches(path, column: str, start: int = 0) -> Iterator[tuple[int, pa.Array]]:
    """The column's texts as large strings, at most _BATCH_ROWS at a time, each with its first row's number; from the
    row group or record batch that holds row `start`, as what stands before it can be skipped unread."""
    first, path = 0, Path(path)
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first + rows > start:
                    at = first
                    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column]):
                        yield at, batch.column(0).cast(pa.large_string())
                        at += batch.num_rows
                first += rows
        return
    for batch in _record_batches(_ipc(path)):
        if first + batch.num_rows > start:
            for at in range(0, batch.num_rows, _BATCH_ROWS):
                yield first + at, batch.column(column)[at : at + _BATCH_ROWS].cast(pa.large_string())
        first += batch.num_rows


def _ipc(path: Path) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    """An Arrow file of either format, through the memory map; `save_to_disk` writes the streaming one."""
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)


def _record_batches(table) -> Iterator[pa.RecordBatch]:
    if isinstance(table, pa.ipc.RecordBatchFileReader):
        return (table.get_batch(i) for i in range(table.num_record_batches))
    return iter(table)


def _opened(path: Path, read):
    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable table ({' '.join(str(error).split())[:200]})") from error
