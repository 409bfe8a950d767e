"""Files to token store, in parallel over a Ray cluster. What code and papers do differently is their `Kind`.

1. *Find*: the driver lists the inputs.
2. *Survey*: tasks read every input once, and say what it is or why it is left out.
3. *Arrange*: the driver, which now knows all of them, puts the rows in order and cuts them into shards by size alone,
   so that every byte of the store is the same on any machine.
4. *Encode*: tasks read, encode and put in place one shard each. Tokens never travel: a task returns its manifest row.
   Its memory is one record batch and one input.

The manifest is written last, in a folder `.NAME.partial` beside the store, which then becomes the store.

An input whose text is another in step 4 than in step 2, by whose facts it was let in, is treated like one that is gone.

An ingest that was killed goes on where it was: a finished piece of a step has a note, `survey-00000.json` or
`shard-00000.json`, that names the exact input it was made from, and is kept if that is still the same. A store made
from the same input (names, sizes, modification times, options) is used again as it is. One made from another is rebuilt
beside it and replaced when the new one is whole; the two never mix.

All nodes must see the input and the store under the same paths.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.quiet import quiet
from pipelines.corpus import sources, unfinished
from pipelines.corpus.decode import Unreadable
from pipelines.corpus.holdout import check_matched, held_out_part
from pipelines.corpus.kind import Facts, Kind, Place, checksum, encode
from pipelines.corpus.sources import Skipped, SourceFile
from pipelines.corpus.store import Shard, ShardWriter, TokenStore, file_checksum, shard_name, write_manifest, write_whole
from pipelines.corpus.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, parse_spec, train_bpe

SHARD_BYTES = 64 << 20
TRAINING_BYTES = 64 << 20  # of text that a byte-pair encoding is trained on; merges hardly change beyond
_FORMAT = 2  # of the rules above; a change makes every earlier record out of date
_SMALLEST_SHARD, _FEWEST_SHARDS = 1 << 20, 32

Progress = Callable[[str, int, int, int], None]


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did. Rates are of source bytes (10⁶) and tokens a second of `seconds`, wall-clock. `counts` is what
    the kind counts beside."""

    folder: str
    files: int
    skipped: dict[str, int]
    counts: dict[str, int]
    bytes: int
    tokens: int
    seconds: float
    megabytes_per_second: float
    tokens_per_second: float
    reused: bool


@dataclass(frozen=True)
class Found:
    """What the first step found, the identity of all that decides the store, and how long that took."""

    files: list[SourceFile]
    skipped: list[Skipped]
    identity: str
    seconds: float


def on_ray(task: Callable[[dict], dict], rows: list[dict]) -> Iterator[dict]:
    """What `task` makes of each row, in any order, as Ray Data gets it done."""
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True
    with ray.data.DataContext.current(context):
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    with quiet():
        yield from dataset.map(task).iter_rows()


def in_process(task: Callable[[dict], dict], rows: list[dict]) -> Iterator[dict]:
    """The same without a cluster, for an input that is smaller than the time to start one."""
    return map(task, rows)


def ingest(
    kind: Kind, paths, out, tokenizer: str = "byte", shard_bytes: int = SHARD_BYTES, progress: Progress | None = None,
    run: Callable[[Callable[[dict], dict], list[dict]], Iterator[dict]] = on_ray, found: Found | None = None,
) -> IngestReport:  # fmt: skip
    """Makes the token store `out` from what `kind` finds under `paths`.

    Args:
        out: the store's folder. Must be absent, empty, or a token store.
        tokenizer: `byte`, `bpe:N` (trained on this corpus), or a `tokenizer.json`.
        shard_bytes: most source bytes in a shard (a larger input has one to itself). A small corpus gets smaller
            shards, 32 or so but none under 1 MiB, to give every CPU something to do.
        progress: called with (step, inputs done, inputs in all, bytes done) as pieces are finished.
        run: `on_ray`, for which Ray must be initialised unless `reusable` says that nothing is to be done, or `in_process`.
        found: what `find` says of these very arguments, where that is known already: a large tree takes seconds.

    Raises ValueError, in one line, for a wrong input.
    """
    found = found or find(kind, paths, tokenizer, shard_bytes)
    started = time.monotonic() - found.seconds
    out = Path(out).resolve()
    if (store := unfinished.up_to_date(out, found.identity)) is not None:
        return report(store, started, reused=True)
    if run is on_ray:
        import ray

        if not ray.is_initialized():
            raise ValueError("Ray is not running here: call ray.init() before ingest")
    unfinished.check_replaceable(out)
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with unfinished.locked(partial, out):
        if unfinished.up_to_date(partial, found.identity) is None:  # else it was killed just before the last step
            build(kind, found, partial, tokenizer, shard_bytes, progress, run)
        unfinished.tidy(partial, len(TokenStore.open(partial).shards))
        unfinished.put_in_place(partial, out)
    return report(TokenStore.open(out), started, reused=False)


def reusable(found: Found, out) -> IngestReport | None:
    """The report of the store `out` if it was made from just this input, else None. Needs no Ray."""
    started = time.monotonic() - found.seconds
    store = unfinished.up_to_date(Path(out).resolve(), found.identity)
    return None if store is None else report(store, started, reused=True)


def find(kind: Kind, paths, tokenizer: str = "byte", shard_bytes: int = SHARD_BYTES, appending: bool = False) -> Found:
    """The first step. What is held out may stand in the store alone where one is appended to."""
    started = time.monotonic()
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    how, value = parse_spec(tokenizer)
    spec = load_tokenizer(value).fingerprint if how == "file" else tokenizer
    files, skipped = kind.find(paths)
    if not appending:
        check_matched(files, kind.held_out)
    identity = hashlib.blake2b(json.dumps([_FORMAT, spec, shard_bytes, kind.identity()]).encode(), digest_size=16)
    for file in files:
        identity.update(_stamp(file))
    for entry in skipped:
        identity.update(json.dumps([entry.path, entry.reason]).encode())
    return Found(files, skipped, identity.hexdigest(), time.monotonic() - started)


def _stamp(file: SourceFile) -> bytes:
    return json.dumps([file.name, file.size, file.mtime_ns, file.member, file.collection]).encode()


def build(kind: Kind, found: Found, partial: Path, tokenizer: str, shard_bytes: int, progress, run, base: TokenStore | None = None) -> None:
    """The other steps. Behind a `base`: its tokenizer, shards numbered after its own, and a manifest of both."""
    skipped = [asdict(entry) for entry in found.skipped]
    pieces = cut(found.files, shard_bytes)
    files, facts = [], []
    for piece, result in zip(pieces, _step("survey", Survey(str(partial), kind), pieces, progress, run)):
        skipped += result["skipped"]
        for number, fact in result["facts"]:
            files.append(piece[number])
            facts.append(Facts(**fact))
    places, left_out = kind.arrange(files, facts)
    skipped += [asdict(entry) for entry in left_out]
    if not places:
        first = f"{skipped[-1]['path']} as {skipped[-1]['reason']}"
        raise ValueError(f"nothing to ingest: all {len(found.files):,} inputs were left out, {first}")
    known = dict(zip(files, facts))
    places = [replace(place, checksum=known[place.file].checksum) for place in places]
    encoder = base.tokenizer if base else _tokenizer(tokenizer, kind, places, partial, found.identity)
    unfinished.record(partial, found.identity, kind.identity())
    shards = cut(places, shard_bytes)
    before = base.shards if base else []
    results = _step("encode", Encode(str(partial), kind, encoder), shards, progress, run, first=len(before))
    skipped += [row for result in results for row in result["skipped"]]
    if base:  # whose list is already the new one if the last run was killed while it swapped them
        skipped = [dict(row) for row in {tuple(row.items()) for row in skipped + base.skipped}]
    skipped.sort(key=lambda row: (row["path"], row["reason"]))
    write_manifest(
        partial, encoder, [*before, *(Shard(**result["shard"]) for result in results)], skipped,
        unit=kind.unit, held_out=kind.held_out, counts=kind.counts([known[place.file] for place in places]),
    )  # fmt: skip


def cut(items: list, shard_bytes: int = SHARD_BYTES) -> list[list]:
    """Cuts inputs or rows, in their order, into runs of at most about `shard_bytes`; the machine has no say in it."""
    sizes = [item.size if isinstance(item, SourceFile) else item.file.size for item in items]
    limit = min(shard_bytes, max(_SMALLEST_SHARD, -(-sum(sizes) // _FEWEST_SHARDS)))
    pieces: list[list] = [[]]
    filled = 0
    for item, size in zip(items, sizes):
        if pieces[-1] and filled + size > limit:
            pieces.append([])
            filled = 0
        pieces[-1].append(item)
        filled += size
    return pieces


def _step(name: str, step: Callable[[dict], dict], pieces: list[list], progress: Progress | None, run, first: int = 0) -> list[dict]:
    """What a step makes of each piece, in their order; the pieces are numbered from `first`."""
    results = {}
    inputs = bytes_done = 0
    total = sum(map(len, pieces))
    # What is in a piece travels as JSON: as nested columns it would be converted value by value.
    rows = [{"index": i, "piece": json.dumps([asdict(item) for item in piece])} for i, piece in enumerate(pieces, start=first)]
    for row in run(step, rows):
        piece = pieces[row["index"] - first]
        results[row["index"]] = json.loads(row["result"])
        inputs += len(piece)
        bytes_done += sum(item.size if isinstance(item, SourceFile) else item.file.size for item in piece)
        if progress:
            progress(name, inputs, total, bytes_done)
    return [results[index] for index in sorted(results)]


@dataclass(frozen=True)
class Survey:
    """The task of the second step: the facts of the inputs of a piece, each with its number in it."""

    folder: str
    kind: Kind

    def __call__(self, row: dict) -> dict:
        files = [SourceFile(**file) for file in json.loads(row["piece"])]
        stamp = _input_stamp(self.kind, files)
        note = Path(self.folder) / f"survey-{row['index']:05d}.json"
        return {"index": row["index"], "result": json.dumps(_noted(note, stamp) or self._make(files, note, stamp))}

    def _make(self, files: list[SourceFile], note: Path, stamp: str) -> dict:
        facts, skipped = [], []
        with sources.reading(files) as read:
            for number, file in enumerate(files):
                try:
                    facts.append((number, asdict(self.kind.survey(file, read(file)))))
                except Unreadable as error:
                    skipped.append({"path": sources.printable(file.name), "reason": str(error)})
        result = {"facts": facts, "skipped": skipped}
        write_whole(note, json.dumps({"input": stamp, "result": result}))
        return result


@dataclass(frozen=True)
class Encode:
    """The task of the fourth step: one shard, its manifest row and what could no longer be read."""

    folder: str
    kind: Kind
    encoder: Tokenizer

    def __call__(self, row: dict) -> dict:
        places = [Place(**{**place, "file": SourceFile(**place["file"])}) for place in json.loads(row["piece"])]
        return {"index": row["index"], "result": json.dumps(self.shard(row["index"], places))}

    def shard(self, index: int, places: list[Place]) -> dict:
        stamp = _input_stamp(self.kind, places, self.encoder)
        note, path = Path(self.folder) / f"shard-{index:05d}.json", Path(self.folder) / shard_name(index)
        result = _noted(note, stamp)
        if result is not None and path.is_file() and file_checksum(path) == result["shard"]["checksum"]:
            return result
        skipped = []
        with sources.reading([place.file for place in places]) as read, ShardWriter(self.folder, index, self.encoder) as writer:
            for place in places:
                try:
                    document = self.kind.read(place, read(place.file))
                    if checksum(document.text) != place.checksum:
                        raise Unreadable("changed: since it was first read")
                except Unreadable as error:  # it was readable, and the same, in the survey
                    if self.kind.unit == "collection":
                        raise ValueError(f"{place.name} changed while it was ingested ({error}); run the same command again") from error
                    skipped.append({"path": place.name, "reason": str(error)})
                    continue
                ids = encode(self.kind.parts(place, document), self.encoder)
                writer.add(place.name, document.source, document.encoding, document.licence, ids, place.collection, document.details)
            shard = writer.close()
        result = {"shard": asdict(shard), "skipped": skipped}
        write_whole(note, json.dumps({"input": stamp, "result": result}))
        return result


def _noted(note: Path, stamp: str) -> dict | None:
    """The result of an earlier, interrupted run for this very input."""
    if not note.is_file():
        return None
    told = json.loads(note.read_text(encoding="ascii"))
    return told["result"] if told["input"] == stamp else None


def _input_stamp(kind: Kind, items: list, encoder: Tokenizer | None = None) -> str:
    stamp = hashlib.blake2b(json.dumps([_FORMAT, kind.identity(), encoder and encoder.fingerprint]).encode(), digest_size=16)
    for item in items:
        stamp.update(_stamp(item) if isinstance(item, SourceFile) else _stamp(item.file))
        if isinstance(item, Place):
            stamp.update(json.dumps([item.name, item.collection, item.first, item.last, item.licence, item.checksum]).encode())
    return stamp.hexdigest()


def _tokenizer(spec: str, kind: Kind, places: list[Place], partial: Path, identity: str) -> Tokenizer:
    how, value = parse_spec(spec)
    if how == "byte":
        return ByteTokenizer()
    if how == "file":
        return load_tokenizer(value)
    if unfinished.recorded(partial) == identity:  # trained by the run that was interrupted
        return load_tokenizer(partial, name=spec)
    encoder = train_bpe(_training_texts(kind, places), value)
    encoder.save(partial)  # before the record, which vouches for it
    return encoder


def _training_texts(kind: Kind, places: list[Place]) -> Iterator[str]:
    """Texts up to TRAINING_BYTES, of all folders alike; the same for the same names. They come in the rows' order, in
    which containers are read fastest: it makes no difference to what is trained. None is held out, unless all are."""
    places = [place for place in places if held_out_part(place.name, place.collection, kind.held_out) is None] or places
    chosen, left = set(), TRAINING_BYTES
    for i in sorted(range(len(places)), key=lambda i: hashlib.blake2b(places[i].name.encode(), digest_size=8).digest()):
        if left <= 0:
            break
        left -= places[i].file.size
        chosen.add(i)
    with sources.reading([places[i].file for i in sorted(chosen)]) as read:
        for i in sorted(chosen):
            with contextlib.suppress(Unreadable):  # listed by the task that reads it for the store
                yield kind.read(places[i], read(places[i].file)).text


def report(store: TokenStore, started: float, reused: bool) -> IngestReport:
    """What the store holds; `started` by `time.monotonic`."""
    seconds = time.monotonic() - started
    manifest = store.manifest
    return IngestReport(
        folder=str(store.folder),
        files=manifest["rows"],
        skipped=manifest["skipped"],
        counts=manifest["counts"],
        bytes=manifest["bytes"],
        tokens=manifest["tokens"],
        seconds=seconds,
        megabytes_per_second=manifest["bytes"] / 1e6 / seconds,
        tokens_per_second=manifest["tokens"] / seconds,
        reused=reused,
    )
