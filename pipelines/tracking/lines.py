"""The lines of a run folder: read whole, followed while they grow, and as the keys and points that MLflow accepts.

The loop writes `metrics.jsonl` (a line a step) and `evaluations.jsonl` (a line a held-out evaluation); both only grow,
except that after a crash they are replaced by a copy cut back to the checkpoint, and grow again with the same values.
"""

import itertools
import json
import logging
import math
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

MLFLOW_PARAM_CHARS = 6000  # more is refused; the whole value is in the artifact config.yaml
NOT_METRICS = {"step", "time", "loss_by_position"}


def read_rows(path: Path) -> list[dict]:
    """All lines of a JSON-lines file. A last line without its newline is still being written and is left out.

    Raises ValueError, with the number of the line, for anything else that isn't a JSON object; FileNotFoundError as usual.
    """
    rows = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or unfinished
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a JSON object was expected, not {type(row).__name__}")
        rows.append(row)
    return rows


class Tail:
    """The new lines of a JSON-lines file that another process appends to and may replace by a shorter one.

    Each step comes out once: lines up to the last step seen are passed over, as after a crash the file is cut back to the
    checkpoint and grows again with the same values. A last line without its newline is still being written: it waits.
    """

    def __init__(self, path: Path, after: int = -1):
        self.path, self.last, self._file = path, after, None

    def rows(self) -> Iterator[dict]:
        try:
            # The open handle keeps the old inode alive, so a replacement can't have the same number.
            if self._file is None or os.fstat(self._file.fileno()).st_ino != self.path.stat().st_ino:
                self.close()
                self._file = self.path.open("rb")
        except FileNotFoundError:
            return
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
        while True:
            position = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(position)
                return
            try:
                row = json.loads(line)
                step = int(row["step"])
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s: the line at byte %d can't be read and is not recorded (%s)", self.path, position, error)
                continue
            if step > self.last:
                self.last = step
                yield row

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def last_step(path: Path) -> int:
    """The last step in a JSON-lines file of a run; -1 where there is none."""
    tail, last = Tail(path), -1
    for row in tail.rows():
        last = row["step"]
    tail.close()
    return last


def step_points(row: dict) -> list[tuple[str, float, int]]:
    """The metrics of one line of metrics.jsonl as (key, value, position on MLflow's step axis).

    MLflow has one axis, an integer step. A loss against tokens is therefore a metric of its own, `loss_by_tokens`, whose
    "step" is the number of tokens seen. `loss` comes last: where it is on record, so is the rest of its line.
    """
    numbers = _numbers(row)
    loss = numbers.pop("loss", None)
    points = [(clean_key(key), value, row["step"]) for key, value in numbers.items()]
    if loss is not None and "tokens" in numbers:
        points.append(("loss_by_tokens", loss, int(row["tokens"])))
    return points if loss is None else [*points, ("loss", loss, row["step"])]


def evaluation_points(row: dict) -> list[tuple[str, float, int]]:
    """The metrics of one line of evaluations.jsonl, under `heldout/`; a stretch of positions is `heldout/loss_at/start-stop`."""
    points = []
    for part in row.get("loss_by_position", ()):
        if "loss" in (numbers := _numbers(part)):
            points.append((f"heldout/loss_at/{part['start']}-{part['stop']}", numbers["loss"], row["step"]))
    return points + [(f"heldout/{key}", value, step) for key, value, step in step_points(row) if key != "tokens"]


def _numbers(row: dict) -> dict[str, float]:
    # MLflow turns an infinity into 1.8e308, which flattens every chart; NaN leaves a gap. The file keeps the truth.
    numbers = {k: v for k, v in row.items() if k not in NOT_METRICS and isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {k: float(v) if math.isfinite(v) else math.nan for k, v in numbers.items()}


def clean_key(key: str) -> str:
    """`key` as MLflow accepts it: ≤ 250 letters, digits and `_ . - / : space`; no empty, `.` or `..` path segment."""
    segments = re.sub(r"[^\w./\- :]", "_", key)[:250].split("/")
    return posixpath.join("", *(s for s in segments if s not in ("", ".", ".."))) or "_"


def flatten(config: dict, prefix: str = "") -> dict[str, str]:
    """Nested `config` as MLflow parameters: dotted clean keys, values as text; two keys that clean alike stay apart."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        found = flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        for inner, text in found.items():
            name = inner = clean_key(inner)
            for number in itertools.count(2):
                if name not in flat:
                    break
                name = f"{inner[:240]}_{number}"
            flat[name] = (text if isinstance(text, str) else json.dumps(text))[:MLFLOW_PARAM_CHARS]
    return flat
