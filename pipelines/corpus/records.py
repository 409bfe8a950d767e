"""The texts of tables as a corpus: a row is a table's row, a collection is a table's folder.

A row's name is `root/file.parquet/12`, its bytes the text in UTF-8. A row whose text is null is left out and listed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import pyarrow.compute as pc

from pipelines.corpus.decode import Unreadable
from pipelines.corpus.kind import END, Document, Facts, Part, Place, checksum
from pipelines.corpus.sources import Skipped, SourceFile
from pipelines.corpus.tables import batches, tables, text_column


@dataclass(frozen=True)
class Records:
    """The rows of the tables under the given paths.

    Args:
        column: the one that holds the text; None takes the first of COLUMNS that a table has.
    """

    column: str | None = None
    unit: ClassVar[str] = "row"
    held_out: ClassVar[tuple[str, ...]] = ()

    def identity(self) -> list:
        return ["tables", self.column]

    def find(self, paths) -> tuple[list[SourceFile], list[Skipped]]:
        files: list[SourceFile] = []
        skipped: list[Skipped] = []
        for path, name in tables(paths):
            column, stat = text_column(path, self.column), os.stat(path)
            for first, batch in batches(path, column):
                for at, size in enumerate(pc.binary_length(batch).to_pylist(), start=first):
                    if size is None:
                        skipped.append(Skipped(f"{name}/{at}", f"no text: {column} is null"))
                    else:
                        files.append(SourceFile(str(path), f"{name}/{at}", size, stat.st_mtime_ns, f"{column}:{at}"))
        if not files:
            raise ValueError(f"no row with a text under {', '.join(map(str, paths))}: {len(skipped):,} rows seen")
        return files, skipped

    def survey(self, file: SourceFile, data: bytes) -> Facts:
        return Facts(checksum(_utf8(data)), len(data))

    def arrange(self, files: list[SourceFile], facts: list[Facts]) -> tuple[list[Place], list[Skipped]]:
        return [Place(file, file.name, file.name.partition("/")[0]) for file in files], []

    def read(self, place: Place, data: bytes) -> Document:
        return Document(_utf8(data), data, "utf-8")

    def parts(self, place: Place, document: Document) -> list[Part]:
        return [document.text, END] if document.text else []

    def counts(self, facts: list[Facts]) -> dict[str, int]:
        return {}


def _utf8(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"undecodable: not UTF-8 at byte {error.start}") from error
