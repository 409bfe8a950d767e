"""Rings whose ranks are threads: exactness for every pattern, what travels on rings of 8, 64 and 256, and what happens when a rank fails."""

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_reference import visible
from tests.unit.workers.attention.cases import (
    CAUSAL,
    PATTERNS,
    SIZE,
    VALUES,
    Case,
    all_cases,
    check_emulated,
    document_ids,
    documents_for,
    errors,
    expected,
    leaves,
    pattern_fields,
    rank_positions,
    some_cases,
)
from workers.attention import Pattern, attend
from workers.attention.emulated import Mailboxes, emulate
from workers.attention.layout import positions, ring_runs, shard
from workers.attention.transport import HopCorrupted
from workers.mesh import LAYOUTS, MeshSpec

RINGS = [(ring, layout) for ring in (1, 2, 3, 4, 8) for layout in (LAYOUTS if ring > 1 else LAYOUTS[:1])]


@pytest.mark.parametrize("fields", VALUES["fields"], ids=list(PATTERNS))
def test_one_rank_computes_every_combination_exactly(fields):
    for case in all_cases(fields):
        check_emulated(case, 1, "zigzag")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", VALUES["fields"], ids=list(PATTERNS))
def test_a_ring_of_two_computes_every_pattern_and_document_exactly(fields, layout):
    for documents, case in zip(VALUES["documents"], some_cases(16, (fields, layout))):
        check_emulated(case._replace(fields=fields, documents=documents), 2, layout)


@pytest.mark.parametrize("ring, layout", RINGS)
def test_out_and_gradients_equal_the_definition(ring, layout):
    """Every ring and layout sees every pattern, kind of documents, number of heads, batch size, type, block size and length."""
    for case in some_cases(16, (ring, layout)):
        check_emulated(case, ring, layout)


@settings(max_examples=60)
@given(
    data=st.data(), ring=st.sampled_from([1, 2, 3, 4]), layout=st.sampled_from(LAYOUTS), fields=pattern_fields(), chunk=st.integers(1, 5),
    batch=st.sampled_from([1, 2]), heads=st.sampled_from(VALUES["heads"]), memory=st.sampled_from([0, 1, 4]), small=st.booleans(),
    backend=st.sampled_from(VALUES["backend"]),
)  # fmt: skip
def test_any_pattern_and_documents_are_exact(data, ring, layout, fields, chunk, batch, heads, memory, small, backend):
    length = 2 * ring * chunk
    ids = [data.draw(document_ids(length)) for _ in range(batch)]
    documents = "none" if None in ids else tuple(ids)
    check_emulated(Case(tuple(fields.items()), documents, heads, batch, torch.float64, length, memory, small, backend), ring, layout)


@pytest.mark.parametrize("name", ["causal", "window and sinks", "alibi", "bidirectional"])
def test_scores_of_ten_thousand_do_not_overflow(name):  # A2
    for (ring, layout), dtype in itertools.product([(1, "zigzag"), (4, "zigzag"), (4, "striped")], (torch.float64, torch.float32)):
        case = Case(tuple(PATTERNS[name].items()), length=32, heads=(6, 2), dtype=dtype, memory=2, magnitude=1e4)
        expected(case, 32)
        for rank_errors, of_memory in emulate(ring, lambda mesh, case=case: errors(mesh, case, 32), layout):
            assert torch.isfinite(torch.tensor(rank_errors)).all() and torch.isfinite(torch.tensor(of_memory)).all()
            # A score's last digit is worth the more the larger it is; what does not round is as good as ever.
            assert max(rank_errors) <= 1e-9 if dtype == torch.float64 else rank_errors[0] <= 1e-2, (ring, layout, dtype, rank_errors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_on_two_ranks_are_what_one_rank_computes(layout):  # A5
    length, documents = 96, torch.tensor([0] * 30 + [1] * 1 + [2] * 41 + [3] * 24)
    q, k, v, grad = (torch.randn(2, length, 2, SIZE, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(4))

    def function(mesh):
        local = leaves(shard(x, mesh, 1) for x in (q, k, v))
        out = attend(*local, Pattern(documents=documents), mesh=mesh)
        out.backward(shard(grad, mesh, 1))
        return [out.detach(), *(x.grad for x in local)], positions(length, mesh)

    whole = [torch.empty_like(q) for _ in range(4)]
    for parts, held in emulate(2, function, layout):
        for x, part in zip(whole, parts):
            x[:, held] = part
    (alone, _), = emulate(1, function)  # fmt: skip
    for ours, theirs in zip(whole, alone):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("documents", ["none", "padding apart", "returning"])
@pytest.mark.parametrize("ring", [2, 8])
def test_bidirectional_in_the_zigzag_layout(ring, documents):  # A6
    for fields in (dict(causal=False), dict(causal=False, window=20), dict(causal=False, block=11)):
        check_emulated(Case(tuple(fields.items()), documents, (6, 2), 2), ring, "zigzag")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_ring_in_bfloat16_errs_little_more_than_one_rank(layout):  # A12
    case = Case(heads=(6, 2), dtype=torch.bfloat16, length=512)
    want = expected(case, 512)

    def largest(ring):
        parts = emulate(ring, absolute, layout)
        return [max(values) for values in zip(*parts)]

    def absolute(mesh):
        local = leaves((shard(x, mesh, 1) for x in want.inputs[:3]), torch.bfloat16)
        out = attend(*local, pattern, mesh=mesh)
        out.backward(shard(want.grad, mesh, 1).bfloat16())
        pairs = zip((out, *(x.grad for x in local)), (want.out, *want.grads))
        return [(got.detach().double() - shard(wanted, mesh, 1)).abs().max().item() for got, wanted in pairs]

    pattern = Pattern()
    for name, ours, alone in zip(("out", "dq", "dk", "dv"), largest(8), largest(1)):
        assert 0 < ours <= 1.5 * alone, name


def outputs(tensors, pattern: Pattern, ring: int, layout: str) -> torch.Tensor:
    """out of a whole sequence, gathered from the ranks."""
    whole = torch.empty_like(tensors[0])

    def function(mesh):
        return positions(whole.shape[1], mesh), attend(*(shard(x, mesh, 1) for x in tensors), pattern, mesh=mesh)

    for held, part in emulate(ring, function, layout):
        whole[:, held] = part
    return whole


@pytest.mark.parametrize("name", CAUSAL)
def test_what_comes_later_changes_nothing_before_bit_for_bit(name):
    for ring, layout in [(1, "zigzag"), (2, "zigzag"), (3, "contiguous"), (4, "striped"), (4, "zigzag")]:
        documents = torch.arange(48) // 31 if ring == 3 else None
        pattern = Pattern(documents=documents, **CAUSAL[name])
        tensors = [torch.randn(1, 48, heads, SIZE, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 2)]
        before = outputs(tensors, pattern, ring, layout)
        for token in (1, 24, 29, 47):
            changed = [x.clone() for x in tensors]
            for x in changed:
                x[:, token] += 10
            after = outputs(changed, pattern, ring, layout)
            assert torch.equal(after[:, :token], before[:, :token]), (ring, layout, token)
            assert not torch.equal(after[:, token], before[:, token])


# What travels.


def rows_sent(pattern: Pattern, batch: int, length: int, ring: int, layout: str) -> list[list[int]]:
    """Of each rank: how many of its rows each other rank sees, in order of distance; from the full mask."""
    mask = visible(pattern, batch, length).any(0)
    held = [rank_positions(ring_runs(length, ring, rank, layout)) for rank in range(ring)]
    return [
        [mask[held[(rank + d) % ring][:, None], held[rank]].any(0).sum().item() for d in range(1, ring)]
        for rank in range(ring)
    ]  # fmt: skip


def count_bytes(pattern: Pattern, batch: int, length: int, heads: tuple[int, int], dtype, ring: int, layout: str, verify: bool = False):
    """(bytes, hops) sent in forward and in backward, by rank."""

    def function(mesh):
        shapes = [(batch, length // ring, count, SIZE) for count in (heads[0], heads[1], heads[1])]
        tensors = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        out = attend(*tensors, pattern, mesh=mesh)
        forward = (mesh.traffic.bytes_sent, mesh.traffic.messages)
        out.sum().backward()
        return forward, (mesh.traffic.bytes_sent - forward[0], mesh.traffic.messages - forward[1])

    return emulate(ring, function, layout, verify)


def check_traffic(pattern: Pattern, ring: int, layout: str, length: int, batch: int = 1, heads=(2, 2), dtype=torch.float32, verify=False):
    """Keys and values to whom they are needed, and in backward their gradients home from there, as ``ring`` says."""
    sent = rows_sent(pattern, batch, length, ring, layout)
    row = 2 * batch * heads[1] * SIZE
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    measured = count_bytes(pattern, batch, length, heads, dtype, ring, layout, verify)
    for rank, (forward, backward) in enumerate(measured):
        hops = sum(n > 0 for n in sent[rank])
        assert forward == (row * sum(sent[rank]) * size, hops), rank
        # Home go the gradients of what others sent here.
        received = [sent[(rank - d) % ring][d - 1] for d in range(1, ring)]
        assert backward == (row * (sum(sent[rank]) * size + sum(received) * wide), hops + sum(n > 0 for n in received)), rank
    return sent


SPARSE = [name for name, fields in PATTERNS.items() if "stride" not in fields]  # a stride's rows are fetched with those between


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", SPARSE)
def test_bytes_are_those_of_the_rows_that_are_seen(name, layout):
    other = ("in order", (6, 2), torch.float32) if layout == "zigzag" else ("none", (2, 2), torch.float64)
    for documents, heads, dtype in (other, ("a row each", (8, 1), torch.bfloat16)):
        pattern = Pattern(documents=documents_for(Case(documents=documents, batch=2), 64), **PATTERNS[name])
        check_traffic(pattern, 8, layout, 64, batch=2, heads=heads, dtype=dtype)


def test_a_dense_ring_sends_everything_to_everybody():
    sent = check_traffic(Pattern(causal=False), 8, "zigzag", 64, heads=(8, 1), dtype=torch.bfloat16)
    assert sent == [[8] * 7] * 8


def test_checksums_are_not_counted():
    check_traffic(Pattern(causal=False), 4, "striped", 32, verify=True)


def test_a_window_on_sixty_four_ranks_sends_its_tail_to_one_neighbour():
    sent = check_traffic(Pattern(window=5), 64, "contiguous", 512)
    assert sent == [[4] + [0] * 62] * 63 + [[0] * 63]


def test_documents_on_sixty_four_ranks_travel_no_further_than_they_reach():
    sent = check_traffic(Pattern(documents=torch.arange(512) // 12), 64, "contiguous", 512)
    assert max(sum(n > 0 for n in rank) for rank in sent) == 1 and any(sum(rank) == 0 for rank in sent)


def test_sinks_on_sixty_four_ranks_come_from_the_first():
    sent = check_traffic(Pattern(window=3, sinks=2), 64, "contiguous", 512)
    assert sent[0] == [2 + 2] + [2] * 62 and sent[1] == [2] + [0] * 62


def test_blocks_on_sixty_four_ranks_do_not_travel():
    assert check_traffic(Pattern(block=8), 64, "contiguous", 512) == [[0] * 63] * 64


def test_a_window_on_two_hundred_and_fifty_six_ranks_reaches_two_neighbours():
    sent = check_traffic(Pattern(window=4), 256, "contiguous", 512)
    assert sent == [[2, 1] + [0] * 253] * 254 + [[2] + [0] * 254, [0] * 255]


@pytest.mark.parametrize("name", ["window and sinks", "block", "causal"])
def test_a_long_ring_is_exact(name):
    check_emulated(Case(tuple(PATTERNS[name].items()), documents="padding apart", length=90), 16, Pattern(**PATTERNS[name]).best_layout)


# What goes wrong.


def flip_a_bit(monkeypatch, way: tuple[int, int, int], turn: int):
    """Change one bit of the ``turn``-th message of a way (source, target, tag), as it is delivered."""
    take, taken = Mailboxes.take, []

    def take_changed(self, asked):
        message = take(self, asked)
        if asked == way:
            taken.append(asked)
            if len(taken) == turn:
                message[0].view(torch.int16).view(-1)[3] ^= 1 << 4
        return message

    monkeypatch.setattr(Mailboxes, "take", take_changed)


def step(mesh, where: str = " in layer 3"):
    q, k, v = (torch.randn(1, 8, 2, SIZE, generator=torch.Generator().manual_seed(mesh.ring_rank), requires_grad=True) for _ in range(3))
    attend(q, k, v, Pattern(), mesh=mesh, where=where).sum().backward()
    return True


@pytest.mark.parametrize(
    "way, turn, said",
    [
        ((1, 2, 0), 1, "ring rank 2: what came from ring rank 1 at hop 1 of the forward in layer 3 does not match its checksum"),
        ((0, 2, 0), 1, "ring rank 2: what came from ring rank 0 at hop 2 of the forward in layer 3 "),
        ((3, 0, 0), 2, "ring rank 0: what came from ring rank 3 at hop 1 of the backward in layer 3 "),
        ((2, 0, 1), 1, "ring rank 0: what came from ring rank 2 at hop 2 of the gradients in layer 3 "),
    ],
)
def test_a_corrupted_hop_is_named(monkeypatch, way, turn, said):
    flip_a_bit(monkeypatch, way, turn)
    with pytest.raises(HopCorrupted, match=said):
        emulate(4, step, verify=True)


def test_a_corrupted_hop_goes_unseen_where_nobody_looks(monkeypatch):
    flip_a_bit(monkeypatch, (1, 2, 0), 1)
    assert emulate(4, step, verify=False) == [True] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verification_raises_no_false_alarm_and_changes_nothing(layout):
    for case in some_cases(16, ("verify", layout))[:6]:
        check_emulated(case, 4, layout, verify=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_a_rank_is_raised_and_nobody_waits_for_it(failing):
    def function(mesh):
        if mesh.ring_rank == failing:
            raise KeyError("this rank alone")
        step(mesh)

    before, start = threading.active_count(), time.monotonic()
    with pytest.raises(KeyError, match="this rank alone"):
        emulate(4, function)
    assert time.monotonic() - start < 30 and threading.active_count() == before


@pytest.mark.timeout(60)
def test_a_rank_that_leaves_early_is_missed_by_name():
    mailboxes = Mailboxes(timeout=0.2)
    with pytest.raises(TimeoutError, match=r"ring rank 1 waited 0\.2 s for ring rank 0"):
        mailboxes.take((0, 1, 0))


def test_what_each_rank_returns_comes_in_order():
    assert emulate(8, lambda mesh: (mesh.ring_rank, mesh.cp_rank, mesh.layout, mesh.ring), "striped") == [
        (r, r, "striped", 8) for r in range(8)
    ]


def test_a_sent_buffer_may_be_used_again():
    """As on a wire: what arrives is what it held when it was sent."""

    def function(mesh):
        buffer, place = torch.full((2,), float(mesh.ring_rank)), torch.empty(2)
        exchange = mesh.ring_transport.exchange(1, buffer, place)
        buffer.fill_(-1)
        return exchange.wait().tolist()

    assert emulate(3, function) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_an_emulated_mesh_holds_what_its_spec_says():
    spec = MeshSpec(ring=4, layout="contiguous")
    held = emulate(4, lambda mesh: (mesh.spec, positions(16, mesh).tolist()), "contiguous")
    assert held == [(spec, list(range(4 * rank, 4 * rank + 4))) for rank in range(4)]
