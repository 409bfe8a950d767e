"""Hierarchical attention against its definition in float64, on emulated rings: output, gradients, causality, traffic."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
        if pattern.shelves is not None:
            shelves = pattern.shelves.expand(batch, length)[b]
            far &= shelves[:, None] == shelves[torch.tensor(stops) - 1]
        all_k = torch.cat([torch.stack(keys), k[b]]).repeat_interleave(groups, 1)
        all_v = torch.cat([torch.stack(values), v[b]]).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q[b], all_k) * scale
        weights = scores.masked_fill(~torch.cat([far, near], 1), -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, all_v))
    return torch.stack(rows)


def inputs(length, batch=1, heads=2, kv_heads=1, summaries=1, size=8):
    generator = torch.Generator().manual_seed(5)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (
        random(batch, length, heads, size), random(batch, length, kv_heads, size), random(batch, length, kv_heads, size),
        random(summaries, kv_heads, size), random(batch, length, heads, size),
    )  # fmt: skip


DOCUMENTS = {
    "none": lambda length, batch: None,
    "one row": lambda length, batch: torch.bucketize(torch.arange(length), torch.tensor([7, 9, 31]), right=True),
    "per row": lambda length, batch: torch.arange(length) // 11 + torch.arange(batch)[:, None] * (torch.arange(length) > 20),
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


@pytest.mark.parametrize("ring, layout", [(1, "contiguous"), (2, "zigzag"), (3, "contiguous")])
def test_summaries_are_seen_inside_a_shelf_alone(ring, layout):
    length, batch = 48, 2
    papers = DOCUMENTS["per row"](length, batch)
    for hierarchy, papers_a_shelf in itertools.product((Hierarchy(4), Hierarchy(3, summaries=2, reach=2)), (1, 2, 3)):
        *whole, grad = inputs(length, batch, summaries=hierarchy.summaries)
        pattern = Pattern(window=5, hierarchy=hierarchy, documents=papers, shelves=papers // papers_a_shelf)
        whole = [x.requires_grad_() for x in whole]
        expected = definition(*whole, pattern, 0.3)
        wanted = torch.autograd.grad(expected, whole[:3], grad)

        def rank(mesh):
            local = [shard(x.detach(), mesh, 1).requires_grad_() for x in whole[:3]]
            out = attend(*local, pattern, mesh=mesh, scale=0.3, pool=whole[3].detach())
            out.backward(shard(grad, mesh, 1))
            pairs = zip((out, *(x.grad for x in local)), (expected.detach(), *wanted))
            return max((a.detach() - shard(b, mesh, 1)).abs().max().item() for a, b in pairs)

        assert max(emulate(ring, rank, layout)) <= 1e-10, (hierarchy, papers_a_shelf)


@given(sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=4), data=st.data())
def test_nothing_crosses_shelves(sizes, data):
    """Whatever changes on one shelf, every other gives the same to the bit, and its later papers see earlier ones."""
    papers = torch.repeat_interleave(torch.arange(sum(map(len, sizes))), torch.tensor([n for shelf in sizes for n in shelf]))
    shelves = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor([sum(shelf) for shelf in sizes]))
    q, k, v, pool, _ = inputs(len(papers))
    pattern = Pattern(window=3, hierarchy=Hierarchy(2), documents=papers, shelves=shelves)
    changed = data.draw(st.integers(0, len(papers) - 1))
    k2, v2 = k.clone(), v.clone()
    k2[:, changed] += 3
    v2[:, changed] -= 3
    before, after = attend(q, k, v, pattern, pool=pool), attend(q, k2, v2, pattern, pool=pool)
    same = (before == after).all(-1).all(-1)[0]
    position = torch.arange(len(papers))
    assert same[(shelves != shelves[changed]) | (position < changed)].all()
    assert not same[(shelves == shelves[changed]) & (papers > papers[changed])].any()


@pytest.mark.parametrize("fields, error", [
    (dict(documents=torch.tensor([0, 0, 1, 1]), shelves=torch.tensor([0, 0, 1, 1])), "need a hierarchy"),
    (dict(window=2, hierarchy=Hierarchy(2), shelves=torch.tensor([0, 0, 1, 1])), "need a hierarchy, and documents"),
    (dict(window=2, hierarchy=Hierarchy(2), documents=torch.tensor([0, 0, 1, 1]), shelves=torch.tensor([0, 1, 1, 1])), "changes inside a document"),
    (dict(window=2, hierarchy=Hierarchy(2), documents=torch.tensor([0, 1, 2, 2]), shelves=torch.tensor([0, 1, 0, 0])), "a shelf comes back"),
])  # fmt: skip
def test_shelves_that_are_none_are_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        Pattern(**fields).check(1, 4)


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
