"""What a block keeps from forward to backward, in another form or place: int8, host memory, a file.

A ``Keeper`` stands where autograd saves tensors, and where a tape (``workers.attention.tape``) does. What it leaves as it
is: parameters and what all blocks share, which are there anyway; what is smaller than a page; and of compression whatever
is not a float, or is marked ``exact``: a statistic of a row, whose error would be in every value of the row.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from workers.parallel.store import Store

SMALL_BYTES = 4096
VALUES = 256  # share a scale
SLICE = VALUES << 12  # values that are compressed at a time: what that takes besides is small


class Keeper:
    """Keeps tensors of the blocks of one model.

    1. ``block(…)`` surrounds a block's forward: inside, autograd saves through ``pack``. A tensor that is saved several
       times is kept once.
    2. In backward ``unpack`` brings a tensor back, for as long as some operation still has to read it; the first one of a block
       fetches what the block before will want.
    """

    def __init__(self, store: Store, compress: bool):
        self._store, self._compress = store, compress
        self._left: set[int] = set()
        self._known: dict[tuple, tuple[StorageWeakRef, Parcel]] = {}
        self._shelf: Shelf | None = None

    @contextlib.contextmanager
    def block(self, first: bool, left: Iterable[torch.Tensor]):
        """Inside, a block runs forward; ``left`` are tensors to leave alone. ``first`` of the blocks of a forward pass."""
        self._left = {(x._local_tensor if isinstance(x, DTensor) else x).untyped_storage()._cdata for x in left}
        self._shelf = Shelf(None if first else self._shelf)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._known.clear()

    def pack(self, x: torch.Tensor):
        if isinstance(x, DTensor):
            return self.pack(x._local_tensor), x._spec
        storage = x.untyped_storage()
        if x.numel() * x.element_size() < SMALL_BYTES or storage._cdata in self._left:
            return x.detach()  # an output would own the graph that owns it
        compress = self._compress and x.is_floating_point() and not getattr(x, "exact", False)
        if not (compress or self._store.elsewhere):
            return x.detach()
        # While a storage is weakly referred to, no other one takes its address.
        key = storage._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
        if key not in self._known:
            self._known[key] = StorageWeakRef(storage), Parcel(x.detach(), self._store, compress, self._shelf)
        return self._known[key][1]

    def unpack(self, kept) -> torch.Tensor:
        if isinstance(kept, tuple):
            local, spec = kept
            return DTensor(self.unpack(local), spec, requires_grad=False)
        return kept.get() if isinstance(kept, Parcel) else kept


class Parcel:
    """One tensor, kept. It comes back with the strides it had."""

    def __init__(self, x: torch.Tensor, store: Store, compress: bool, shelf: Shelf):
        if not torch.ops.aten.is_non_overlapping_and_dense.default(x):
            x = x.contiguous()
        self._shape, self._stride, self._dtype = x.shape, x.stride(), x.dtype
        flat = x.as_strided((x.numel(),), (1,))
        self._parts = [store.put(part) for part in (compressed(flat) if compress else (flat,))]
        self._compress, self._restored, self._shelf = compress, None, shelf
        shelf.parcels.append(weakref.ref(self))

    def fetch(self) -> None:
        """Start bringing it back."""
        for part in self._parts:
            part.fetch()

    def get(self) -> torch.Tensor:
        if self._restored is None:
            parts = [part.get() for part in self._parts]
            flat = restored(*parts, self._dtype)[: self._shape.numel()] if self._compress else parts[0]
            self._restored = flat.as_strided(self._shape, self._stride)
            self._parts = []
            self._shelf.opened()
        return self._restored


class Shelf:
    """The parcels of one block, and the block before."""

    def __init__(self, before: Shelf | None):
        self.parcels: list[weakref.ref] = []
        self._before = before

    def opened(self) -> None:
        """Fetch what the block before has kept, once: backward comes to it next."""
        before, self._before = self._before, None
        for parcel in before.parcels if before is not None else ():
            if parcel() is not None:
                parcel().fetch()


def compressed(x_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N'] (N' is N in whole blocks of 256) and a scale for each block: its largest magnitude / 127.

    A value comes back off by at most 1/254 of the largest magnitude among the 256 that share its scale (besides the rounding
    of its own type). A block that is not finite comes back not finite. Costs 1 + 4/256 bytes a value.
    """
    blocks = -(-x_N.numel() // VALUES)
    whole = x_N.new_empty(blocks * VALUES, dtype=torch.int8)
    scales = x_N.new_empty(blocks, dtype=torch.promote_types(x_N.dtype, torch.float32))
    for values, ints, scale in zip(x_N.split(SLICE), whole.split(SLICE), scales.split(SLICE // VALUES)):
        rows = torch.nn.functional.pad(values.to(scales.dtype), (0, -values.numel() % VALUES)).view(-1, VALUES)
        torch.linalg.vector_norm(rows, torch.inf, dim=1, out=scale).div_(127).clamp_min_(torch.finfo(scales.dtype).tiny)
        ints.view(-1, VALUES).copy_((rows / scale.unsqueeze(1)).round_())
    return whole, scales


def restored(ints_N: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``compressed``, in whole blocks."""
    x_N = ints_N.new_empty(ints_N.shape, dtype=dtype)
    for values, ints, scale in zip(x_N.split(SLICE), ints_N.split(SLICE), scales.split(SLICE // VALUES)):
        torch.mul(ints.view(-1, VALUES), scale.unsqueeze(1), out=values.view(-1, VALUES))
    return x_N
