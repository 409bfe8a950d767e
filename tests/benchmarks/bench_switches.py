"""What each memory switch saves and costs when a model is trained on a ring.

    python -m tests.benchmarks.bench_switches --model smollm2 --lengths 8192 16384 --precisions bf16 fp32
    python -m tests.benchmarks.bench_switches --init MODEL --lengths 8192
    python -m tests.benchmarks.bench_switches --loss

Each row is one run of ``train`` in processes of its own: the peak resident size of the largest rank after the last backward
(with weights, optimizer state and PyTorch itself), CPU seconds of rank 0 for forward and backward of the last step, and its
loss and gradient norm, which only ``compress`` may change (those of every step are in the JSON). Tokens are random, or with ``--init`` (a Hugging Face model
folder, whose weights are the start) this project's sources in the model's own tokenizer.

``--loss`` measures the loss alone at 131,072 tokens and a vocabulary of 49,152: what forward and backward take beyond their
inputs, beside the size of one whole matrix of logits, and the gradients beside those of slices by the definition.
``--check`` exits 1 when that is less than 20 times as much, or gradients differ by more than 1e-5.

A table on stderr, one JSON object as the last line of stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

from pipelines.config import load_config
from tests.benchmarks.common import MeasurementFailed, launch
from workers.parallel.memory import MemoryConfig

SMOLLM2 = {
    "dim": 576,
    "layers": 30,
    "heads": 9,
    "kv_heads": 3,
    "ffn_dim": 1536,
    "vocab_size": 49152,
    "rope_theta": 1e5,
    "tie_embeddings": True,
}
CASES = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "disk": {"offload": "disk"},
    "full+disk": {"recompute": "full", "offload": "disk"},
    "selective+disk": {"recompute": "selective", "offload": "disk"},
    "int8": {"compress": "int8"},
    "selective+int8": {"recompute": "selective", "compress": "int8"},
    "tile": {"mlp_tile": 1024},
    "full+tile": {"recompute": "full", "mlp_tile": 1024},
    "chunk": {"loss_chunk": 256},
    "all": {"recompute": "full", "offload": "disk", "compress": "int8", "mlp_tile": 1024, "loss_chunk": 256},
}
LOSS = {"tokens": 131_072, "vocabulary": 49_152}
LEAST_RATIO, GRADIENT_ERROR = 20, 1e-5
GIB, MIB = 2**30, 2**20


def measure(case: str, model: dict, length: int, precision: str, options) -> dict:
    with tempfile.TemporaryDirectory() as run:
        training = {"steps": options.steps, "context": length, "precision": precision}
        memory = {**CASES[case], **({"offload_folder": options.folder} if options.folder and "offload" in CASES[case] else {})}
        ranks = launch(
            "training_run", options.ring, timeout=options.timeout, model=model, training=training, mesh={"ring": options.ring}, run=run,
            memory=memory, init=options.init,
        )  # fmt: skip
        steps = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return {
        "case": case, "tokens": length, "precision": precision, "peak_gib": max(rank["peak_bytes"] for rank in ranks) / GIB,
        "cpu_seconds": ranks[0]["pass_seconds"], "losses": [step["loss"] for step in steps], "grad_norms": [step["grad_norm"] for step in steps],
    }  # fmt: skip


def switches(options) -> dict:
    """A row a case, length and precision; a case that fails is reported and the others go on."""
    model = model_of(options)
    print(
        f"{'case':>15} {'tokens':>7} {'type':>5} | {'peak GiB':>9} {'saved':>6} {'CPU s':>9} {'ratio':>6} {'loss':>12} {'grad norm':>12}",
        file=sys.stderr,
    )
    rows, failed = [], []
    for precision in options.precisions:
        for length in options.lengths:
            plain = None
            for case in options.cases:
                try:
                    row = measure(case, model, length, precision, options)
                except MeasurementFailed as error:
                    failed.append({"case": case, "tokens": length, "precision": precision, "error": str(error)})
                    print(f"{case:>15} {length:>7} {precision:>5} | FAILED {error}", file=sys.stderr, flush=True)
                    continue
                rows.append(row)
                plain = row if case == "none" else plain
                saved = f"{1 - row['peak_gib'] / plain['peak_gib']:6.1%}" if plain else f"{'':>6}"
                ratio = f"{row['cpu_seconds'] / plain['cpu_seconds']:6.2f}" if plain else f"{'':>6}"
                print(
                    f"{case:>15} {length:>7} {precision:>5} | {row['peak_gib']:9.3f} {saved} {row['cpu_seconds']:9.1f} {ratio} "
                    f"{row['losses'][-1]:12.8f} {row['grad_norms'][-1]:12.8f}", file=sys.stderr, flush=True,
                )  # fmt: skip
    return {"benchmark": "switches", "model": model, "ring": options.ring, "steps": options.steps, "rows": rows, "failed": failed}


def model_of(options) -> dict:
    """The fields of the ModelConfig to train: SmolLM2-135M's shape, a preset's, or a model folder's."""
    if options.init is not None:
        return {}  # each rank reads the folder
    if options.model == "smollm2":
        return SMOLLM2
    config = load_config(options.model).model
    return {**dataclasses.asdict(config), "vocab_size": config.vocab_size or 512}


def loss(options) -> dict:
    """The loss alone, a process a model size."""
    logits = LOSS["tokens"] * LOSS["vocabulary"] * 4
    print(f"one matrix of {LOSS['tokens']:,} × {LOSS['vocabulary']:,} float32 logits: {logits / MIB:,.0f} MiB", file=sys.stderr)
    print(f"{'hidden':>7} {'chunk':>6} | {'taken MiB':>10} {'ratio':>7} {'CPU s':>8} {'gradient error':>15}", file=sys.stderr)
    rows = []
    for hidden in options.hidden:
        (row,) = launch("loss_run", 1, timeout=options.timeout, hidden=hidden, chunk=MemoryConfig().loss_chunk, **LOSS)
        row["ratio"] = logits / row["taken_bytes"]
        rows.append(row)
        print(
            f"{hidden:>7} {row['chunk']:>6} | {row['taken_bytes'] / MIB:10.1f} {row['ratio']:7.1f} {row['cpu_seconds']:8.1f} {row['error']:15.1e}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    holds = all(row["ratio"] >= LEAST_RATIO and row["error"] <= GRADIENT_ERROR for row in rows)
    return {"benchmark": "loss", **LOSS, "logits_bytes": logits, "rows": rows, "holds": holds, "failed": []}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or a preset")
    parser.add_argument("--init", metavar="FOLDER", help="a Hugging Face model folder to start from")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], metavar="TOKENS")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--ring", type=int, default=2, metavar="RANKS")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", help="where disk offload writes; not a folder in memory")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for one case")
    parser.add_argument("--loss", action="store_true", help="measure the loss alone")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 576], help="model sizes for --loss")
    parser.add_argument("--check", action="store_true", help="with --loss: exit 1 when the claim fails")
    options = parser.parse_args()
    options.init = str(Path(options.init).absolute()) if options.init else None
    load = [os.getloadavg()[0]]
    result = loss(options) if options.loss else switches(options)
    print(json.dumps({**result, "load": [*load, os.getloadavg()[0]]}))
    return 1 if result["failed"] or (options.check and not result.get("holds", True)) else 0


if __name__ == "__main__":
    sys.exit(main())
