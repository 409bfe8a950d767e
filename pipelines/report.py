"""What a run shows of itself: the line of a step, figures, and the report at its end.

Nothing here changes a run or needs a server.
"""

import math
import shlex
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.tracking import TrackerInfo
from pipelines.tracking.lines import read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

WARM_UP_SHARE = 0.1  # the first steps compile, allocate and fill caches: they say nothing about speed


def step_line(row: dict) -> str:
    """One step as one line: step, loss, gradient norm, tokens/s, peak memory, time spent waiting for data; why it was slow, if it was."""
    slow = f"  slow, {row['slow']}" if row.get("slow") else ""
    return (
        f"step {row['step']:>7,}  loss {row['loss']:>8.4f}  grad {row['grad_norm']:>8.3g}  "
        f"{_count(row['tokens_per_second']):>8} tok/s  "
        f"mem {_bytes(row['peak_memory_bytes']):>9}  wait {row['loader_wait_seconds']:>6.2f} s{slow}"
    )


def evaluation_line(row: dict) -> str:
    """An evaluation as one line: the held-out loss, and what earlier papers of a shelf, or files of a repository, are worth."""
    return f"held-out loss at step {row['step']}: {row['loss']:.4f}" + (f"; {_worth_of_earlier(row)}" if "alone_later_loss" in row else "")


def _worth_of_earlier(row: dict) -> str:
    with_them, without = row["later_loss"], row["alone_later_loss"]
    return f"{with_them:.4f} with, {without:.4f} without the earlier parts of its document ({with_them - without:+.4f}, {row['later_targets']:,} targets)"


def log_buckets(parts: list[dict]) -> list[dict]:
    """Stretches of positions merged into octaves (starts in [2^k, 2^(k+1)), and position 0), losses weighted by their targets.

    Late positions differ little from their neighbours and early ones a lot, so a loss by position wants a logarithmic axis.
    Stretches without a target have no loss and are left out.
    """
    octaves: dict[int, list[dict]] = {}
    for part in sorted(parts, key=lambda part: part["start"]):
        if part["targets"]:
            octaves.setdefault(part["start"].bit_length(), []).append(part)
    merged = []
    for group in octaves.values():
        targets = sum(part["targets"] for part in group)
        loss = sum(part["loss"] * part["targets"] for part in group) / targets
        merged.append({"start": group[0]["start"], "stop": max(part["stop"] for part in group), "loss": loss, "targets": targets})
    return merged


def loss_figure(rows: list[dict]) -> "Figure":
    """Training loss and gradient norm against tokens. Raises ValueError without a row."""
    if not rows:
        raise ValueError("a loss figure needs at least one step; metrics.jsonl holds none")
    figure, (top, bottom) = _figure(2, height=6)
    tokens = [row["tokens"] for row in rows]
    top.plot(tokens, [row["loss"] for row in rows], color="tab:blue", linewidth=1)
    top.set_ylabel("loss (nats per token)")
    bottom.plot(tokens, [row["grad_norm"] for row in rows], color="tab:gray", linewidth=1)
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("tokens seen")
    top.set_title("Training loss")
    return figure


def loss_by_position_figure(evaluations: list[dict]) -> "Figure":
    """Held-out loss against the position in the context, at the first and at the last evaluation, in octaves.

    A model that uses its context falls to the right. Raises ValueError where no evaluation has a loss by position.
    """
    measured = [row for row in evaluations if log_buckets(row.get("loss_by_position", []))]
    if not measured:
        raise ValueError("a figure of the loss by position needs an evaluation with targets; evaluations.jsonl holds none")
    figure, (axes,) = _figure(1, height=4.5)
    ends = [(measured[0], "tab:gray"), (measured[-1], "tab:blue")] if len(measured) > 1 else [(measured[0], "tab:blue")]
    for row, colour in ends:
        buckets = log_buckets(row["loss_by_position"])
        edges = [max(bucket["start"], 0.5) for bucket in buckets] + [buckets[-1]["stop"]]  # a log axis has no 0
        axes.stairs(
            [bucket["loss"] for bucket in buckets],
            edges,
            baseline=None,
            color=colour,
            linewidth=2,
            label=f"step {row['step']:,}: mean {row['loss']:.4f}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the context (tokens)")
    axes.set_ylabel("held-out loss (nats per token)")
    axes.set_title("Loss by position")
    axes.legend()
    return figure


def closing_report(run_dir: Path, tracker_info: TrackerInfo | None, completion: str | None = None) -> "Group":
    """What a run achieved and where to look at it, as a rich renderable; `completion` is a sample of the model's text.

    Reads `metrics.jsonl` and `evaluations.jsonl`; a file that doesn't exist counts as empty.
    Raises ValueError for a damaged line.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    run_dir = Path(run_dir).resolve()
    files = (run_dir / "metrics.jsonl", run_dir / "evaluations.jsonl")
    rows, evaluations = (read_rows(path) if path.exists() else [] for path in files)
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        facts.add_row("held-out loss", f"{first['loss']:.4f} at step {first['step']:,} → {last['loss']:.4f} at step {last['step']:,}")
        if "alone_later_loss" in last:
            facts.add_row("earlier papers, files", _worth_of_earlier(last))
    if rows:
        facts.add_row(
            "training loss",
            f"{rows[0]['loss']:.4f} → {rows[-1]['loss']:.4f} over {rows[-1]['step']:,} steps, {rows[-1]['tokens']:,} tokens",
        )
        speeds = [row["tokens_per_second"] for row in rows[int(len(rows) * WARM_UP_SHARE) :]]
        used = [row["mfu"] for row in rows[int(len(rows) * WARM_UP_SHARE) :] if "mfu" in row]
        mfu = f", MFU {statistics.median(used):.0%}" if used else ""
        facts.add_row("speed", f"{_count(statistics.median(speeds))} tokens/s (median){mfu}")
        if slow := [row for row in rows if row.get("slow")]:
            facts.add_row("slow steps", f"{len(slow):,}; the last, {slow[-1]['step']:,}, {slow[-1]['slow']}")
        facts.add_row("peak memory", f"{_bytes(max(row['peak_memory_bytes'] for row in rows))} on the fullest rank")
        facts.add_row("skipped steps", f"{rows[-1].get('skipped_steps', 0):,}")
    else:
        facts.add_row("steps", "none: metrics.jsonl is empty or absent")
    facts.add_row("run folder", Text(str(run_dir)))
    if tracker_info is not None:
        for name, text in _whereabouts(run_dir, tracker_info):
            facts.add_row(name, Text(text))
    parts = [Text("The run is over", style="bold"), facts]
    if table := _position_table(evaluations):
        parts += [Text(""), table]
    if completion is not None:
        parts += [Text(""), Text("A sample of the model's text", style="bold"), Text(completion)]
    return Group(*parts)


def _whereabouts(run_dir: Path, info: TrackerInfo) -> list[tuple[str, str]]:
    lines = [("recorded in", f"{info.uri}, experiment {info.experiment}, run {info.run_name}")]
    if info.waiting:
        lines.append(("not yet there", f"{info.waiting:,} steps and evaluations wait in the run folder"))
    if info.uri.startswith("http") and info.run_id:
        lines.append(("look at it", f"{info.uri.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{info.run_id}"))
    elif info.uri == f"sqlite:///{run_dir.parent}/mlflow.db":
        lines.append(("look at it", f"ringspan ui --runs {shlex.quote(str(run_dir.parent))}"))
    return lines


def _position_table(evaluations: list[dict]):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    ends = [log_buckets(row.get("loss_by_position", [])) for row in (evaluations[:1] + evaluations[-1:])]
    if not ends or not all(ends):
        return None
    table = Table(
        "positions",
        *(f"step {row['step']:,}" for row in (evaluations[0], evaluations[-1])),
        "change",
        title="Held-out loss by position",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    start = {bucket["start"]: bucket["loss"] for bucket in ends[0]}
    for bucket in ends[1]:
        before = start.get(bucket["start"], math.nan)
        table.add_row(
            f"{bucket['start']:,} – {bucket['stop'] - 1:,}", f"{before:.4f}", f"{bucket['loss']:.4f}", f"{bucket['loss'] - before:+.4f}"
        )
    for column in table.columns:
        column.justify = "right"
    return table


def _figure(panels: int, height: float):
    # The class itself, not pyplot: no global state, no display, and safe in a thread.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for panel in axes:
        panel.grid(alpha=0.3)
    return figure, axes


def _count(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (unit if name != 'k' else 1e3):.1f}{name}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
