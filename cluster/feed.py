"""Windows on their way to the mesh: Ray Data reads them in bounded memory and deals them to the data-parallel groups.

Sequence g of the global order goes to group g % dp. Only the first rank of a group (its leader) holds a split; inside
the group it hands every rank its slice (``workers.training.batch``). The order never depends on the mesh, and a restart
reads on from the checkpoint's position.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import ray
import ray.data
import ray.train
from ray.data import Datasource, ExecutionOptions, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from workers.training.window import Window, blank

log = logging.getLogger(__name__)
BYTES_PER_TOKEN = 24  # tokens, targets, documents and parts int32, positions int64
BLOCK_BYTES = 1 << 20  # each block costs Ray some milliseconds, so short windows travel several at once
BLOCKS_PER_TASK = 64


class WindowReader(Protocol):
    """Where windows come from: picklable, and cheap to pickle."""

    def read(self, number: int) -> Window:
        """Sequence ``number`` of the global order."""


def windows_per_block(context: int) -> int:
    return max(1, BLOCK_BYTES // (context * BYTES_PER_TOKEN))


class Windows(Datasource):
    """Sequences ``[first, stop)`` of a reader for ``dp`` groups: a block holds the next few of one group, and blocks rotate.

    The last round is filled up with blank windows, since only blocks of one size are dealt in strict rotation.
    """

    def __init__(self, reader: WindowReader, context: int, dp: int, first: int, stop: int):
        super().__init__()
        self._context, self._dp, self._first, self._stop = context, dp, first, stop
        self._reader = ray.put(reader)  # once, and not with each of the tasks
        self._in_block = windows_per_block(context)
        self.blocks = math.ceil((stop - first) / (dp * self._in_block)) * dp

    def estimate_inmemory_data_size(self) -> int:
        return self.blocks * self._in_block * self._context * BYTES_PER_TOKEN

    def get_read_tasks(self, parallelism: int, per_task_row_limit=None, data_context=None) -> list[ReadTask]:
        tasks = []
        for first in range(0, self.blocks, BLOCKS_PER_TASK):
            blocks = range(first, min(self.blocks, first + BLOCKS_PER_TASK))
            rows = len(blocks) * self._in_block
            metadata = BlockMetadata(num_rows=rows, size_bytes=rows * self._context * BYTES_PER_TOKEN, input_files=None, exec_stats=None)
            tasks.append(ReadTask(lambda blocks=blocks: self._read(blocks), metadata))
        return tasks

    def _read(self, blocks: range) -> Iterator[pa.Table]:
        reader = ray.get(self._reader)
        return (self._block(reader, index) for index in blocks)

    def _block(self, reader: WindowReader, index: int) -> pa.Table:
        turn, group = divmod(index, self._dp)
        first = self._first + turn * self._in_block * self._dp + group
        numbers = range(first, first + self._in_block * self._dp, self._dp)
        windows = [reader.read(n) if n < self._stop else blank(n, self._context) for n in numbers]
        windows = [window._replace(parts=window.part_ids) for window in windows]
        columns = {"number": pa.array(numbers)}
        for name in Window._fields[1:]:
            values = np.concatenate([getattr(window, name) for window in windows])
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values), self._context)
        return pa.table(columns)


def dataset(reader: WindowReader, context: int, dp: int, first: int, stop: int) -> ray.data.Dataset:
    """The sequences ``[first, stop)`` as a Ray dataset; nothing is read before it is iterated."""
    source = Windows(reader, context, dp, first, stop)
    return ray.data.read_datasource(source, override_num_blocks=max(1, math.ceil(source.blocks / BLOCKS_PER_TASK)))


class MeshDataConfig(ray.train.DataConfig):
    """Splits datasets over data-parallel groups, where Ray Train by itself would split them over ranks."""

    def __init__(self, dp: int, ranks_per_group: int, context: int):
        self._block_bytes = windows_per_block(context) * context * BYTES_PER_TOKEN
        # One CPU for each dataset: tasks that wait for a slow consumer keep theirs, and would leave an evaluation none.
        limits = ExecutionResources.for_limits(cpu=1, object_store_memory=max(64 << 20, 16 * dp * self._block_bytes))
        super().__init__(execution_options=ExecutionOptions(preserve_order=True, resource_limits=limits))
        self._dp, self._ranks_per_group = dp, ranks_per_group

    def configure(self, datasets, world_size, worker_handles, worker_node_ids, **kwargs):
        """For each rank its iterators: a leader's split, None for the rest of its group."""
        splits = [{} for _ in range(world_size)]
        for name, data in datasets.items():
            data = data.copy(data)
            data.context.execution_options = self._resolve_execution_options(name)
            data.context.enable_progress_bars = False
            # Blocks of just this size are passed on as they are, dealt in strict rotation, so sequence g reaches group g % dp.
            data.context.target_max_block_size = self._block_bytes
            iterators = data.streaming_split(self._dp, equal=True)
            for rank in range(world_size):
                group, place = divmod(rank, self._ranks_per_group)
                splits[rank][name] = iterators[group] if place == 0 else None
        return splits


class Stalls:
    """Says that a leader waits for its stream: after ``seconds``, then each time it has waited twice as long.

    note: a file in which the last warning stands while the wait goes on, for the driver to pass on; None for the log alone.
    """

    def __init__(self, rank: int, seconds: float, note: Path | None = None):
        self._rank, self._seconds, self._note = rank, seconds, note

    @contextlib.contextmanager
    def watched(self, due: int):
        """Inside, the leader waits for sequence ``due``."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(due, done), name="stalls", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _watch(self, due: int, done: threading.Event) -> None:
        began, pause, text = time.monotonic(), self._seconds, None
        while not done.wait(pause):
            text = (
                f"rank {self._rank} has waited {time.monotonic() - began:.0f} s for sequence {due}: the stream of windows stalls; look for a slow "
                "disk under the token store, CPUs that are all taken, or a full object store"
            )
            log.warning(text)
            if self._note is not None:
                self._note.write_text(text, encoding="utf-8")
            pause = time.monotonic() - began
        if self._note is not None and text is not None:
            self._note.unlink(missing_ok=True)


def windows(split, first: int, dp: int, stalls: Stalls) -> Iterator[Window]:
    """A leader's windows, from sequence ``first`` of the group on; blank ones follow the last.

    Raises RuntimeError when a window is not the one that is due: then data would be lost or seen twice.
    """
    due = first
    batches = iter(split.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1))
    while True:
        with stalls.watched(due):
            rows = next(batches, None)
        if rows is None:
            return
        for place, number in enumerate(rows["number"]):
            if number != due:
                raise RuntimeError(f"the stream gave sequence {number} where {due} was due")
            yield Window(int(number), *(rows[name][place] for name in Window._fields[1:]))
            due += dp


def fresh(split, dp_rank: int, dp: int, stalls: Stalls) -> Callable[[], Iterator[Window]]:
    """A function that starts a new pass over a leader's split."""
    return lambda: windows(split, dp_rank, dp, stalls)
