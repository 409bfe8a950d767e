"""Windows on their way to the mesh: Ray Data reads them in bounded memory and deals them to the data-parallel groups.

Sequence g of the global order goes to group g % dp. Only the first rank of a group (its leader) holds a split; inside
the group it hands every rank its slice (``workers.training.batch``). The order never depends on the mesh, and a restart
reads on from the checkpoint's position.
"""

from __future__ import annotations

import math
from typing import Callable, Iterator, Protocol

import pyarrow as pa
import ray.data
import ray.train
from ray.data import Datasource, ExecutionOptions, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from workers.training.window import Window, blank

WINDOWS_PER_TASK = 64
BYTES_PER_TOKEN = 20  # tokens, targets and documents int32, positions int64


class WindowReader(Protocol):
    """Where windows come from: picklable, and cheap to pickle."""

    def read(self, number: int) -> Window:
        """Sequence ``number`` of the global order."""


class Windows(Datasource):
    """Sequences ``[first, stop)`` of a reader, one a block, in order; those from ``limit`` on are blank."""

    def __init__(self, reader: WindowReader, context: int, first: int, stop: int, limit: int | None = None):
        super().__init__()
        self._reader, self._context, self._first, self._stop, self._limit = reader, context, first, stop, limit

    def estimate_inmemory_data_size(self) -> int:
        return (self._stop - self._first) * self._context * BYTES_PER_TOKEN

    def get_read_tasks(self, parallelism: int, per_task_row_limit=None, data_context=None) -> list[ReadTask]:
        tasks = []
        for first in range(self._first, self._stop, WINDOWS_PER_TASK):
            stop = min(self._stop, first + WINDOWS_PER_TASK)
            size = (stop - first) * self._context * BYTES_PER_TOKEN
            metadata = BlockMetadata(num_rows=stop - first, size_bytes=size, input_files=None, exec_stats=None)
            reader, context, limit = self._reader, self._context, self._limit
            tasks.append(ReadTask(lambda a=first, b=stop: _tables(reader, context, a, b, limit), metadata))
        return tasks


def _tables(reader: WindowReader, context: int, first: int, stop: int, limit: int | None) -> Iterator[pa.Table]:
    for number in range(first, stop):
        window = reader.read(number) if limit is None or number < limit else blank(number, context)
        columns = {name: pa.FixedSizeListArray.from_arrays(pa.array(values), context) for name, values in window._asdict().items() if name != "number"}
        yield pa.table({"number": [number], **columns})


def dataset(reader: WindowReader, context: int, first: int, stop: int, limit: int | None = None) -> ray.data.Dataset:
    """The sequences as a Ray dataset; nothing is read before it is iterated."""
    source = Windows(reader, context, first, stop, limit)
    return ray.data.read_datasource(source, override_num_blocks=max(1, math.ceil((stop - first) / WINDOWS_PER_TASK)))


class MeshDataConfig(ray.train.DataConfig):
    """Splits datasets over data-parallel groups, where Ray Train by itself would split them over ranks."""

    def __init__(self, dp: int, ranks_per_group: int, context: int):
        window = context * BYTES_PER_TOKEN
        limits = ExecutionResources.for_limits(object_store_memory=max(64 << 20, 16 * dp * window))
        super().__init__(execution_options=ExecutionOptions(preserve_order=True, resource_limits=limits))
        self._dp, self._ranks_per_group, self._window = dp, ranks_per_group, window

    def configure(self, datasets, world_size, worker_handles, worker_node_ids, **kwargs):
        """For each rank its iterators: a leader's split, None for the rest of its group."""
        splits = [{} for _ in range(world_size)]
        for name, data in datasets.items():
            data = data.copy(data)
            data.context.execution_options = self._resolve_execution_options(name)
            data.context.enable_progress_bars = False
            # One window a block: then blocks are dealt in strict rotation, and sequence g reaches group g % dp.
            data.context.target_max_block_size = self._window
            iterators = data.streaming_split(self._dp, equal=True)
            for rank in range(world_size):
                group, place = divmod(rank, self._ranks_per_group)
                splits[rank][name] = iterators[group] if place == 0 else None
        return splits


def windows(split, first: int, dp: int) -> Iterator[Window]:
    """A leader's windows, from sequence ``first`` of the group on.

    Raises RuntimeError when a window is not the one that is due: then data would be lost or seen twice.
    """
    due = first
    for row in split.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=2):
        window = Window(int(row["number"][0]), *(row[name][0] for name in Window._fields[1:]))
        if window.number != due:
            raise RuntimeError(f"the stream gave sequence {window.number} where {due} was due")
        yield window
        due += dp


def fresh(split, dp_rank: int, dp: int) -> Callable[[], Iterator[Window]]:
    """A function that starts a new pass over a leader's split."""
    return lambda: windows(split, dp_rank, dp)
