"""Top-k attention against its definition in float64, on emulated rings: the choice, output, gradients, recomputation, traffic."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from workers.attention import Pattern, TopBlocks, attend, topk
from workers.attention.emulated import emulate
from workers.attention.layout import Run, shard


def definition(q, k, v, pattern):
    """The choice block by block, then softmax with a full mask."""
    batch, length, heads, size = q.shape
    groups, block = heads // k.shape[2], pattern.top.block
    documents = torch.zeros(batch, length) if pattern.documents is None else pattern.documents.expand(batch, length)
    position = torch.arange(length)
    rows = []
    for b in range(batch):
        starts = [p for p in range(length) if p == 0 or documents[b, p] != documents[b, p - 1]]
        mask = torch.zeros(length, length, dtype=torch.bool)
        for start, stop in zip(starts, [*starts[1:], length]):
            spans = [(a, min(a + block, stop)) for a in range(start, stop, block)]
            for index, (a, c) in enumerate(spans):
                mask[a:c, a:c] = position[a:c, None] >= position[a:c]
                before = spans[max(index - 1, 0)]
                score = lambda s: (q[b, before[0] : before[1]].mean(0).unflatten(0, (-1, groups)).mean(1) * k[b, s[0] : s[1]].mean(0)).sum()
                for a2, c2 in sorted(spans[:index], key=score, reverse=True)[: pattern.top.keep - 1]:
                    mask[a:c, a2:c2] = True
        scores = torch.einsum("qhd,khd->hqk", q[b], k[b].repeat_interleave(groups, 1)) * size**-0.5
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v[b].repeat_interleave(groups, 1)))
    return torch.stack(rows)


def inputs(length, batch=1, heads=2, kv_heads=1, size=8):
    generator = torch.Generator().manual_seed(11)
    shapes = ((batch, length, n, size) for n in (heads, kv_heads, kv_heads, heads))
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_out_and_gradients_equal_the_definition(ring, layout):
    length = 48
    packed = {
        "none": None,
        "one row": torch.bucketize(torch.arange(length), torch.tensor([7, 9, 31]), right=True),
        "per row": torch.arange(length) // 17 + torch.arange(2)[:, None] * (torch.arange(length) > 20),
    }
    for (block, keep), documents, (heads, kv_heads) in itertools.product([(4, 3), (5, 2), (3, 1), (8, 100)], packed, [(3, 3), (4, 2)]):
        *whole, grad = inputs(length, 2, heads, kv_heads)
        pattern = Pattern(top=TopBlocks(block, keep), documents=packed[documents])
        whole = [x.requires_grad_() for x in whole]
        expected = definition(*whole, pattern)
        expected.backward(grad)

        def rank(mesh):
            local = [shard(x.detach(), mesh, 1).requires_grad_() for x in whole]
            out = attend(*local, pattern, mesh=mesh)
            out.backward(shard(grad, mesh, 1))
            wanted = (expected.detach(), *(x.grad for x in whole))
            return max((a.detach() - shard(b, mesh, 1)).abs().max().item() for a, b in zip((out, *(x.grad for x in local)), wanted))

        assert max(emulate(ring, rank, layout)) <= 1e-10, (block, keep, documents)


def test_all_blocks_kept_is_causal_attention():
    q, k, v, _ = inputs(40)
    assert torch.allclose(attend(q, k, v, Pattern(top=TopBlocks(8, 5))), attend(q, k, v, Pattern()), atol=1e-12)


def test_a_sequence_is_served_alike_whatever_it_is_batched_with():
    q, k, v, _ = inputs(64, batch=3)
    pattern = Pattern(top=TopBlocks(8, 2))
    together = attend(q, k, v, pattern)
    alone = [attend(*(x[b : b + 1] for x in (q, k, v)), Pattern(top=TopBlocks(8, 2))) for b in range(3)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-12)


def test_recomputation_in_backward_makes_the_choice_again_from_memory(monkeypatch):
    """A layer that is recomputed must not choose anew: noise in the recomputed activations could choose otherwise."""
    choices = []
    best = topk._best
    monkeypatch.setattr(topk, "_best", lambda *a: choices.append(1) or best(*a))
    q, k, v, grad = (x.requires_grad_() for x in inputs(64))
    pattern = Pattern(top=TopBlocks(8, 3))
    out = checkpoint(lambda q, k, v: attend(q, k, v, pattern, where=" of layer 0"), q, k, v, use_reentrant=False)
    assert len(choices) == 1
    recomputed = torch.autograd.grad(out, (q, k, v), grad)
    assert len(choices) == 1
    plain = torch.autograd.grad(attend(q, k, v, pattern), (q, k, v), grad)
    assert len(choices) == 2  # another forward chooses for itself
    assert all(torch.equal(a, b) for a, b in zip(recomputed, plain))


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_later_token_changes_nothing_before(layout):
    """Bit for bit, in float32: what later blocks choose must not change how earlier ones are computed either."""
    length = 128
    q, k, v, _ = (x.float() for x in inputs(length, size=64))

    def rank(mesh):
        out = lambda *t: attend(*(shard(x, mesh, 1) for x in t), Pattern(top=TopBlocks(16, 3)), mesh=mesh)
        before, position, same = out(q, k, v), shard(torch.arange(length), mesh, 0), []
        for changed in range(5, length, 9):
            noisy = [x.index_add(1, torch.tensor([changed]), torch.full_like(x[:, :1], 3.0)) for x in (q, k, v)]
            same.append(torch.equal(before[:, position < changed], out(*noisy)[:, position < changed]))
        return all(same)

    assert all(emulate(4, rank, layout))


def test_a_layer_that_ran_twice_with_one_pattern_chooses_anew():
    """Two forwards before a backward: which selection a recomputation wants is then not to be told by the layer's name."""
    pattern, results = Pattern(top=TopBlocks(8, 2)), []
    first, second = inputs(64), tuple(x.flip(1) for x in inputs(64))
    for tensors in (first, second):
        q, k, v, grad = (x.clone().requires_grad_() for x in tensors)
        out = checkpoint(lambda q, k, v: attend(q, k, v, pattern, where=" of layer 0"), q, k, v, use_reentrant=False)
        results.append((out, (q, k, v), grad))
    for out, leaves, grad in results:
        plain = torch.autograd.grad(attend(*leaves, Pattern(top=TopBlocks(8, 2))), leaves, grad)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, leaves, grad), plain))


def test_pairs_grow_with_the_blocks_kept():
    for length in (256, 1024):
        q, k, v, _ = inputs(length)
        pattern = Pattern(top=TopBlocks(16, 4))
        attend(q, k, v, pattern)
        (selection,) = pattern.kept(("selections", ""), list)
        run = [Run(0, 1, length, 0)]
        assert sum(t.pairs for t in selection.tiles(run, run)) <= length * 16 * 4


def test_what_does_not_combine_is_refused():
    with pytest.raises(ValueError, match="top combines with documents alone"):
        Pattern(top=TopBlocks(), window=4)
    with pytest.raises(ValueError, match="keep is 0"):
        TopBlocks(keep=0)
    q, k, v, _ = inputs(16)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attend(q[:, -3:], k, v, Pattern(top=TopBlocks()))
