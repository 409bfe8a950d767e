"""Each backend's tile against the definition in float64, forward and backward, and how large its blocks are."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.attention import Pattern
from workers.attention.block import BACKENDS
from workers.attention.kernels import cpu, reference
from workers.attention.plan import RUNG_TOKENS, make_plan
from workers.attention.tile import Tile, band_tiles

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SLOPES = (0.5, 0.25, 0.125, 0.0625, 0.03, 0.01)
SCALE = 0.2

TILES = {
    "causal": Tile(0, 7, 0, 7, None, 0),
    "one": Tile(0, 1, 0, 1, None, 0),
    "causal, large": Tile(3, 300, 5, 300, None, 0),
    "wide": Tile(0, 5, 0, 33),
    "tall": Tile(2, 33, 1, 5),
    "window": Tile(0, 40, 0, 40, -6, 0),
    "window, ahead as well": Tile(0, 40, 0, 40, -6, 9),
    "tail of a window": Tile(0, 8, 0, 9, 1, None),
    "band between": Tile(0, 30, 0, 50, 3, 20),
    "ladder": Tile(1, 8, 0, 8, None, 0, rungs=4, shift=9),
    "ladder that shares keys": Tile(0, 6, 0, 17, 0, 11, rungs=4, shift=6),
    "every third": Tile(1, 10, 2, 10, None, 0, step=3),
    "interleaved ladder": Tile(0, 10, 0, 10, -3, 0, step=4, rungs=3, shift=1),
    "far apart": Tile(0, 10, 0, 12, distance=25),
    "far apart, every third": Tile(0, 8, 0, 8, None, 0, distance=25, stride=3),
}


def inputs(dtype: torch.dtype, tokens: int = 320):
    """q, k, v and the gradient of out [B, S, heads, D], rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, tokens, heads, 16) for heads in (6, 2, 2, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(name: str, dtype, tile: Tile, slopes, device="cpu"):
    backend = BACKENDS[name]
    q, k, v, grad = (backend.arrange(x.to(device)) for x in inputs(dtype))
    q, grad = (tile.q_of(x).flatten(0, 1) for x in (q, grad))
    k, v = (tile.k_of(x).flatten(0, 1) for x in (k, v))
    out, lse = backend.forward(q, k, v, tile, slopes, SCALE)
    return out, lse, *backend.backward(grad, q, k, v, out, lse, tile, slopes, SCALE)


def definition(dtype, tile: Tile, slopes):
    """out, lse, dq, dk, dv of every rung, from one mask."""
    rungs = torch.arange(tile.rungs)[:, None] * tile.shift
    queries = tile.q_start + rungs + tile.step * torch.arange(tile.queries)
    keys = tile.k_start + rungs + tile.step * torch.arange(tile.keys)
    q, k, v, grad = (x.double() for x in inputs(dtype))
    q, grad = (x[:, queries].flatten(0, 1).requires_grad_() for x in (q, grad))
    k, v = (x[:, keys].flatten(0, 1).requires_grad_() for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(3, 2)) * SCALE
    i, j = torch.arange(tile.queries)[:, None], torch.arange(tile.keys)
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * (tile.distance + tile.stride * (i - j))
    hidden = torch.zeros(tile.queries, tile.keys, dtype=torch.bool)
    if tile.lower is not None:
        hidden |= j < i + tile.lower
    if tile.upper is not None:
        hidden |= j > i + tile.upper
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(3, 2))
    return out, scores.logsumexp(-1).transpose(1, 2), *torch.autograd.grad(out, (q, k, v), grad)


def check(name, dtype, tile, slopes=None, device="cpu"):
    for what, got, want in zip(("out", "lse", "dq", "dk", "dv"), run(name, dtype, tile, slopes, device), definition(dtype, tile, slopes)):
        assert got.shape == want.shape
        error = ((got.cpu().double() - want).abs().max() / max(1.0, want.abs().max())).item()
        assert error <= TOLERANCE[dtype], f"{what} is off by {error:.1e}"


@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["no slopes", "alibi"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_tile_equals_the_definition(name, dtype, tile, slopes):
    check(name, dtype, TILES[tile], slopes)


@settings(max_examples=60)
@given(
    name=st.sampled_from(["cpu", "reference"]), queries=st.integers(1, 40), keys=st.integers(1, 40), slopes=st.sampled_from([None, SLOPES]),
    lower=st.none() | st.integers(-30, 30), upper=st.none() | st.integers(-30, 30), distance=st.integers(0, 99), stride=st.integers(1, 4),
)  # fmt: skip
def test_any_band_equals_the_definition(name, queries, keys, lower, upper, slopes, distance, stride):
    for tile in band_tiles(Tile(0, queries, 0, keys, lower, upper, distance=distance, stride=stride)):
        check(name, torch.float64, tile, slopes)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name, dtype", [("cuda", torch.bfloat16), ("efficient", torch.bfloat16), ("efficient", torch.float32)], ids=str)
def test_cuda_tile_equals_the_definition(name, dtype, tile):
    check(name, dtype, TILES[tile], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ["efficient", "reference"])
def test_cuda_tile_with_slopes_equals_the_definition(name, tile):
    check(name, torch.float32, TILES[tile], SLOPES, device="cuda")


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["no slopes", "alibi"])
def test_lse_is_as_wide_as_the_accumulators(name, slopes):
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        for tile in (TILES["causal"], TILES["wide"], TILES["window"]):
            out, lse, *grads = run(name, dtype, tile, slopes)
            assert lse.dtype == wide and {x.dtype for x in (out, *grads)} == {dtype}


LENGTH = 65_536
LONG = {
    "causal": dict(),
    "bidirectional": dict(causal=False),
    "window": dict(window=4096),
    "bidirectional window": dict(window=1000, causal=False),
    "short window and sinks": dict(window=100, sinks=4),
    "block": dict(block=4096),
    "block and sinks": dict(block=1000, sinks=4),
    "stride": dict(stride=8),
    "dilated window": dict(stride=4, window=4096),
    "documents": dict(documents=torch.arange(LENGTH) // 3000),
    "alibi": dict(alibi=True),
    "alibi and window": dict(alibi=True, window=2048),
}


def planned(name: str, split) -> tuple[Pattern, list[Tile]]:
    """What a single rank, and the first hops of one of eight, give the kernel for 65,536 tokens."""
    pattern = Pattern(**LONG[name])
    hops = make_plan(pattern, LENGTH, LENGTH, 1, 0, "contiguous", split)
    hops += make_plan(pattern, LENGTH // 8, LENGTH // 8, 8, 5, pattern.best_layout, split)[:3]
    return pattern, [tile for hop in hops for _, tiles in hop.tiles for tile in tiles]


@pytest.mark.parametrize("name", LONG)
def test_the_plain_formula_forms_scores_of_one_block_a_rung(name):  # A10
    _, tiles = planned(name, reference.split)
    assert tiles
    for tile in tiles:
        assert tile.queries <= reference.ROWS and tile.keys <= reference.COLUMNS
        assert tile.rungs * tile.queries * tile.keys <= max(reference.ROWS * reference.COLUMNS, reference.ROWS * RUNG_TOKENS)


@pytest.mark.parametrize("name", LONG)
def test_a_mask_on_the_cpu_is_small_whatever_the_window(name):  # A10
    """Full tiles and causal squares go without a mask; with ALiBi a square has one, and a full tile's is a single row."""
    pattern, tiles = planned(name, cpu.split)
    masked = [tile for tile in tiles if not tile.full and (pattern.alibi or not tile.causal)]
    assert bool(masked) == (pattern.window is not None or pattern.alibi)
    for tile in masked:
        if tile.causal:
            assert tile.queries <= cpu.SQUARE
        else:
            assert tile.queries * tile.keys <= 3 * (2 * cpu.SQUARE) ** 2
    for tile in tiles:
        assert not tile.causal or tile.queries <= cpu.SQUARE


def test_the_cpu_makes_the_mask_that_the_tile_asks_for_and_no_other():
    for tile, slopes in itertools.product(TILES.values(), (None, SLOPES)):
        mask, shift = cpu._bias(tile, slopes, torch.bfloat16)
        if slopes is None:
            assert shift is None and (mask is None) == (tile.full or tile.causal)
        elif tile.full:
            assert mask.shape == (1, 6, 1, tile.keys) and shift.shape == (1, tile.queries, 6)
        if mask is not None:
            assert mask.dtype == torch.float32 and mask.shape[-1] == tile.keys
