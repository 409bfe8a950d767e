"""Where kept tensors wait: on the device itself, in pinned host memory, or in a file.

A store takes flat tensors (``put``) and gives a place for each: ``get()`` brings the tensor back, ``fetch()`` begins to. A place
is free for another tensor of its size when nothing refers to it any more, so that after the first step nothing is allocated.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable

import torch


class _Here:
    def __init__(self, x: torch.Tensor):
        self._x = x

    def fetch(self) -> None:
        pass

    def get(self) -> torch.Tensor:
        return self._x


class Store:
    """The device itself. ``elsewhere`` says whether a store takes tensors away from it."""

    elsewhere = False

    def put(self, x_N: torch.Tensor):
        return _Here(x_N)


class _Pool:
    """Places by their size in bytes; ``make(size)`` when none is free."""

    def __init__(self, make: Callable):
        self._make, self._free = make, defaultdict(list)

    def take(self, size: int):
        return self._free[size].pop() if self._free[size] else self._make(size)

    def give(self, size: int, place) -> None:
        self._free[size].append(place)


class HostStore(Store):
    """Pinned memory of the host, for tensors of a GPU, by a stream of its own: copies run beside the computation."""

    elsewhere = True

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.pool = _Pool(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def put(self, x_N: torch.Tensor):
        return _Pinned(self, x_N)


class _Pinned:
    def __init__(self, store: HostStore, x_N: torch.Tensor):
        self._store, self._dtype, self._device = store, x_N.dtype, x_N.device
        self._arriving = None
        source = x_N.view(torch.uint8)
        self._buffer = store.pool.take(source.numel())
        store.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(store.stream):
            self._buffer.copy_(source, non_blocking=True)
        x_N.record_stream(store.stream)  # its memory is not given away before it is copied

    def fetch(self) -> None:
        if self._arriving is None:
            with torch.cuda.stream(self._store.stream):  # behind the copy that filled the buffer
                self._arriving = self._buffer.to(self._device, non_blocking=True)
                self._arrived = self._store.stream.record_event()

    def get(self) -> torch.Tensor:
        self.fetch()
        x, self._arriving = self._arriving, None
        torch.cuda.current_stream().wait_event(self._arrived)
        x.record_stream(torch.cuda.current_stream())
        return x.view(self._dtype)

    def __del__(self):
        self._store.pool.give(self._buffer.numel(), self._buffer)  # what still reads it runs before what fills it: one stream


class DiskStore(Store):
    """A file without a name in ``folder``, gone when the process ends. Writes wait for the page cache at most; ``fetch`` asks
    the system to read ahead. Raises OSError when the disk is full."""

    elsewhere = True

    def __init__(self, folder: str | None):
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)
        self._end = 0
        self.pool = _Pool(self._extend)

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    def _extend(self, size: int) -> int:
        offset, self._end = self._end, self._end + size
        return offset

    def put(self, x_N: torch.Tensor):
        return _OnDisk(self, x_N)


class _OnDisk:
    def __init__(self, store: DiskStore, x_N: torch.Tensor):
        self._store, self._dtype, self._device = store, x_N.dtype, x_N.device
        source = memoryview(x_N.cpu().view(torch.uint8).numpy())
        self._size = len(source)
        self._offset = store.pool.take(self._size)
        done = 0
        while done < self._size:  # one call moves 2 GiB at most
            done += os.pwrite(store.descriptor, source[done:], self._offset + done)

    def fetch(self) -> None:
        os.posix_fadvise(self._store.descriptor, self._offset, self._size, os.POSIX_FADV_WILLNEED)

    def get(self) -> torch.Tensor:
        x = torch.empty(self._size, dtype=torch.uint8)
        target, done = memoryview(x.numpy()), 0
        while done < self._size:
            done += os.preadv(self._store.descriptor, [target[done:]], self._offset + done)
        return x.view(self._dtype).to(self._device)

    def __del__(self):
        self._store.pool.give(self._size, self._offset)
