"""Gloo ranks for tests: processes that start once, import torch once, and run many cases.

A case is a module-level function ``case(**arguments) → picklable``; every rank runs it inside an initialised process
group of the asked size. An exception on any rank is raised in the test, with that rank's traceback.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

CASES = 25  # that a rank runs before it is started anew: caches of torch keep meshes, and so process groups' threads, alive


class CaseFailed(AssertionError):
    pass


class World:
    """Up to as many ranks as cases ask for; ``run`` returns what each rank returned, by rank."""

    def __init__(self):
        self._context = multiprocessing.get_context("spawn")
        self._ranks = []
        self._folder = tempfile.TemporaryDirectory()
        self._case = 0

    def run(self, case, ranks: int, timeout: float = 120, **arguments) -> list:
        if self._case % CASES == CASES - 1:
            self.close()
        while len(self._ranks) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_rank_main, args=(theirs,), daemon=True)
            process.start()
            self._ranks.append((process, ours))
        self._case += 1
        store = os.path.join(self._folder.name, f"store-{self._case}")
        for rank in range(ranks):
            self._ranks[rank][1].send((case, arguments, rank, ranks, store))
        results = []
        for rank in range(ranks):
            process, pipe = self._ranks[rank]
            if not pipe.poll(timeout):
                self.close()
                raise CaseFailed(f"rank {rank} of {ranks} gave no answer to {case.__name__} within {timeout} s")
            try:
                results.append(pipe.recv())
            except EOFError as error:
                process.join()
                self.close()  # the next case finds ranks of its own
                raise CaseFailed(f"rank {rank} of {ranks} died in {case.__name__} with exit code {process.exitcode}") from error
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(results) if not ok]
        if failures:
            raise CaseFailed("\n".join(failures))
        return [value for _, value in results]

    def close(self):
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []


def _rank_main(pipe):
    faulthandler.enable()  # a rank that dies says where
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        case, arguments, rank, ranks, store = pipe.recv()
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
            try:
                pipe.send((True, case(**arguments)))
            finally:
                dist.destroy_process_group()
                # DTensor remembers meshes, and takes one of an earlier case for an equal one of now: its groups are gone, and
                # their names are other groups'.
                _clear_sharding_prop_cache()
                gc.collect()  # a model and its mesh are a cycle, which holds every group's threads and sockets
        except Exception:
            pipe.send((False, traceback.format_exc()))
