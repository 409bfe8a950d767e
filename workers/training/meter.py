"""What a step cost: tokens/s, memory, waiting; and the file that keeps it, a JSON line a step."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import torch


class Meter:
    """Times one step. ``loader_wait`` seconds stood still for data, ``exposed`` for attention's messages."""

    def __init__(self, mesh):
        self._mesh = mesh
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()
        self._exposed = self._mesh.traffic.exposed_seconds
        self.loader_wait = 0.0

    def loading(self):
        """A context manager: the time inside counts as waiting for data."""
        return _Waiting(self)

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def exposed_seconds(self) -> float:
        return self._mesh.traffic.exposed_seconds - self._exposed


class _Waiting:
    def __init__(self, meter: Meter):
        self._meter = meter

    def __enter__(self):
        self._began = time.perf_counter()

    def __exit__(self, *_):
        self._meter.loader_wait += time.perf_counter() - self._began


def peak_memory(device_type: str) -> int:
    """Bytes: the device's peak on CUDA, on the CPU the process's peak resident size."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class JsonLines:
    """A file of JSON lines keyed by ``step``. Written by rank 0, followed by whoever shows or records the run."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, row: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def cut(self, step: int) -> None:
        """Drop every line after ``step``: a resumed run takes those steps again. Atomic."""
        if not self.path.exists():
            return
        with open(self.path, encoding="utf-8") as file:
            kept = [line for line in file if line.endswith("\n") and json.loads(line)["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)
