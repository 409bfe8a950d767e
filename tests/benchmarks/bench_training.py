"""Our training step beside torchtitan's and a plain PyTorch oracle: equal weights, tokens and optimizer.

    PEERS_VENV=~/peers-venv python -m tests.benchmarks.bench_training --peers ../shared/peers

1. The oracle (one process, no parallelism) says which loss and gradient norm each step must have.
2. At each length and mesh ours and torchtitan's trainer run in turn, A B A B, so that a drift of the machine meets both.
3. A table on stderr, one JSON object as the last line of stdout: CPU seconds a step of the busiest rank (the machine may
   be shared: wall time says little), peak resident GiB of the largest, and the ratio ours / torchtitan.

Exits 1 when a loss or norm of ours or of torchtitan differs from the oracle's, or a run failed; with ``--check`` also
when a ratio is not below 1. Without ``PEERS_VENV`` torchtitan is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.benchmarks.common import ONE_THREAD, PEERS, TIMEOUT, MeasurementFailed, launch

MODEL = {"dim": 256, "layers": 4, "heads": 8, "ffn_dim": 768, "vocab_size": 2048}
# The peers' optimizer; torchtitan's warm-up of one step multiplies the first rate by 1, so the rate is constant.
OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 0, "decay": "constant", "weight_decay": 0.0, "clip": 1.0}
MESHES = {
    "cp1": {},
    "cp2": {"ring": 2},
    "cp4": {"ring": 4},
    "tp2": {"tp": 2},
    "cp2tp2": {"ring": 2, "tp": 2},
}
LOSS_TOLERANCE = 1e-4  # absolute; losses are near 7.7, and the peers print five decimals
NORM_TOLERANCE = 1e-4  # relative; norms are between 2 and 6, and the peers print four decimals: half a digit is 2.5e-5
GIB = 2**30


def run_ours(mesh: dict, length: int, steps: int, start: str, peers: Path) -> dict:
    """One run of ``train``: ``cpu_s``, ``rss_gib``, and ``loss`` and ``gnorm`` of every step."""
    with tempfile.TemporaryDirectory() as run:
        ranks = launch(
            "training_run",
            mesh.get("ring", 1) * mesh.get("tp", 1),
            model=MODEL,
            mesh=mesh,
            run=run,
            start=start,
            peers=str(peers),
            training={**OPTIMIZER, "steps": steps, "context": length},
        )
        rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return {
        "cpu_s": max(rank["cpu_seconds"] for rank in ranks),
        "rss_gib": max(rank["peak_bytes"] for rank in ranks) / GIB,
        "loss": [row["loss"] for row in rows],
        "gnorm": [row["grad_norm"] for row in rows],
    }


def run_oracle(length: int, steps: int, peers: Path) -> dict:
    return _peer([sys.executable, str(peers / "oracle.py"), "--seq", str(length), "--steps", str(steps)])


def run_torchtitan(mesh: dict, length: int, steps: int, peers: Path) -> dict:
    script = ["bash", str(peers / "run_torchtitan.sh"), str(length), str(mesh.get("ring", 1))]
    return _peer([*script, "--tp", str(mesh.get("tp", 1)), "--steps", str(steps)])


def _peer(command: list[str]) -> dict:
    """The object a peer's driver prints after ``RESULT``."""
    environment = {**ONE_THREAD, "PYTHONDONTWRITEBYTECODE": "1"}  # the peers' folder may be read-only
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        output = f"not done in {TIMEOUT} s"
    finally:
        if process.poll() is None:  # the whole session: a launcher's ranks outlive it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise MeasurementFailed(f"{' '.join(command)}:\n{output[-2000:]}")
    return json.loads(found[-1].removeprefix("RESULT "))


def differences(found: dict, oracle: dict) -> tuple[float, float]:
    """Largest absolute difference of the losses, and largest relative one of the gradient norms, over all steps."""
    assert len(found["loss"]) == len(oracle["loss"]), "not the same number of steps"
    loss = max(abs(a - b) for a, b in zip(found["loss"], oracle["loss"]))
    norm = max(abs(a - b) / b for a, b in zip(found["gnorm"], oracle["gnorm"]))
    return loss, norm


def compare(mesh_name: str, length: int, options, oracle: dict, start: str) -> dict:
    """One configuration: both sides in turn, ``options.repeats`` times."""
    mesh = MESHES[mesh_name]
    ours, titans = [], []
    for _ in range(options.repeats):
        ours.append(run_ours(mesh, length, options.steps, start, options.peers))
        if options.torchtitan:
            titans.append(run_torchtitan(mesh, length, options.steps, options.peers))
    row = {"tokens": length, "mesh": mesh_name, **_side("ours", ours, oracle)}
    if titans:
        row |= _side("torchtitan", titans, oracle)
        ratios = [a["cpu_s"] / b["cpu_s"] for a, b in zip(ours, titans)]
        row |= {"cpu_ratio": median(ratios), "cpu_ratio_range": [min(ratios), max(ratios)]}
        row["rss_ratio"] = row["ours_rss_gib"] / row["torchtitan_rss_gib"]
    return row


def _side(name: str, runs: list[dict], oracle: dict) -> dict:
    losses, norms = zip(*(differences(run, oracle) for run in runs))
    return {
        f"{name}_cpu_s": median(run["cpu_s"] for run in runs),
        f"{name}_rss_gib": median(run["rss_gib"] for run in runs),
        f"{name}_loss_difference": max(losses),
        f"{name}_norm_difference": max(norms),
        # Written so that a NaN is not equal.
        f"{name}_equal": max(losses) <= LOSS_TOLERANCE and max(norms) <= NORM_TOLERANCE,
    }


HEADER = (
    f"{'tokens':>6} {'mesh':>6} | {'CPU s/step: ours':>16} {'titan':>7} {'ratio':>6} {'(range)':>13} | "
    f"{'GiB: ours':>9} {'titan':>6} {'ratio':>6} | {'Δloss':>8} {'Δnorm':>8} equal"
)


def line(row: dict) -> str:
    start = f"{row['tokens']:>6} {row['mesh']:>6} | {row['ours_cpu_s']:16.3f} "
    end = f" | {row['ours_loss_difference']:8.1e} {row['ours_norm_difference']:8.1e} {'yes' if row['ours_equal'] else 'NO'}"
    if "cpu_ratio" not in row:
        return f"{start}{'':>28} | {row['ours_rss_gib']:9.3f} {'':>13}{end}"
    low, high = row["cpu_ratio_range"]
    return (
        f"{start}{row['torchtitan_cpu_s']:7.3f} {row['cpu_ratio']:6.3f} ({low:5.3f}-{high:5.3f}) | "
        f"{row['ours_rss_gib']:9.3f} {row['torchtitan_rss_gib']:6.3f} {row['rss_ratio']:6.3f}{end}"
        f"{'' if row['torchtitan_equal'] else ' (torchtitan differs)'}"
    )


def failures(rows: list[dict], check: bool) -> list[str]:
    """What is wrong, one line each."""
    found = []
    for row in rows:
        where = f"{row['mesh']} at {row['tokens']} tokens"
        for side in ("ours", "torchtitan"):
            if not row.get(f"{side}_equal", True):
                found.append(f"{where}: losses or norms of {side} are not the oracle's")
        for ratio, what in (("cpu_ratio", "CPU seconds"), ("rss_ratio", "peak resident size")):
            if check and not row.get(ratio, 0) < 1:
                found.append(f"{where}: our {what} are {row[ratio]:.3f} of torchtitan's")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with oracle.py, common.py and run_torchtitan.sh")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], metavar="TOKENS")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--steps", type=int, default=6, help="of each run; one fewer is timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 unless every ratio is below 1")
    options = parser.parse_args()
    options.peers = options.peers.resolve()
    if not (options.peers / "oracle.py").exists():
        parser.error(f"--peers {options.peers} has no oracle.py; give the folder with the peers' drivers")
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}; at least 2 are needed to time one")
    venv = os.environ.get("PEERS_VENV")
    options.torchtitan = bool(venv) and (Path(venv) / "bin" / "torchrun").exists()
    if not options.torchtitan:
        print(f"torchtitan is left out: PEERS_VENV ({venv or 'not set'}) has no bin/torchrun", file=sys.stderr)
    load = [os.getloadavg()[0]]
    oracles, rows, broken = {}, [], []
    with tempfile.TemporaryDirectory() as folder:
        start = launch("write_start", 1, model=MODEL, peers=str(options.peers), run=folder)[0]
        print(HEADER, file=sys.stderr)
        for length in options.lengths:
            oracle = oracles[length] = run_oracle(length, options.steps, options.peers)
            print(f"{length:>6} {'oracle':>6} | {oracle['cpu_s']:16.3f} {'':>28} | {oracle['rss_gib']:9.3f}", file=sys.stderr)
            for mesh in options.meshes:
                try:
                    rows.append(compare(mesh, length, options, oracle, start))
                    print(line(rows[-1]), file=sys.stderr, flush=True)
                except MeasurementFailed as error:
                    broken.append(f"{mesh} at {length} tokens failed: {error}")
                    print(broken[-1], file=sys.stderr)
    load.append(os.getloadavg()[0])
    wrong = broken + failures(rows, options.check)
    for text in wrong:
        print(f"FAILED {text}", file=sys.stderr)
    result = {"benchmark": "training", "steps": options.steps, "repeats": options.repeats, "torchtitan": options.torchtitan}
    print(json.dumps({**result, "load": load, "oracle": oracles, "rows": rows, "failed": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
