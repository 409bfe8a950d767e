"""How fast does ingest make a token store, next to a plain loop over the same files?

    python -m tests.benchmarks.bench_ingest --tokenizer bpe:4096 --cpus 2

Rows: reading the bytes; the corpus rules alone (find, decode, filter); one process that reads and encodes with the
`tokenizers` library called directly; Ringspan's encoder in one process; ingest over Ray, the first time on a fresh
cluster and again into another folder. CPU seconds are of all processes of the row, worker processes included.
The last line of the output is the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import ray

from pipelines.corpus import sources
from pipelines.corpus.code import Code
from pipelines.corpus.ingest import ingest
from pipelines.corpus.store import TokenStore
from pipelines.corpus.tokenizer import ByteTokenizer, LibraryTokenizer, load_tokenizer, parse_spec, train_bpe


def cpu_seconds() -> float:
    """Of this process and all below it that are alive."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # ended between the listing and the question
        total += times.user + times.system
    return total


class Table:
    def __init__(self):
        self.rows: list[dict] = []

    def time(self, name: str, work) -> None:
        """`work` returns (bytes, tokens)."""
        wall, cpu = time.monotonic(), cpu_seconds()
        size, tokens = work()
        wall, cpu = time.monotonic() - wall, cpu_seconds() - cpu
        rates = {"mb_per_s": size / 1e6 / wall, "tokens_per_s": tokens / wall}
        row = {"row": name, "seconds": wall, "cpu_seconds": cpu, **rates}
        self.rows.append(row)
        speed = f"{row['mb_per_s']:>9.1f} MB/s{row['tokens_per_s'] / 1e6:>9.2f} M tokens/s"
        print(f"{name:<34}{wall:>9.2f} s{cpu:>9.2f} CPU s{speed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=[sysconfig.get_path("stdlib")], help="default: the standard library")
    parser.add_argument("--tokenizer", default="byte", help="byte, bpe:N or a tokenizer.json")
    parser.add_argument("--cpus", type=int, default=psutil.cpu_count(), help="CPUs that Ray may use")
    options = parser.parse_args()
    files, _ = sources.find_code(options.paths)
    texts: list[str] = []
    table = Table()

    def read():
        return sum(len(Path(file.path).read_bytes()) for file in files), 0

    def decode():
        size = 0
        for file in sources.find_code(options.paths)[0]:
            try:
                text = sources.read_text(file.path)
            except sources.Unreadable:
                continue
            if sources.unwanted(text.text) is None:
                texts.append(text.text)
                size += len(text.source)
        return size, 0

    table.time("read the bytes", read)
    table.time("find, decode, filter", decode)
    size = table.rows[-1]["mb_per_s"] * 1e6 * table.rows[-1]["seconds"]
    kind, value = parse_spec(options.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "bpe":
            trained = []
            table.time(f"train {options.tokenizer}", lambda: (trained.append(train_bpe(iter(texts), value)), (size, 0))[1])
            trained[0].save(folder)
        encoder = ByteTokenizer() if kind == "byte" else load_tokenizer(folder if kind == "bpe" else value)
        if isinstance(encoder, LibraryTokenizer):
            library = encoder._library
            table.time("tokenizers, one process", lambda: (size, sum(len(library.encode(text).ids) for text in texts)))
        table.time("encode, one process", lambda: (size, sum(len(encoder.encode(text)) for text in texts)))
        spec = options.tokenizer if kind != "bpe" else str(Path(folder) / "tokenizer.json")
        ray.init("local", num_cpus=options.cpus, include_dashboard=False, logging_level="error")
        for run in ("fresh", "warm"):
            out = Path(folder) / run

            def make():
                report = ingest(Code(), options.paths, out, spec)
                return report.bytes, report.tokens

            table.time(f"ingest, {run} cluster of {options.cpus} CPUs", make)
        table.time("ingest again, nothing changed", make)
        table.time("open the store", lambda: (size, TokenStore.open(out).tokens))
        ray.shutdown()
    print(json.dumps({"tokenizer": options.tokenizer, "files": len(files), "bytes": int(size), "rows": table.rows}))


if __name__ == "__main__":
    main()
