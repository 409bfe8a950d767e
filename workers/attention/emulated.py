"""An emulated ring: the ring's own code with ranks that are threads of one process.

Rings of 8, 64 or 256 ranks are run, and their traffic and balance counted, on one machine; and a ring on one GPU. On CUDA
call ``ring_forward`` and ``ring_backward`` (``workers.attention.ring``) themselves: PyTorch runs a device's backward on
one thread, on which ranks that wait for one another would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from workers.attention.transport import Ring, Traffic
from workers.mesh import MeshSpec


class ThreadRing(Ring):
    """The same ring with ranks that are threads of one process: rings of hundreds, and rings on one GPU."""

    def __init__(self, size: int, rank: int, mailboxes: Mailboxes, traffic: Traffic, verify: bool = False):
        self.group, self.size, self.rank, self.traffic, self.verify = None, size, rank, traffic, verify
        self._mailboxes = mailboxes

    def _transfer(self, outgoing, target, incoming, source, tag):
        if outgoing:
            self._mailboxes.put((self.rank, target, tag), outgoing)
        return [_Delivery(self._mailboxes, (source, self.rank, tag), incoming)] if incoming else []


class Mailboxes:
    """Messages between threads, in order for each (source, target, tag). ``abort`` wakes all who wait, when one of them has failed."""

    def __init__(self, timeout: float = 1800.0):
        self._messages: dict[tuple[int, int, int], list] = {}
        self._changed = threading.Condition()
        self._aborted = False
        self._timeout = timeout

    def put(self, way: tuple[int, int, int], tensors: list[torch.Tensor]) -> None:
        # A copy, as on a wire: the sender may use its buffer again.
        message = [x.detach().clone() for x in tensors]
        with self._changed:
            self._messages.setdefault(way, []).append(message)
            self._changed.notify_all()

    def take(self, way: tuple[int, int, int]) -> list[torch.Tensor]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._aborted or self._messages.get(way), self._timeout):
                raise TimeoutError(f"ring rank {way[1]} waited {self._timeout} s for ring rank {way[0]}")
            if self._aborted:
                raise RuntimeError("another rank of the emulated ring has failed")
            return self._messages[way].pop(0)

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class _Delivery:
    def __init__(self, mailboxes: Mailboxes, way: tuple[int, int, int], incoming: list[torch.Tensor]):
        self._mailboxes, self._way, self._incoming = mailboxes, way, incoming

    def wait(self) -> None:
        for place, message in zip(self._incoming, self._mailboxes.take(self._way)):
            place.copy_(message)


class EmulatedMesh:
    """What ``attend`` and ``layout`` ask of a mesh, for one rank of an emulated ring."""

    def __init__(self, spec: MeshSpec, ring: ThreadRing):
        self.spec = spec
        self.ring, self.ulysses, self.layout = spec.ring, 1, spec.layout
        self.ring_transport, self.traffic = ring, ring.traffic
        self.cp_rank = self.ring_rank = ring.rank
        self.ulysses_rank = self.tp_rank = 0


def emulate(ring: int, function: Callable[[EmulatedMesh], object], layout: str = "zigzag", verify: bool = False) -> list:
    """What ``function(mesh)`` returns on every rank of an emulated ring. The first error of any rank is raised."""
    spec, mailboxes = MeshSpec(ring=ring, layout=layout), Mailboxes()
    results: list = [None] * ring
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(EmulatedMesh(spec, ThreadRing(ring, rank, mailboxes, Traffic(), verify)))
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)
            mailboxes.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"ring rank {rank}", daemon=True) for rank in range(ring)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
