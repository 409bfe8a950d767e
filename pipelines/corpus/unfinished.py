"""The folder of an ingest under way: `.NAME.partial` beside the store, which becomes the store when it is whole.

`.ingest.json` says what input the folder is made from: an ingest of the same input goes on with what is there, one of
another input begins anew. Modification times belong to one machine, so this file is no part of the store's identity.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipelines.corpus.store import MANIFEST, SKIPPED, StoreError, TokenStore, shard_name, write_whole
from pipelines.corpus.tokenizer import FILE_NAME
from pipelines.paths import check_folder

_RECORD = ".ingest.json"
_OURS = {MANIFEST, SKIPPED, FILE_NAME, _RECORD}


def up_to_date(folder: Path, identity: str) -> TokenStore | None:
    """The finished store in `folder`, if it was made from this input and opens; a damaged one is to be made again."""
    if recorded(folder) != identity:
        return None
    try:
        return TokenStore.open(folder)
    except StoreError:
        return None


def recorded(folder: Path) -> str | None:
    """The identity of the input that `folder` is made from."""
    return _told(folder).get("identity")


def recorded_options(folder: Path) -> list | None:
    """The options of the kind that `folder` was made with; None where that isn't on record."""
    return _told(folder).get("options")


def _told(folder: Path) -> dict:
    """The record of `folder`; a damaged one is none."""
    try:
        told = json.loads((folder / _RECORD).read_text(encoding="ascii"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def record(partial: Path, identity: str, options: list) -> None:
    # An unfinished folder may hold the manifest of another input: it goes before the record says otherwise.
    (partial / MANIFEST).unlink(missing_ok=True)
    write_whole(partial / _RECORD, json.dumps({"identity": identity, "options": options}) + "\n")


@contextlib.contextmanager
def record_moved(partial: Path, out: Path) -> Iterator[None]:
    """Inside, what `out` is made from changes: its record goes first, and the new one, of no single input, comes last."""
    (out / _RECORD).unlink(missing_ok=True)
    yield
    told = json.loads((partial / _RECORD).read_text(encoding="ascii"))
    write_whole(out / _RECORD, json.dumps({**told, "identity": "appended"}) + "\n")


@contextlib.contextmanager
def locked(partial: Path, out: Path) -> Iterator[None]:
    """Holds the unfinished folder for this process; the lock ends with the process, however that ends."""
    folder = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(f"another ingest is writing {out}; wait for it or choose another folder") from error
    finally:
        os.close(folder)


def tidy(partial: Path, shards: int) -> None:
    """Takes away what an earlier, interrupted run left and what was needed only to go on after an interruption."""
    kept = {*_OURS, *map(shard_name, range(shards))}
    for path in partial.iterdir():
        if path.name not in kept:
            path.unlink()


def check_replaceable(out: Path) -> None:
    """Only a token store gives way to a new one: nothing else in `out` is ever deleted."""
    check_folder(out, "--out")
    if not out.exists():
        return
    names = set(os.listdir(out)) - _OURS
    foreign = sorted(name for name in names if not (name.startswith("shard-") and name.endswith(".arrow")))
    if foreign:
        raise ValueError(f"{out} holds {foreign[0]!r}, which is no part of a token store; choose another folder")


def put_in_place(partial: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.old")
    if old.exists():  # from a run that was killed between the two renames below, or just after them
        shutil.rmtree(old)
    if out.exists():
        os.rename(out, old)
    os.rename(partial, out)
    if old.exists():
        shutil.rmtree(old)
