"""Hops round the ring: messages to the rank some places on and from the rank as many places before, in flight during computation.

``emulated`` has a ring whose ranks are threads.
"""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist


class HopCorrupted(RuntimeError):
    """What arrived is not what was sent (``attention.verify_ring``)."""


class Stopwatch:
    """Seconds of this rank's device inside ``with stopwatch(device)``: host time on the CPU; on CUDA the time between two
    events of the stream, which are read, and waited for, when ``seconds`` is asked for.
    """

    def __init__(self):
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, device: torch.device):
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((before, after))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3
        self._events.clear()
        return self._seconds


class Traffic:
    """What attention sent and computed on this rank, and how long it took.

    bytes_sent, messages: of hops and all-to-alls. waiting: computation stood still for them (exposed communication).
    computing: tiles were computed. scores: (query, key, head) triples, counted in backward, for a forward may run twice.
    """

    def __init__(self):
        self.bytes_sent = 0
        self.messages = 0
        self.scores = 0
        self.waiting, self.computing = Stopwatch(), Stopwatch()

    def count(self, sent: torch.Tensor) -> None:
        """One message on its way."""
        self.bytes_sent += sent.numel() * sent.element_size()
        self.messages += 1

    @property
    def exposed_seconds(self) -> float:
        return self.waiting.seconds

    def wait(self, requests: list, device: torch.device) -> None:
        """Wait for the requests, and count it."""
        with self.waiting(device):
            for request in requests:
                request.wait()


class Exchange:
    """Buffers on their way: ``wait()`` returns what came, None where nothing was to come."""

    def __init__(self, ring: Ring, sent: list[torch.Tensor], received: list[torch.Tensor], requests: list, label: str, source: int):
        self._ring, self._received, self._requests, self._label, self._source = ring, received, requests, label, source
        self._sent = sent  # must live until the sends are done

    def finish(self) -> None:
        """Wait until everything has come and gone."""
        if self._requests:
            self._ring.traffic.wait(self._requests, (self._sent + self._received)[0].device)
        self._sent, self._requests = [], []

    def wait(self) -> torch.Tensor | None:
        self.finish()
        if not self._received:
            return None
        if self._ring.verify and not torch.equal(checksum(self._received[0]), self._received[1]):
            raise HopCorrupted(
                f"ring rank {self._ring.rank}: what came from ring rank {self._source} at {self._label} does not match its checksum; "
                f"its memory, the link or the network card is at fault"
            )
        return self._received[0]


class Ring:
    """Point-to-point messages on one process group. Every rank posts its send and its receive together, so none waits for another.

    ``verify``: a checksum travels with every message. ``overlap`` False waits for a message as soon as it is posted: for
    measuring what overlap is worth.
    """

    overlap = True

    def __init__(self, group, traffic: Traffic, verify: bool = False):
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.traffic = traffic
        self.verify = verify
        if group is not None:
            self._ranks = dist.get_process_group_ranks(group)
            if "nccl" in dist.get_backend(group):  # "cpu:gloo,cuda:nccl" under Ray Train
                # NCCL wants every rank of a group at its first call; a sparse pattern's first hop may leave some out.
                dist.barrier(group, device_ids=[torch.cuda.current_device()])

    def exchange(
        self, places: int, sent: torch.Tensor | None, received: torch.Tensor | None, tag: int = 0, label: str = "a hop"
    ) -> Exchange:
        """Start sending ``sent`` to the rank ``places`` on, and filling ``received`` from the rank as many places before.

        Both are contiguous and left untouched until the exchange is waited for; either may be None: the other rank knows.
        Every rank starts its exchanges in one order (NCCL pairs messages by order, gloo by ``tag`` as well).
        ``label`` says in an error what was on its way.
        """
        outgoing, incoming = ([] if x is None else [x] for x in (sent, received))
        if sent is not None:
            self.traffic.count(sent)
        if self.verify:
            outgoing += [checksum(x) for x in outgoing]
            incoming += [torch.empty(2, dtype=torch.int64, device=x.device) for x in incoming]
        source = (self.rank - places) % self.size
        requests = self._transfer(outgoing, (self.rank + places) % self.size, incoming, source, tag)
        exchange = Exchange(self, outgoing, incoming, requests, label, source)
        if not self.overlap:
            exchange.finish()
        return exchange

    def _transfer(self, outgoing: list[torch.Tensor], target: int, incoming: list[torch.Tensor], source: int, tag: int) -> list:
        operations = [dist.P2POp(dist.isend, x, self._ranks[target], self.group, tag) for x in outgoing]
        operations += [dist.P2POp(dist.irecv, x, self._ranks[source], self.group, tag) for x in incoming]
        return dist.batch_isend_irecv(operations) if operations else []


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Two int64 sums over the 16-bit words of a contiguous tensor, the second weighted by place: a changed or lost word shows,
    and words that changed places unless a multiple of 65,521 apart."""
    words = x.reshape(-1).view(torch.int16)
    weights = torch.arange(1, 65_522, device=x.device)
    sums = torch.zeros(2, dtype=torch.int64, device=x.device)
    for part in words.split(16 * 65_521):  # a part at a time: int64 copies of the whole would be four times the message
        part = torch.nn.functional.pad(part, (0, -len(part) % 65_521)).long().view(-1, 65_521)
        sums += torch.stack((part.sum(), (part * weights).sum()))
    return sums
