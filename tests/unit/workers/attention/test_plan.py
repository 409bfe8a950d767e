"""Hops bring the rows that are needed and no others, both ends agree on them, and no rank computes much more than another."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention_reference import visible
from tests.unit.workers.attention.cases import (
    PATTERNS,
    Case,
    count_pairs,
    document_ids,
    documents_for,
    pattern_fields,
    pieces,
    rank_positions,
)
from workers.attention import Pattern
from workers.attention.kernels import cpu, reference
from workers.attention.layout import ring_runs
from workers.attention.plan import imbalance, make_plan, needed_ranges, work
from workers.attention.tile import Tile
from workers.mesh import LAYOUTS


def whole(tile: Tile, alibi: bool) -> list[Tile]:
    return [tile]


def plans(pattern: Pattern, length: int, ring: int, layout: str, split=whole):
    return [make_plan(pattern, length // ring, length // ring, ring, rank, layout, split) for rank in range(ring)]


def rows(ranges) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def check(pattern: Pattern, batch: int, length: int, ring: int, layout: str, split, exact: bool) -> None:
    """Against the full mask: what arrives, what is sent, and what is computed at every hop of every rank."""
    mask = visible(pattern, batch, length)
    positions = [rank_positions(ring_runs(length, ring, rank, layout)) for rank in range(ring)]
    planned = plans(pattern, length, ring, layout, split)
    for rank, distance in itertools.product(range(ring), range(ring)):
        source, hop = (rank - distance) % ring, planned[rank][distance]
        assert hop.distance == distance
        seen = mask[:, positions[rank][:, None], positions[source]]
        if distance:
            received, needed = rows(hop.received), seen.any(0).any(0).nonzero().flatten().tolist()
            assert received == needed if exact else set(received) >= set(needed)
            assert bool(received) == bool(needed) == bool(hop.tiles)
            assert hop.received == planned[source][distance].sent
            assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(hop.received))
        else:
            received, own = list(range(length // ring)), hop.received + hop.sent
            assert own == []
        counts = torch.zeros(batch, len(positions[rank]), len(received), dtype=torch.int64)
        for batch_rows, tiles in hop.tiles:
            counts[batch_rows] += count_pairs(tiles, *counts.shape[1:])
        assert torch.equal(counts, seen[:, :, received].long())


SPLITS = {"whole": whole, "cpu": cpu.split, "reference": reference.split}


@pytest.mark.parametrize("documents", ["none", "in order", "a row each"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", [name for name, fields in PATTERNS.items() if "stride" not in fields])
def test_what_a_query_sees_arrives_and_nothing_else(name, layout, documents):
    for ring in (2, 3, 8):
        pattern = Pattern(documents=documents_for(Case(documents=documents, batch=2), 96), **PATTERNS[name])
        check(pattern, 2, 96, ring, layout, whole, exact=True)


@pytest.mark.parametrize("documents, layout", [("in order", "striped"), ("returning", "striped"), ("returning", "contiguous")])
def test_what_stands_between_needed_rows_stays_where_it_is(documents, layout):
    pattern = Pattern(window=7, sinks=2, documents=documents_for(Case(documents=documents), 96))
    check(pattern, 1, 96, 8, layout, whole, exact=True)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_pieces_of_every_named_pattern_compute_every_pair_once(name, split):
    for (ring, layout), small in itertools.product([(1, "zigzag"), (2, "zigzag"), (3, "contiguous")], (True, False)):
        with pieces(small):
            check(Pattern(**PATTERNS[name]), 1, 48, ring, layout, SPLITS[split], exact=False)


@given(
    data=st.data(), ring=st.sampled_from([1, 2, 3, 4, 8]), chunk=st.integers(1, 4), layout=st.sampled_from(LAYOUTS), fields=pattern_fields(),
    split=st.sampled_from(list(SPLITS)), small=st.booleans(), batch=st.sampled_from([1, 2]),
)  # fmt: skip
def test_both_ends_agree_and_every_pair_is_computed_once(data, ring, chunk, layout, fields, split, small, batch):
    length = 2 * ring * chunk
    ids = [data.draw(document_ids(length)) for _ in range(batch)]
    documents = None if None in ids else torch.tensor(ids)
    with pieces(small):
        check(Pattern(documents=documents, **fields), batch, length, ring, layout, SPLITS[split], exact=False)


def sent(pattern: Pattern, length: int, ring: int, layout: str) -> list[dict[int, int]]:
    """Of each rank: how many rows go to the rank so many places on."""
    return [{hop.distance: len(rows(hop.sent)) for hop in plan if hop.sent} for plan in plans(pattern, length, ring, layout)]


def test_a_dense_pattern_sends_what_the_classic_ring_does():
    assert sent(Pattern(causal=False), 64, 8, "contiguous") == [dict.fromkeys(range(1, 8), 8)] * 8
    for zigzag in sent(Pattern(), 64, 8, "zigzag"):  # everybody's first chunk is before everybody's last one
        assert list(zigzag) == list(range(1, 8)) and set(zigzag.values()) <= {4, 8}


def test_in_the_contiguous_layout_nothing_travels_back():
    assert sent(Pattern(), 64, 4, "contiguous") == [{d: 16 for d in range(1, 4 - rank)} for rank in range(4)]


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_a_window_no_longer_than_a_shard_takes_its_tail_from_one_neighbour(window):
    tail = {1: window - 1} if window > 1 else {}
    assert sent(Pattern(window=window), 64, 8, "contiguous") == [tail] * 7 + [{}]
    both = {1: window - 1, 7: window - 1} if window > 1 else {}
    ends = sent(Pattern(window=window, causal=False), 64, 8, "contiguous")
    assert ends[1:-1] == [both] * 6
    assert ends[0] == {d: n for d, n in both.items() if d == 1} and ends[-1] == {d: n for d, n in both.items() if d == 7}


def test_sinks_travel_to_everybody_and_a_window_to_one():
    got = sent(Pattern(window=5, sinks=2), 64, 8, "contiguous")
    assert got[0] == {1: 2 + 4, **dict.fromkeys(range(2, 8), 2)}
    assert got[1:] == [{1: 4}] * 6 + [{}]


def test_blocks_and_documents_that_end_with_a_shard_send_nothing():
    for pattern in (
        Pattern(block=8),
        Pattern(block=4, sinks=0),
        Pattern(documents=torch.arange(64) // 8),
        Pattern(stride=1, block=None, window=1),
    ):
        assert sent(pattern, 64, 8, "contiguous") == [{}] * 8
    # A document of twelve tokens straddles two shards of eight.
    assert sent(Pattern(documents=torch.arange(64) // 12), 64, 8, "contiguous") == [{1: 8}, {1: 4}, {}, {1: 8}, {1: 4}, {}, {1: 8}, {}][:8]


def test_rows_of_a_batch_share_their_hops():
    """One row's document straddles two shards, the other's does not: the hop takes place, and computes the one row."""
    pattern = Pattern(documents=torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]))
    hop = plans(pattern, 4, 2, "contiguous")[1][1]
    assert hop.received == [(0, 2)]
    assert [batch_rows for batch_rows, _ in hop.tiles] == [slice(0, 1)]


def test_one_rank_with_fewer_queries_than_keys():
    (hop,) = make_plan(Pattern(window=4), 2, 10, 1, 0, "zigzag", whole)
    assert torch.equal(sum(count_pairs(tiles, 2, 10) for _, tiles in hop.tiles), visible(Pattern(window=4), 1, 10)[0, -2:].long())


def test_a_plan_is_made_once_a_pattern():
    pattern = Pattern(window=3)
    first = make_plan(pattern, 8, 8, 4, 1, "zigzag", whole)
    assert make_plan(pattern, 8, 8, 4, 1, "zigzag", whole) is first
    assert make_plan(pattern, 8, 8, 4, 2, "zigzag", whole) is not first
    assert make_plan(pattern, 8, 8, 4, 1, "striped", whole) is not first
    assert make_plan(pattern, 8, 8, 4, 1, "zigzag", cpu.split) is not first


def test_needed_ranges_are_a_union():
    tiles = [Tile(0, 1, 4, 3), Tile(0, 1, 0, 2), Tile(0, 1, 2, 1), Tile(0, 1, 5, 1), Tile(0, 1, 9, 1)]
    assert needed_ranges([(slice(0, 1), tiles[:2]), (slice(1, 2), tiles[2:])]) == [(0, 3), (4, 7), (9, 10)]


BALANCE = {  # the busiest of 8 and of 64 ranks over the mean, at most
    ("causal", "zigzag"): (1.0, 1.0),
    ("causal", "striped"): (1.01, 1.05),
    ("causal", "contiguous"): (1.9, 2.0),
    ("window", "zigzag"): (1.01, 1.02),
    ("window", "striped"): (1.01, 1.02),
    ("window", "contiguous"): (1.01, 1.02),
    ("block", "zigzag"): (1.0, 1.0),
    ("block", "contiguous"): (1.0, 1.0),
    ("block", "striped"): (1.11, 1.97),
    ("stride", "zigzag"): (1.0, 1.0),
    ("stride", "contiguous"): (1.9, 2.0),
    ("bidirectional", "contiguous"): (1.0, 1.0),
    ("documents", "zigzag"): (1.1, 1.7),
    ("documents", "striped"): (1.05, 1.05),
}
WIDE = {
    "causal": dict(), "window": dict(window=64), "block": dict(block=64), "stride": dict(stride=8), "bidirectional": dict(causal=False),
    "documents": dict(documents=torch.arange(4096) // 300),
}  # fmt: skip


@pytest.mark.parametrize("name, layout", BALANCE)
def test_balance_of_work(name, layout):
    """The busiest of 8 and of 64 ranks against the mean, in visible pairs."""
    for ring, most in zip((8, 64), BALANCE[name, layout]):
        assert 1.0 <= imbalance(Pattern(**WIDE[name]), 4096, ring, layout) <= most + 1e-9, ring


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_work_is_the_pairs_that_are_visible(name, layout):
    documents = documents_for(Case(documents="a row each", batch=2), 96)
    pattern = Pattern(documents=documents, **PATTERNS[name])
    mask = visible(pattern, 2, 96)
    positions = [rank_positions(ring_runs(96, 8, rank, layout)) for rank in range(8)]
    assert work(pattern, 96, 8, layout) == [mask[:, own].sum().item() // 2 for own in positions]
    assert imbalance(pattern, 96, 8, layout) == max(work(pattern, 96, 8, layout)) * 8 / sum(work(pattern, 96, 8, layout))


@pytest.mark.parametrize(
    "fields", [dict(), dict(window=64), dict(window=1000), dict(window=64, sinks=4), dict(stride=8), dict(alibi=True)], ids=str
)
@pytest.mark.parametrize("ring", [2, 8])
def test_the_best_layout_gives_nobody_more_work_and_sends_least(fields, ring):
    pattern = Pattern(**fields)
    busiest = {layout: max(work(pattern, 4096, ring, layout)) for layout in LAYOUTS}
    saved = (pattern.window or 0) ** 2 // 2  # by the first queries, whose window is not full yet; it falls to one rank
    assert busiest[pattern.best_layout] <= 1.01 * min(busiest.values()) + saved / ring
    if pattern.window is not None:
        traffic = {layout: sum(sum(rank.values()) for rank in sent(pattern, 4096, ring, layout)) for layout in LAYOUTS}
        assert traffic[pattern.best_layout] == min(traffic.values()) < max(traffic.values())


def test_the_best_layout_follows_the_reach():
    for fields, layout in ((dict(), "zigzag"), (dict(stride=3), "zigzag"), (dict(alibi=True), "zigzag")):
        assert Pattern(**fields).best_layout == layout
    for fields in (dict(window=3), dict(block=3), dict(causal=False), dict(stride=2, window=9)):
        assert Pattern(**fields).best_layout == "contiguous"


def test_pairs_of_a_hop_are_a_mean_over_all_batch_rows():
    pattern = Pattern(documents=torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]))
    hops = make_plan(pattern, 2, 2, 2, 1, "contiguous", whole)
    assert [hop.pairs for hop in hops] == [(2 + 3) // 2, 2 // 2]
