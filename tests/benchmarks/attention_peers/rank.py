"""One rank of one side: ``python rank.py ARGUMENTS`` (a JSON object), a line of JSON for every line it is told.

It builds its side, compares output and gradients with SDPA's in float64 at a small length, warms up once, and then takes
one step for every line ``step`` on stdin; the end of stdin ends it. Everybody gets the same tensors.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
FOLDER = Path(__file__).resolve().parent
CHECKED_TOKENS = 1024


def main(arguments: dict) -> None:
    sys.path.insert(0, str(FOLDER))
    if "CPU kernel" in arguments["side"]:
        sys.path.insert(0, str(FOLDER / "kernel"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    import torch
    import torch.distributed as dist
    from sides import SIDES

    torch.set_num_threads(arguments["threads"])
    rank, ranks = arguments["rank"], arguments["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{arguments['store']}", rank=rank, world_size=ranks)

    def answer(**values):
        print(json.dumps(values), file=answers, flush=True)

    side = SIDES[arguments["side"]][0](ranks, rank)
    small = min(arguments["tokens"], CHECKED_TOKENS)
    answer(difference=difference(step_of(side, small, arguments), reference(small, arguments)))
    step = step_of(side, arguments["tokens"], arguments)[0]
    step()
    answer(ready=True)
    for _ in sys.stdin:
        if ranks > 1:
            dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        answer(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu_start, peak_bytes=peak_resident())


def tensors(length: int, arguments: dict) -> list:
    """q, k, v and the gradient of the output, [1, S, H, D]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = arguments["heads"], arguments["kv_heads"]
    return [torch.randn(1, length, h, arguments["head_dim"], generator=generator) for h in (heads, kv_heads, kv_heads, heads)]


def step_of(side, length: int, arguments: dict):
    """(a forward and backward that returns out, dq, dk, dv of this rank; this rank's positions)."""
    import torch

    positions, attention = side(length)
    q, k, v, grad = (x[:, positions].contiguous() for x in tensors(length, arguments))
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> tuple:
        out = attention(q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    return step, positions


def reference(length: int, arguments: dict) -> list:
    """out, dq, dk, dv of the whole sequence by SDPA in float64."""
    import torch
    import torch.nn.functional as F

    q, k, v, grad = (x.double().transpose(1, 2) for x in tensors(length, arguments))
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return [x.detach().transpose(1, 2) for x in (out, *torch.autograd.grad(out, (q, k, v), grad))]


def difference(step_and_positions: tuple, expected: list) -> float:
    """The largest of out, dq, dk and dv, relative to the largest value of each; a NaN is infinite."""
    step, positions = step_and_positions
    found = [((a.double() - b[:, positions]).abs().max() / b.abs().max()).item() for a, b in zip(step(), expected)]
    return max(value if value == value else float("inf") for value in found)


def peak_resident() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
