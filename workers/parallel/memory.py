"""Memory switches: what a rank keeps from forward to backward, in which form, and where.

Every switch stands alone and combines with the others on every mesh. None changes a result but ``compress``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from workers.attention.tape import Tape
from workers.parallel.keep import Keeper
from workers.parallel.store import DiskStore, HostStore, Store
from workers.parallel.tiles import in_tiles
from workers.training.loss import CHUNK_TOKENS

CHOICES = {
    "recompute": ("none", "full", "selective"),
    "offload": ("none", "host", "disk"),
    "compress": ("none", "int8"),
    "optimizer": ("device", "host"),
}
_M_MMAP_THRESHOLD = -3  # of malloc.h


@dataclass(frozen=True)
class MemoryConfig:
    """recompute: "full" keeps a block's input only and computes the block again in backward (Chen et al. 2016); "selective"
        keeps attention's output and lse besides, so that neither attention nor its messages run again.
    offload: what is kept waits for backward in "host" memory (of a GPU) or on "disk", in offload_folder (null: the system's
        folder for temporary files). compress: "int8" keeps it in a byte a value.
    mlp_tile: tokens that the feed-forward layers take at a time; null takes all. loss_chunk: tokens whose logits exist at a time.
    optimizer: "host" keeps weights, gradients and optimizer state of a GPU in host memory, and steps there.
    """

    recompute: str = "none"
    offload: str = "none"
    offload_folder: str | None = None
    compress: str = "none"
    mlp_tile: int | None = None
    loss_chunk: int = CHUNK_TOKENS
    optimizer: str = "device"

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"memory.{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}")
        for name in ("mlp_tile", "loss_chunk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"memory.{name} is {getattr(self, name)}; it must be at least 1")
        if self.offload_folder is not None and self.offload != "disk":
            raise ValueError(f"memory.offload_folder is {self.offload_folder!r}, but memory.offload is {self.offload!r}; set it to disk")

    def check_device(self, device_type: str) -> None:
        """Raise ValueError for what ranks on such devices would not save."""
        if device_type == "cpu":
            for name, instead in (("offload", "; disk or none can be used there"), ("optimizer", "; use device")):
                if getattr(self, name) == "host":
                    raise ValueError(f"memory.{name} is 'host', but this run is on CPUs, whose memory that is already{instead}")


def grow_segments() -> None:
    """Let CUDA's allocator grow its segments in place: lengths that change leave no holes. Before the first allocation; what
    the environment says of the allocator stands."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def return_pages() -> None:
    """Let glibc give a tensor's pages back to the system as soon as it is freed. Left alone it raises the size from which an
    allocation is a mapping of its own up to 32 MiB, and tensors below that live in a heap with holes: twice what is in use,
    where blocks are recomputed. Other C libraries have no such setting; what the environment says stands."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, 1_000_000)


def apply_memory(model: torch.nn.Module, config: MemoryConfig) -> None:
    """Make the blocks of ``model`` keep what ``config`` says, in place; before FSDP, whose gathering then stays outside."""
    keeper = None
    if config.offload != "none" or config.compress != "none":
        store = {"none": Store, "host": HostStore, "disk": lambda: DiskStore(config.offload_folder)}[config.offload]()
        keeper = Keeper(store, config.compress == "int8")
    for index, block in enumerate(model.layers):
        if config.mlp_tile is not None:
            block.mlp.forward = partial(in_tiles, block.mlp, block.mlp.forward, config.mlp_tile)
        if keeper is not None or config.recompute != "none":
            block.forward = partial(_run, block, block.forward, index == 0, config.recompute, keeper)


def _run(block, forward, first: bool, recompute: str, keeper: Keeper | None, x_BSD: torch.Tensor, *shared) -> torch.Tensor:
    """``forward(x_BSD, *shared)`` of a block; what it keeps for backward is what the switches say.

    ``shared`` is the same for all blocks (the rotary table, the pattern), so it is there in any case.
    """
    if not torch.is_grad_enabled():
        return forward(x_BSD, *shared)
    left = [*block.parameters(), *(x for x in tree_leaves(shared) if isinstance(x, torch.Tensor))]
    with keeper.block(first, left) if keeper is not None else contextlib.nullcontext():
        if recompute == "none":
            return forward(x_BSD, *shared)
        contexts = {"context_fn": partial(_tape, keeper)} if recompute == "selective" else {}
        # Nothing is drawn at random in a block.
        return checkpoint(forward, x_BSD, *shared, use_reentrant=False, preserve_rng_state=False, **contexts)


def _tape(keeper: Keeper | None):
    """What surrounds a block's forward, and its recomputation."""
    tape = Tape(keeper.pack, keeper.unpack) if keeper is not None else Tape()
    return tape.recording(), tape.replaying()
