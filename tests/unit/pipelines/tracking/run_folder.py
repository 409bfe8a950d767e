"""A run folder as the loop writes it, and waiting for what the record makes of it."""

import json
import time
from pathlib import Path

CONFIG = {"model": {"layers": 2, "width": 64}, "training": {"steps": 5}}
LONG_S = 90  # for a close on a busy machine; a quiet one needs a second


def a_row(step: int, **changes) -> dict:
    return {
        "step": step,
        "tokens": step * 64,
        "loss": 4.0 / step,
        "grad_norm": 1.0 + step,
        "learning_rate": 1e-3,
        "tokens_per_second": 1000.0,
        "peak_memory_bytes": 1 << 20,
        "loader_wait_seconds": 0.01,
        "exposed_comm_seconds": 0.0,
        "skipped_steps": 0,
    } | changes


def an_evaluation(step: int, loss: float) -> dict:
    parts = [{"start": 0, "stop": 32, "loss": loss + 1, "targets": 31}, {"start": 32, "stop": 64, "loss": loss - 1, "targets": 32}]
    return {"step": step, "tokens": step * 64, "loss": loss, "loss_by_position": parts}


def append(path: Path, *rows: dict) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def replace(path: Path, *rows: dict) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scratch.replace(path)


def until(condition, seconds: float = LONG_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def steps_of(client, run_id: str, key: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, key))
