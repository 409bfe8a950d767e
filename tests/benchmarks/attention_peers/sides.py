"""How each library is called: a side is set up once in each rank and answers a length with (positions, function).

``positions`` are the global positions that this rank holds, and ``function(q, k, v) → out`` maps its [B, S, H, D] to the
same. Where a peer wants heads before tokens the driver transposes, without a copy.

What is not the peer's own code as installed is part of its name: "[CPU kernel put under it]" is ``kernel/flash_attn``
instead of CUDA's; "[one line mended]" is told at its function.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F

aten = torch.ops.aten
COPIED = ("_buffer.to(torch.float32)", "_buffer.to(torch.float32, copy=True)")


def contiguous(length: int, ranks: int, rank: int) -> torch.Tensor:
    return torch.arange(length).chunk(ranks)[rank]


def striped(length: int, ranks: int, rank: int) -> torch.Tensor:
    return torch.arange(rank, length, ranks)


def zigzag(length: int, ranks: int, rank: int) -> torch.Tensor:
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def heads_first(function):
    """A function of [B, H, S, D] as one of [B, S, H, D]."""
    return lambda *tensors: function(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)


def sdpa(ranks: int, rank: int):
    """PyTorch's kernel in one process."""
    attention = heads_first(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]))
    return lambda length: (contiguous(length, 1, 0), attention)


def ours(ring: int, ulysses: int):
    from workers.attention import Pattern, attend
    from workers.attention.layout import positions
    from workers.mesh import MeshSpec

    mesh, pattern = MeshSpec(ring=ring, ulysses=ulysses).build("cpu"), Pattern()
    return lambda length: (positions(length, mesh), lambda q, k, v: attend(q, k, v, pattern, mesh=mesh))


def torch_ring(ranks: int, rank: int):
    """PyTorch's own ring, private, which has no rule for the CPU's kernel yet: called with it by hand."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

    context_parallel.set_rotate_method("alltoall")
    context_parallel._cp_options.enable_load_balance = True  # head-tail: zigzag
    group = dist.group.WORLD

    def block(q, k, v, is_causal=False, **_):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

    def block_backward(*, grad_out, query, key, value, out, logsumexp, is_causal):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    class TorchRing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = context_parallel._templated_ring_attention(group, 2, block, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            return context_parallel._templated_ring_attention_backward(
                group, 2, block_backward, grad, "grad_out", *ctx.saved_tensors, is_causal=True
            )[:3]

    return lambda length: (zigzag(length, ranks, rank), heads_first(TorchRing.apply))


def ring_flash_attn(module: str, layout):
    """One line mended: it keeps its first block's gradients by ``.to(torch.float32)``, a copy of bfloat16 but for float32
    the scratch buffer itself, which the next block overwrites."""

    def set_up(ranks: int, rank: int):
        _package_without_init("ring_flash_attn")  # its __init__ wants transformers for an adapter that is not used here
        function = getattr(_mended(f"ring_flash_attn.{module}", *COPIED), f"{module}_func")
        attention = lambda q, k, v: function(q, k, v, causal=True, group=dist.group.WORLD)
        return lambda length: (layout(length, ranks, rank), attention)

    return set_up


def yunchang_zigzag(ranks: int, rank: int):
    """Mended as ``ring_flash_attn``, which it is a copy of."""
    import yunchang
    from yunchang.hybrid.utils import RING_IMPL_DICT

    yunchang.set_seq_parallel_pg(1, ranks, rank, ranks)
    module = _mended("yunchang.ring.zigzag_ring_flash_attn", *COPIED)
    RING_IMPL_DICT["zigzag"] = module.zigzag_ring_flash_attn_func
    layer = yunchang.LongContextAttention(ring_impl_type="zigzag")
    return lambda length: (zigzag(length, ranks, rank), lambda q, k, v: layer(q, k, v, causal=True))


def yunchang_ulysses(ranks: int, rank: int):
    import yunchang

    layer = yunchang.UlyssesAttention(dist.group.WORLD)
    return lambda length: (contiguous(length, ranks, rank), lambda q, k, v: layer(q, k, v, causal=True))


def ring_attention_pytorch(ranks: int, rank: int):
    """Its own blocks of plain PyTorch. One line mended: its last pass of the keys' gradients returns (received, sent), and
    is used as if it returned what was received."""
    import ring_attention_pytorch.ring_flash_attention as ring
    from ring_attention_pytorch.ring import ring_pass

    ring.ring_pass = lambda *arguments, **options: ring_pass(*arguments, **options)[0]

    def of(length: int):
        bucket = min(512, length // ranks)
        return contiguous(length, ranks, rank), lambda q, k, v: ring.ring_flash_attn(q, k, v, None, True, bucket, True, False, None, ranks)

    return of


def ringmaster_zigzag(ranks: int, rank: int):
    """Without CUDA its zigzag ring wants packed sequences: one document here."""
    from ringmaster.ring.zigzag import zigzag_ring_attention

    def of(length: int):
        ends = torch.tensor([0, length])
        attention = lambda q, k, v: zigzag_ring_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), group=dist.group.WORLD, scaling=None, cu_seqlens=ends
        )
        return zigzag(length, ranks, rank), attention

    return of


def _package_without_init(name: str) -> None:
    """A package whose modules can be imported while its ``__init__`` is not run."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package


def _mended(name: str, old: str, new: str):
    """The module with ``old`` replaced in its source, which must be there."""
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    assert old in source, f"{name} no longer holds {old!r}: see whether it still needs mending"
    exec(compile(source.replace(old, new), module.__file__, "exec"), module.__dict__)
    return module


CPU_KERNEL = "[CPU kernel put under it]"
MENDED = "[one line mended]"
# name → (set-up, distribution it needs or None). Sides of no distribution run in the project's environment.
SIDES = {
    "ours ring": (lambda ranks, rank: ours(ranks, 1), None),
    "ours ulysses": (lambda ranks, rank: ours(1, ranks), None),
    "F.scaled_dot_product_attention, one process": (sdpa, None),
    "torch ring, all-to-all, head-tail": (torch_ring, None),
    f"ring-flash-attn zigzag {CPU_KERNEL} {MENDED}": (ring_flash_attn("zigzag_ring_flash_attn", zigzag), "ring-flash-attn"),
    f"ring-flash-attn stripe {CPU_KERNEL} {MENDED}": (ring_flash_attn("stripe_flash_attn", striped), "ring-flash-attn"),
    f"yunchang zigzag {CPU_KERNEL} {MENDED}": (yunchang_zigzag, "yunchang"),
    f"yunchang ulysses {CPU_KERNEL}": (yunchang_ulysses, "yunchang"),
    f"ring-attention-pytorch ring {MENDED}": (ring_attention_pytorch, "ring-attention-pytorch"),
    "axolotl-ringmaster zigzag, packed": (ringmaster_zigzag, "axolotl-ringmaster"),
}
