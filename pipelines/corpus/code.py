"""Source code as a corpus: a row is a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pipelines.corpus import sources
from pipelines.corpus.kind import END, Document, Facts, Part, Place
from pipelines.corpus.sources import Skipped, SourceFile, Unreadable


@dataclass(frozen=True)
class Code:
    """The files under the given paths that `sources.find_code` takes."""

    unit: str = "row"

    def identity(self) -> list:
        return ["code", self.unit]

    def find(self, paths) -> tuple[list[SourceFile], list[Skipped]]:
        return sources.find_code(paths)

    def survey(self, file: SourceFile, data: bytes) -> Facts:
        text = sources.decode(data, file.name)
        if reason := sources.unwanted(text.text):
            raise Unreadable(reason)
        checksum = hashlib.blake2b(text.text.encode(), digest_size=16).hexdigest()
        return Facts(checksum, len(data), sources.licence(text.text))

    def arrange(self, files: list[SourceFile], facts: list[Facts]) -> tuple[list[Place], list[Skipped]]:
        return [Place(file, file.name, file.name.partition("/")[0]) for file in files], []

    def read(self, place: Place, data: bytes) -> Document:
        text = sources.decode(data, place.file.name)
        return Document(text.text, text.source, text.encoding, sources.licence(text.text))

    def parts(self, place: Place, document: Document) -> list[Part]:
        return [document.text, END] if document.text else []

    def counts(self, facts: list[Facts]) -> dict[str, int]:
        return {}
