"""The block primitive: (out, lse) of one tile and the tile's gradients, by the kernel that suits the device.

Legend: N batch × rungs, Q queries, K keys, H query heads, G KV heads (H % G == 0), D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from workers.attention.kernels import cpu, cuda, flash_attn, reference
from workers.attention.tile import Tile

HALF = (torch.bfloat16, torch.float16)
AMPERE = (8, 9, 10, 11, 12)


class Backend(NamedTuple):
    """A kernel, what it wants tensors and tiles like, and what it can compute.

    - ``arrange(x_BSHD) → x_BSHD`` in the memory order that the kernel reads best;
    - ``split(tile, alibi) → tiles`` that the kernel computes well;
    - ``forward(q_NQHD, k_NKGD, v_NKGD, tile, slopes, scale) → out_NQHD, lse_NQH``; lse in float32 (float64 for float64);
    - ``backward(grad_NQHD, q, k, v, out_NQHD, lse_NQH, tile, slopes, scale) → dq, dk, dv``: the tile's gradients given the
      *whole* row's out and lse. The identity P = exp(S − lse), D = rowsum(dO · O) of FlashAttention (Dao et al. 2022)
      needs nothing else, so tiles and hops add up.

    ``slopes`` are ALiBi's, one a query head, or None. Of ``dtypes``, ``widest`` (the largest head, and then a multiple of
    8) and ``generations`` (major compute capabilities) None is no limit. ``package`` is what must be installed: the
    generation of FlashAttention and how to get it.
    """

    name: str
    device: str | None
    arrange: Callable[[torch.Tensor], torch.Tensor]
    split: Callable[[Tile, bool], list[Tile]]
    forward: Callable
    backward: Callable
    dtypes: tuple[torch.dtype, ...] | None = None
    widest: int | None = None
    alibi: bool = True
    generations: tuple[int, ...] | None = None
    package: tuple[int, str] | None = None


def last_dense(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any stride but in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpu", "cpu", cpu.heads_first, cpu.split, cpu.forward, cpu.backward),
        Backend(
            "cuda", "cuda", last_dense, cuda.flash_split, cuda.flash_forward, cuda.flash_backward,
            HALF, 256, alibi=False, generations=AMPERE,
        ),
        Backend(
            "efficient", "cuda", last_dense, cuda.efficient_split, cuda.efficient_forward, cuda.efficient_backward,
            (*HALF, torch.float32), 65_536,
        ),
        Backend("reference", None, last_dense, reference.split, reference.forward, reference.backward),
        Backend(
            "flash2", "cuda", last_dense, flash_attn.split2, flash_attn.forward2, flash_attn.backward2,
            HALF, 256, generations=AMPERE, package=(2, "pip install 'flash-attn>=2.7'"),
        ),
        Backend(
            "flash3", "cuda", last_dense, cuda.flash_split, flash_attn.forward3, flash_attn.backward3,
            HALF, 256, alibi=False, generations=(9,), package=(3, "build it in hopper/ of github.com/Dao-AILab/flash-attention"),
        ),
        Backend(
            "flash4", "cuda", last_dense, cuda.flash_split, flash_attn.forward4, flash_attn.backward4,
            HALF, 128, alibi=False, generations=(9, 10), package=(4, "pip install flash-attn-4"),
        ),
    )
}  # fmt: skip


def resolve(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, alibi: bool = False) -> Backend:
    """The backend called ``name``, or for ``auto`` the fastest one for the device, type, head size and pattern.

    Raises ValueError for a backend that cannot run there.
    """
    case = (device, dtype, head_dim, alibi)
    if name == "auto":
        name = next(choice for choice in _fastest_first(device, alibi) if choice in ("cpu", "reference") or not _obstacle(choice, *case))
    if name not in BACKENDS:
        raise ValueError(f"attention.backend is {name!r}; it must be one of auto, {', '.join(BACKENDS)}")
    obstacle = _obstacle(name, *case)
    if obstacle:
        raise ValueError(f"attention.backend {name!r} {obstacle}")
    return BACKENDS[name]


def _fastest_first(device: torch.device, alibi: bool) -> list[str]:
    """What to try on a device, ending in what can do everything. FlashAttention 3 and 4 are for the generation they were written for."""
    if device.type != "cuda":
        return ["cpu"]
    if alibi:  # the efficient kernel would leave all of it to the plain formula
        return ["flash2", "reference"]
    written_for = [name for name, major in (("flash4", 10), ("flash3", 9)) if _generation(device) == major]
    return [*written_for, "flash2", "cuda", "efficient", "reference"]


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, alibi: bool) -> str | None:
    """Why the backend cannot compute this and what to do, as the rest of a sentence about it."""
    backend = BACKENDS[name]
    if backend.device not in (None, device.type):
        return f"cannot run on {device.type}; use auto or reference"
    obstacle = _not_computed(backend, dtype, head_dim, alibi)
    if obstacle:
        return obstacle
    if backend.package is not None and not flash_attn.installed(backend.package[0]):
        return f"needs FlashAttention {backend.package[0]}, which is not installed: {backend.package[1]}; or use auto"
    major = _generation(device) if backend.generations is not None else None
    if major is not None and major not in backend.generations:
        return f"has no kernels for compute capability {major}.x, only for {', '.join(f'{m}.x' for m in backend.generations)}; use auto"
    return None


def check_backend(name: str, dtype: torch.dtype, head_dim: int, alibi: bool) -> None:
    """Raise ValueError for a backend that computes no such attention on any device: what can be told before one is at hand."""
    obstacle = _not_computed(BACKENDS[name], dtype, head_dim, alibi) if name != "auto" else None
    if obstacle:
        raise ValueError(f"attention.backend {name!r} {obstacle}")


def _not_computed(backend: Backend, dtype: torch.dtype, head_dim: int, alibi: bool) -> str | None:
    if alibi and not backend.alibi:
        return "has no ALiBi; use auto or reference"
    if backend.dtypes is not None and dtype not in backend.dtypes:
        return f"does not compute {_plain(dtype)}, only {', '.join(map(_plain, backend.dtypes))}; use auto or reference"
    if backend.widest is not None and (head_dim % 8 or head_dim > backend.widest):
        return f"takes heads whose size is a multiple of 8 up to {backend.widest}, not {head_dim}; use auto or reference"
    return None


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _generation(device: torch.device) -> int | None:
    """The major compute capability; None where no such device can be asked."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.cuda.is_available() else None
