"""Tiles cover exactly the visible pairs, for every layout, rank and hop, without building a mask."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention_reference import visible
from workers.attention import Pattern
from workers.attention.layout import Run, ring_runs


def covered(pattern: Pattern, length: int, ring: int, layout: str, row: int = 0) -> torch.Tensor:
    """How often tiles cover each pair of global positions, int [S, S]."""
    counts = torch.zeros(length, length, dtype=torch.int64)
    runs = [ring_runs(length, ring, rank, layout) for rank in range(ring)]
    positions = [torch.cat([torch.arange(r.start, r.start + r.stride * r.length, r.stride) for r in rank_runs]) for rank_runs in runs]
    for query_rank, key_rank in itertools.product(range(ring), repeat=2):
        for tile in pattern.tiles(runs[query_rank], runs[key_rank], row):
            queries = positions[query_rank][tile.q_start : tile.q_stop]
            keys = positions[key_rank][tile.k_start : tile.k_stop]
            block = torch.ones(len(queries), len(keys), dtype=torch.int64)
            if tile.causal:
                assert block.shape[0] == block.shape[1]
                block = block.tril()
            assert block.sum() == tile.pairs
            counts[queries[:, None], keys] += block
    return counts


@given(
    ring=st.sampled_from([1, 2, 3, 4, 8]), chunk=st.integers(1, 5), layout=st.sampled_from(["zigzag", "contiguous", "striped"]),
    causal=st.booleans(), ids=st.lists(st.integers(0, 3), min_size=80, max_size=80), packed=st.booleans(), alone=st.booleans(),
)  # fmt: skip
def test_every_visible_pair_is_covered_once(ring, chunk, layout, causal, ids, packed, alone):
    length = 2 * ring * chunk
    ids = torch.tensor(ids[:length])
    documents = None if alone else (ids == 0).cumsum(0) if packed else ids  # documents in order, or returning ones
    pattern = Pattern(causal=causal, documents=documents)
    assert torch.equal(covered(pattern, length, ring, layout), visible(pattern, 1, length)[0].long())


def test_rows_have_their_own_documents():
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    pattern = Pattern(documents=documents)
    assert pattern.rows == [slice(0, 1), slice(1, 2)]
    for row in range(2):
        assert torch.equal(covered(pattern, 4, 2, "zigzag", row), visible(pattern, 2, 4)[row].long())


@pytest.mark.parametrize("layout, most", [("zigzag", 1.01), ("striped", 1.01), ("contiguous", 1.8)])
def test_balance_of_causal_work(layout, most):
    """The busiest of eight ranks against the mean, in visible pairs."""
    ring, length = 8, 8 * 2048
    runs = [ring_runs(length, ring, rank, layout) for rank in range(ring)]
    pattern = Pattern()
    work = [sum(t.pairs for key_runs in runs for t in pattern.tiles(runs[rank], key_runs)) for rank in range(ring)]
    assert sum(work) == length * (length + 1) // 2
    imbalance = max(work) / (sum(work) / ring)
    assert imbalance <= most + (0.1 if layout == "contiguous" else 0)


def test_zigzag_needs_one_kernel_call_a_hop():
    ring, runs = 4, [ring_runs(4096, 4, rank, "zigzag") for rank in range(4)]
    for query_rank, key_rank in itertools.product(range(ring), repeat=2):
        assert len(Pattern().tiles(runs[query_rank], runs[key_rank])) == 1


def test_a_long_sequence_of_documents_costs_no_mask():  # A10
    """A million positions and a thousand documents: as many tiles as documents, found without anything quadratic."""
    length = 1 << 20
    pattern = Pattern(documents=torch.arange(length) // 1024)
    tiles = pattern.tiles([Run(0, 1, length, 0)], [Run(0, 1, length, 0)])
    assert len(tiles) == 1024
    assert sum(t.pairs for t in tiles) == 1024 * 1024 * 1025 // 2


def test_documents_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\[S\] or \[B, S\]"):
        Pattern(documents=torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="2 × 8"):
        Pattern(documents=torch.zeros(4)).check(2, 8)
