"""An evaluation as a table, a figure, and files, which also go on record."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.models.source import Source
from pipelines.report import log_buckets
from pipelines.tracking import TrackerInfo, add

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

MOST_ROWS = 12  # documents shown; the JSON has all


def table(value: dict) -> Group:
    """Totals, loss by context, and the documents that the model knows least."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [Text(f"loss {value['loss']:.4f} · perplexity {value['perplexity']:.2f} · {value['targets']:,} tokens, each scored once")]
    lines.append(Text(f"store {value['store']}\ncheckpoint {value['checkpoint']}", style="dim"))
    by_context = Table("tokens seen before", "loss", "tokens", title="By context", title_justify="left", box=SIMPLE_HEAD)
    for row in log_buckets(value["loss_by_context"]):
        by_context.add_row(f"{row['start']:,} – {row['stop'] - 1:,}", f"{row['loss']:.4f}", f"{row['targets']:,}")
    hardest = sorted((row for row in value["documents"]), key=lambda row: -row["loss"])
    documents = Table("document", "loss", "perplexity", "tokens", title=f"By document: the highest of {len(hardest)}",
                      title_justify="left", box=SIMPLE_HEAD)  # fmt: skip
    for row in hardest[:MOST_ROWS]:
        documents.add_row(row["name"], f"{row['loss']:.4f}", f"{math.exp(min(row['loss'], 700)):.2f}", f"{row['targets']:,}")
    for shown, first in ((by_context, 0), (documents, 1)):
        for column in shown.columns[first:]:
            column.justify = "right"
    return Group(*lines, by_context, documents)


def figure(value: dict) -> Figure:
    """Loss against the tokens seen before a target in its window, and against its position in the document, in octaves."""
    from matplotlib.figure import Figure  # the class itself: no global state, no display

    drawn = Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawn.subplots()
    for name, label, colour in (
        ("loss_by_context", "tokens seen before", "tab:blue"),
        ("loss_by_position", "position in the document", "tab:gray"),
    ):
        buckets = log_buckets(value[name])
        edges = [max(bucket["start"], 0.5) for bucket in buckets] + [buckets[-1]["stop"]]  # a log axis has no 0
        axes.stairs([bucket["loss"] for bucket in buckets], edges, baseline=None, color=colour, linewidth=2, label=f"by {label}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"Loss {value['loss']:.4f} over {value['targets']:,} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def files(value: dict) -> dict[str, bytes]:
    """The evaluation as files, by name."""
    image = io.BytesIO()
    figure(value).savefig(image, format="png", dpi=150)
    return {"evaluation.json": (json.dumps(value, indent=1) + "\n").encode(), "evaluation.png": image.getvalue()}


def save(made: dict[str, bytes], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        (out / name).write_bytes(data)


def record(made: dict[str, bytes], source: Source) -> TrackerInfo | None:
    """Puts the files on record in MLflow, beside the run whose checkpoint was evaluated, each evaluation in a folder of its own."""
    folder = f"evaluation/{source.weights.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return add(source.folder, {f"{folder}/{name}": data for name, data in made.items()})
