"""A plan in words and tables, and as plain values."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from pipelines.plan.duration import EFFICIENCY, LINKS
from pipelines.plan.plan import Plan
from pipelines.plan.simulate import Hop, Simulation


def size(bytes: float) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if bytes >= scale:
            return f"{bytes / scale:,.1f} {unit}"
    return f"{bytes / 1024:,.1f} KiB"


def seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:,.2f} s" if value >= 0.1 else f"{value * 1e3:,.2g} ms"


def verdict(plan: Plan) -> str:
    peak, memory = plan.peak, plan.device.memory
    largest = plan.largest
    share = f"{size(largest.bytes)} of it {largest.kind} ({largest.why})"
    if plan.fits:
        return f"fits: {size(peak.bytes)} of {plan.device.name}'s {size(memory)} a rank at its peak ({peak.name}); {share}"
    return f"does not fit: {size(peak.bytes)} a rank at its peak ({peak.name}), {plan.device.name} has {size(memory)}, because {share}"


def render(plan: Plan, mesh_line: str, parameters_line: str) -> Group:
    """What `ringspan plan` prints; the lines are those that `ringspan train` prints of the mesh and the parameters."""
    shape, mesh = plan.shape, plan.shape.mesh
    tokens = shape.config.training.batch * shape.length
    low, high = plan.duration.mfu(plan.work, mesh.world, plan.device, shape.element)
    lines = [] if plan.stage is None else [f"stage {plan.stage}, in which a rank holds most"]
    lines += [
        f"{parameters_line} · {mesh.world} ranks: {mesh_line} · {shape.length:,} tokens, {shape.tokens:,} a rank",
        verdict(plan),
        "longest context that fits: " + (f"{plan.longest:,} tokens" if plan.longest else "none"),
    ]
    duration, (slow, quick) = plan.duration, zip(EFFICIENCY[plan.device.type], LINKS)
    step = [
        f"a step: {plan.work.model:.3g} FLOPs ({plan.work.attention / plan.work.model:.0%} attention), {plan.work.rank:.3g} computed by the "
        f"busiest rank (attention's balance {plan.work.imbalance:.3f})",
        f"expected {seconds(duration.quick)} to {seconds(duration.slow)} a step, {tokens / duration.slow:,.0f} to {tokens / duration.quick:,.0f} "
        f"tokens/s, MFU {low:.0%} to {high:.0%} (assumed: {slow[0]:.0%} of peak FLOP/s and {slow[1]:.0%} of the links with nothing hidden, "
        f"to {quick[0]:.0%} and {quick[1]:.0%} with ring and weights' traffic hidden)",
    ]  # fmt: skip
    parts = [*lines, _memory_table(plan)]
    if plan.host_bytes:
        where = "in host memory" if shape.config.memory.offload == "host" else "on disk"
        parts.append(f"besides, {size(plan.host_bytes)} a rank wait {where} for backward")
    if plan.host_optimizer_bytes:
        parts.append(f"besides, {size(plan.host_optimizer_bytes)} a rank of weights, gradients and AdamW's moments lie in host memory")
    if plan.flows:
        parts.append(_traffic_table(plan))
    parts += step
    if plan.steps:
        parts.append(_steps_table(plan))
    if plan.simulation is not None:
        parts += _simulation(plan.simulation)
        if shape.model.top_blocks is not None:
            parts.append(
                "which blocks are chosen only the tokens tell: the schedule is that of all blocks, the most that a choice can ask for"
            )
    return Group(*parts)


def _memory_table(plan: Plan) -> Table:
    table = _table(f"memory of a rank at its peak: {plan.peak.name}", "kind", "bytes", "why")
    for kind in plan.peak.by_kind():
        items = sorted((item for item in plan.peak.items if item.kind == kind), key=lambda item: -item.bytes)
        table.add_row(kind, size(sum(item.bytes for item in items)), "; ".join(dict.fromkeys(item.why for item in items[:3])))
    return table


def _traffic_table(plan: Plan) -> Table:
    table = _table("sent by a rank in a step", "kind", "in its node", "between nodes", "why")
    for flow in plan.flows:
        table.add_row(flow.kind, size(flow.inside), size(flow.between), flow.why)
    return table


def _steps_table(plan: Plan) -> Table:
    table = _table("to reach further", "change", "--set", "peak now", "longest context", "ranks")
    for step in plan.steps:
        table.add_row(step.change, " ".join(step.settings), size(step.bytes), f"{step.longest:,}", str(step.ranks))
    return table


def _simulation(found: Simulation) -> list:
    mesh = found.mesh
    table = _table(f"ring of {mesh.ring} ({mesh.layout})", "hop", "most pairs", "mean pairs", "rows", "forward", "backward")
    for first, last, hop in _alike(found.hops):
        figures = f"{hop.most_pairs:,}", f"{hop.mean_pairs:,.0f}", f"{hop.rows:,}", size(hop.forward_bytes), size(hop.backward_bytes)
        table.add_row(str(first) if first == last else f"{first}–{last}", *figures)
    return [
        table,
        f"{mesh.world} ranks: the busiest rank computes {found.balance:.3f} of the mean; with every hop as long as its busiest rank, "
        f"{found.critical:.3f}",
        f"one tiny attention on {mesh.ring} emulated ring ranks equals one rank's: output within {found.error:.1e}, gradients within "
        f"{found.gradient_error:.1e}",
    ]


def _alike(hops: list[Hop]) -> list[tuple[int, int, Hop]]:
    """(first, last, hop) of each stretch of hops that differ in their distance alone."""
    found: list[tuple[int, int, Hop]] = []
    for hop in hops:
        if found and found[-1][2]._replace(distance=hop.distance) == hop:
            found[-1] = (found[-1][0], hop.distance, hop)
        else:
            found.append((hop.distance, hop.distance, hop))
    return found


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("kind", "why", "change", "--set") else "right", overflow="fold")
    return table


def as_values(plan: Plan) -> dict:
    """The plan as JSON holds it; bytes and seconds."""
    shape, mesh = plan.shape, plan.shape.mesh
    value = {
        "parameters": plan.total, "trainable": plan.trainable, "stage": plan.stage, "device": plan.device.name,
        "tokens": shape.length, "tokens_per_rank": shape.tokens,
        "mesh": {axis: getattr(mesh, axis) for axis in ("dp", "replicate", "pp", "ring", "ulysses", "tp", "layout")}, "ranks": mesh.world,
        "fits": plan.fits, "verdict": verdict(plan), "capacity_bytes": plan.device.memory,
        "peak_bytes": plan.peak.bytes, "peak_moment": plan.peak.name, "memory": plan.peak.by_kind(),
        "moments": {instant.name: instant.bytes for instant in plan.instants}, "elsewhere_bytes": plan.host_bytes + plan.host_optimizer_bytes,
        "traffic": {flow.kind: {"inside": flow.inside, "between": flow.between} for flow in plan.flows},
        "flops": plan.work.model, "attention_flops": plan.work.attention, "rank_flops": plan.work.rank, "imbalance": plan.work.imbalance,
        "seconds": [plan.duration.quick, plan.duration.slow], "longest_context": plan.longest,
        "steps": [
            {"change": step.change, "set": step.settings, "peak_bytes": step.bytes, "longest_context": step.longest, "ranks": step.ranks}
            for step in plan.steps
        ],
    }  # fmt: skip
    if plan.simulation is not None:
        found = plan.simulation
        value["simulation"] = {
            "ranks": found.mesh.world, "ring": found.mesh.ring, "pairs": found.pairs, "balance": found.balance, "critical": found.critical,
            "hops": [hop._asdict() for hop in found.hops], "error": found.error, "gradient_error": found.gradient_error,
        }  # fmt: skip
    return value
