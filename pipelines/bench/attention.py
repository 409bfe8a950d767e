"""``ringspan bench attention``: our attention beside PyTorch's kernel in one process, on this machine.

1. Cases run in growing order, the ranks of a world size being started once; see ``cases`` and ``measure``.
2. Before a length's first case the kernel is measured in a process of its own: causal, with one thread, and with as many
   as there are ranks (at most the cores; on CUDA one GPU). Beyond REFERENCE_TOKENS tokens it is measured at so many.
3. What a pattern makes and the kernel makes is compared in visible pairs of query and key a second, so that sparse
   patterns, whose point is that they have fewer pairs, are held to the same speed.

``share`` = pairs a second of ours / of the kernel with as many threads (or GPUs) as there are ranks: 1 is no loss.
``speedup`` = the same over one thread (one GPU): a ring of 2 should come near 2.
``cpu_share`` = pairs a CPU second, all ranks' together, over the one-thread kernel's: a busy machine changes it least.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

from pipelines.bench.cases import Case, parse_pattern, visible_pairs
from pipelines.bench.figure import figure
from pipelines.bench.measure import attend_case, emulated_case, kernel_case
from pipelines.bench.ranks import RankFailed, Ranks
from workers.attention.plan import busiest_over_mean

log = logging.getLogger(__name__)
REFERENCE_TOKENS = 32_768  # a minute on one core, four times that at twice the length
SHORT, SHORT_STEPS = 4_096, 5  # up to SHORT tokens at least so many steps of the kernel, on which every share leans


def run(repeat: int, cases: list[Case], device: torch.device, out: Path | None, say: Callable[[str], None]) -> dict:
    """Measure ``cases``; the answer of the command, and with ``out`` also ``attention.json`` and ``attention.png`` in that folder.

    A case that fails is listed in ``failed`` and the others are measured. ``say`` gets a line at each case's end.
    """
    load, rows, failed = [os.getloadavg()[0]], [], []
    if load[0] > 0.5 * (os.cpu_count() or 1):
        say(
            f"others use this machine (load average {load[0]:.1f} on {os.cpu_count()} cores): trust CPU seconds and their share, not wall seconds"
        )
    bench = _Bench(device, repeat)
    with bench:
        for number, case in enumerate(cases, 1):
            try:
                rows.append(bench.row(case))
                log.info("%s: %.3f-%.3f s", case, *rows[-1]["seconds_range"])
                say(f"[{number}/{len(cases)}] {case}: {rows[-1]['seconds']:.3f} s, share {rows[-1]['share']:.2f}")
            except RankFailed as error:
                failed.append({"case": str(case), "error": str(error)})
                say(f"[{number}/{len(cases)}] {case} failed: {error}")
    result = {
        "benchmark": "attention", "torch": torch.__version__, "device": device.type, "cores": os.cpu_count(),
        "load": [*load, os.getloadavg()[0]], "repeat": repeat, "rows": rows, "kernel": bench.kernel_rows, "failed": failed,
    }  # fmt: skip
    if out is not None and rows:
        out.mkdir(parents=True, exist_ok=True)
        result |= {"table": str(out / "attention.json"), "figure": str(out / "attention.png")}
        (out / "attention.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        figure(rows).savefig(out / "attention.png", dpi=120)
    return result


class _Bench:
    """The processes at hand: those of one world size, and the one of the kernel."""

    def __init__(self, device: torch.device, repeat: int):
        self.device, self.repeat = device, repeat
        self.kernel_rows: list[dict] = []
        self._measured: dict[tuple, dict] = {}
        self._pairs: dict[tuple[str, int], int] = {}
        self._worlds: dict[str, tuple[int, Ranks]] = {}

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_) -> None:
        for _, ranks in self._worlds.values():
            ranks.close()

    def row(self, case: Case) -> dict:
        """One row of the table. Raises RankFailed."""
        threads = 1 if self.device.type == "cuda" else min(case.processes, os.cpu_count() or 1)
        one, many = self._kernel(case, 1), self._kernel(case, threads)
        body = emulated_case if case.emulated else attend_case
        ranks = self._run("ring", case.processes, body, case=case, repeat=self.repeat)
        row = asdict(case) | (_emulated(ranks[0], self.device) if case.emulated else _together(ranks, case))
        pairs = self.pairs(case.pattern, case.tokens)
        gpus = case.ranks if self.device.type == "cuda" and not case.emulated else 1
        speed = pairs / row["seconds"]
        return row | {
            "pairs": pairs,
            "share": speed / many["pairs_per_second"] / gpus,
            "speedup": speed / one["pairs_per_second"],
            "cpu_share": pairs / row["cpu_seconds"] / one["pairs_per_cpu_second"],
            "kernel_tokens": one["tokens"], "kernel_threads": threads,
            "kernel_seconds": many["seconds"], "kernel_seconds_one_thread": one["seconds"],
        }  # fmt: skip

    def pairs(self, pattern: str, tokens: int) -> int:
        """Visible pairs of query and key in a sequence."""
        key = pattern, tokens
        if key not in self._pairs:
            self._pairs[key] = visible_pairs(parse_pattern(pattern), tokens)
        return self._pairs[key]

    def _kernel(self, case: Case, threads: int) -> dict:
        tokens = min(case.tokens, REFERENCE_TOKENS)
        key = tokens, threads
        if key not in self._measured:
            whole = replace(case, tokens=tokens, pattern="causal", ring=1, ulysses=1, emulated=False)
            repeat = max(self.repeat, SHORT_STEPS) if tokens <= SHORT else self.repeat
            found = self._run("kernel", 1, kernel_case, case=whole, threads=threads, repeat=repeat)[0]
            pairs, seconds, cpu = tokens * (tokens + 1) // 2, median(found["seconds"]), median(found["cpu_seconds"])
            self._measured[key] = {
                "tokens": tokens, "threads": threads, "seconds": seconds, "cpu_seconds": cpu, "peak_bytes": found["peak_bytes"],
                "pairs_per_second": pairs / seconds, "pairs_per_cpu_second": pairs / cpu,
            }  # fmt: skip
            self.kernel_rows.append(self._measured[key])
            spread = f"{min(found['seconds']):.3f}-{max(found['seconds']):.3f}"
            log.info("kernel in one process, %s tokens, %s threads: %.3f s (%s)", f"{tokens:,}", threads, seconds, spread)
        return self._measured[key]

    def _run(self, name: str, size: int, body, **arguments) -> list[dict]:
        found = self._worlds.get(name)
        if found is None or found[0] != size:
            if found is not None:
                found[1].close()
            self._worlds[name] = size, Ranks(size, self.device.type)
        try:
            return self._worlds[name][1].run(body, **arguments)
        except RankFailed:
            del self._worlds[name]
            raise


def _together(ranks: list[dict], case: Case) -> dict:
    """The row of real ranks: the slowest one's wall seconds, all ranks' CPU seconds together, the largest peak."""
    slowest = [max(times) for times in zip(*(rank["seconds"] for rank in ranks))]
    pairs = [rank["pairs"] for rank in {rank["ring_rank"]: rank for rank in ranks}.values()]
    sent = [rank["bytes_sent"] for rank in ranks]
    return {
        "seconds": median(slowest), "seconds_range": [min(slowest), max(slowest)],
        "cpu_seconds": median(sum(times) for times in zip(*(rank["cpu_seconds"] for rank in ranks))),
        "wait_seconds": max(rank["wait_seconds"] for rank in ranks),
        "bytes_sent": sum(sent), "bytes_sent_by_busiest": max(sent), "imbalance": busiest_over_mean(pairs),
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks), "start_bytes": max(rank["start_bytes"] for rank in ranks),
        "peak_is_of": ranks[0]["peak_is_of"],
    }  # fmt: skip


def _emulated(found: dict, device: torch.device) -> dict:
    """The row of an emulated ring: seconds are the sum of all ranks' work, memory is that of the one process."""
    sums = found["seconds" if device.type == "cuda" else "cpu_seconds"]
    return {
        "seconds": median(sums), "seconds_range": [min(sums), max(sums)], "cpu_seconds": median(found["cpu_seconds"]), "wait_seconds": None,
        "bytes_sent": sum(found["rank_bytes_sent"]), "bytes_sent_by_busiest": max(found["rank_bytes_sent"]),
        "imbalance": busiest_over_mean(found["rank_pairs"]),
        "peak_bytes": found["peak_bytes"], "start_bytes": found["start_bytes"],
        "peak_is_of": "all ranks" if found["peak_is_of"] == "case" else "process",
    }  # fmt: skip
