"""Files to token store, in parallel over a Ray cluster.

1. The driver finds the files and cuts the sorted list into shards by size alone, so that the plan, and with it every
   byte of the store, is the same on any machine.
2. Each Ray Data task reads, decodes and encodes the files of one shard and puts the shard in place whole. Tokens
   never travel: a task returns its manifest row. Its memory is one record batch and one file.
3. The driver writes the manifest last, in a folder `.NAME.partial` beside the store, which then becomes the store.

An ingest that was killed goes on where it was: a finished shard has a note `shard-00000.json` that names the exact
input it was made from, and is kept if that input is still the same. A store made from the same input (names, sizes,
modification times, tokenizer, shard size) is used again as it is. One made from another is rebuilt beside it and
replaced when the new one is whole; the two never mix. What the input was is recorded in `.ingest.json`: modification
times belong to one machine, so this file is no part of the store's identity.

All nodes must see the input and the store under the same paths.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipelines.corpus import sources
from pipelines.corpus.sources import Skipped, SourceFile, Unreadable
from pipelines.corpus.store import (
    MANIFEST,
    SKIPPED,
    Shard,
    ShardWriter,
    StoreError,
    TokenStore,
    file_checksum,
    shard_name,
    write_manifest,
)
from pipelines.corpus.tokenizer import FILE_NAME, ByteTokenizer, Tokenizer, load_tokenizer, parse_spec, train_bpe
from pipelines.paths import check_folder

SHARD_BYTES = 64 << 20
TRAINING_BYTES = 64 << 20  # of text that a byte-pair encoding is trained on; merges hardly change beyond
_RECORD = ".ingest.json"
_FORMAT = 1  # of the rules above; a change makes every earlier record out of date
_SMALLEST_SHARD, _FEWEST_SHARDS = 1 << 20, 32

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did. Rates are of source bytes (10⁶) and tokens a second of `seconds`, wall-clock."""

    folder: str
    files: int
    skipped: dict[str, int]
    bytes: int
    tokens: int
    seconds: float
    megabytes_per_second: float
    tokens_per_second: float
    reused: bool


@dataclass(frozen=True)
class _Plan:
    files: list[SourceFile]
    skipped: list[Skipped]
    shards: list[list[SourceFile]]
    identity: str


def ingest_code(
    paths, out, tokenizer: str = "byte", shard_bytes: int = SHARD_BYTES, progress: Progress | None = None
) -> IngestReport:
    """Makes the token store `out` from the code under `paths`. Ray must be initialised, unless `reusable` says yes.

    Args:
        paths: files and folders; see `sources.find_code`.
        out: the store's folder. Must be absent, empty, or a token store.
        tokenizer: `byte`, `bpe:N` (trained on this corpus), or a `tokenizer.json`.
        shard_bytes: most source bytes in a shard (a larger file has one to itself). A small corpus gets smaller
            shards, 32 or so but none under 1 MiB, to give every CPU something to do.
        progress: called with (files done, files in all, bytes done) as shards are finished.

    Every document that isn't empty ends in `end_of_text`. Raises ValueError, in one line, for a wrong input.
    """
    import ray  # here, so that finding out that nothing is to be done doesn't cost its import

    started = time.monotonic()
    out = Path(out).resolve()
    plan = _plan(paths, tokenizer, shard_bytes)
    if (store := _up_to_date(out, plan)) is not None:
        return _report(store, started, reused=True)
    if not ray.is_initialized():
        raise ValueError("Ray is not running here: call ray.init() before ingest_code")
    check_replaceable(out)
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial, out):
        if _up_to_date(partial, plan) is None:  # else it was killed just before the last step
            encoder = _tokenizer(tokenizer, plan, partial)
            _write_record(partial, plan)
            results = sorted(_run(plan, partial, encoder, progress), key=lambda result: result["index"])
            skipped = [asdict(entry) for entry in plan.skipped] + [row for r in results for row in r["skipped"]]
            skipped.sort(key=lambda row: (row["path"], row["reason"]))
            write_manifest(partial, encoder, [Shard(**result["shard"]) for result in results], skipped)
        _tidy(partial, len(plan.shards))
        _put_in_place(partial, out)
    return _report(TokenStore.open(out), started, reused=False)


def reusable(paths, out, tokenizer: str = "byte", shard_bytes: int = SHARD_BYTES) -> IngestReport | None:
    """The report of the store `out` if it was made from just this input, else None. Needs no Ray."""
    started = time.monotonic()
    store = _up_to_date(Path(out).resolve(), _plan(paths, tokenizer, shard_bytes))
    return None if store is None else _report(store, started, reused=True)


def plan_shards(files: list[SourceFile], shard_bytes: int = SHARD_BYTES) -> list[list[SourceFile]]:
    """Cuts the list, in its order, into runs of at most about `shard_bytes`; the machine has no say in it."""
    total = sum(file.size for file in files)
    limit = min(shard_bytes, max(_SMALLEST_SHARD, -(-total // _FEWEST_SHARDS)))
    shards: list[list[SourceFile]] = [[]]
    filled = 0
    for file in files:
        if shards[-1] and filled + file.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(file)
        filled += file.size
    return shards


def _plan(paths, tokenizer: str, shard_bytes: int) -> _Plan:
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    kind, value = parse_spec(tokenizer)
    spec = load_tokenizer(value).fingerprint if kind == "file" else tokenizer
    files, skipped = sources.find_code(paths)
    identity = hashlib.blake2b(json.dumps([_FORMAT, spec, shard_bytes]).encode(), digest_size=16)
    for file in files:
        identity.update(_stamp(file))
    for entry in skipped:
        identity.update(json.dumps([entry.path, entry.reason]).encode())
    return _Plan(files, skipped, plan_shards(files, shard_bytes), identity.hexdigest())


def _stamp(file: SourceFile) -> bytes:
    return json.dumps([file.name, file.size, file.mtime_ns]).encode()


def _up_to_date(folder: Path, plan: _Plan) -> TokenStore | None:
    """The finished store in `folder`, if it was made by this plan and opens; a damaged one is to be made again."""
    if _recorded(folder) != plan.identity:
        return None
    try:
        return TokenStore.open(folder)
    except StoreError:
        return None


def _recorded(folder: Path) -> str | None:
    record = folder / _RECORD
    return json.loads(record.read_text(encoding="ascii"))["identity"] if record.is_file() else None


def _write_record(partial: Path, plan: _Plan) -> None:
    # An unfinished folder may hold the manifest of another input: it goes before the record says otherwise.
    (partial / MANIFEST).unlink(missing_ok=True)
    temporary = partial / (_RECORD + ".tmp")
    temporary.write_text(json.dumps({"identity": plan.identity}) + "\n", encoding="ascii")
    os.replace(temporary, partial / _RECORD)


def _tokenizer(spec: str, plan: _Plan, partial: Path) -> Tokenizer:
    kind, value = parse_spec(spec)
    if kind == "byte":
        return ByteTokenizer()
    if kind == "file":
        return load_tokenizer(value)
    if _recorded(partial) == plan.identity:  # trained by the run that was interrupted
        return load_tokenizer(partial, name=spec)
    encoder = train_bpe(_training_texts(plan.files), value)
    encoder.save(partial)  # before the record, which vouches for it
    return encoder


def _training_texts(files: list[SourceFile]) -> Iterator[str]:
    """Texts in an order that mixes folders, up to TRAINING_BYTES; the same for the same names."""
    left = TRAINING_BYTES
    for file in sorted(files, key=lambda file: hashlib.blake2b(file.name.encode(), digest_size=8).digest()):
        if left <= 0:
            return
        try:
            text = sources.read_text(file.path).text
        except Unreadable:
            continue  # listed by the task that reads it for the store
        if sources.unwanted(text) is None:
            left -= file.size
            yield text


def _run(plan: _Plan, folder: Path, encoder: Tokenizer, progress: Progress | None) -> Iterator[dict]:
    """Results of the shards as they are finished, in any order."""
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True
    # The files of a shard travel as JSON: as nested columns they would be converted one by one.
    rows = [{"index": i, "files": json.dumps([asdict(f) for f in shard])} for i, shard in enumerate(plan.shards)]
    with ray.data.DataContext.current(context):
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    dataset = dataset.map(_shard_task, fn_kwargs={"folder": str(folder), "encoder": encoder})
    files_done = bytes_done = 0
    with _quiet():
        for row in dataset.iter_rows():
            shard = plan.shards[row["index"]]
            files_done += len(shard)
            bytes_done += sum(file.size for file in shard)
            if progress:
                progress(files_done, len(plan.files), bytes_done)
            yield json.loads(row["result"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Ray Data's notes on its own progress out of the terminal, where the caller may draw a bar; errors show."""
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _shard_task(row: dict, folder: str, encoder: Tokenizer) -> dict:
    index = row["index"]
    files = [SourceFile(**file) for file in json.loads(row["files"])]
    result = _finished(Path(folder), index, files, encoder) or build_shard(folder, index, files, encoder)
    return {"index": index, "result": json.dumps(result)}


def build_shard(folder, index: int, files: list[SourceFile], encoder: Tokenizer) -> dict:
    """Reads, encodes and writes the files of one shard; returns `index`, `shard` (manifest row) and `skipped`."""
    skipped = []
    with ShardWriter(folder, index, encoder) as writer:
        for file in files:
            try:
                text = sources.read_text(file.path)
            except Unreadable as error:
                skipped.append({"path": file.name, "reason": str(error)})
                continue
            if reason := sources.unwanted(text.text):
                skipped.append({"path": file.name, "reason": reason})
                continue
            ids = encoder.encode(text.text)
            if len(ids):
                ids = np.append(ids, ids.dtype.type(encoder.end_of_text))
            writer.add(file.name, text.source, text.encoding, sources.licence(text.text), ids)
        shard = writer.close()
    result = {"index": index, "shard": asdict(shard), "skipped": skipped}
    note = {"input": _shard_input(files, encoder), "result": result}
    temporary = _note(folder, index).with_suffix(".json.tmp")
    temporary.write_text(json.dumps(note), encoding="ascii")
    os.replace(temporary, _note(folder, index))
    return result


def _finished(folder: Path, index: int, files: list[SourceFile], encoder: Tokenizer) -> dict | None:
    """The result of an earlier, interrupted run for this very shard."""
    if not _note(folder, index).is_file():
        return None
    note = json.loads(_note(folder, index).read_text(encoding="ascii"))
    path, checksum = folder / shard_name(index), note["result"]["shard"]["checksum"]
    whole = note["input"] == _shard_input(files, encoder) and path.is_file() and file_checksum(path) == checksum
    return note["result"] if whole else None


def _shard_input(files: list[SourceFile], encoder: Tokenizer) -> str:
    stamp = hashlib.blake2b(f"{_FORMAT} {encoder.fingerprint}".encode(), digest_size=16)
    for file in files:
        stamp.update(_stamp(file))
    return stamp.hexdigest()


def _note(folder, index: int) -> Path:
    return Path(folder) / f"shard-{index:05d}.json"


@contextlib.contextmanager
def _locked(partial: Path, out: Path) -> Iterator[None]:
    """Holds the unfinished folder for this process; the lock ends with the process, however that ends."""
    folder = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(f"another ingest is writing {out}; wait for it or choose another folder") from error
    finally:
        os.close(folder)


def _tidy(partial: Path, shards: int) -> None:
    """Takes away what an earlier, interrupted run left and what was needed only to go on after an interruption."""
    kept = {MANIFEST, SKIPPED, FILE_NAME, _RECORD, *map(shard_name, range(shards))}
    for path in partial.iterdir():
        if path.name not in kept:
            path.unlink()


def check_replaceable(out: Path) -> None:
    """Only a token store gives way to a new one: nothing else in `out` is ever deleted."""
    check_folder(out, "--out")
    if not out.exists():
        return
    ours = {MANIFEST, SKIPPED, FILE_NAME, _RECORD}
    names = set(os.listdir(out)) - ours
    foreign = sorted(name for name in names if not (name.startswith("shard-") and name.endswith(".arrow")))
    if foreign:
        raise ValueError(f"{out} holds {foreign[0]!r}, which is no part of a token store; choose another folder")


def _put_in_place(partial: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.old")
    if old.exists():  # from a run that was killed between the two renames below, or just after them
        shutil.rmtree(old)
    if out.exists():
        os.rename(out, old)
    os.rename(partial, out)
    if old.exists():
        shutil.rmtree(old)


def _report(store: TokenStore, started: float, reused: bool) -> IngestReport:
    seconds = time.monotonic() - started
    manifest = store.manifest
    return IngestReport(
        folder=str(store.folder),
        files=manifest["documents"],
        skipped=manifest["skipped"],
        bytes=manifest["bytes"],
        tokens=manifest["tokens"],
        seconds=seconds,
        megabytes_per_second=manifest["bytes"] / 1e6 / seconds,
        tokens_per_second=manifest["tokens"] / seconds,
        reused=reused,
    )
