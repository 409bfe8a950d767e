"""Does the memory of a training step grow in a straight line with the length, and does a ring divide it?

    python -m tests.benchmarks.bench_memory --check

Each figure is the peak resident size of the largest rank after one step of ``train`` on random tokens, in processes of
its own, less that of the same processes with ``BASELINE`` tokens a rank: what is left grew with the sequence.

Claims: the growth is within ``LINEAR`` of a straight line through no constant, at every ring size; and with two ranks
each grows by at most ``HALF`` of what one rank alone does. ``--check`` exits 1 when one fails. A table and the claims
on stderr, one JSON object as the last line of stdout. The attention of the longest sequence costs minutes: quadratic.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

from tests.benchmarks.common import launch

MODEL = {"dim": 128, "layers": 2, "heads": 4, "ffn_dim": 384, "vocab_size": 512}
BASELINE = 1024  # tokens of a rank: as many as a chunk of the loss, whose logits do not grow with the sequence
LINEAR = 0.10  # of the fitted growth
HALF = 0.55
MIB = 2**20


def peak(length: int, ring: int) -> float:
    """MiB of the largest rank after one step on ``length`` tokens over ``ring`` ranks."""
    with tempfile.TemporaryDirectory() as run:
        training = {"steps": 1, "context": length}
        ranks = launch("training_run", ring, model=MODEL, training=training, mesh={"ring": ring}, run=run)
    return max(rank["peak_bytes"] for rank in ranks) / MIB


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """``(slope, worst)`` of y = slope · x by least squares on relative errors; ``worst`` is the largest of these.

    Relative, so that the short sequences count as much as the long ones: a quadratic term shows at both ends.
    """
    rates = [y / x for x, y in points]
    slope = sum(rates) / sum(rate * rate for rate in rates) if any(rates) else 0.0
    slope = 1 / slope if slope else 0.0
    return slope, max(abs(rate / slope - 1) for rate in rates) if slope else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536], metavar="TOKENS")
    parser.add_argument("--rings", type=int, nargs="+", default=[1, 2, 4], metavar="RANKS")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    options = parser.parse_args()
