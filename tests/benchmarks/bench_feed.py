"""What a training rank gets from the stream: tokens/s through Ray Data, and whether memory stays bounded.

    python -m tests.benchmarks.bench_feed --tokens 400000000 --context 65536 --budget 128

Writes a store larger than the object store that Ray is given (``--budget`` MB), reads a whole epoch of it through
``cluster.feed`` as the leaders of ``--dp`` groups do, and samples the object store and the readers' own memory (resident
without mapped pages). The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import psutil
import ray

from cluster import feed
from pipelines.corpus.windows import WindowPlan
from tests.benchmarks.bench_stream import write


@ray.remote(num_cpus=0)
class Leader:
    def read(self, split, first: int, dp: int, windows: int) -> dict:
        process, own, count = psutil.Process(), [], 0
        start = time.perf_counter()
        first_after = None
        for _ in zip(range(windows), feed.windows(split, first, dp, feed.Stalls(0, 60))):
            count += 1
            if first_after is None:
                first_after, start = time.perf_counter() - start, time.perf_counter()
            if count % 20 == 0:
                memory = process.memory_info()
                own.append((memory.rss - memory.shared) / 1e6)
        quarter = max(1, len(own) // 4)
        return {
            "windows": count, "first_window_s": first_after, "seconds": time.perf_counter() - start,
            "own_mb_first_quarter": max(own[:quarter]), "own_mb_most": max(own),
        }  # fmt: skip


def spilled_bytes() -> int:
    """Bytes that did not fit the object store and went to disk."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.spilled_bytes_total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=400_000_000)
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--budget", type=int, default=128, help="MB of Ray's object store")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--windows", type=int, help="stop after so many windows; default a whole epoch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, _ = write(Path(folder), options.tokens, 1_000_000)
        size = sum(path.stat().st_size for path in Path(folder).glob("shard-*")) / 1e6
        plan = WindowPlan(store, options.context)
        stop = (options.windows or len(plan)) // options.dp * options.dp
        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=options.budget << 20,
        )
        config = feed.MeshDataConfig(options.dp, 1, options.context)
        data = feed.dataset(plan, options.context, options.dp, 0, stop)
        splits = [rank["train"] for rank in config.configure({"train": data}, options.dp, None, None)]
        leaders = [Leader.remote() for _ in splits]
        rows = ray.get(
            [leader.read.remote(split, rank, options.dp, stop // options.dp) for rank, (leader, split) in enumerate(zip(leaders, splits))]
        )
        spilled = spilled_bytes()
        ray.shutdown()
    tokens = sum(row["windows"] for row in rows) * options.context
    result = {
        "store_mb": round(size), "budget_mb": options.budget, "context": options.context, "dp": options.dp, "tokens": tokens,
        "tokens_per_s": round(tokens / max(row["seconds"] for row in rows)), "first_window_s": round(max(row["first_window_s"] for row in rows), 2),
        "own_mb_first_quarter": round(max(row["own_mb_first_quarter"] for row in rows), 1),
        "own_mb_most": round(max(row["own_mb_most"] for row in rows), 1), "spilled_mb": round(spilled / 1e6, 1),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
