"""Token stores in object stores, `s3://bucket/folder` and what else `pyarrow.fs` reads (`gs://`, `hdfs://`).

A shard is read through the memory map, so it is brought to this machine whole: into a folder that is named after the
store's fingerprint, `$RINGSPAN_CACHE/stores/FINGERPRINT` (by default `~/.cache/ringspan`), once for all processes of
the machine, whatever bucket it came from. It is read in ranges of 16 MiB and checked against the manifest on the way.

A store is put there shard by shard, its manifest last; a manifest that is about to be untrue is taken away first. So
whoever reads meanwhile finds a whole store or none. What is there already isn't put again.

Credentials, region and endpoint come from the usual environment (`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`,
`AWS_DEFAULT_REGION`, `AWS_ENDPOINT_URL`, …) or the machine's role.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyarrow import ArrowException
from pyarrow.fs import FileSelector, FileSystem, FileType

from pipelines.corpus.store import MANIFEST, SKIPPED, StoreError
from pipelines.corpus.tokenizer import FILE_NAME
from pipelines.paths import absolute

_RANGE = 16 << 20


def is_remote(address) -> bool:
    """Whether `address` is a URI and no path of this machine."""
    return "://" in str(address)


def located(address, what: str) -> str | Path:
    """A URI as it is, a path made absolute; `what` names it in an error."""
    return str(address) if is_remote(address) else absolute(address, what)


def cache_folder() -> Path:
    return Path(os.environ.get("RINGSPAN_CACHE") or Path.home() / ".cache" / "ringspan")


def staging(uri: str, keep: bool = False) -> Path:
    """Where on this machine the store that is to be put at `uri` is made, the same each time; a machine of its own
    starts with what is there if that is to be kept."""
    local = cache_folder() / "made" / hashlib.blake2b(uri.rstrip("/").encode(), digest_size=16).hexdigest()
    if keep and (there := fetch(uri)):
        if not (local / MANIFEST).is_file() or (local / MANIFEST).read_bytes() != (there / MANIFEST).read_bytes():
            shutil.rmtree(local, ignore_errors=True)
            shutil.copytree(there, local)
    return local


def fetch(uri: str) -> Path:
    """The local folder of the store at `uri`, brought here unless it is already. StoreError in one line."""
    with _said_in_one_line(uri):
        files, folder = FileSystem.from_uri(uri.rstrip("/"))
        if files.get_file_info(f"{folder}/{MANIFEST}").type is not FileType.File:
            how = f"put one there with `ringspan ingest … --out {uri}`"
            raise StoreError(f"{uri}: no {MANIFEST}, so no finished token store; {how}")
        told = files.open_input_file(f"{folder}/{MANIFEST}").read()
        try:
            manifest = json.loads(told)
            shards, name = {str(row["name"]): row["checksum"] for row in manifest["shards"]}, str(manifest["fingerprint"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{uri}/{MANIFEST}: not a manifest ({error})") from error
        if not name.isalnum() or any("/" in shard for shard in shards):
            raise StoreError(f"{uri}/{MANIFEST}: the fingerprint {name!r} or a shard's name is none")
        local = cache_folder() / "stores" / name
        local.mkdir(parents=True, exist_ok=True)
        # Stores of one fingerprint hold the same rows; what they left out, and counted, may differ.
        known = (local / MANIFEST).is_file() and (local / MANIFEST).read_bytes() == told
        for name, checksum in {**shards, FILE_NAME: None, SKIPPED: None}.items():
            if not (local / name).is_file() or (name == SKIPPED and not known):
                _bring(files, f"{folder}/{name}", local / name, checksum, uri)
        if not known:
            _place(local / MANIFEST, [told])
        return local


def put(local: Path, uri: str) -> bool:
    """Makes the store at `uri` the one in the folder `local`; False if it is that already. OSError if it fails."""
    files, folder = FileSystem.from_uri(uri.rstrip("/"))
    manifest = (local / MANIFEST).read_bytes()
    there = {info.base_name for info in files.get_file_info(FileSelector(folder, allow_not_found=True))}
    told = files.open_input_file(f"{folder}/{MANIFEST}").read() if MANIFEST in there else None
    if told == manifest:
        return False
    old, new = _checksums(told), _checksums(manifest)
    if told is not None and not (old and old.items() <= new.items()):  # what was only appended to stays true to the end
        files.delete_file(f"{folder}/{MANIFEST}")
    shards = [name for name, checksum in new.items() if old.get(name) != checksum or name not in there]
    for name in [*shards, FILE_NAME, SKIPPED, MANIFEST]:
        with open(local / name, "rb") as source, files.open_output_stream(f"{folder}/{name}") as target:
            while piece := source.read(_RANGE):
                target.write(piece)
    for name in sorted(there - new.keys()):
        if name.startswith("shard-"):  # of the store that stood here
            files.delete_file(f"{folder}/{name}")
    return True


def _checksums(manifest: bytes | None) -> dict[str, str]:
    """Of each shard by name; of what is no manifest there are none to rely on."""
    try:
        return {row["name"]: row["checksum"] for row in json.loads(manifest)["shards"]} if manifest else {}
    except (ValueError, KeyError, TypeError):
        return {}


def check_writable(uri: str) -> None:
    """ValueError in one line, before anything is made, for a place where no store can be put."""
    with _said_in_one_line(uri):
        files, folder = FileSystem.from_uri(uri.rstrip("/"))
        bucket, _, below = folder.partition("/")
        if not below:
            raise StoreError(f"{uri}: name a folder in the bucket: {uri.rstrip('/')}/corpus")
        if files.get_file_info(bucket).type is FileType.NotFound:
            raise StoreError(f"{uri}: there is no bucket {bucket}, or these credentials do not see it; make it first")
        foreign = [
            info.base_name
            for info in files.get_file_info(FileSelector(folder, allow_not_found=True))
            if info.base_name not in (MANIFEST, SKIPPED, FILE_NAME) and not info.base_name.startswith("shard-")
        ]
        if foreign:
            raise StoreError(f"{uri} holds {min(foreign)!r}, which is no part of a token store; choose another folder")


def _bring(files: FileSystem, source: str, target: Path, checksum: str | None, uri: str) -> None:
    digest = hashlib.blake2b(digest_size=16)

    def ranges() -> Iterator[bytes]:
        with files.open_input_file(source) as file:
            for at in range(0, file.size(), _RANGE):
                piece = file.read_at(min(_RANGE, file.size() - at), at)
                digest.update(piece)
                yield piece
        if checksum is not None and digest.hexdigest() != checksum:
            raise StoreError(f"{uri}/{target.name}: checksum {digest.hexdigest()}, the manifest says {checksum}")

    _place(target, ranges())


def _place(target: Path, pieces) -> None:
    """Writes a file beside its place and moves it there whole, whoever else does the same."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def _said_in_one_line(uri: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except (OSError, ArrowException) as error:
        told, how = " ".join(str(error).split())[:300], "the credentials, region and endpoint of the environment"
        raise StoreError(f"{uri}: cannot be reached with {how} ({told})") from error
