"""Is a training run's memory what ``ringspan plan`` said it would be?

    python -m tests.benchmarks.bench_plan --check

Each case is a run of two steps and a checkpoint by ``train`` in fresh processes; its largest rank's peak resident size stands
beside the plan's. Errors are of the whole, and of what stands above a process without a model, which no size of a model
changes (``memory.PROCESS``, measured with ``--process``: none of the cases). ``--check`` exits 1 when an error of the whole is
more than ``LIMIT``.

Ranks give a tensor's pages back when it is freed, as in a run (``memory.return_pages``). ``--heap`` shows what they would
hold without: MALLOC_MMAP_THRESHOLD_ at the 32 MiB that glibc grows it to. A table on stderr, one JSON object as the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

from pipelines.config import Config
from pipelines.plan import make_shape
from pipelines.plan.memory import PROCESS, peak
from tests.benchmarks.common import MeasurementFailed, launch

LIMIT = 0.10
MIB = 1 << 20
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

NARROW = {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 1024, "vocab_size": 4096}
WORDS = {"dim": 384, "layers": 3, "heads": 6, "ffn_dim": 1024, "vocab_size": 16384}
LARGE = {"dim": 768, "layers": 6, "heads": 12, "kv_heads": 4, "ffn_dim": 2048, "vocab_size": 16384}  # beyond SMALL_MODEL_BYTES
LONG = {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 512, "vocab_size": 512}
DEEP = {**NARROW, "layers": 8}

CASES = {
    "one rank": dict(model=NARROW, training={"context": 4096}),
    "bfloat16": dict(model=NARROW, training={"context": 2048, "batch": 2, "micro_batch": 2, "precision": "bf16"}),
    "large vocabulary": dict(model={**WORDS, "tie_embeddings": True}, training={"context": 3072}),
    "ring": dict(model=NARROW, training={"context": 8192}, mesh={"ring": 2}),
    "ring, bfloat16": dict(model=WORDS, training={"context": 4096, "precision": "bf16"}, mesh={"ring": 2}),
    "ring, 16,384 tokens": dict(model=LONG, training={"context": 16384}, mesh={"ring": 2}),
    "ulysses": dict(model=WORDS, training={"context": 4096}, mesh={"ulysses": 2}),
    "tensor": dict(model=WORDS, training={"context": 4096}, mesh={"tp": 2}),
    "data, accumulated": dict(model=WORDS, training={"context": 2048, "batch": 4}, mesh={"dp": 2}),
    "large, ring": dict(model=LARGE, training={"context": 2048}, mesh={"ring": 2}),
    "pipeline": dict(model=NARROW, training={"context": 2048, "batch": 4}, mesh={"pp": 2}),
    "window": dict(model={**NARROW, "window": 512}, training={"context": 8192}, mesh={"ring": 2}),
    "recompute full": dict(model=DEEP, training={"context": 8192}, mesh={"ring": 2}, memory={"recompute": "full"}),
    "recompute selective": dict(model=DEEP, training={"context": 8192}, mesh={"ring": 2}, memory={"recompute": "selective"}),
    "tiles": dict(model=NARROW, training={"context": 4096}, mesh={"tp": 2}, memory={"mlp_tile": 512, "loss_chunk": 256}),
    "disk": dict(model=DEEP, training={"context": 4096}, memory={"offload": "disk"}),
    "int8": dict(model=DEEP, training={"context": 4096}, memory={"compress": "int8"}),
    "adapter": dict(model=LARGE, training={"context": 2048}, adapter={"rank": 16}),
}
PROCESSES = {
    f"{mesh or 'one'} {precision}": dict(
        model={"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64, "vocab_size": 256},
        mesh=mesh, training={"context": 64, "batch": 2, "precision": precision},
    )
    for mesh in ({}, {"ring": 2}, {"tp": 2}, {"dp": 2})
    for precision in ("fp32", "bf16")
}  # fmt: skip


def planned(case: dict) -> tuple[int, int, str]:
    """Bytes that the plan says a rank needs, bytes of that which are the process's own, and the moment of the peak."""
    shape = make_shape(Config.model_validate(case), None, "cpu")
    found = peak(shape)
    return found.bytes, PROCESS[shape.device, shape.element], found.name


def measured(case: dict, heap: bool) -> int:
    """Bytes of the largest rank over a whole run."""
    config = Config.model_validate(case)
    with tempfile.TemporaryDirectory() as run:
        ranks = launch(
            "training_run", config.mesh_spec().world, environment=HEAP if heap else None, run=run,
            model=case["model"], training={"steps": 2, **case["training"]}, mesh=case.get("mesh", {}),
            memory=case.get("memory"), adapter=case.get("adapter"),
        )  # fmt: skip
    return max(rank["whole_peak_bytes"] for rank in ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--heap", action="store_true", help="let tensors below 32 MiB live in glibc's heap")
    parser.add_argument("--process", action="store_true", help="measure processes with next to no model instead")
    parser.add_argument("--check", action="store_true", help="exit 1 when an error is above the limit")
    options = parser.parse_args()
    cases = PROCESSES if options.process else {name: case for name, case in CASES.items() if not options.only or name in options.only}
    load, rows = [os.getloadavg()[0]], []
    print(f"{'case':<20} {'planned':>8} {'measured':>9} {'error':>7} {'above the process':>18}  peak", file=sys.stderr)
    for name, case in cases.items():
        try:
            plan, process, moment = planned(case)
            found = measured(case, options.heap)
        except MeasurementFailed as error:
            print(f"FAILED {name}: {error}", file=sys.stderr)
            return 1
        error, above = plan / found - 1, (plan - process) / (found - process) - 1
        rows.append({"case": name, "planned_mib": plan / MIB, "measured_mib": found / MIB, "error": error, "above": above})
        print(f"{name:<20} {plan / MIB:8.1f} {found / MIB:9.1f} {error:+7.1%} {above:+18.1%}  {moment}", file=sys.stderr, flush=True)
    load.append(os.getloadavg()[0])
    worst = max(rows, key=lambda row: abs(row["error"]))
    holds = abs(worst["error"]) <= LIMIT
    verdict = f"within {LIMIT:.0%}: the worst of {len(rows)}, {worst['case']}, is {worst['error']:+.1%} off"
    print(f"{'holds ' if holds else 'FAILED'} {verdict}", file=sys.stderr)
    print(json.dumps({"benchmark": "plan", "heap": options.heap, "load": load, "rows": rows, "holds": holds}))
    return 1 if options.check and not options.process and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
