"""What ``ringspan bench attention`` shows: the table as text, and the figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADING = (
    "tokens", "heads/KV", "pattern", "ring", "layout", "backend",
    "seconds", "CPU s", "share", "× one", "CPU share", "sent", "peak", "kernel at",
)  # fmt: skip
MARKS = "osD^vP*X"


def table(result: dict) -> str:
    """The rows as aligned columns, and below them what the columns mean."""
    rows = result["rows"]
    cells = [HEADING, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADING))]
    lines = ["  ".join(_justified(text, width, column) for column, (text, width) in enumerate(zip(row, widths))).rstrip() for row in cells]
    return "\n".join([*lines, "", *_legend(result)])


def _cells(row: dict) -> tuple[str, ...]:
    ring = str(row["ring"]) + (f"×{row['ulysses']}u" if row["ulysses"] > 1 else "")
    ring += (" emu" if row["emulated"] else "") + ("" if row["overlap"] else " no overlap")
    return (
        f"{row['tokens']:,}", f"{row['heads']}/{row['kv_heads']}", row["pattern"], ring, row["layout"], row["backend"],
        f"{row['seconds']:.3f}", f"{row['cpu_seconds']:.3f}",
        f"{row['share']:.2f}", f"{row['speedup']:.2f}", f"{row['cpu_share']:.2f}",
        _mebibytes(row["bytes_sent_by_busiest"]),
        f"{_mebibytes(row['peak_bytes'])} (+{_mebibytes(row['peak_bytes'] - row['start_bytes'])})",
        f"{row['kernel_tokens']:,}",
    )  # fmt: skip


def _justified(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column in (2, 3, 4, 5) else text.rjust(width)


def _legend(result: dict) -> list[str]:
    rows = result["rows"]
    emulated = any(row["emulated"] for row in rows)
    one = "GPU" if result["device"] == "cuda" else "thread"
    direction = "forward" if rows and rows[0]["forward_only"] else "forward + backward"
    lines = [
        f"seconds: {direction}, " + ("the sum over the ranks, which are threads" if emulated else "wall of the slowest rank")
        + f", median of {result['repeat']}; CPU s: all ranks together",
        f"share: visible pairs a second over F.scaled_dot_product_attention's, causal, in one process with as many {one}s as ranks",
        f"× one: over one {one}'s; CPU share: visible pairs a CPU second, all ranks' together, over one {one}'s",
        f"sent: MiB of the busiest rank in one step; peak: MiB, {_peak_is_of(result)} (+ what the case added)",
    ]  # fmt: skip
    shared = (not row["emulated"] and row["kernel_threads"] < row["ring"] * row["ulysses"] for row in rows)
    if result["device"] == "cpu" and any(shared):
        cores = result["cores"]
        lines.append(f"{cores} cores are shared by more ranks: wall seconds are the machine's, and the kernel had {cores} threads at most")
    if any(row["kernel_tokens"] < row["tokens"] for row in rows):
        lines.append("kernel at: the length the kernel was measured at, where it would take too long at the row's own")
    return lines


def _peak_is_of(result: dict) -> str:
    kinds = {row["peak_is_of"] for row in result["rows"]}
    if result["device"] == "cuda":
        return "the most that tensors took on a GPU"
    if "process" in kinds:
        return "resident size of the largest process, the most so far: cases run in growing order"
    if "all ranks" in kinds:
        return "resident size of the one process that holds all ranks, reset before each case"
    return "resident size of the largest rank's process, reset before each case"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def figure(rows: list[dict]) -> Figure:
    """Seconds a token, and share of the kernel's speed, over tokens; a line for each pattern, ring and layout."""
    from matplotlib.figure import Figure  # the class itself: no global state, no display

    lines: dict[str, list[dict]] = {}
    for row in rows:
        ulysses = f" × ulysses {row['ulysses']}" if row["ulysses"] > 1 else ""
        layout = f", {row['layout']}" if row["ring"] > 1 else ""
        lines.setdefault(f"{row['pattern']}, ring {row['ring']}{ulysses}{layout}", []).append(row)
    drawn = Figure(figsize=(8, 7), layout="constrained")
    top, bottom = drawn.subplots(2, 1, sharex=True)
    for number, (label, line) in enumerate(lines.items()):
        style = {"marker": MARKS[number // 10 % len(MARKS)], "color": f"C{number % 10}", "label": label}
        tokens = [row["tokens"] for row in line]
        top.plot(tokens, [row["seconds"] / row["tokens"] for row in line], **style)
        bottom.plot(tokens, [row["share"] for row in line], **style)
    first = rows[0]
    what = "forward" if first["forward_only"] else "forward + backward"
    top.set_title(f"Attention, {what}: {first['heads']} heads ({first['kv_heads']} KV) of {first['head_dim']}, {first['dtype']}")
    top.set_ylabel("seconds a token" + (" (sum over ranks)" if first["emulated"] else ""))
    top.set_xscale("log", base=2)
    top.set_yscale("log")
    bottom.axhline(1, color="tab:gray", linewidth=1, linestyle="--")
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("share of the one-process kernel's speed")
    bottom.set_xlabel("tokens")
    ticks = sorted({row["tokens"] for row in rows})
    bottom.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    top.legend(fontsize="small")
    return drawn
