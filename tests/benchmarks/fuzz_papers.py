"""Nasty papers at random: is each read or explained, in bounded time, with exact positions?

    python -m tests.benchmarks.fuzz_papers --examples 10000 --seed 0 [FOLDER...]

An example is a small paper of one of the formats, or a file from one of the folders, that is cut, has parts doubled,
exchanged with another's or replaced by what such a format stumbles over, under a name of any format's. Of each: nothing
but Unreadable is raised, and that with `kind: detail` in one line; a second look gives the same; every heading,
reference and marker stands where the details say; and no example takes longer than LONGEST_SECONDS of CPU time. Prints
how many there were by outcome, and as last line the same as JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import time
from pathlib import Path

from pipelines.corpus.decode import Unreadable
from pipelines.literature_analysis.formats import EXTENSIONS, read
from tests.unit.pipelines.literature_analysis.test_formats import EVERY, FILES, NOISE, check

LONGEST_SECONDS = 20
_LARGEST_SEED = 200_000  # bytes of a real file; larger ones only make the run longer


def example(chance: random.Random, seeds: list[bytes]) -> bytes:
    """A paper that has been damaged a few times."""
    data = chance.choice(seeds)
    for _ in range(chance.randrange(1, 6)):
        start = chance.randrange(len(data) + 1)
        stop = min(len(data), start + chance.choice([0, 1, 10, 1000]))
        noise = "".join(chance.choice(NOISE) for _ in range(chance.randrange(12))).encode("utf-8", "surrogatepass")
        how = chance.randrange(5)
        if how == 0:
            data = data[:start]
        elif how == 1:
            data = data[:start] + data[start:stop] * chance.choice([2, 3, 50]) + data[stop:]
        elif how == 2:
            other = chance.choice(seeds)
            at = chance.randrange(len(other) + 1)
            data = data[:start] + other[at : at + 1000] + data[stop:]
        elif how == 3:
            data = data[:start] + bytes(chance.randrange(256) for _ in range(4)) + data[stop:]
        else:
            data = data[:start] + noise * chance.choice([1, 1, 100]) + data[stop:]
    return data


def outcome(data: bytes, name: str) -> str:
    """Format or kind of reason; raises AssertionError where a law is broken."""
    try:
        paper = read(data, name, FILES.get)
    except Unreadable as error:
        assert re.fullmatch(r"[a-zA-Z- ]+: \S.*", str(error)), str(error)
        return f"unreadable: {str(error).partition(':')[0]}"
    check(paper)
    assert read(data, name, FILES.get) == paper
    return paper.format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("folders", nargs="*", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    paths = [p for folder in options.folders for p in sorted(folder.rglob("*")) if p.suffix in EXTENSIONS]
    paths = [path for path in paths if path.stat().st_size <= _LARGEST_SEED]
    seeds = [*EVERY.values(), *(path.read_bytes() for path in chance.sample(paths, min(200, len(paths))))]
    counts: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    for number in range(options.examples):
        data, name = example(chance, seeds), f"paper{chance.choice(sorted(EXTENSIONS))}"
        started = time.process_time()
        try:
            counts[outcome(data, name)] += 1
        except Exception:
            Path("fuzz_papers.failure").write_bytes(data)
            print(f"example {number}, {name}, is in fuzz_papers.failure")
            raise
        seconds = time.process_time() - started
        slowest = max(slowest, seconds)
        assert seconds < LONGEST_SECONDS, f"example {number}, {name}, took {seconds:.1f} s"
    for kind, count in sorted(counts.items()):
        print(f"{count:7,}  {kind}")
    print(json.dumps({"examples": options.examples, "slowest_seconds": round(slowest, 2), **dict(sorted(counts.items()))}))


if __name__ == "__main__":
    main()
