"""``attend`` on one rank: against its definition, where nothing is visible, and what it refuses."""

import pytest
import torch

from tests import attention_reference
from tests.unit.workers.attention.cases import PATTERNS as NAMED
from tests.unit.workers.attention.cases import pieces
from workers.attention import Pattern, attend
from workers.attention.emulated import emulate
from workers.attention.layout import shard
from workers.attention.tile import Tile


def inputs(length: int = 24, batch: int = 2, heads: int = 6, kv_heads: int = 2, dtype=torch.float64, queries: int | None = None):
    generator = torch.Generator().manual_seed(length)
    sizes = [(queries or length, heads), (length, kv_heads), (length, kv_heads)]
    return [torch.randn(batch, s, h, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s, h in sizes]


PATTERNS = {
    "causal": Pattern(),
    "bidirectional": Pattern(causal=False),
    "documents": Pattern(documents=torch.arange(24) // 5),
    "bidirectional, padding alone": Pattern(causal=False, documents=torch.tensor([0] * 11 + [1] * 9 + [-1] * 4)),
    "a row each": Pattern(documents=torch.stack([torch.arange(24) // 7, torch.zeros(24, dtype=torch.long)])),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", PATTERNS)
def test_out_and_gradients_equal_the_definition(name, backend):
    qkv, pattern = inputs(), PATTERNS[name]
    out, expected = attend(*qkv, pattern, backend=backend), attention_reference.attention(*qkv, pattern)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    got, wanted = torch.autograd.grad(out, qkv, grad), torch.autograd.grad(expected, qkv, grad)
    for ours, theirs in zip((out, *got), (expected, *wanted)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("queries", [1, 5, 24])
def test_fewer_queries_than_keys_are_the_last_ones(queries):
    """As a cache asks: the new tokens see of what came before what the pattern says."""
    q, k, v = inputs(queries=24)
    for fields in NAMED.values():
        for documents in (None, torch.arange(24) // 9):
            pattern = Pattern(documents=documents, **fields)
            whole = attention_reference.attention(q, k, v, pattern)
            torch.testing.assert_close(attend(q[:, -queries:], k, v, pattern), whole[:, -queries:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_memory_is_seen_by_every_query_and_gets_its_gradient(backend):
    qkv, generator = inputs(), torch.Generator().manual_seed(5)
    memory = [torch.randn(3, 2, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    for pattern in (Pattern(), Pattern(window=3, alibi=True), Pattern(documents=torch.arange(24) // 5), Blindfold()):
        out = attend(*qkv, pattern, memory=tuple(memory), backend=backend)
        if isinstance(pattern, Blindfold):  # the memory alone
            scores = torch.einsum("bqhd,khd->bhqk", qkv[0], memory[0].repeat_interleave(3, 1)) * 8**-0.5
            expected = torch.einsum("bhqk,khd->bqhd", scores.softmax(-1), memory[1].repeat_interleave(3, 1))
        else:
            expected = attention_reference.attention(*qkv, pattern, memory=memory)
        got, wanted = (torch.autograd.grad(x.square().sum(), [*qkv, *memory], materialize_grads=True) for x in (out, expected))
        for ours, theirs in zip((out, *got), (expected, *wanted)):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


class Blind(Pattern):
    """The first eight of sixteen queries see no key; the rest see the first eight."""

    def tiles(self, query_runs, key_runs, row=0):
        return [Tile(8, 8, 0, 8)]


class Blindfold(Pattern):
    """Nobody sees anything."""

    def tiles(self, query_runs, key_runs, row=0):
        return []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_query_that_sees_no_key_gives_zero_and_no_nan(dtype):  # A1
    qkv = inputs(16, dtype=dtype)
    out = attend(*qkv, Blind())
    out.sum().backward()
    assert not out[:, :8].any() and out[:, 8:].any()
    dq, dk, dv = (x.grad for x in qkv)
    assert all(torch.isfinite(x).all() for x in (out, dq, dk, dv))
    assert not dq[:, :8].any() and dq[:, 8:].any()
    assert not dk[:, 8:].any() and not dv[:, 8:].any() and dv[:, :8].any()


def test_where_nothing_is_visible_everything_is_zero():  # A1
    qkv = inputs(16)
    out = attend(*qkv, Blindfold())
    out.sum().backward()
    assert not any(x.any() for x in (out, *(x.grad for x in qkv)))


@pytest.mark.parametrize("small", [True, False])
def test_queries_that_see_nothing_at_some_hops_or_at_all(small):  # A1
    """On a ring: rank 0's queries see nothing anywhere, the others' the first eight keys of rank 0 alone."""

    class OfRankZero(Pattern):
        def tiles(self, query_runs, key_runs, row=0):
            return [Tile(0, 8, 0, 8)] if query_runs[0].start > 0 and key_runs[0].start == 0 else []

    q, k, v = (x.detach() for x in inputs(32))
    pattern = OfRankZero()

    def function(mesh):
        local = [shard(x, mesh, 1).clone().requires_grad_() for x in (q, k, v)]
        out = attend(*local, pattern, mesh=mesh)
        out.sum().backward()
        return [out.detach(), *(x.grad for x in local)]

    with pieces(small):
        results = emulate(4, function, "contiguous")
    assert all(torch.isfinite(x).all() for parts in results for x in parts)
    assert not any(x.any() for x in results[0][:2]) and all(x.any() for x in results[0][2:])
    for out, dq, dk, dv in results[1:]:
        assert out.any() and dq.any() and not dk.any() and not dv.any()
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, 8:], k[:, :8].repeat_interleave(3, 2)) * 8**-0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v[:, :8].repeat_interleave(3, 2))
    torch.testing.assert_close(torch.cat([out for out, *_ in results[1:]], 1), expected, rtol=1e-12, atol=1e-12)


def test_the_scale_is_that_of_the_head_unless_given():
    qkv = inputs()
    torch.testing.assert_close(attend(*qkv, Pattern()), attend(*qkv, Pattern(), scale=8**-0.5))
    torch.testing.assert_close(attend(*qkv, Pattern(), scale=0.1), attention_reference.attention(*qkv, Pattern(), scale=0.1))


@pytest.mark.parametrize("causal", [True, False])
def test_a_key_out_of_sight_may_hold_anything(causal):
    """What a pattern hides is not read: even a NaN there reaches nobody."""
    q, k, v = (x.detach() for x in inputs(8))
    pattern = Pattern(causal=causal, documents=torch.tensor([0] * 5 + [1] * 3))
    clean = attend(q, k, v, pattern)
    for x in (k, v):
        x[:, 5:] = torch.nan
    assert torch.equal(attend(q, k, v, pattern)[:, :5], clean[:, :5])


def test_inputs_of_any_stride():
    q, k, v = (x.detach() for x in inputs())
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(attend(*strided, Pattern()), attend(q, k, v, Pattern()))


def zeros(*shapes):
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    "shapes, said",
    [
        (((4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), r"want \[B, S, H, D\]"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 1, 8)), r"k \(1, 4, 2, 8\), v \(1, 4, 1, 8\)"),
        (((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), r"q \(2, 4, 2, 8\)"),
        (((1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 16)), r"k \(1, 4, 2, 16\)"),
        (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "3 query heads and 2 KV heads"),
        (((1, 5, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "5 queries and 4 keys"),
    ],
)
def test_shapes_that_do_not_fit(shapes, said):
    with pytest.raises(ValueError, match=said):
        attend(*zeros(*shapes), Pattern())


def test_documents_and_backends_that_do_not_fit():
    q, k, v = zeros((2, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8))
    with pytest.raises(ValueError, match="2 × 4 global positions"):
        attend(q, k, v, Pattern(documents=torch.zeros(5)))
    with pytest.raises(ValueError, match="2 × 4 global positions"):
        attend(q, k, v, Pattern(documents=torch.zeros(3, 4)))
    with pytest.raises(ValueError, match="one of auto"):
        attend(q, k, v, Pattern(), backend="fastest")
