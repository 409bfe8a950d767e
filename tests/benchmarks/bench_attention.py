"""Our attention beside other libraries': equal tensors, causal, forward and backward, on gloo ranks of one thread each.

    python -m tests.benchmarks.bench_attention --peers-python PEERS/bin/python

1. Each peer's output and gradients are compared with SDPA's in float64 (1,024 tokens) before it is timed; one that differs
   is not timed.
2. Then it and ours take turns, A B A B, so that a drift of the machine meets both: a ratio is of neighbours, the median
   counts, and its range says how quiet the machine was.
3. A table on stderr, one JSON object as the last line of stdout: wall seconds of the slowest rank, CPU seconds of all
   ranks together (the number to trust on a shared machine), and the ratios ours / peer.

``F.scaled_dot_product_attention`` runs in one process with as many threads as there are ranks. Exits 1 when a side failed
or was wrong; with ``--check`` also when a CPU ratio is above 1.05. Without ``--peers-python`` only PyTorch's own are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

from tests.benchmarks.attention_peers.sides import SIDES
from tests.benchmarks.common import ROOT, MeasurementFailed

RANK = Path(__file__).parent / "attention_peers" / "rank.py"
TOLERANCE = 1e-4  # relative, float32 against float64
CHECKED_RATIO = 1.05
TIMEOUT = 900  # seconds for one answer


class Side:
    """The rank processes of one library, waiting to be told to step. A context manager: they end with it."""

    def __init__(self, name: str, python: str, ranks: int, options):
        threads = 1
        if name.startswith("F."):
            ranks, threads = 1, min(ranks, os.cpu_count() or 1)
        self.name, self.processes, self.answers, self.logs = name, [], [], []
        self._folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if python == sys.executable:
            environment["PYTHONPATH"] = str(ROOT)
        for rank in range(ranks):
            arguments = {
                "side": name, "rank": rank, "ranks": ranks, "threads": threads, "store": f"{self._folder.name}/store",
                "tokens": options.tokens, "heads": options.heads, "kv_heads": options.kv_heads, "head_dim": options.head_dim,
            }  # fmt: skip
            log = Path(self._folder.name) / f"{rank}.err"
            with open(log, "w") as err:
                process = subprocess.Popen(
                    [python, str(RANK), json.dumps(arguments)], env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err,
                )  # fmt: skip
            self.processes.append(process)
            self.logs.append(log)
            self.answers.append(queue.Queue())
            threading.Thread(target=self._listen, args=(process.stdout, self.answers[-1]), daemon=True).start()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def prepare(self) -> float:
        """The largest difference from SDPA of any rank; the ranks have warmed up, unless it is above TOLERANCE."""
        worst = max(answer["difference"] for answer in self._collect())
        if worst <= TOLERANCE:
            self._collect()
        return worst

    def step(self) -> dict:
        """One forward and backward."""
        for process in self.processes:
            process.stdin.write("step\n")
            process.stdin.flush()
        answers = self._collect()
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "cpu_seconds": sum(answer["cpu_seconds"] for answer in answers),
            "peak_bytes": max(answer["peak_bytes"] for answer in answers),
        }

    def _collect(self) -> list[dict]:
        found = []
        for rank, answers in enumerate(self.answers):
            try:
                line = answers.get(timeout=TIMEOUT)
            except queue.Empty:
                raise MeasurementFailed(f"{self.name}: rank {rank} gave no answer in {TIMEOUT} s") from None
            if not line:
                last = self.logs[rank].read_text().strip().splitlines()[-1:]
                raise MeasurementFailed(f"{self.name}: rank {rank} ended: {''.join(last)}")
            found.append(json.loads(line))
        return found

    @staticmethod
    def _listen(stream, answers: queue.Queue) -> None:
        for line in stream:
            answers.put(line)
        answers.put("")


def compare(name: str, python: str, ranks: int, options) -> dict:
    """One row: a peer and ours in turn. Ulysses meets Ulysses, everything else the ring."""
    own = "ours ulysses" if "ulysses" in name else "ours ring"
    with Side(name, python, ranks, options) as peer, Side(own, sys.executable, ranks, options) as mine:
        worst, my_worst = peer.prepare(), mine.prepare()
        if my_worst > TOLERANCE:
            raise MeasurementFailed(f"{own} differs from SDPA by {my_worst:.1e}")
        row = {"peer": name, "ours": own, "ranks": ranks, "tokens": options.tokens, "difference": worst, "ours_difference": my_worst}
        if worst > TOLERANCE:
            return row | {"wrong": True}
        pairs = [(mine.step(), peer.step()) for _ in range(options.repeat)]
    for key in ("seconds", "cpu_seconds"):
        ratios = [a[key] / b[key] for a, b in pairs]
        row |= {f"ours_{key}": median(a[key] for a, _ in pairs), f"peer_{key}": median(b[key] for _, b in pairs)}
        row |= {f"{key}_ratio": median(ratios), f"{key}_ratio_range": [min(ratios), max(ratios)]}
    return row | {"ours_peak_bytes": max(a["peak_bytes"] for a, _ in pairs), "peer_peak_bytes": max(b["peak_bytes"] for _, b in pairs)}


HEADER = (
    f"{'peer':<70} {'ranks':>5} | {'wall s: ours':>12} {'peer':>7} {'ratio':>6} {'(range)':>13} | "
    f"{'CPU s: ours':>11} {'peer':>7} {'ratio':>6} {'(range)':>13} | {'MiB: ours':>9} {'peer':>6}"
)


def line(row: dict) -> str:
    start = f"{row['peer']:<70} {row['ranks']:>5} | "
    if row.get("wrong"):
        return f"{start}differs from SDPA by {row['difference']:.1e}: not timed"
    parts = []
    for key, width in (("seconds", 12), ("cpu_seconds", 11)):
        low, high = row[f"{key}_ratio_range"]
        parts.append(f"{row[f'ours_{key}']:{width}.3f} {row[f'peer_{key}']:7.3f} {row[f'{key}_ratio']:6.3f} ({low:5.3f}-{high:5.3f})")
    return f"{start}{' | '.join(parts)} | {row['ours_peak_bytes'] / 2**20:9.0f} {row['peer_peak_bytes'] / 2**20:6.0f}"


def installed(python: str) -> dict[str, str]:
    """Versions of the peers' distributions in the environment of ``python``. Raises ValueError when it cannot be run."""
    code = (
        "import importlib.metadata as m, json, sys\nfound = {}\nfor name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    names = sorted({distribution for _, distribution in SIDES.values() if distribution} | {"torch"})
    try:
        result = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"--peers-python {python} cannot be run: {error}") from error
    return json.loads(result.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5, help="turns of each pair")
    parser.add_argument("--peers-python", help="python of the environment that holds the peers; see README.md")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only peers whose names hold one of these words")
    parser.add_argument("--check", action="store_true", help=f"exit 1 when a ratio of CPU seconds is above {CHECKED_RATIO}")
    options = parser.parse_args()
    options.kv_heads = options.kv_heads or options.heads
    if options.tokens < 1 or any(ranks < 2 or options.tokens % (2 * ranks) for ranks in options.ranks) or options.repeat < 1:
        parser.error(f"{options.tokens} tokens must divide by 2 × each of --ranks {options.ranks}, which start at 2; --repeat at 1")
    if min(options.heads, options.kv_heads, options.head_dim) < 1 or options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}")
    try:
        found = installed(options.peers_python) if options.peers_python else {}
    except ValueError as error:
        parser.error(str(error))
    rows, failed, left_out, load = [], [], {}, [os.getloadavg()[0]]
    print(HEADER, file=sys.stderr)
    for ranks in options.ranks:
        for name, (_, distribution) in SIDES.items():
            if name.startswith("ours") or (options.only and not any(word in name for word in options.only)):
                continue
            if distribution is not None and distribution not in found:
                left_out[distribution] = "not installed" if options.peers_python else "no --peers-python"
                continue
            try:
                rows.append(compare(name, options.peers_python if distribution else sys.executable, ranks, options))
                print(line(rows[-1]), file=sys.stderr, flush=True)
            except MeasurementFailed as error:
                failed.append(str(error))
                print(f"FAILED {failed[-1]}", file=sys.stderr, flush=True)
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    failed += [f"{row['peer']} differs from SDPA by {row['difference']:.1e}" for row in rows if row.get("wrong")]
    if options.check:
        slow = [row for row in rows if row.get("cpu_seconds_ratio", 0) > CHECKED_RATIO]
        failed += [f"{row['ours']} takes {row['cpu_seconds_ratio']:.3f} of the CPU seconds of {row['peer']}" for row in slow]
    load.append(os.getloadavg()[0])
    result = {"benchmark": "attention_peers", "versions": found, "load": load, "rows": rows, "left_out": left_out, "failed": failed}
    print(json.dumps({**vars(options), **result}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
