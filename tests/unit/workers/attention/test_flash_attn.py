"""The adapters of CUDA kernels, without a GPU: stand-ins take their place that know the kernels' signatures, their windows,
their ALiBi and what they want of tensors, and compute by the plain formula."""

import itertools
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import attention_reference
from tests.benchmarks.bench_gpu import OneDeviceRing
from tests.unit.workers.attention.cases import PATTERNS, count_pairs
from workers.attention import Pattern
from workers.attention.block import BACKENDS
from workers.attention.kernels import cuda, flash_attn, reference
from workers.attention.pattern import alibi_slopes
from workers.attention.tile import Tile, band_tiles
from workers.mesh import LAYOUTS

SLOPES = (0.5, 0.25, 0.11, 0.06)
SCALE = 0.3
HEADS, KV_HEADS, SIZE = 4, 2, 8


# The plain formula, with a window that counts from the diagonal ending in the last query and key.


def offsets(queries: int, keys: int) -> torch.Tensor:
    """How far right of that diagonal key j stands for query i."""
    return torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)


def window_1(queries: int, keys: int, left: int | None, right: int | None) -> torch.Tensor:
    """bool [Q, K]; None is no limit."""
    apart = offsets(queries, keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        seen &= apart >= -left
    if right is not None:
        seen &= apart <= right
    return seen


def window_2(queries, keys, causal, left, right):
    """As FlashAttention 2 and PyTorch's copy of it read their arguments: (bool [Q, K], whether the causal kernel runs)."""
    left, right = (-1 if limit >= keys else limit for limit in (left, right))
    right = 0 if causal else right
    causal = left < 0 and right == 0
    if left < 0 <= right:
        left = keys
    if right < 0 <= left:
        right = keys
    if left < 0:
        return window_1(queries, keys, None, None), False
    return window_1(queries, keys, None if causal else left, right), causal


def window_3(queries, keys, causal, left, right):
    left, right = -1 if left >= keys - 1 else left, -1 if right >= queries - 1 else right
    right = 0 if causal else right
    return window_1(queries, keys, None if left < 0 else left, None if right < 0 else right)


def window_4(queries, keys, causal, left, right):
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        left = right = None
    return window_1(queries, keys, left, right)


def scores_of(q, k, scale, seen, bias=None):
    check_tensors(q, k)
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) * scale
    return (scores if bias is None else scores + bias).masked_fill(~seen, -torch.inf)


def plain_forward(q, k, v, scale, seen, bias=None):
    check_tensors(v)
    scores = scores_of(q, k, scale, seen, bias)
    out = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v.double().repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out.to(q.dtype), scores.logsumexp(-1).float()


def plain_backward(dout, q, k, v, out, lse, scale, seen, bias=None):
    check_tensors(dout, v, out)
    groups = q.shape[2] // k.shape[2]
    weights = (scores_of(q, k, scale, seen, bias) - lse.double().unsqueeze(-1)).exp()
    dv = torch.einsum("nhqk,nqhd->nkhd", weights, dout.double())
    dweights = torch.einsum("nqhd,nkhd->nhqk", dout.double(), v.double().repeat_interleave(groups, 2))
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (dweights - delta) * scale
    dq = torch.einsum("nhqk,nkhd->nqhd", dscores, k.double().repeat_interleave(groups, 2))
    dk = torch.einsum("nhqk,nqhd->nkhd", dscores, q.double())
    return [dq.to(q.dtype), *(x.unflatten(2, (k.shape[2], groups)).sum(3).to(q.dtype) for x in (dk, dv))]


def check_tensors(*tensors):
    for x in tensors:
        assert x.dim() == 4 and x.stride(-1) == 1 and x.dtype in (torch.bfloat16, torch.float32)


def check_lse(lse, q):
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])


def fill(places, values):
    for place, value in zip(places, values):
        assert place.shape == value.shape and place.dtype == value.dtype and place.stride(-1) == 1
        place.copy_(value)


def numbers(*limits):
    assert all(type(limit) is int for limit in limits)


# FlashAttention 2, from version 2.7 on (flash_attn.flash_attn_interface): no argument has a default but the last.


def alibi_2(q, k, causal, slopes):
    if slopes is None:
        return None
    assert slopes.dtype == torch.float32 and slopes.shape == (q.shape[2],)
    apart = offsets(q.shape[1], k.shape[1])
    by = torch.arange(k.shape[1]).expand_as(apart) if causal else -apart.abs()
    return slopes.double()[:, None, None] * by


def forward_2(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax):
    assert (dropout_p, softcap, return_softmax) == (0.0, 0.0, False)
    numbers(window_size_left, window_size_right)
    seen, runs_causal = window_2(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    out, lse = plain_forward(q, k, v, softmax_scale, seen, alibi_2(q, k, runs_causal, alibi_slopes))
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def backward_2(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, softcap, deterministic, rng_state) == (0.0, 0.0, False, None)
    numbers(window_size_left, window_size_right)
    check_lse(softmax_lse, q)
    seen, runs_causal = window_2(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    bias = alibi_2(q, k, runs_causal, alibi_slopes)
    fill((dq, dk, dv), plain_backward(dout, q, k, v, out, softmax_lse, softmax_scale, seen, bias))
    return torch.empty(0)


# FlashAttention 3 (flash_attn_interface), of its arguments those that the adapter may use.


def forward_3(q, k, v, *, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, num_splits=1):
    numbers(window_size_left, window_size_right)
    seen = window_3(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    return *plain_forward(q, k, v, softmax_scale, seen), torch.empty(0), torch.empty(0)


def backward_3(
    dout, q, k, v, out, softmax_lse, *, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
    window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    numbers(window_size_left, window_size_right)
    check_lse(softmax_lse, q)
    seen = window_3(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
    fill((dq, dk, dv), plain_backward(dout, q, k, v, out, softmax_lse, softmax_scale, seen))
    return torch.empty(0)


# FlashAttention 4 (flash_attn.cute.interface), likewise.


def forward_4(q, k, v, *, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False):
    assert return_lse
    seen = window_4(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    return *plain_forward(q, k, v, softmax_scale, seen), None, None


def backward_4(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, window_size_right=None, *,
    deterministic=False,
):  # fmt: skip
    check_lse(lse, q)
    seen = window_4(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    return tuple(plain_backward(dout, q, k, v, out, lse, softmax_scale, seen))


# PyTorch's own operators, registered for the CPU where it has none: the dispatcher then holds a call to their schemas.


def aten_flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert cum_seq_q is None and cum_seq_k is None and alibi_slopes is None and (max_q, max_k) == (query.shape[1], key.shape[1])
    left, right = (-1 if limit is None else limit for limit in (window_size_left, window_size_right))
    out, lse = plain_forward(query, key, value, scale, window_2(max_q, max_k, is_causal, left, right)[0])
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), torch.empty(0)


def aten_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert cum_seq_q is None and cum_seq_k is None and rng_state.shape == (2,) and rng_state.dtype == unused.dtype == torch.uint64
    check_lse(logsumexp, query)
    left, right = (-1 if limit is None else limit for limit in (window_size_left, window_size_right))
    return tuple(plain_backward(grad_out, query, key, value, out, logsumexp, scale, window_2(max_q, max_k, is_causal, left, right)[0]))


def from_top_left(query, key, custom_mask_type):
    assert custom_mask_type in (0, 1) and query.shape[2] == key.shape[2]
    seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
    return seen.tril() if custom_mask_type else seen


def aten_efficient_forward(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    assert compute_log_sumexp and bias is None
    out, lse = plain_forward(query, key, value, scale, from_top_left(query, key, custom_mask_type))
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    state = torch.empty((), dtype=torch.int64)
    return out, lse, state, state, query.shape[1], key.shape[1]


def aten_efficient_backward(
    grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp, dropout_p,
    philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None, num_splits_key=None, window_size=None,
    shared_storage_dqdkdv=False,
):  # fmt: skip
    assert out.stride()[1:] == (query.shape[2] * query.shape[3], query.shape[3], 1), "the kernel reads out's tokens this far apart"
    assert logsumexp.shape[2] % 32 == 0 and logsumexp.stride(0) % 8 == logsumexp.stride(1) % 8 == 0
    seen = from_top_left(query, key, custom_mask_type)
    lse = logsumexp[..., : query.shape[1]]
    return *plain_backward(grad_out_, query, key, value, out, lse, scale, seen), torch.empty(0)


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")}
    modules |= {name: ModuleType(name) for name in ("flash_attn.cute", "flash_attn.cute.interface")}
    modules["flash_attn"].flash_attn_interface = two = modules["flash_attn.flash_attn_interface"]
    modules["flash_attn.cute"].interface = four = modules["flash_attn.cute.interface"]
    three = modules["flash_attn_interface"]
    two._flash_attn_forward, two._flash_attn_backward = forward_2, backward_2
    three._flash_attn_forward, three._flash_attn_backward = forward_3, backward_3
    four._flash_attn_fwd, four._flash_attn_bwd = forward_4, backward_4
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as library:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        library.impl("_flash_attention_forward", aten_flash_forward, "CPU")
        library.impl("_flash_attention_backward", aten_flash_backward, "CPU")
        library.impl("_efficient_attention_forward", aten_efficient_forward, "CPU")
        library.impl("_efficient_attention_backward", aten_efficient_backward, "CPU")
        yield


TILES = {
    "one": Tile(0, 1, 0, 1, None, 0),
    "causal": Tile(0, 24, 0, 24, None, 0),
    "wide": Tile(0, 5, 0, 33),
    "tall": Tile(2, 33, 1, 5),
    "one query": Tile(0, 1, 0, 30),
    "one key": Tile(0, 30, 0, 1),
    "very tall": Tile(0, 50, 0, 3),
    "window": Tile(0, 40, 0, 40, -6, 0),
    "window, ahead as well": Tile(0, 40, 0, 40, -6, 9),
    "tail of a window": Tile(0, 8, 0, 8, 0, None),
    "window far longer than its keys": Tile(0, 32, 0, 3, -30, None),
    "the same at the diagonal": Tile(0, 33, 0, 3, -30, 0),
    "band between": Tile(0, 30, 0, 50, 3, 20),
    "ladder": Tile(1, 8, 0, 8, None, 0, rungs=4, shift=9),
    "ladder that shares keys": Tile(0, 6, 0, 17, 0, 11, rungs=4, shift=6),
    "every third": Tile(1, 10, 2, 10, None, 0, step=3),
    "interleaved ladder": Tile(0, 10, 0, 10, -3, 0, step=4, rungs=3, shift=1),
    "far apart": Tile(0, 10, 0, 12, distance=25),
    "far apart, every third": Tile(0, 8, 0, 8, None, 0, distance=25, stride=3),
    "far apart, tall and striped": Tile(0, 19, 0, 8, distance=70, stride=3),
}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 2e-5}


def compare(name: str, tile: Tile, slopes, dtype=torch.bfloat16, tokens: int = 64):
    """Each piece of ``tile`` against the reference, its tensors the views of larger ones that the ring gives."""
    backend = BACKENDS[name]
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS, HEADS)]
    q, k, v, grad, out = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    for piece in (part for whole in band_tiles(tile) for part in backend.split(whole, slopes is not None)):
        queries, gradient, row = (piece.q_of(x).flatten(0, 1) for x in (q, grad, out))
        keys, values = (piece.k_of(x).flatten(0, 1) for x in (k, v))
        part = (queries, keys, values, piece, slopes, SCALE)
        got, want = backend.forward(*part), reference.forward(*part)
        assert got[1].dtype == torch.float32
        for what, mine, theirs, limit in zip(("out", "lse"), got, want, (TOLERANCE[dtype], 2e-5)):
            close(what, piece, mine, theirs, limit)
        whole = (row, want[1] + 0.5)  # a row sees other keys besides
        got, want = (kernel.backward(gradient, *part[:3], *whole, *part[3:]) for kernel in (backend, reference))
        for what, mine, theirs in zip(("dq", "dk", "dv"), got, want):
            assert mine.dtype == dtype
            close(what, piece, mine, theirs, TOLERANCE[dtype])


def close(what, piece, got, want, limit):
    assert got.shape == want.shape and torch.isfinite(got).all()
    error = ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1)).item()
    assert error <= limit, f"{what} of {piece} is off by {error:.1e}"


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.bfloat16) for name in ("cuda", "flash2", "flash3", "flash4", "efficient")] + [("efficient", torch.float32)],
    ids=str,
)
def test_a_tile_equals_the_reference(name, dtype, tile):
    compare(name, TILES[tile], None, dtype)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name, dtype", [("flash2", torch.bfloat16), ("efficient", torch.float32)], ids=str)
def test_a_tile_with_slopes_equals_the_reference(name, dtype, tile):
    compare(name, TILES[tile], SLOPES, dtype)


@settings(max_examples=150)
@given(
    name=st.sampled_from(["cuda", "flash2", "flash2 with slopes", "flash3", "flash4"]), queries=st.integers(1, 40), keys=st.integers(1, 40),
    lower=st.none() | st.integers(-40, 30), upper=st.none() | st.integers(-30, 30), distance=st.integers(0, 99), stride=st.integers(1, 4),
)  # fmt: skip
def test_any_band_equals_the_reference(name, queries, keys, lower, upper, distance, stride):
    slopes = SLOPES if "slopes" in name else None
    compare(name.split()[0], Tile(0, queries, 0, keys, lower, upper, distance=distance, stride=stride), slopes)


SMALL = list(itertools.product(range(1, 7), range(1, 7), (None, *range(-6, 5)), (None, *range(-5, 6))))


def in_band(tile: Tile) -> torch.Tensor:
    apart = torch.arange(tile.keys) - torch.arange(tile.queries)[:, None]
    low, high = (-99 if tile.lower is None else tile.lower), (99 if tile.upper is None else tile.upper)
    return (apart >= low) & (apart <= high)


def test_every_band_is_a_window_of_every_generation():
    for queries, keys, lower, upper in SMALL:
        for whole in band_tiles(Tile(0, queries, 0, keys, lower, upper)):
            pieces = cuda.flash_split(whole, False)
            for tile in pieces:
                left, right = cuda.flash_window(tile)
                assert (left >= 0) == (tile.lower is not None) and (right >= 0) == (tile.upper is not None)
                limits = (False, left, right)
                assert torch.equal(window_2(tile.queries, tile.keys, *limits)[0], in_band(tile)), tile
                assert torch.equal(window_3(tile.queries, tile.keys, *limits), in_band(tile)), tile
                none = (False, *(None if limit < 0 else limit for limit in (left, right)))
                assert torch.equal(window_4(tile.queries, tile.keys, *none), in_band(tile)), tile
            covered = count_pairs(pieces, queries, keys)
            assert torch.equal(covered, count_pairs([whole], queries, keys)), whole


def test_pieces_with_slopes_cover_a_band_once_and_lie_on_one_side():
    left_to_the_formula = 0
    for queries, keys, lower, upper in SMALL + [(40, 2, None, None), (40, 2, -30, 0)]:
        for whole in band_tiles(Tile(0, queries, 0, keys, lower, upper)):
            pieces = flash_attn.split2(whole, True)
            assert torch.equal(count_pairs(pieces, queries, keys), count_pairs([whole], queries, keys)), whole
            left_to_the_formula += sum(flash_attn._side(piece) == 0 for piece in pieces)
            if whole.queries <= flash_attn.MOST_STRIPS * whole.keys:
                assert all(flash_attn._side(piece) for piece in pieces)
    assert left_to_the_formula == 1


def test_a_dense_tile_is_one_call_and_with_slopes_two():
    for name in ("cuda", "flash2", "flash3", "flash4"):
        for tile in (TILES["causal"], TILES["wide"], TILES["tall"], TILES["window"], TILES["ladder"]):
            assert BACKENDS[name].split(tile, False) == [tile]
    assert len(flash_attn.split2(TILES["causal"], True)) == 1
    assert len(flash_attn.split2(TILES["window"], True)) == 1
    assert len(flash_attn.split2(TILES["wide"], True)) == 2


def test_alibi_stays_exact_a_million_tokens_away():
    """Nothing of the size of slope · position enters a score: far from the start a tile's out is what it is at the start."""
    near, far = Tile(0, 24, 0, 24, None, 0), Tile(0, 24, 0, 24, None, 0, distance=2**20)
    q, k, v = (torch.randn(1, 24, heads, SIZE).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    (out, lse), (far_out, far_lse) = (flash_attn.forward2(q, k, v, tile, SLOPES, SCALE) for tile in (near, far))
    assert torch.equal(out, far_out)
    assert torch.allclose(far_lse - lse, -(2**20) * torch.tensor(SLOPES).expand_as(lse), rtol=1e-5)


@pytest.mark.parametrize("layout, other", list(zip(LAYOUTS, ("cuda", "flash3", "flash4"))))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_ring_on_these_kernels_equals_the_definition(pattern, layout, other):
    """Their pieces through plan, ladders, merging and the way home; documents make tiles of every shape."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, 54, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    documents = torch.tensor([3, 17, 2, 21, 11]).repeat_interleave(torch.tensor([3, 17, 2, 21, 11]))
    for name, ids in (("flash2", documents), ("flash2" if "alibi" in pattern else other, None)):
        seen = Pattern(documents=ids, **PATTERNS[pattern])
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        out = attention_reference.attention(*wide, seen)
        wanted = [out.detach(), *torch.autograd.grad(out, wide, grad.double())]
        slopes = tuple(alibi_slopes(HEADS)) if seen.alibi else None
        ring = OneDeviceRing(seen, 3, layout, BACKENDS[name], SIZE**-0.5, slopes)
        ranks = ring.shards(q, k, v, grad)
        results = ring.forward([rank[:3] for rank in ranks])
        found = ring.backward([rank[3] for rank in ranks], [rank[:3] for rank in ranks], results)
        for (mine, _), more, theirs in zip(results, found, ring.shards(*wanted)):
            for what, got, want in zip(("out", "dq", "dk", "dv"), (mine, *more), theirs):
                close(f"{what} by {name}", seen, got, want, 3e-2)


def test_pytorch_agrees_on_shapes_and_types():
    """Its own shape functions; that of the efficient kernel's backward cannot be called in torch 2.13."""
    q, grad = (torch.empty(2, 100, 8, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 130, 2, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    for tile in (Tile(0, 100, 0, 130), Tile(0, 100, 0, 130, 3, 20)):
        out, lse = cuda.flash_forward(q, k, v, tile, None, 0.1)
        assert out.shape == q.shape and lse.shape == (2, 100, 8) and lse.dtype == torch.float32
        grads = cuda.flash_backward(grad, q, k, v, out, lse, tile, None, 0.1)
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]
    out, lse = cuda.efficient_forward(q.float(), k.float(), v.float(), Tile(0, 100, 0, 130), None, 0.1)
    assert out.shape == q.shape and lse.shape == (2, 100, 8) and lse.dtype == torch.float32
