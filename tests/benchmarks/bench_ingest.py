"""How fast does ingest make a token store, next to a plain loop and to `datasets.map` over the same files?

    python -m tests.benchmarks.bench_ingest PATH... --tokenizer bpe:32768 --peers-python PEERS/bin/python --check

The Linux kernel as Debian ships it, on which the figures in the README were taken:

    apt-get download linux-source-6.1 && dpkg -x linux-source-6.1_*.deb . && tar -xf usr/src/linux-source-6.1.tar.xz
    python -m tests.benchmarks.bench_ingest linux-source-6.1 --peers-python PEERS/bin/python --check

Rows, each over the files that ingest keeps, read from disk anew: ingest over Ray with all that belongs to it (finding,
decoding, rules, licences, duplicates, writing), the first time and again with nothing changed; one process with a loop
of `tokenizers`; `datasets.map` in batches with as many processes as Ray had CPUs. A tokenizer `bpe:N` is trained first,
and all use it. Seconds are wall-clock, CPU seconds of all processes that took part, and peak memory is the largest sum
of their proportional sizes (PSS), seen once a second. Then every row is compared with its file: bytes, text, and the
text that its tokens decode to. `--limit` measures on a copy of so many megabytes, files picked by a hash of their name.

`--check` wants twice the loop's bytes a CPU second, at least the bytes a second of `datasets.map`, 4 GB, and a second
ingest within 30 seconds. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from pipelines.corpus.code import Code
from pipelines.corpus.decode import Unreadable, read_text
from pipelines.corpus.find import find_code
from pipelines.corpus.ingest import TRAINING_BYTES, find, ingest, reusable
from pipelines.corpus.sources import SourceFile
from pipelines.corpus.store import TokenStore
from pipelines.corpus.tokenizer import parse_spec, train_bpe

KIND = Code(gitignore=False)  # an unpacked kernel excludes itself
MOST_MEMORY, MOST_SECONDS_AGAIN = 4e9, 30

# Both read a list of paths from a file. They run in processes of their own, the second in another environment.
LOOP = """
import sys, tokenizers
library = tokenizers.Tokenizer.from_file(sys.argv[1])
tokens = 0
for line in open(sys.argv[2]):
    with open(line[:-1], "rb") as file:
        tokens += len(library.encode(file.read().decode("utf-8", "replace"), add_special_tokens=False).ids)
print(tokens)
"""
DATASETS = """
import functools, sys, datasets, tokenizers
datasets.disable_progress_bars()
datasets.disable_caching()
library = functools.lru_cache(tokenizers.Tokenizer.from_file)
def encode(batch):
    texts = []
    for path in batch["path"]:
        with open(path, "rb") as file:
            texts.append(file.read().decode("utf-8", "replace"))
    return {"ids": [row.ids for row in library(sys.argv[1]).encode_batch(texts, add_special_tokens=False)]}
if __name__ == "__main__":
    paths = datasets.Dataset.from_dict({"path": open(sys.argv[2]).read().splitlines()})
    made = paths.map(encode, batched=True, batch_size=100, num_proc=int(sys.argv[3]), writer_batch_size=100)
    print(sum(len(column.values) for column in made.data.column("ids").chunks))
"""


class Usage(threading.Thread):
    """CPU seconds and peak memory of this process and all below it, also of those that end while it looks on."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak = 0
        self._seconds: dict[tuple, float] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Usage:
        self._look()
        self._before, self._began = dict(self._seconds), time.monotonic()
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        self.join()
        self.wall = time.monotonic() - self._began
        self._look()
        self.cpu = sum(seconds - self._before.get(process, 0.0) for process, seconds in self._seconds.items())

    def run(self) -> None:
        while not self._ended.wait(1):
            self._look()

    def _look(self) -> None:
        memory = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                times = process.cpu_times()
                memory += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended between the listing and the question
            self._seconds[process.pid, process.create_time()] = times.user + times.system
        self.peak = max(self.peak, memory)


class Table:
    def __init__(self):
        self.rows: list[dict] = []

    def time(self, name: str, work) -> dict:
        """`work` returns (bytes, tokens)."""
        with Usage() as usage:
            size, tokens = work()
        row = {
            "row": name, "seconds": usage.wall, "cpu_seconds": usage.cpu, "mb_per_s": size / 1e6 / usage.wall,
            "mb_per_cpu_s": size / 1e6 / max(usage.cpu, 1e-3), "bytes": size, "tokens": tokens, "peak_bytes": usage.peak,
        }  # fmt: skip
        self.rows.append(row)
        print(
            f"{name:<34}{usage.wall:>9.1f} s{usage.cpu:>9.1f} CPU s{row['mb_per_s']:>8.2f} MB/s{row['mb_per_cpu_s']:>8.2f} MB/CPU s"
            f"{tokens / 1e6:>9.1f} M tokens{usage.peak / 1e9:>7.2f} GB",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return row


def by_hash(files: Iterable[SourceFile], limit: float) -> Iterator[SourceFile]:
    """Files in the order of a hash of their name, up to `limit` bytes."""
    for file in sorted(files, key=lambda file: hashlib.blake2b(file.name.encode(), digest_size=8).digest()):
        limit -= file.size
        if limit < 0:
            return
        yield file


def copied(paths: list[str], folder: Path, megabytes: float) -> list[str]:
    for file in by_hash(KIND.find(paths)[0], megabytes * 1e6):
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.path, target)
    return [str(path) for path in sorted(folder.iterdir())]


def train(paths: list[str], size: int, folder: Path) -> tuple[int, int]:
    texts = []
    for file in by_hash(find_code(paths, gitignore=False)[0], TRAINING_BYTES):
        try:
            texts.append(read_text(file.path).text)
        except Unreadable:
            continue
    train_bpe(iter(texts), size).save(folder)
    return sum(len(text.encode()) for text in texts), 0


def peer(python: str, program: str, *arguments) -> int:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "peer.py"
        script.write_text(program)
        environment["HF_HOME"] = folder
        done = subprocess.run([python, str(script), *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def round_trip(store: TokenStore, path_of: dict[str, str]) -> int:
    """Rows whose file, text or tokens are not what the store says."""
    wrong = 0
    for i in range(len(store)):
        source, text = Path(path_of[store.paths(i)]).read_bytes(), store.text(i)
        same = store.source(i) == source and source.decode(store.encoding(i)) == text
        if not (same and store.tokenizer.decode(store[i], skip_special=True) == text):
            print(f"not as it was: {store.paths(i)}", file=sys.stderr)
            wrong += 1
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=[sysconfig.get_path("stdlib")], help="default: the standard library")
    parser.add_argument("--tokenizer", default="bpe:32768", help="bpe:N or a tokenizer.json")
    parser.add_argument("--cpus", type=int, default=psutil.cpu_count(), help="CPUs that Ray may use")
    parser.add_argument("--limit", type=float, metavar="MEGABYTES", help="measure on a copy of so much")
    parser.add_argument("--peers-python", help="Python of an environment with `datasets` and `tokenizers`")
    parser.add_argument("--out", help="keep the store here")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        told = measure(options, Path(temporary))
    print(json.dumps(told))
    missed = [name for name, reached in told["goals"].items() if not reached]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    sys.exit(1 if options.check and missed else 0)


def measure(options, folder: Path) -> dict:
    import ray

    paths = options.paths if options.limit is None else copied(options.paths, folder / "copy", options.limit)
    table = Table()
    kind, value = parse_spec(options.tokenizer)
    tokenizer = value
    if kind == "bpe":
        table.time(f"train {options.tokenizer}", lambda: train(paths, value, folder))
        tokenizer = folder / "tokenizer.json"
    out = Path(options.out) if options.out else folder / "store"

    def make():
        # Ray's own processes are in the figures, its start too.
        ray.init("local", num_cpus=options.cpus, include_dashboard=False, logging_level="error")
        report = ingest(KIND, paths, out, str(tokenizer))
        return report.bytes, report.tokens

    ours = table.time(f"ingest, {options.cpus} CPUs", make)
    ray.shutdown()
    again = table.time(
        "ingest again, nothing changed", lambda: ((report := reusable(find(KIND, paths, str(tokenizer)), out)).bytes, report.tokens)
    )
    store = TokenStore.open(out)
    path_of = {file.name: file.path for file in KIND.find(paths)[0]}
    kept = folder / "kept.txt"
    kept.write_text("".join(path_of[store.paths(i)] + "\n" for i in range(len(store))))
    size = ours["bytes"]
    loop = table.time("tokenizers, a loop in one process", lambda: (size, peer(sys.executable, LOOP, tokenizer, kept)))
    goals = {
        "2 × the loop per CPU second": ours["mb_per_cpu_s"] >= 2 * loop["mb_per_cpu_s"],
        "memory": ours["peak_bytes"] < MOST_MEMORY,
        "again": again["seconds"] < MOST_SECONDS_AGAIN,
    }
    if options.peers_python:
        name = f"datasets.map, {options.cpus} processes"
        theirs = table.time(name, lambda: (size, peer(options.peers_python, DATASETS, tokenizer, kept, options.cpus)))
        goals["datasets.map"] = ours["mb_per_s"] >= theirs["mb_per_s"]
    wrong = []
    table.time("round trip of every file", lambda: (size, wrong.append(round_trip(store, path_of)) or store.tokens))
    goals["round trip"] = wrong == [0]
    skipped = store.manifest["skipped"]
    print(f"kept {len(store):,} files, left out: " + ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()), file=sys.stderr)
    return {
        "tokenizer": options.tokenizer,
        "files": len(store),
        "bytes": size,
        "tokens": store.tokens,
        "skipped": skipped,
        "rows": table.rows,
        "goals": goals,
    }


if __name__ == "__main__":
    main()
