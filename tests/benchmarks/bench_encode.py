"""How fast does one process encode code, next to a plain loop of the `tokenizers` library?

    python -m tests.benchmarks.bench_encode /usr/include --megabytes 20 --tokenizer bpe:4096 --tokenizer tokenizer.json

The plain loop is `Tokenizer.encode(text).ids` over the files. CPU seconds of one thread, the median of rounds in which
the two take turns; ours begins each round with an empty table of words. Ids are compared file by file. The last line
of the output is the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import time

os.environ["RAYON_NUM_THREADS"] = "1"  # before the library is loaded

import numpy as np
import tokenizers

from pipelines.corpus.decode import Unreadable, read_text
from pipelines.corpus.find import find_code
from pipelines.corpus.tokenizer import LibraryTokenizer, load_tokenizer, parse_spec, train_bpe


def texts(paths: list[str], megabytes: float) -> list[str]:
    """Of files spread evenly over the sorted list."""
    files, _ = find_code(paths)
    step = max(1, int(sum(file.size for file in files) / (megabytes * 1e6)))
    found = []
    for file in files[::step]:
        try:
            found.append(read_text(file.path).text)
        except Unreadable:
            continue
    return found


def seconds(encode, corpus: list[str]) -> tuple[float, list]:
    start = time.process_time()
    ids = [encode(text) for text in corpus]
    return time.process_time() - start, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=[sysconfig.get_path("stdlib")], help="default: the standard library")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", action="append", help="bpe:N or a tokenizer.json; repeatable; default bpe:4096")
    options = parser.parse_args()
    corpus = texts(options.paths, options.megabytes)
    size = sum(len(text.encode()) for text in corpus) / 1e6
    rows = []
    for spec in options.tokenizer or ["bpe:4096"]:
        kind, value = parse_spec(spec)
        ours = train_bpe(iter(corpus), value) if kind == "bpe" else load_tokenizer(value)
        assert isinstance(ours, LibraryTokenizer)
        library = tokenizers.Tokenizer.from_str(ours.document)
        library.encode_special_tokens = True
        plain, table = [], []
        for _ in range(options.rounds):
            spent, expected = seconds(lambda text: library.encode(text, add_special_tokens=False).ids, corpus)
            plain.append(spent)
            ours._words.clear()
            spent, found = seconds(ours.encode, corpus)
            table.append(spent)
        assert all(np.array_equal(a, b) for a, b in zip(expected, found))
        plain, table = size / statistics.median(plain), size / statistics.median(table)
        row = {"tokenizer": spec, "plain_mb_per_cpu_s": plain, "ours_mb_per_cpu_s": table, "ratio": table / plain}
        rows.append({**row, "tokens": sum(map(len, found)), "words": len(ours._words)})
        print(f"{spec:<40} plain {plain:6.2f} MB/s   ours {table:6.2f} MB/s   × {table / plain:.2f}", flush=True)
    print(json.dumps({"files": len(corpus), "megabytes": size, "rows": rows}))


if __name__ == "__main__":
    main()
