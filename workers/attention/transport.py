"""Hops round the ring: one message to the next rank and one from the previous, in flight while a block is computed."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


class Traffic:
    """Counts what this rank sent and how long its computation stood still for it."""

    def __init__(self):
        self.bytes_sent = 0
        self.hops = 0
        self.exposed_seconds = 0.0


class Hop:
    """A buffer on its way: ``wait()`` returns what came from the previous rank."""

    def __init__(self, received: torch.Tensor, requests: list, traffic: Traffic, sent: torch.Tensor):
        self._received, self._requests, self._traffic = received, requests, traffic
        self._sent = sent  # must live until the send is done

    def wait(self) -> torch.Tensor:
        """Seconds waited count as exposed communication (host time: on CUDA the stream waits, not the host)."""
        start = time.perf_counter()
        for request in self._requests:
            request.wait()
        self._traffic.exposed_seconds += time.perf_counter() - start
        self._sent = None
        return self._received


class Ring:
    """Point-to-point hops on one process group. Every rank posts its send and its receive together, so none waits for another."""

    def __init__(self, group, traffic: Traffic):
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.traffic = traffic
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            self._next = ranks[(self.rank + 1) % self.size]
            self._previous = ranks[(self.rank - 1) % self.size]

    def send(self, buffer: torch.Tensor) -> Hop:
        """Start sending ``buffer`` (contiguous, left untouched until the hop is waited for) to the next rank."""
        received = torch.empty_like(buffer)
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, self._next, self.group),
                dist.P2POp(dist.irecv, received, self._previous, self.group),
            ]
        )
        self.traffic.bytes_sent += buffer.numel() * buffer.element_size()
        self.traffic.hops += 1
        return Hop(received, requests, self.traffic, buffer)
