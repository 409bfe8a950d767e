"""Does the memory of a training step grow in a straight line with the length, and does a ring divide it?

    python -m tests.benchmarks.bench_memory --check

Each figure is the peak resident size of the largest rank after one step of ``train`` on random tokens, in processes of
its own. Less the peak of the same processes at ``BASELINE`` tokens a rank, it is what the further tokens cost: the
activations. Divided by how many further tokens of the sequence there are, it is a rate in KiB a token.

Claims: at every ring size activations lie on a line through the origin, within ``LINEAR`` or ``NOISE_MIB``, the larger;
with two ranks a rank's rate is at most ``HALF`` of that of one rank alone. ``--check`` exits 1 when one fails. A table and the claims on stderr, one JSON object
as the last line of stdout. The attention of the longest sequences takes minutes: its time is quadratic.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

from tests.benchmarks.common import MeasurementFailed, launch

MODEL = {"dim": 128, "layers": 2, "heads": 4, "ffn_dim": 384, "vocab_size": 512}
BASELINE = 1024  # tokens of a rank: as many as a chunk of the loss, whose logits do not grow with the sequence
LINEAR = 0.15  # of what the fitted rate gives
NOISE_MIB = 8  # repeated runs of one configuration differ by as much: the allocator's doing, and large beside 4,096 tokens
HALF = 0.55
KIB, MIB = 2**10, 2**20


def peak(length: int, ring: int) -> int:
    """Bytes of the largest rank after one step on ``length`` tokens over ``ring`` ranks."""
    with tempfile.TemporaryDirectory() as run:
        training = {"steps": 1, "context": length}
        ranks = launch("training_run", ring, model=MODEL, training=training, mesh={"ring": ring}, run=run)
    return max(rank["peak_bytes"] for rank in ranks)


def measure(lengths: list[int], ring: int) -> list[dict]:
    """A row a length: ``peak_mib`` and ``activations_mib`` of a rank, and ``kib_per_token`` of the sequence."""
    baseline = peak(BASELINE * ring, ring)
    print(f"{ring:>5} {BASELINE * ring:>8} | {baseline / MIB:9.1f} {'baseline':>12}", file=sys.stderr, flush=True)
    rows = []
    for length in lengths:
        value = peak(length, ring)
        row = {
            "ring": ring,
            "tokens": length,
            "further_tokens": length - BASELINE * ring,
            "peak_mib": value / MIB,
            "activations_mib": (value - baseline) / MIB,
        }
        row["kib_per_token"] = row["activations_mib"] * MIB / KIB / row["further_tokens"]
        print(
            f"{ring:>5} {length:>8} | {row['peak_mib']:9.1f} {row['activations_mib']:12.1f} {row['kib_per_token']:10.2f}",
            file=sys.stderr,
            flush=True,
        )
        rows.append(row)
    return rows


def fit(rows: list[dict]) -> dict:
    """Least squares through the origin, activations over further tokens.

    ``kib_per_token`` of the line; ``worst_share`` and ``worst_mib``, the largest distances from it; ``linear``, whether all are small.
    """
    squares = sum(row["further_tokens"] ** 2 for row in rows)
    slope = sum(row["activations_mib"] * row["further_tokens"] for row in rows) / squares
    expected = [slope * row["further_tokens"] for row in rows]
    distances = [abs(row["activations_mib"] - want) for row, want in zip(rows, expected)]
    return {
        "kib_per_token": slope * MIB / KIB,
        "worst_share": max(distance / want for distance, want in zip(distances, expected)),
        "worst_mib": max(distances),
        "linear": all(distance <= max(LINEAR * want, NOISE_MIB) for distance, want in zip(distances, expected)),
    }


def claims(fits: dict[int, dict]) -> list[dict]:
    """What is claimed, with its figures, and whether it ``holds``."""
    found = []
    for ring, line in fits.items():
        text = (
            f"ring {ring}: a line of {line['kib_per_token']:.2f} KiB a token, points at most {line['worst_share']:.1%} "
            f"and {line['worst_mib']:.1f} MiB off it (limit for each point {LINEAR:.0%} or {NOISE_MIB} MiB)"
        )
        found.append({"claim": text, "holds": line["linear"]})
    if 1 in fits and 2 in fits:
        ratio = fits[2]["kib_per_token"] / fits[1]["kib_per_token"]
        found.append({"claim": f"two ranks: each {ratio:.3f} of one rank's activations (limit {HALF})", "holds": ratio <= HALF})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536], metavar="TOKENS")
    parser.add_argument("--rings", type=int, nargs="+", default=[1, 2, 4], metavar="RANKS")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    options = parser.parse_args()
    for ring in options.rings:
        usable = [length for length in options.lengths if length > BASELINE * ring]
        if len(usable) < 2:
            parser.error(f"--lengths has {len(usable)} above {BASELINE} × {ring} tokens, the baseline of ring {ring}; give at least 2")
    load = [os.getloadavg()[0]]
    print(f"{'ring':>5} {'tokens':>8} | {'peak MiB':>9} {'activations':>12} {'KiB/token':>10}", file=sys.stderr)
    rows, fits = [], {}
    try:
        for ring in options.rings:
            measured = measure([length for length in options.lengths if length > BASELINE * ring], ring)
            rows += measured
            fits[ring] = fit(measured)
    except MeasurementFailed as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    load.append(os.getloadavg()[0])
    found = claims(fits)
    for claim in found:
        print(f"{'holds ' if claim['holds'] else 'FAILED'} {claim['claim']}", file=sys.stderr)
    print(json.dumps({"benchmark": "memory", "model": MODEL, "load": load, "rows": rows, "fits": fits, "claims": found}))
    return 1 if options.check and not all(claim["holds"] for claim in found) else 0


if __name__ == "__main__":
    sys.exit(main())
