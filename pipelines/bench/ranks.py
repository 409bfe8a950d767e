"""Fresh processes that measure: started once for a world size, one torch thread each, gloo or NCCL between them.

This file imports no torch, so that a rank limits its threads before anything starts some.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from datetime import timedelta

PATIENCE = timedelta(hours=12)  # a rank may wait long for a busier one; a rank that fails ends the others


class RankFailed(RuntimeError):
    """A rank raised or died; all of them are ended."""


class Ranks:
    """``size`` processes; ``run`` has each of them call a module-level function."""

    def __init__(self, size: int, device_type: str):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._processes, self._pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs, rank, size, store, device_type), daemon=True)
            process.start()
            theirs.close()  # so that the end of a rank ends its pipe
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, function, **arguments) -> list:
        """What ``function(**arguments)`` returned, by rank. Raises RankFailed with the first failure's words."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that is gone shows below
                pipe.send((function, arguments))
        results: list = [None] * len(self._pipes)
        waiting = dict(zip(self._pipes, range(len(self._pipes))))
        while waiting:
            for pipe in multiprocessing.connection.wait(list(waiting)):
                rank = waiting.pop(pipe)
                try:
                    failed, results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(10)
                    failed, results[rank] = True, f"it ended with exit code {self._processes[rank].exitcode} (out of memory?)"
                if failed:
                    self.close()
                    raise RankFailed(f"rank {rank} of {len(results)}: {results[rank]}")
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _rank_main(pipe, rank: int, size: int, store: str, device_type: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its ranks
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=PATIENCE)
    except BaseException:
        pipe.recv()
        pipe.send((True, _last_words()))
        return
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the parent has gone
            return
        try:
            pipe.send((False, function(**arguments)))
        except Exception:
            pipe.send((True, _last_words()))


def _last_words() -> str:
    """The exception, and where it was raised."""
    lines = traceback.format_exc().strip().splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f"{lines[-1]} ({places[-1]})" if places else lines[-1]
