"""Windows of long documents in parallel: Ray Data over actors that hold the model (``workers.inference.process``).

Actors read their windows themselves, through the memory map; only results travel, in order and in bounded memory. An actor
that dies is started again and its windows are redone, but not for ever: Ray Data by itself would go on with a window that
kills every actor it meets, one that is too large for the memory say.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import ray
import ray.data
from ray.data import ExecutionOptions, ExecutionResources
from ray.util.annotations import RayDeprecationWarning

from cluster.quiet import quiet
from workers.inference.process import Piece, Result, process

BLOCK_TOKENS = 16_384  # of windows that travel as one task: a task costs Ray some ten milliseconds
DEATHS = 3  # of an actor, that are mended
STORE_BYTES = 256 << 20  # the most that results may take on their way

COLUMNS = dict.fromkeys(("number", "document", "start", "context_only"), pa.int64()) | {
    "losses": pa.list_(pa.float32()), "weights": pa.list_(pa.float32()), "segments": pa.list_(pa.int32()),
    "counts": pa.list_(pa.float32()), "sums": pa.list_(pa.float32()),
}  # fmt: skip


class PieceReader(Protocol):
    """Where pieces come from: picklable, and cheap to pickle."""

    context: int  # most tokens of a piece

    def __len__(self) -> int: ...

    def read(self, number: int) -> Piece: ...


class Processor:
    """An actor: the model of ``weights`` (a checkpoint or a model folder), on a GPU where it was given one."""

    def __init__(self, reader, weights: Path, threads: int):
        import torch

        from workers.inference.generate import load_decoder

        torch.set_num_threads(threads)
        self._reader = ray.get(reader) if isinstance(reader, ray.ObjectRef) else reader
        self._model = load_decoder(weights, "cuda" if ray.get_gpu_ids() else "cpu")

    def __call__(self, batch: pa.Table) -> pa.Table:
        results = [process(self._model, self._reader.read(number)) for number in batch["id"].to_pylist()]
        flat = [result._replace(sums=result.sums.ravel()) for result in results]
        return pa.table({name: pa.array([getattr(result, name) for result in flat], kind) for name, kind in COLUMNS.items()})


def process_pieces(reader: PieceReader, weights: Path, actors: int | None = None) -> Iterator[Result]:
    """The results of all pieces, in order; Ray must be connected.

    ``actors`` hold the model; null is one for each GPU, else for each CPU but one, and never more than there are blocks.
    Raises RayError for what the model raised and for an actor that keeps dying, and RuntimeError for a result that is not due.
    """
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    in_block = max(1, BLOCK_TOKENS // reader.context)
    blocks = -(-len(reader) // in_block)
    actors = min(actors or gpus or max(1, int(resources["CPU"]) - 1), blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)  # Ray Data has no other parameter for deaths yet
        data = ray.data.range(len(reader), override_num_blocks=blocks).map_batches(
            Processor, fn_constructor_args=(ray.put(reader), weights, 1), batch_size=in_block, batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=actors), num_cpus=0 if gpus else 1, num_gpus=1 if gpus else 0,
            max_restarts=DEATHS, max_task_retries=DEATHS,
        )  # fmt: skip
    data.context.execution_options = ExecutionOptions(
        preserve_order=True, resource_limits=ExecutionResources.for_limits(object_store_memory=STORE_BYTES)
    )
    data.context.enable_progress_bars = False
    data.context.raise_original_map_exception = True
    due = 0
    with quiet():
        for table in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            for row in range(len(table)):
                result = _result({name: table[name][row] for name in COLUMNS})
                if result.number != due:
                    raise RuntimeError(f"piece {result.number} came where {due} was due")
                yield result
                due += 1
    if due != len(reader):
        raise RuntimeError(f"{due} of {len(reader)} pieces came back")


def _result(row: dict[str, pa.Scalar]) -> Result:
    found = {name: value.values.to_numpy() if isinstance(value, pa.ListScalar) else value.as_py() for name, value in row.items()}
    found["sums"] = found["sums"].reshape(len(found["segments"]), -1)
    return Result(**found)
