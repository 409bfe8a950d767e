"""What a step cost each rank: seconds, memory, waiting, FLOPs; and the file that keeps it, a JSON line a step."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class Sample(NamedTuple):
    """One rank's step. Seconds: of the step; stood still for data (loading); stood still for attention's messages (exposed);
    attention's tiles (computing). scores: (query, key, head) triples computed. memory: peak bytes of the process or device.
    stalls: times that memory had to be fetched from disk (major page faults), or freed before it could be taken (CUDA).
    """

    seconds: float
    loading: float
    exposed: float
    computing: float
    scores: float
    memory: float
    stalls: float


class Meter:
    """Times one step of this rank."""

    def __init__(self, mesh):
        self._mesh = mesh
        self.start()

    def start(self) -> None:
        self._began, self._before = time.perf_counter(), self._counters()
        self._loading = 0.0

    def loading(self):
        """A context manager: the time inside counts as waiting for data."""
        return _Loading(self)

    def sample(self) -> Sample:
        """The step so far."""
        exposed, computing, scores, stalls = (now - before for now, before in zip(self._counters(), self._before))
        seconds = time.perf_counter() - self._began
        return Sample(seconds, self._loading, exposed, computing, scores, peak_memory(self._mesh.device_type), stalls)

    def samples(self) -> list[Sample]:
        """Every rank's step so far, by rank. A collective."""
        own = torch.tensor(self.sample(), dtype=torch.float64, device=self._mesh.device)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return [Sample(*row) for row in torch.stack(every).tolist()]

    def _counters(self) -> tuple[float, ...]:
        traffic = self._mesh.traffic
        return traffic.exposed_seconds, traffic.computing.seconds, traffic.scores, memory_stalls(self._mesh.device_type)


class _Loading:
    def __init__(self, meter: Meter):
        self._meter = meter

    def __enter__(self):
        self._began = time.perf_counter()

    def __exit__(self, *_):
        self._meter._loading += time.perf_counter() - self._began


def peak_memory(device_type: str) -> int:
    """Bytes: the device's peak on CUDA, on the CPU the process's peak resident size."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident()


def peak_resident() -> int:
    """Bytes of this process at its fullest. On Linux from /proc: ``ru_maxrss`` starts there at the peak of the parent process."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # no Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def memory_stalls(device_type: str) -> int:
    """How often memory was short until now: retried allocations on CUDA, pages that came back from disk on the CPU."""
    if device_type == "cuda":
        return torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


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
