"""More inputs for a store that is there: new shards behind the old ones, then a new manifest at one stroke.

Until the manifest is swapped the store is what it was, also for those who read it, whenever this is killed; the same
command then goes on. Nothing old is written again: the tokenizer is the store's own, its rows keep their numbers.

An input that is in the store already, byte for byte, is passed over; one that differs is refused, as a store's rows
don't change. So is one more row for a collection that is already there where a collection is one document.

Where something is held out, a new input of the same text as an old row of the other side is left out, whichever of the
two it is. Other duplicates, and near ones, are looked for among the new inputs, not between them and the old rows.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipelines.corpus import sources, unfinished
from pipelines.corpus.holdout import held_out_part
from pipelines.corpus.ingest import SHARD_BYTES, IngestReport, Progress, build, find, on_ray, report
from pipelines.corpus.kind import Document, Facts, Kind, Part, Place, checksum
from pipelines.corpus.sources import Skipped, SourceFile
from pipelines.corpus.store import MANIFEST, SKIPPED, TokenStore, read_manifest
from pipelines.corpus.tokenizer import load_tokenizer, parse_spec


class _NothingNew(Exception):
    pass


def append(
    kind: Kind, paths, out, tokenizer: str | None = None, shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None, run=on_ray,
) -> IngestReport:  # fmt: skip
    """Adds what `kind` finds under `paths` to the store `out`; see `ingest`, whose arguments these are.

    The options must be those that the store was made with; `tokenizer` may be left out. Raises ValueError, in one line,
    that names what differs. The report is of the whole store, and `reused` where nothing was new.
    """
    started = time.monotonic()
    out = Path(out).resolve()
    check_same(TokenStore.open(out), kind, tokenizer)
    found = find(kind, paths, "byte", shard_bytes, appending=True)
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(exist_ok=True)
    with unfinished.locked(partial, out):
        store = TokenStore.open(out)  # only now: another append may have ended meanwhile
        check_same(store, kind, tokenizer)
        try:
            build(_Appending(kind, store), found, partial, "byte", shard_bytes, progress, run, base=store)
        except _NothingNew:
            if unfinished.recorded(out) is None and unfinished.recorded(partial) is not None:
                with unfinished.record_moved(partial, out):  # killed between the swap and this
                    pass
            shutil.rmtree(partial)
            return report(store, started, reused=True)
        for shard in read_manifest(partial)["shards"][len(store.shards) :]:
            os.replace(partial / shard["name"], out / shard["name"])
        with unfinished.record_moved(partial, out):
            os.replace(partial / SKIPPED, out / SKIPPED)
            os.replace(partial / MANIFEST, out / MANIFEST)
        shutil.rmtree(partial)
    return report(TokenStore.open(out), started, reused=False)


def check_same(store: TokenStore, kind: Kind, tokenizer: str | None) -> None:
    """ValueError unless the store was made with this tokenizer and these options."""
    recorded = store.manifest["tokenizer"]
    if tokenizer is not None:
        how, value = parse_spec(tokenizer)
        found = load_tokenizer(value).fingerprint if how == "file" else tokenizer
        if found not in (recorded["fingerprint"], recorded["name"]):
            made = f"{store.folder} was made with the tokenizer {recorded['name']}"
            raise ValueError(f"--append: {made}, not {tokenizer}; leave --tokenizer out")
    told = unfinished.recorded_options(store.folder)
    here = {"unit": kind.unit, "held out": sorted(kind.held_out), "options": kind.identity()}
    there = {"unit": store.unit, "held out": sorted(store.manifest["held_out"]), "options": kind.identity() if told is None else told}
    for name, value in here.items():
        if there[name] != value:
            made = f"{store.folder} was made with {name} {there[name]!r}"
            raise ValueError(f"--append: {made}, not {value!r}; give the same, or ingest anew")


@dataclass(frozen=True)
class _Appending:
    """The kind, without the rows that the store has."""

    kind: Kind
    store: TokenStore

    @property
    def unit(self) -> str:
        return self.kind.unit

    @property
    def held_out(self) -> tuple[str, ...]:
        return self.kind.held_out

    def identity(self) -> list:
        return self.kind.identity()

    def find(self, paths) -> tuple[list[SourceFile], list[Skipped]]:
        return self.kind.find(paths)

    def survey(self, file: SourceFile, data: bytes) -> Facts:
        return self.kind.survey(file, data)

    def arrange(self, files: list[SourceFile], facts: list[Facts]) -> tuple[list[Place], list[Skipped]]:
        places, skipped = self.kind.arrange(files, facts)
        new = self._new(places)
        checksums = {file: fact.checksum for file, fact in zip(files, facts)}
        copies = self._copies(new, [checksums[place.file] for place in new]) if self.held_out else {}
        kept = [place for place in new if place.name not in copies]
        if len(places) > len(new) and not kept:
            raise _NothingNew
        if copies and self.unit == "collection":
            name, copied = min(copies.items())
            raise ValueError(f"--append: {name} is {copied} in {self.store.folder}; leave it out, or ingest anew")
        return kept, skipped + [Skipped(name, f"held out: {copied} in the store") for name, copied in copies.items()]

    def read(self, place: Place, data: bytes) -> Document:
        return self.kind.read(place, data)

    def parts(self, place: Place, document: Document) -> list[Part]:
        return self.kind.parts(place, document)

    def counts(self, facts: list[Facts]) -> dict[str, int]:
        return dict(Counter(self.store.manifest["counts"]) + Counter(self.kind.counts(facts)))

    def _copies(self, new: list[Place], checksums: list[str]) -> dict[str, str]:
        """The new rows, by name, that copy an old one from the other side of what is held out, and which."""
        store, sought, copies = self.store, set(checksums), {}
        is_held_out = lambda path, collection: held_out_part(path, collection, self.held_out) is not None
        old: dict[str, int] = {}
        for row in range(len(store)):
            text = store.text(row)
            if text and (found := checksum(text)) in sought:
                old[found] = row
        for place, own in zip(new, checksums):
            if own in old and is_held_out(place.name, place.collection) != is_held_out(
                path := store.paths(old[own]), store.collection(old[own])
            ):
                copies[place.name] = f"the same text as {path}"
        return copies

    def _new(self, places: list[Place]) -> list[Place]:
        names, collections = (self.store.column(name).to_pylist() for name in ("path", "collection"))
        row = {key: i for i, key in enumerate(zip(collections, names))}
        there = [place for place in places if (place.collection, place.name) in row]
        with sources.reading([place.file for place in there]) as read:
            for place in there:
                source = self.kind.read(place, read(place.file)).source
                if source != self.store.source(row[place.collection, place.name]):
                    there = f"{place.name} is in {self.store.folder} with other contents"
                    raise ValueError(f"--append: {there}; ingest anew, or rename it")
        new = [place for place in places if (place.collection, place.name) not in row]
        grown = {place.collection for place in new} & set(collections) if self.unit == "collection" else set()
        if grown:
            there = f"{min(grown)} is in {self.store.folder} as one document"
            raise ValueError(f"--append: {there}, which can't grow; ingest anew")
        return new
