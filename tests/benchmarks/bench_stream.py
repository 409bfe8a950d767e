"""How fast does a token store give slices and windows, next to numpy.memmap, and does its memory stay flat?

    python -m tests.benchmarks.bench_stream --tokens 200000000 --context 65536

Writes a store of that many random tokens and the same tokens as one flat file, reads random slices from both, then
windows in training order. The process's own memory (resident, without the mapped pages, which the system takes back at
will) is sampled throughout. The last line of the output is the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from pipelines.corpus.store import ShardWriter, TokenStore, write_manifest
from pipelines.corpus.tokenizer import ByteTokenizer
from pipelines.corpus.windows import WindowPlan

DOCUMENTS_PER_SHARD = 16


def own_megabytes() -> float:
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 1e6


def write(folder: Path, tokens: int, document: int) -> tuple[TokenStore, np.memmap]:
    encoder, shards, random = ByteTokenizer(), [], np.random.default_rng(0)
    with open(folder / "flat.bin", "wb") as flat:
        for shard in range(-(-tokens // (document * DOCUMENTS_PER_SHARD))):
            with ShardWriter(folder, shard, encoder) as writer:
                for i in range(DOCUMENTS_PER_SHARD):
                    ids = random.integers(0, 256, document, np.uint16)
                    flat.write(ids.tobytes())
                    writer.add(f"{shard}/{i}", b"", "utf-8", None, ids)
                shards.append(writer.close())
    write_manifest(folder, encoder, shards, [])
    return TokenStore.open(folder), np.memmap(folder / "flat.bin", np.uint16, "r")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--document", type=int, default=1_000_000, help="tokens in a document")
    parser.add_argument("--context", type=int, default=65_536, help="tokens in a slice or window")
    parser.add_argument("--reads", type=int, default=2000)
    options = parser.parse_args()
    rows = []

    def measure(name: str, read, reads: int) -> None:
        for i in range(min(20, reads)):
            read(i)
        samples = [own_megabytes()]
        seconds = 0.0
        for i in range(reads):
            start = time.perf_counter()
            read(i)
            seconds += time.perf_counter() - start
            if i % 100 == 0:
                samples.append(own_megabytes())
        row = {
            "row": name,
            "microseconds_per_read": seconds / reads * 1e6,
            "tokens_per_s": reads * options.context / seconds,
            "own_mb_first": samples[0],
            "own_mb_most": max(samples),
        }
        rows.append(row)
        print(
            f"{name:<28}{row['microseconds_per_read']:>10.1f} µs a read{row['tokens_per_s'] / 1e6:>9.0f} M tokens/s"
            f"   own memory {samples[0]:.1f} → at most {max(samples):.1f} MB",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as name:
        store, flat = write(Path(name), options.tokens, options.document)
        random = np.random.default_rng(1)
        places = random.integers(0, options.document - options.context, options.reads)
        chosen = random.integers(0, len(store), options.reads)

        def from_store(i: int) -> np.ndarray:
            return store[chosen[i]][places[i] : places[i] + options.context].astype(np.int32)

        def from_flat(i: int) -> np.ndarray:
            start = int(chosen[i]) * options.document + int(places[i])
            return flat[start : start + options.context].astype(np.int32)

        assert all(np.array_equal(from_store(i), from_flat(i)) for i in range(min(50, options.reads)))
        measure("numpy.memmap, random slices", from_flat, options.reads)
        measure("token store, random slices", from_store, options.reads)
        start = time.perf_counter()
        plan = WindowPlan(store, options.context)
        print(f"planned {len(plan):,} windows in {time.perf_counter() - start:.2f} s")
        measure("windows in training order", plan.read, options.reads)
        start = time.perf_counter()
        TokenStore.open(name)
        print(f"opened {len(store.shards)} shards in {(time.perf_counter() - start) * 1e3:.1f} ms")
    print(json.dumps({"tokens": store.tokens, "context": options.context, "rows": rows}))


if __name__ == "__main__":
    main()
