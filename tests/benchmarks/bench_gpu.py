"""What does a ring cost beside one flash attention call over the whole sequence? All of it on one GPU.

    python -m tests.benchmarks.bench_gpu [--tokens 131072 1048576] [--kv-heads 2] [--check]

The ranks of an emulated ring are threads that share the card, so their kernels run one after another: the time is the sum
over all ranks, and the ratio, the whole call's time / the ring's, is the efficiency of the ring's own work: its smaller
kernels, its merging, and each hop's copy (twice here, where a wire would carry it once). What hides behind communication is
not measured: there is none. The table goes to stderr, the last line of the output is the table as JSON.

Legend: B batch, S tokens of a rank, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from workers.attention.block import Backend, resolve
from workers.attention.emulated import EmulatedMesh, emulate
from workers.attention.layout import shard
from workers.attention.pattern import Pattern
from workers.attention.plan import make_plan
from workers.attention.ring import Call, ring_backward, ring_forward
from workers.attention.tile import Tile

TARGET = 0.95
TABLE = "{:>9} {:>9} {:>15} {:>15} {:>6} {:>9} {:>8} {:>7}"
WARM_UP = 16_384  # tokens: kernels are loaded, or compiled, before anything is timed


class OneDeviceRing:
    """Forward and backward of all ranks of a ring on one device. Tensors are lists by rank of [B, S, heads, D].

    The ring's functions are called as they are, not through autograd: that runs a device's backward on one thread, on which
    ranks that wait for one another would wait for ever.
    """

    def __init__(self, pattern: Pattern, size: int, layout: str, kernel: Backend, scale: float, slopes: tuple[float, ...] | None = None):
        self.pattern, self.size, self.layout, self.kernel, self.scale, self.slopes = pattern, size, layout, kernel, scale, slopes

    def shards(self, *whole_BSHD: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Each rank's part of whole tensors."""
        return emulate(self.size, lambda mesh: tuple(shard(x, mesh, 1).contiguous() for x in whole_BSHD), self.layout)

    def forward(self, qkv: list[tuple]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(out, lse) of each rank."""

        def rank(mesh: EmulatedMesh):
            q, k, v = qkv[mesh.ring_rank]
            return ring_forward(q, k, v, None, None, self._call(mesh, q))

        return emulate(self.size, rank, self.layout)

    def backward(self, grads: list[torch.Tensor], qkv: list[tuple], results: list[tuple]) -> list[tuple[torch.Tensor, ...]]:
        """(dq, dk, dv) of each rank."""

        def rank(mesh: EmulatedMesh):
            q, k, v = qkv[mesh.ring_rank]
            return ring_backward(grads[mesh.ring_rank], q, k, v, None, None, *results[mesh.ring_rank], self._call(mesh, q))[:3]

        return emulate(self.size, rank, self.layout)

    def _call(self, mesh: EmulatedMesh, q_BSHD: torch.Tensor) -> Call:
        if q_BSHD.is_cuda:
            torch.cuda.set_device(q_BSHD.device)  # of this thread
        tokens = q_BSHD.shape[1]
        plan = make_plan(self.pattern, tokens, tokens, self.size, mesh.ring_rank, self.layout, self.kernel.split)
        return Call(plan, mesh.ring_transport, self.kernel, self.scale, self.slopes)


def timed(work: Callable, repeats: int) -> tuple[float, int, object]:
    """(seconds of the best of ``repeats``, peak bytes, what the last returned)."""
    best, result = float("inf"), None
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        result = None  # or two results would be alive
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, torch.cuda.max_memory_allocated(), result


def measure(tokens: int, options: argparse.Namespace, repeats: int) -> dict:
    """One row of the table: the whole call, the ring, and how far their outputs and gradients are apart."""
    device, dtype, scale = torch.device("cuda"), getattr(torch, options.dtype), options.head_dim**-0.5
    kernel = resolve(options.backend, device, dtype, options.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    q, k, v, grad = (torch.randn(1, tokens, n, options.head_dim, generator=generator, device=device, dtype=dtype) for n in heads)
    ring = OneDeviceRing(Pattern(), options.ring, "zigzag", kernel, scale)
    ranks = ring.shards(q, k, v, grad)
    qkv, grads = [rank[:3] for rank in ranks], [rank[3] for rank in ranks]

    tile = Tile(0, tokens, 0, tokens, None, 0)
    row = {"tokens": tokens, "backend": kernel.name, "heads": options.heads, "kv_heads": options.kv_heads, "ring": options.ring}
    seconds, peak, (out, lse) = timed(partial(kernel.forward, q, k, v, tile, None, scale), repeats)
    row |= {"whole_forward_seconds": seconds, "whole_forward_peak_bytes": peak}
    seconds, peak, whole = timed(partial(kernel.backward, grad, q, k, v, out, lse, tile, None, scale), repeats)
    row |= {"whole_backward_seconds": seconds, "whole_backward_peak_bytes": peak}
    expected = ring.shards(out, *whole)
    del q, k, v, grad, out, lse, whole

    seconds, peak, results = timed(partial(ring.forward, qkv), repeats)
    row |= {"ring_forward_seconds": seconds, "ring_forward_peak_bytes": peak}
    seconds, peak, found = timed(partial(ring.backward, grads, qkv, results), repeats)
    row |= {"ring_backward_seconds": seconds, "ring_backward_peak_bytes": peak}
    for name, index in (("out", 0), ("dq", 1), ("dk", 2), ("dv", 3)):
        row[f"{name}_error"] = max(_error((rank[0], *more)[index], want[index]) for rank, more, want in zip(results, found, expected))
    for part in ("forward", "backward"):
        row[f"{part}_ratio"] = row[f"whole_{part}_seconds"] / row[f"ring_{part}_seconds"]
    whole, ringed = (sum(row[f"{what}_{part}_seconds"] for part in ("forward", "backward")) for what in ("whole", "ring"))
    return row | {"ratio": whole / ringed}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference relative to the largest value."""
    return ((got - want).abs().max() / want.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[131_072, 1_048_576])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8, help="fewer than heads is grouped-query attention")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ring", type=int, default=8, help="ranks")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if a ratio is under {TARGET}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu: no CUDA device is visible; run it on a machine with one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}", file=sys.stderr)
    print(TABLE.format("tokens", "backend", "whole s", "ring s", "ratio", "GiB whole", "GiB ring", "error"), file=sys.stderr)
    measure(WARM_UP, options, 1)
    rows = []
    for tokens in options.tokens:
        try:
            rows.append(measure(tokens, options, repeats=3 if tokens <= 262_144 else 1))
        except torch.OutOfMemoryError:
            print(f"{tokens:9,} does not fit: {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB", file=sys.stderr)
            rows.append({"tokens": tokens, "ratio": None})
            continue
        _print(rows[-1])
    print(json.dumps({"device": torch.cuda.get_device_name(), "target": TARGET, "rows": rows}))
    if options.check and not all(row["ratio"] is not None and row["ratio"] >= TARGET for row in rows):
        sys.exit(1)


def _print(row: dict) -> None:
    seconds = {what: f"{row[f'{what}_forward_seconds']:.3f} + {row[f'{what}_backward_seconds']:.3f}" for what in ("whole", "ring")}
    whole, ringed = (max(row[f"{what}_{part}_peak_bytes"] for part in ("forward", "backward")) / 2**30 for what in ("whole", "ring"))
    error = max(row[f"{name}_error"] for name in ("out", "dq", "dk", "dv"))
    numbers = (f"{row['ratio']:.3f}", f"{whole:.1f}", f"{ringed:.1f}", f"{error:.0e}")
    print(TABLE.format(f"{row['tokens']:,}", row["backend"], seconds["whole"], seconds["ring"], *numbers), file=sys.stderr)


if __name__ == "__main__":
    main()
