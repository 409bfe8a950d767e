"""What each rank does for one case: make inputs, warm up once, and time ``repeat`` steps of forward and backward.

A step is attention alone: no projections, no model. Inputs are random and of the local shape, the gradient of the output
too. A body returns, by rank: ``seconds`` (wall) and ``cpu_seconds`` (the process's own, all its threads) of each step;
``peak_bytes``; and of a ring the bytes it sent a step, what it waited, and its visible pairs.

Legend: B batch (1), S local tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipelines.bench.cases import Case, parse_pattern, rank_plan
from workers.attention import attend
from workers.attention.block import resolve
from workers.attention.emulated import emulate
from workers.attention.pattern import Pattern, alibi_slopes
from workers.attention.ring import Call, ring_backward, ring_forward
from workers.mesh import Mesh, MeshSpec
from workers.training.meter import peak_resident

_meshes: dict[MeshSpec, Mesh] = {}


def attend_case(case: Case, repeat: int) -> dict:
    """Body of every rank: ``attend`` on the mesh, and its backward by autograd."""
    device = _device()
    spec = MeshSpec(ring=case.ring, ulysses=case.ulysses, layout=case.layout)
    if spec not in _meshes:
        _meshes[spec] = spec.build(device.type)
    mesh = _meshes[spec]
    mesh.ring_transport.overlap = case.overlap
    memory = PeakMemory(device)
    q, k, v, grad = inputs(case, case.tokens // case.ranks, seed=mesh.cp_rank, device=device)
    pattern = parse_pattern(case.pattern)

    def step() -> None:
        out = attend(q, k, v, pattern, mesh=mesh, backend=case.backend)
        if not case.forward_only:
            torch.autograd.grad(out, (q, k, v), grad)

    for x in (q, k, v):
        x.requires_grad_(not case.forward_only)
    step()
    before = mesh.traffic.bytes_sent, mesh.traffic.exposed_seconds
    result = timed(step, repeat, device)
    return {
        **result, **memory.read(), "ring_rank": mesh.ring_rank,
        "bytes_sent": (mesh.traffic.bytes_sent - before[0]) // repeat,
        "wait_seconds": (mesh.traffic.exposed_seconds - before[1]) / repeat,
        # A choice of blocks is of the tokens: it has no plan beforehand, and ranks choose as many each.
        "pairs": 1 if pattern.top else sum(hop.pairs for hop in rank_plan(case, pattern, mesh.ring_rank, device)),
    }  # fmt: skip


def emulated_case(case: Case, repeat: int) -> dict:
    """Body of the one process of an emulated ring. Seconds are the sum over its ranks, memory is that of all of them."""
    device = _device()
    memory = PeakMemory(device)
    ranks = [inputs(case, case.tokens // case.ring, seed=rank, device=device) for rank in range(case.ring)]
    pattern = parse_pattern(case.pattern)
    traffic: list[int] = []

    def step() -> None:
        traffic[:] = emulated_step(case, pattern, ranks, device)[1]

    step()
    result = timed(step, repeat, device)
    pairs = [sum(hop.pairs for hop in rank_plan(case, pattern, rank, device)) for rank in range(case.ring)]
    return {**result, **memory.read(), "rank_bytes_sent": list(traffic), "rank_pairs": pairs}


def emulated_step(case: Case, pattern: Pattern, ranks: list[tuple], device: torch.device) -> tuple[list, list[int]]:
    """One step of ``ranks``' (q, k, v, grad), whole blocks by ring rank: (out, dq, dk, dv) and bytes sent, by rank.

    The ring's forward and backward are called as they are: autograd runs a GPU's backward on one thread, on which the
    ranks would wait for one another for ever.
    """
    slopes = tuple(alibi_slopes(case.heads)) if pattern.alibi else None
    kernel = resolve(case.backend, device, ranks[0][0].dtype, case.head_dim, pattern.alibi)

    def one_rank(mesh):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        plan = rank_plan(case, pattern, mesh.ring_rank, device)
        call = Call(plan, mesh.ring_transport, kernel, case.head_dim**-0.5, slopes)
        *qkv, grad = ranks[mesh.ring_rank]
        q, k, v = (kernel.arrange(x) for x in qkv)
        with torch.no_grad():
            out, lse = ring_forward(q, k, v, None, None, call)
            grads = () if case.forward_only else ring_backward(grad, q, k, v, None, None, out, lse, call)[:3]
        return (out, *grads), mesh.traffic.bytes_sent

    results = emulate(case.ring, one_rank, case.layout)
    return [result[0] for result in results], [result[1] for result in results]


def kernel_case(case: Case, threads: int, repeat: int) -> dict:
    """Body of one process: PyTorch's kernel on the whole causal sequence, each head's tokens side by side, as it likes best."""
    device = _device()
    memory = PeakMemory(device)
    torch.set_num_threads(threads)
    try:
        tensors = inputs(replace(case, ring=1, ulysses=1), case.tokens, seed=0, device=device)
        q, k, v, grad = (x.transpose(1, 2).contiguous() for x in tensors)
        del tensors

        def step() -> None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=case.heads != case.kv_heads)
            if not case.forward_only:
                torch.autograd.grad(out, (q, k, v), grad)

        for x in (q, k, v):
            x.requires_grad_(not case.forward_only)
        step()
        return {**timed(step, repeat, device), **memory.read()}
    finally:
        torch.set_num_threads(1)


def inputs(case: Case, tokens: int, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q_BSHD, k_BSGD, v_BSGD and the gradient of the output, standard normal."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return tuple(torch.randn(1, tokens, h, case.head_dim, generator=generator, device=device).to(dtype) for h in heads)


def timed(step, repeat: int, device: torch.device) -> dict:
    """Seconds of each of ``repeat`` steps that all ranks start together."""
    seconds, cpu_seconds = [], []
    for _ in range(repeat):
        if dist.get_world_size() > 1:
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        _synchronize(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


class PeakMemory:
    """The most memory since this was made: of the GPU's tensors; on a CPU the resident size of the whole process.

    A resident peak never falls by itself. Linux resets it (``/proc/self/clear_refs``, man 5 proc), after what earlier cases
    freed has been given back; where that is not allowed, ``peak_is_of`` says "process" and the peak is the largest so far,
    cases being measured in growing order.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.of_case = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start = torch.cuda.memory_allocated(device)
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed
        except (OSError, AttributeError):
            pass
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            self.of_case = False
        self.start = peak_resident()

    def read(self) -> dict:
        """``peak_bytes``, and ``start_bytes`` that were in use before the case."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_resident()
        # The kernel's counters are exact to some pages a thread, so a peak may read a little less than the start.
        return {"peak_bytes": max(peak, self.start), "start_bytes": self.start, "peak_is_of": "case" if self.of_case else "process"}


def _device() -> torch.device:
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
