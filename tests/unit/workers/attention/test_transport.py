"""What a ring counts, and that it notices when something else arrives than was sent."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.attention.emulated import Mailboxes, ThreadRing, emulate
from workers.attention.transport import HopCorrupted, Ring, Traffic, checksum

TYPES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def pair(verify: bool = False) -> tuple[ThreadRing, ThreadRing]:
    mailboxes = Mailboxes(timeout=5)
    return tuple(ThreadRing(2, rank, mailboxes, Traffic(), verify) for rank in range(2))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("verify", [False, True])
def test_what_is_sent_arrives_and_is_counted(dtype, verify):
    first, second = pair(verify)
    x, place = torch.randn(3, 5).to(dtype), torch.empty(3, 5, dtype=dtype)
    sending, receiving = first.exchange(1, x, None), second.exchange(1, None, place)
    assert sending.wait() is None
    assert receiving.wait() is place and torch.equal(place, x)
    assert (first.traffic.bytes_sent, first.traffic.messages) == (15 * TYPES[dtype], 1)  # a checksum is no traffic of the pattern's
    assert (second.traffic.bytes_sent, second.traffic.messages) == (0, 0)


def test_nothing_to_send_and_nothing_to_come_is_no_hop():
    ring, _ = pair()
    assert ring.exchange(1, None, None).wait() is None
    assert (ring.traffic.bytes_sent, ring.traffic.messages, ring.traffic.exposed_seconds) == (0, 0, 0.0)


def test_places_count_round_the_ring_both_ways():
    mailboxes = Mailboxes(timeout=5)
    rings = [ThreadRing(3, rank, mailboxes, Traffic()) for rank in range(3)]
    for places in (1, 2, -1, -2):
        places_of = [torch.empty(1) for _ in rings]
        exchanges = [ring.exchange(places, torch.tensor([float(ring.rank)]), place) for ring, place in zip(rings, places_of)]
        assert [exchange.wait().item() for exchange in exchanges] == [(rank - places) % 3 for rank in range(3)]


def test_messages_of_one_way_keep_their_order_and_tags_apart():
    first, second = pair()
    for tag, value in ((0, 1.0), (1, 10.0), (0, 2.0), (1, 20.0)):
        first.exchange(1, torch.tensor([value]), None, tag)
    places = {(tag, turn): torch.empty(1) for turn in range(2) for tag in (1, 0)}
    got = [second.exchange(1, None, place, tag).wait().item() for (tag, _), place in places.items()]
    assert got == [10.0, 1.0, 20.0, 2.0]


def test_waiting_is_counted():
    class Slow:
        def wait(self):
            time.sleep(0.05)

    traffic = Traffic()
    traffic.wait([Slow(), Slow()], torch.device("cpu"))
    assert 0.1 <= traffic.exposed_seconds < 1.0


def test_one_rank_is_a_ring_by_itself():
    ring = Ring(None, Traffic())
    assert (ring.size, ring.rank) == (1, 0)


@given(dtype=st.sampled_from(list(TYPES)), size=st.integers(1, 300), place=st.integers(0, 10**6), bit=st.integers(0, 15))
def test_one_flipped_bit_changes_the_checksum(dtype, size, place, bit):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = checksum(x)
    words = x.view(torch.int16)
    words[place % words.numel()] ^= -(1 << 15) if bit == 15 else 1 << bit
    assert not torch.equal(checksum(x), before)


def test_what_changes_places_changes_the_checksum():
    x = torch.arange(64.0).view(4, 16)
    for moved in (x.flip(0), x.roll(1), x.t().contiguous()):
        assert not torch.equal(checksum(moved), checksum(x))
    assert torch.equal(checksum(x.clone()), checksum(x)) and checksum(x).dtype == torch.int64


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, torch.nan, 1e-40])
def test_any_value_that_arrives_as_sent_is_no_alarm(value):
    first, second = pair(verify=True)
    first.exchange(1, torch.full((4,), value), None)
    assert second.exchange(1, None, torch.empty(4)).wait() is not None


def test_what_arrives_changed_names_both_ranks_and_the_hop(monkeypatch):
    first, second = pair(verify=True)
    put = first._mailboxes.put

    def put_changed(way, tensors):
        tensors[0] = tensors[0].clone()
        tensors[0].view(torch.int32)[2] ^= 1  # the lowest bit of one number
        put(way, tensors)

    monkeypatch.setattr(first._mailboxes, "put", put_changed)
    first.exchange(1, torch.ones(5), None)
    with pytest.raises(HopCorrupted, match="ring rank 1: what came from ring rank 0 at hop 1 of layer 7 does not match"):
        second.exchange(1, None, torch.empty(5), label="hop 1 of layer 7").wait()


def test_without_verification_nothing_is_looked_at():
    first, second = pair(verify=False)
    sent = []
    first._mailboxes.put = lambda way, tensors: sent.append(len(tensors))
    first.exchange(1, torch.ones(5), None)
    assert sent == [1]


def test_without_overlap_a_message_is_there_before_computation_goes_on():
    def rank(mesh):
        ring = mesh.ring_transport
        ring.overlap = False
        received = torch.empty(3)
        exchange = ring.exchange(1, torch.full((3,), float(ring.rank)), received)
        arrived = received.clone()
        assert torch.equal(exchange.wait(), arrived)
        return arrived[0].item()

    assert emulate(3, rank) == [2.0, 0.0, 1.0]
