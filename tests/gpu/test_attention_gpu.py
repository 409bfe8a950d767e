"""Attention on one CUDA device: each kernel's tiles, ``attend`` and an emulated ring, against float64 by the definition.

Lengths lie about the kernels' own blocks of 64 to 256 tokens, not on them.
"""

from functools import cache

import pytest
import torch

from tests import attention_reference
from tests.benchmarks.bench_gpu import OneDeviceRing
from workers.attention import Pattern, attend
from workers.attention.block import BACKENDS, resolve
from workers.attention.kernels import reference
from workers.attention.pattern import alibi_slopes
from workers.attention.tile import Tile, band_tiles
from workers.mesh import LAYOUTS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 3e-5}
BATCH, HEADS, KV_HEADS, SIZE = 2, 8, 2, 64
HALF_KERNELS = ["auto", "cuda", "efficient", "reference", "flash2", "flash3", "flash4"]
KERNELS = [(name, torch.bfloat16) for name in HALF_KERNELS] + [(name, torch.float32) for name in ("auto", "efficient", "reference")]


def kernel_for(name: str, dtype: torch.dtype, head_dim: int = SIZE, alibi: bool = False):
    """The backend; a test whose package or type of GPU is not here is skipped, and says why."""
    try:
        return resolve(name, DEVICE, dtype, head_dim, alibi)
    except ValueError as reason:
        pytest.skip(str(reason))


def close(what: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert got.shape == want.shape and torch.isfinite(got).all(), what
    error = ((got.double() - want.to(got.device)).abs().max() / want.abs().max().clamp(min=1)).item()
    assert error <= limit, f"{what} is off by {error:.1e}"


TILES = {
    "one": Tile(0, 1, 0, 1, None, 0),
    "one query": Tile(0, 1, 0, 700),
    "one key": Tile(0, 300, 0, 1),
    "causal": Tile(3, 517, 5, 517, None, 0),
    "wide": Tile(0, 65, 0, 700),
    "tall": Tile(2, 700, 1, 129),
    "window": Tile(0, 700, 0, 700, -150, 0),
    "window, ahead as well": Tile(0, 700, 0, 700, -60, 190),
    "tail of a window": Tile(0, 255, 0, 255, 0, None),
    "window far longer than its keys": Tile(0, 600, 0, 40, -560, None),
    "the same at the diagonal": Tile(0, 600, 0, 40, -560, 0),
    "band between": Tile(0, 300, 0, 500, 30, 200),
    "ladder": Tile(1, 130, 0, 130, None, 0, rungs=4, shift=140),
    "ladder that shares keys": Tile(0, 128, 0, 255, 0, 127, rungs=4, shift=128),
    "every third": Tile(1, 200, 2, 200, None, 0, step=3),
    "interleaved ladder": Tile(0, 150, 0, 150, -40, 0, step=4, rungs=3, shift=1),
    "far apart, striped": Tile(0, 190, 0, 130, distance=1000, stride=3),
}


def check_tile(name: str, dtype: torch.dtype, tile: Tile, alibi: bool, head_dim: int = SIZE) -> None:
    """Each piece that the kernel is given, its tensors views as the ring makes them; the row's own out and lse go into backward."""
    kernel = kernel_for(name, dtype, head_dim, alibi)
    slopes = tuple(alibi_slopes(HEADS)) if alibi else None
    generator = torch.Generator(DEVICE).manual_seed(1)
    shapes = [(BATCH, 768, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes)
    for piece in (part for whole in band_tiles(tile) for part in kernel.split(whole, alibi)):
        queries, gradient = (piece.q_of(x).flatten(0, 1) for x in (q, grad))
        keys, values = (piece.k_of(x).flatten(0, 1) for x in (k, v))
        wide = [x.double() for x in (gradient, queries, keys, values)]
        out, lse = reference.forward(*wide[1:], piece, slopes, head_dim**-0.5)
        got, got_lse = kernel.forward(queries, keys, values, piece, slopes, head_dim**-0.5)
        close(f"out of {piece}", got, out, TOLERANCE[dtype])
        close(f"lse of {piece}", got_lse, lse, 1e-4)
        found = kernel.backward(gradient, queries, keys, values, out.to(dtype), lse.float(), piece, slopes, head_dim**-0.5)
        for what, one, other in zip(("dq", "dk", "dv"), found, reference.backward(*wide, out, lse, piece, slopes, head_dim**-0.5)):
            close(f"{what} of {piece}", one, other, TOLERANCE[dtype])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name, dtype", KERNELS, ids=str)
def test_a_tile_equals_the_definition(name, dtype, tile):
    check_tile(name, dtype, TILES[tile], alibi=False)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name, dtype", [("flash2", torch.bfloat16), ("efficient", torch.float32), ("reference", torch.bfloat16)], ids=str)
def test_a_tile_with_slopes_equals_the_definition(name, dtype, tile):
    check_tile(name, dtype, TILES[tile], alibi=True)


@pytest.mark.parametrize("head_dim", [8, 72, 128, 192, 256])
@pytest.mark.parametrize("name", HALF_KERNELS[1:])
def test_head_sizes(name, head_dim):
    for dtype in (torch.bfloat16, torch.float16):
        for tile in ("causal", "wide", "window"):
            check_tile(name, dtype, TILES[tile], alibi=False, head_dim=head_dim)


LENGTH = 640  # divides into the chunks of a ring of 4 and of 5
PATTERNS = {
    "causal": dict(),
    "bidirectional": dict(causal=False),
    "window": dict(window=100),
    "wide window": dict(window=500),
    "bidirectional window": dict(window=70, causal=False),
    "window and sinks": dict(window=90, sinks=4),
    "block": dict(block=150),
    "block and sinks": dict(block=130, sinks=3),
    "stride": dict(stride=7),
    "dilated window": dict(stride=3, window=200),
    "alibi": dict(alibi=True),
    "alibi, window and sinks": dict(alibi=True, window=120, sinks=3),
    "documents": dict(documents=True),
    "documents, window and sinks": dict(documents=True, window=80, sinks=2),
    "documents and alibi": dict(documents=True, alibi=True),
}


def pattern_of(name: str) -> Pattern:
    fields = dict(PATTERNS[name])
    if fields.pop("documents", False):
        cuts = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.01
        fields["documents"] = cuts.cumsum(1)
    return Pattern(**fields)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, LENGTH, heads, SIZE, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


@cache
def definition(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """out, dq, dk, dv in float64."""
    *qkv, grad = (x.double() for x in tensors(dtype))
    qkv = [x.requires_grad_() for x in qkv]
    out = attention_reference.attention(*qkv, pattern_of(name))
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name, dtype", KERNELS, ids=str)
def test_attend_equals_the_definition(name, dtype, pattern):
    kernel_for(name, dtype, alibi="alibi" in pattern)
    *qkv, grad = (x.to(DEVICE) for x in tensors(dtype))
    qkv = [x.requires_grad_() for x in qkv]
    out = attend(*qkv, pattern_of(pattern), backend=name)
    grads = torch.autograd.grad(out, qkv, grad)
    for what, got, want in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), definition(pattern, dtype)):
        close(what, got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name, dtype", [("auto", torch.bfloat16), ("auto", torch.float32), ("flash2", torch.bfloat16)], ids=str)
def test_a_ring_on_one_gpu_equals_the_definition_and_one_rank(name, dtype, pattern, layout):
    kernel = kernel_for(name, dtype, alibi="alibi" in pattern)
    slopes = tuple(alibi_slopes(HEADS)) if "alibi" in pattern else None
    one, ring = (OneDeviceRing(pattern_of(pattern), size, layout, kernel, SIZE**-0.5, slopes) for size in (1, 4))
    found = {}
    for way in (one, ring):
        ranks = way.shards(*(x.to(DEVICE) for x in tensors(dtype)))
        qkv, grads = [rank[:3] for rank in ranks], [rank[3] for rank in ranks]
        results = way.forward(qkv)
        found[way] = [(result[0], *more) for result, more in zip(results, way.backward(grads, qkv, results))]
    wanted = ring.shards(*definition(pattern, dtype))
    alone = ring.shards(*(x.double() for x in found[one][0]))
    for rank, got in enumerate(found[ring]):
        for what, mine, theirs, single in zip(("out", "dq", "dk", "dv"), got, wanted[rank], alone[rank]):
            close(f"{what} of rank {rank}", mine, theirs, TOLERANCE[dtype])
            close(f"{what} of rank {rank}, beside one rank's", mine, single, 2 * TOLERANCE[dtype])  # both are rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_grows_with_the_length_and_not_its_square(dtype):
    peaks = []
    for tokens in (8192, 16_384, 32_768):
        qkv = [torch.randn(1, tokens, HEADS, SIZE, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(*qkv, Pattern()).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del qkv
    assert peaks[2] - peaks[1] <= 2.2 * (peaks[1] - peaks[0]), peaks


def test_every_kernel_is_tried():
    assert set(HALF_KERNELS) == {"auto", *BACKENDS} - {"cpu"}
