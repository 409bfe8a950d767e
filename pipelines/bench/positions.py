"""``ringspan bench positions``: how exact rotary positions are far out, and how each encoding fares beyond the trained length."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipelines.bench import angles
from pipelines.bench.extrapolation import HEAD_DIM, TUNED, Experiment, Text, measure, standard_library
from pipelines.corpus import TokenStore
from workers.model.config import padded_vocabulary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALIBI_MULTIPLE, ALIBI_LIMIT = 8, 1.03  # Press et al. 2022, as held to here: 3% at eight times the trained length


@dataclass(frozen=True)
class Options:
    """The options as they were typed. ``quick`` replaces the sizes by the smallest that mean anything."""

    store: str | None = None
    context: int = 256
    multiples: str = "1,2,4,8,16"
    steps: int = 600
    batch: int = 8
    dim: int = 128
    layers: int = 4
    windows: int = 16
    seed: int = 0
    quick: bool = False


def prepare(options: Options) -> tuple[Experiment, Text]:
    """The experiment and its text. Raises ValueError, one line, for what cannot be measured."""
    if options.quick:
        options = replace(options, context=32, multiples="1,2,4", steps=10, batch=8, dim=64, layers=2, windows=4)
    for name in ("context", "steps", "batch", "layers", "windows"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}; it must not be negative")
    if options.dim < HEAD_DIM or options.dim % HEAD_DIM:
        raise ValueError(f"--dim is {options.dim}; it must be a multiple of {HEAD_DIM}, the size of a head")
    parts = options.multiples.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(f"--multiples is {options.multiples!r}; give whole numbers separated by commas, as 1,2,4,8")
    multiples = sorted({1, *map(int, parts)})
    if len(multiples) == 1 or any(multiples[-1] % multiple for multiple in multiples):
        raise ValueError(
            f"--multiples is {options.multiples!r}; each must divide the largest, which is more than 1: all score the same tokens"
        )
    if options.context < 2:
        raise ValueError(f"--context is {options.context}; scalings need at least 2")
    if options.store is None:
        documents, vocabulary = standard_library(), 256
    else:
        store = TokenStore.open(options.store)
        documents, vocabulary = (store[number] for number in range(len(store))), padded_vocabulary(store.vocab_size)
    sizes = {name: getattr(options, name) for name in ("context", "steps", "batch", "dim", "layers", "windows", "seed")}
    experiment = Experiment(multiples=tuple(multiples), vocab_size=vocabulary, **sizes)
    return experiment, Text.split(documents, experiment.longest, experiment.windows)


def run(experiment: Experiment, text: Text, out: Path | None, say: Callable[[str], None]) -> dict:
    """Measure; the answer of the command, and with ``out`` also ``positions.json`` and ``positions.png`` in that folder."""
    start = time.perf_counter()
    health = angles.rows()
    say(f"angles: {len(health)} cases")
    rows = measure(experiment, text, say)
    result = {
        "benchmark": "positions", "torch": torch.__version__, "experiment": asdict(experiment), "held_out_tokens": text.held_out[:, 1:].numel(),
        "seconds": time.perf_counter() - start, "health": health, "rows": rows, "claims": claims(health, rows),
    }  # fmt: skip
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result |= {"table": str(out / "positions.json"), "figure": str(out / "positions.png")}
        (out / "positions.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        figure(result).savefig(out / "positions.png", dpi=120)
    return result


def claims(health: list[dict], rows: list[dict]) -> list[dict]:
    """What is claimed of encodings, the figure that was measured, and whether it holds. What was not measured is left out."""
    ratio = {(row["encoding"], row["multiple"]): row["ratio"] for row in rows}
    longest = max(row["multiple"] for row in rows)
    far = angles.POSITIONS[-1]
    drift = angles.worst(health, "model", "drift", far)
    found = [
        {
            "claim": f"q · k keeps to its distance within 1e-6 at {far:,} tokens, with every scaling",
            "measured": drift,
            "holds": drift < 1e-6,
        }
    ]
    if ("alibi", ALIBI_MULTIPLE) in ratio:
        measured = ratio["alibi", ALIBI_MULTIPLE]
        found.append(
            {"claim": f"ALiBi keeps within 3% perplexity at {ALIBI_MULTIPLE} L", "measured": measured, "holds": measured <= ALIBI_LIMIT}
        )
    for name in ("rope, ntk", "rope, dynamic", "rope, yarn", TUNED):
        measured = ratio[name, longest]
        claim = f"{name} keeps within 3% perplexity at {longest} L"
        found.append({"claim": claim, "measured": measured, "holds": measured <= ALIBI_LIMIT})
    return found


def table(result: dict) -> str:
    """Errors at the farthest position; perplexity and its ratio by encoding and length; the claims."""
    far, rows = angles.POSITIONS[-1], result["rows"]
    multiples = sorted({row["multiple"] for row in rows})
    lines = [f"{'at ' + format(far, ',') + ' tokens, worst scaling':40}  angle     drift of q · k"]
    for method in angles.METHODS:
        lines.append(
            f"{method:40}  " + "   ".join(f"{angles.worst(result['health'], method, error, far):.1e}" for error in ("angle", "drift"))
        )
    lines += ["", "perplexity (ratio to L)  " + "".join(f"{str(multiple) + ' L':>16}" for multiple in multiples)]
    for name in dict.fromkeys(row["encoding"] for row in rows):
        cells = [f"{row['perplexity']:.3g} ({row['ratio']:.3f})" for row in rows if row["encoding"] == name]
        lines.append(f"{name:25}" + "".join(f"{cell:>16}" for cell in cells))
    lines += [
        "",
        *(f"{'holds' if claim['holds'] else 'does not hold'}: {claim['claim']} ({claim['measured']:.3g})" for claim in result["claims"]),
    ]
    return "\n".join(lines)


def figure(result: dict) -> Figure:
    """Drift over positions by method; perplexity over the scored length by encoding, as a ratio to that at L."""
    from matplotlib.figure import Figure  # the class itself: no global state, no display

    rows, context = result["rows"], result["experiment"]["context"]
    drawn = Figure(figsize=(8, 9), layout="constrained")
    top, bottom = drawn.subplots(2, 1)
    for method in angles.METHODS:
        top.plot(angles.POSITIONS, [angles.worst(result["health"], method, "drift", p) for p in angles.POSITIONS], marker="o", label=method)
    top.set_title("Rotary positions: how far q · k / |q||k| is from what its distance alone gives")
    top.set_xscale("log")
    top.set_yscale("log")
    top.set_xlabel("position")
    top.set_ylabel("largest error, worst scaling")
    for number, name in enumerate(dict.fromkeys(row["encoding"] for row in rows)):
        line = [row for row in rows if row["encoding"] == name]
        style = "--" if "," in name else "-"
        bottom.plot([row["tokens"] for row in line], [row["ratio"] for row in line], style, marker="o", color=f"C{number}", label=name)
    bottom.axhline(1, color="tab:gray", linewidth=1)
    bottom.set_title(f"Trained at {context} tokens: perplexity of the same targets in longer windows")
    bottom.set_xscale("log", base=2)
    bottom.set_yscale("log")
    ticks = sorted({row["tokens"] for row in rows})
    bottom.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    bottom.minorticks_off()
    highest = max(row["ratio"] for row in rows)
    ratios = [ratio for ratio in (1, 1.5, 2, 3, 4, 6, 8, 16, 32) if ratio <= highest]
    bottom.set_yticks(ratios, [f"{ratio:g}" for ratio in ratios])
    bottom.set_xlabel("tokens of a window")
    bottom.set_ylabel("perplexity / that at the trained length")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return drawn
