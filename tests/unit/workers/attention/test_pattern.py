"""Tiles cover exactly the visible pairs, for every layout, rank and hop, without building a mask."""

import dataclasses
import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_reference import slopes, visible
from tests.unit.workers.attention.cases import PATTERNS, count_pairs, document_ids, pattern_fields, rank_positions
from workers.attention import Hierarchy, Pattern, TopBlocks
from workers.attention.layout import Run, ring_runs
from workers.attention.pattern import alibi_slopes
from workers.mesh import LAYOUTS


def covered(pattern: Pattern, length: int, ring: int, layout: str, row: int = 0) -> torch.Tensor:
    """How often tiles cover each pair of global positions, int [S, S]."""
    counts = torch.zeros(length, length, dtype=torch.int64)
    runs = [ring_runs(length, ring, rank, layout) for rank in range(ring)]
    positions = [rank_positions(rank_runs) for rank_runs in runs]
    for own, other in itertools.product(range(ring), repeat=2):
        tiles = pattern.tiles(runs[own], runs[other], row)
        counts[positions[own][:, None], positions[other]] += count_pairs(tiles, len(positions[own]), len(positions[other]))
        if pattern.alibi:
            check_distances(tiles, positions[own], positions[other])
    return counts


def check_distances(tiles, own, other):
    for tile in tiles:
        i, j = torch.arange(tile.queries)[:, None], torch.arange(tile.keys)
        for rung in range(tile.rungs):
            queries, keys = (own[tile.q_start + rung * tile.shift + tile.step * i], other[tile.k_start + rung * tile.shift + tile.step * j])
            assert torch.equal(queries - keys, tile.distance + tile.stride * (i - j)), tile


@settings(max_examples=300)
@given(
    data=st.data(), ring=st.sampled_from([1, 2, 3, 4, 8]), chunk=st.integers(1, 5), layout=st.sampled_from(LAYOUTS), fields=pattern_fields()
)
def test_every_visible_pair_is_covered_once(data, ring, chunk, layout, fields):
    length = 2 * ring * chunk
    ids = data.draw(document_ids(length))
    pattern = Pattern(documents=None if ids is None else torch.tensor(ids), **fields)
    assert torch.equal(covered(pattern, length, ring, layout), visible(pattern, 1, length)[0].long())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_named_pattern_covers_what_is_visible_once(name, layout):
    for ring, documents in itertools.product((1, 2, 3, 4, 8), (None, torch.arange(48) // 11, (torch.arange(48) // 5) % 2)):
        pattern = Pattern(documents=documents, **PATTERNS[name])
        assert torch.equal(covered(pattern, 48, ring, layout), visible(pattern, 1, 48)[0].long()), ring


@pytest.mark.parametrize("fields", [dict(), dict(window=2, sinks=1), dict(causal=False)], ids=str)
def test_rows_have_their_own_documents(fields):
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    pattern = Pattern(documents=documents, **fields)
    assert pattern.rows == [slice(0, 1), slice(1, 2)]
    assert Pattern(documents=documents[0], **fields).rows == Pattern(**fields).rows == [slice(None)]
    for row in range(2):
        assert torch.equal(covered(pattern, 4, 2, "zigzag", row), visible(pattern, 2, 4)[row].long())


@pytest.mark.parametrize("queries", [1, 7, 24])
@pytest.mark.parametrize("name", PATTERNS)
def test_fewer_queries_than_keys_are_the_last_ones(name, queries):
    pattern = Pattern(documents=torch.arange(24) // 9, **PATTERNS[name])
    tiles = pattern.tiles([Run(24 - queries, 1, queries, 0)], [Run(0, 1, 24, 0)])
    assert torch.equal(count_pairs(tiles, queries, 24), visible(pattern, 1, 24)[0, -queries:].long())


def test_padding_sees_only_padding():
    documents = torch.tensor([0] * 5 + [-1] * 3)
    counts = covered(Pattern(documents=documents), 8, 2, "zigzag")
    assert not counts[5:, :5].any() and not counts[:5, 5:].any() and counts[:5, :5].sum() == 15


def test_zigzag_needs_one_kernel_call_a_hop():
    runs = [ring_runs(4096, 4, rank, "zigzag") for rank in range(4)]
    for own, other in itertools.product(runs, repeat=2):
        assert len(Pattern().tiles(own, other)) == 1


def test_documents_of_one_length_are_one_ladder():
    (tile,) = Pattern(documents=torch.arange(4096) // 64).tiles([Run(0, 1, 4096, 0)], [Run(0, 1, 4096, 0)])
    assert tile.causal and (tile.queries, tile.rungs, tile.shift) == (64, 64, 64)


MILLION = 1 << 20


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "fields, pairs",
    [
        (dict(), MILLION * (MILLION + 1) // 2),
        (dict(documents=torch.arange(MILLION) // 1024), 1024 * 1024 * 1025 // 2),
        (dict(window=4096), MILLION * 4096 - 4096 * 4095 // 2),
        (dict(block=4096), 256 * 4096 * 4097 // 2),
        (dict(block=1024, documents=torch.arange(MILLION) // 2048), 1024 * 1024 * 1025 // 2),
        (dict(window=100, documents=torch.arange(MILLION) // 1024), 1024 * (1024 * 100 - 100 * 99 // 2)),
    ],
    ids=["dense", "documents", "window", "block", "block in documents", "window in documents"],
)
def test_a_million_tokens_cost_no_mask(fields, pairs, layout):  # A10
    """On one rank and on eight: counted without anything that grows with the pairs, in seconds, and few kernel calls."""
    pattern, before = Pattern(**fields), time.process_time()
    ring = 1 if layout == "zigzag" else 8
    runs = [ring_runs(MILLION, ring, rank, layout) for rank in range(ring)]
    tiles = [tile for own, other in itertools.product(runs, repeat=2) for tile in pattern.tiles(own, other)]
    assert sum(t.pairs for t in tiles) == pairs
    assert len(tiles) <= 64 * 1024 and time.process_time() - before < 30


def test_slopes_are_those_of_the_paper():
    for heads in (1, 2, 3, 6, 8, 12, 20, 32):
        assert alibi_slopes(heads) == pytest.approx(slopes(heads).tolist(), rel=1e-12)


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(block=4, window=4), "block = 4 and window = 4 do not combine"),
        (dict(block=4, stride=2), "block = 4 and stride = 2 do not combine"),
        (dict(alibi=True, causal=False), "alibi and causal = False do not combine"),
        (dict(sinks=2), "sinks = 2 need a window, a block or a stride"),
        (dict(sinks=-1, window=2), r"sinks is -1; it must not be negative"),
        (dict(window=0), r"window is 0; it must be at least 1"),
        (dict(block=-3), r"block is -3; it must be at least 1"),
        (dict(stride=0), r"stride is 0; it must be at least 1"),
        (dict(documents=torch.zeros(1, 2, 3)), r"documents has shape \(1, 2, 3\); it must be \[S\] or \[B, S\]"),
    ],
    ids=str,
)
def test_what_does_not_combine_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        Pattern(**fields)


def test_documents_of_another_length_or_batch_are_refused():
    for documents in (torch.zeros(4), torch.zeros(3, 8), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match="2 × 8"):
            Pattern(documents=documents).check(2, 8)
    Pattern(documents=torch.zeros(8)).check(2, 8)
    Pattern(documents=torch.zeros(2, 8)).check(2, 8)


def test_a_changed_copy_of_a_pattern_remembers_nothing_of_it():
    pattern, run = Pattern(), [Run(0, 1, 16, 0)]
    pattern.tiles(run, run)
    changed = dataclasses.replace(pattern, window=4)
    assert sum(tile.pairs for tile in changed.tiles(run, run)) == 16 * 4 - 6


@pytest.mark.parametrize("fields", [dict(window=4, hierarchy=Hierarchy(4)), dict(top=TopBlocks(4, 2))], ids=str)
def test_summaries_want_a_document_in_one_piece(fields):
    pattern = Pattern(documents=torch.tensor([5, 5, 7, 7, 5, 5]), **fields)
    with pytest.raises(ValueError, match="a document id comes back after another document"):
        pattern.check(1, 6)
    Pattern(documents=torch.tensor([[5, 5, 7, 7, 8, 8], [1, 1, 1, 5, 7, 7]]), **fields).check(2, 6)
