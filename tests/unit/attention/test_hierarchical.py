"""Hierarchical attention against its definition in float64, on emulated rings: output, gradients, causality, traffic."""

import itertools

import pytest
import torch

from workers.attention import Hierarchy, Pattern, attend
from workers.attention.emulated import emulate
from workers.attention.layout import shard


def definition(q, k, v, pool, pattern, scale):
    """Summaries one by one, then one softmax over summaries and tokens with a full mask."""
    batch, length, heads, _ = q.shape
    groups = heads // k.shape[2]
    documents = torch.zeros(batch, length) if pattern.documents is None else pattern.documents.expand(batch, length)
    rows = []
    for b in range(batch):
        ids = documents[b]
        starts = [p for p in range(length) if p == 0 or ids[p] != ids[p - 1]]
        spans = [(a, c) for start, stop in zip(starts, [*starts[1:], length]) for a, c in
                 ((a, min(a + pattern.hierarchy.segment, stop)) for a in range(start, stop, pattern.hierarchy.segment))]  # fmt: skip
        keys, values, stops = [], [], []
        for n, (a, c) in itertools.product(range(pattern.hierarchy.summaries), spans):
            weights = (torch.einsum("sgd,gd->sg", k[b, a:c], pool[n]) * scale).softmax(0)
            keys.append(torch.einsum("sg,sgd->gd", weights, k[b, a:c]))
            values.append(torch.einsum("sg,sgd->gd", weights, v[b, a:c]))
            stops.append(c)
        position = torch.arange(length)
        document_start = torch.tensor([max(s for s in starts if s <= p) for p in range(length)])
        near = (position[:, None] >= position) & (position[:, None] - position < pattern.window) & (ids[:, None] == ids)
        limit = torch.maximum(document_start, position - pattern.window + 1)
        order = torch.tensor(sorted(c for _, c in spans))
        seen = torch.searchsorted(order, limit, right=True)
        number = torch.searchsorted(order, torch.tensor(stops))
        far = number < seen[:, None]
        if pattern.hierarchy.reach is not None:
            far &= number >= seen[:, None] - pattern.hierarchy.reach
        all_k = torch.cat([torch.stack(keys), k[b]]).repeat_interleave(groups, 1)
        all_v = torch.cat([torch.stack(values), v[b]]).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q[b], all_k) * scale
        weights = scores.masked_fill(~torch.cat([far, near], 1), -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, all_v))
    return torch.stack(rows)


def inputs(length, batch=1, heads=2, kv_heads=1, summaries=1, size=8):
    generator = torch.Generator().manual_seed(5)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return (
        random(batch, length, heads, size), random(batch, length, kv_heads, size), random(batch, length, kv_heads, size),
        random(summaries, kv_heads, size), random(batch, length, heads, size),
    )  # fmt: skip


DOCUMENTS = {
    "none": lambda length, batch: None,
    "one row": lambda length, batch: torch.bucketize(torch.arange(length), torch.tensor([7, 9, 31]), right=True),
    "per row": lambda length, batch: (torch.arange(length) // 11 + torch.arange(batch)[:, None] * (torch.arange(length) > 20)),
}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_out_and_gradients_equal_the_definition(ring, layout):
    for (window, hierarchy), documents, (batch, heads, kv_heads) in itertools.product(
        [(5, Hierarchy(4)), (3, Hierarchy(5, summaries=2)), (8, Hierarchy(8, summaries=3, reach=2))], DOCUMENTS, [(1, 3, 3), (2, 4, 2)]
    ):
        length = 48
        *whole, grad = inputs(length, batch, heads, kv_heads, hierarchy.summaries)
        pattern = Pattern(window=window, hierarchy=hierarchy, documents=DOCUMENTS[documents](length, batch))
        whole = [x.requires_grad_() for x in whole]
        expected = definition(*whole, pattern, 0.3)
        expected.backward(grad)

        def rank(mesh):
            local = [shard(x.detach(), mesh, 1).requires_grad_() for x in whole[:3]]
            pool = whole[3].detach().clone().requires_grad_()
            out = attend(*local, pattern, mesh=mesh, scale=0.3, pool=pool)
            out.backward(shard(grad, mesh, 1))
            wanted = (expected.detach(), *(x.grad for x in whole[:3]))
            return [(a.detach() - shard(b, mesh, 1)).abs().max().item() for a, b in zip((out, *(x.grad for x in local)), wanted)], pool.grad

        ranks = emulate(ring, rank, layout)
        assert max(max(errors) for errors, _ in ranks) <= 1e-10, (window, hierarchy, documents)
        assert (sum(grad for _, grad in ranks) - whole[3].grad).abs().max() <= 1e-10


def test_no_pooling_vectors_is_the_mean():
    q, k, v, pool, _ = inputs(32)
    pattern = Pattern(window=4, hierarchy=Hierarchy(8))
    assert torch.equal(attend(q, k, v, pattern), attend(q, k, v, pattern, pool=torch.zeros_like(pool)))


def test_the_last_queries_alone_see_what_they_saw():
    q, k, v, pool, _ = inputs(45)
    pattern = Pattern(window=4, hierarchy=Hierarchy(8))
    whole = attend(q, k, v, pattern, pool=pool)
    assert torch.allclose(attend(q[:, -6:], k, v, pattern, pool=pool), whole[:, -6:], atol=1e-12)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_later_token_or_document_changes_nothing_before(layout):
    length = 64
    q, k, v, pool, _ = inputs(length)
    documents = torch.arange(length) // 20
    pattern = Pattern(window=6, hierarchy=Hierarchy(8, summaries=2), documents=documents)
    pool = torch.cat([pool, -pool])
    for changed in (0, 19, 20, 37, 63):
        k2, v2, q2 = (x.clone() for x in (k, v, q))
        for x in (k2, v2, q2):
            x[:, changed] += 3

        def rank(mesh):
            before, after = (
                attend(*(shard(x, mesh, 1) for x in tensors), pattern, mesh=mesh, pool=pool) for tensors in ((q, k, v), (q2, k2, v2))
            )
            earlier = shard(torch.arange(length), mesh, 0) < changed
            return torch.equal(before[:, earlier], after[:, earlier]), torch.equal(before, after)

        ranks = emulate(4, rank, layout)
        assert all(same for same, _ in ranks)
        assert not all(same for _, same in ranks)


def test_only_summaries_and_the_window_travel():
    length, ring, window, heads, size = 512, 4, 16, 2, 8
    pattern = Pattern(window=window, hierarchy=Hierarchy(32, summaries=2))

    def rank(mesh):
        x = torch.zeros(1, length // ring, heads, size)
        attend(x, x, x, pattern, mesh=mesh)
        return mesh.traffic.bytes_sent

    segments = length // ring // 32
    summaries = (ring - 1) * segments * 2 * heads * (2 * size + 1) * 4
    tail = 2 * (window - 1) * heads * size * 4
    assert emulate(ring, rank, "contiguous") == [summaries + tail] * 3 + [summaries]


@pytest.mark.parametrize("fields", [dict(), dict(window=4, alibi=True), dict(window=4, causal=False), dict(window=4, stride=2)], ids=str)
def test_what_does_not_combine_is_refused(fields):
    with pytest.raises(ValueError, match="hierarchy needs a causal window|alibi"):
        Pattern(hierarchy=Hierarchy(), **fields)
    with pytest.raises(ValueError, match="segment is 0"):
        Hierarchy(0)
