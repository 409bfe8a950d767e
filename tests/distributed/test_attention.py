"""Ring attention and Ulysses on real ranks against the definition in float64: output and all gradients, on every layout and mesh."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.unit.workers.attention.cases import CAUSAL, PATTERNS, SIZE, VALUES, Case, all_cases, check, errors, some_cases
from workers.attention import Pattern, attend
from workers.attention.layout import positions, shard, unshard
from workers.attention.transport import HopCorrupted
from workers.mesh import LAYOUTS, MeshSpec

MESHES = [
    MeshSpec(ring=ring, ulysses=ulysses, layout=layout)
    for ring, ulysses in [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 2), (3, 2), (4, 2)]
    for layout in (LAYOUTS if ring > 1 else LAYOUTS[:1])
]
SIXTEEN = MeshSpec(ring=8, ulysses=2)


def name_of(spec: MeshSpec) -> str:
    return f"ring{spec.ring}-ulysses{spec.ulysses}-{spec.layout}"


def compare(spec: MeshSpec, cases: list[Case]) -> list:
    mesh = spec.build("cpu")
    return [errors(mesh, case, spec.padded(case.length)) for case in cases]


def run(world, spec: MeshSpec, cases: list[Case]) -> None:
    by_rank = world.run(compare, ranks=spec.world, spec=spec, cases=cases)
    for case, results in zip(cases, zip(*by_rank)):
        check(results, case, spec.padded(case.length))


def cases_for(spec: MeshSpec) -> list[Case]:
    """Every mesh sees every value of every parameter; the smallest ones see every pattern with every kind of documents."""
    cases = some_cases(16, spec)
    if spec.world == 2 and spec.layout == "zigzag":
        cases += [
            case._replace(documents=name) for fields in VALUES["fields"] for name, case in zip(VALUES["documents"], all_cases(fields)[::7])
        ]
    return cases


@pytest.mark.parametrize("spec", MESHES, ids=name_of)
def test_out_and_gradients_equal_the_definition(world, spec):
    run(world, spec, cases_for(spec))


def test_sixteen_ranks(world):
    """A ring of eight with two ulysses ranks each."""
    run(world, SIXTEEN, [case._replace(small_pieces=False) for case in some_cases(16, "sixteen")])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ulysses, heads", [(2, (8, 1)), (2, (2, 1)), (4, (8, 2)), (4, (4, 1)), (2, (6, 2)), (4, (8, 4))])
def test_fewer_kv_heads_than_ulysses_ranks(world, ulysses, heads, layout):
    """Heads are copied where there are too few; the memory's are too, and ALiBi's slopes stay with their query heads."""
    cases = [
        Case(tuple(PATTERNS[name].items()), documents, heads, 2, torch.float64, 45, memory)
        for name, documents, memory in (("alibi", "none", 3), ("alibi, window and sinks", "a row each", 0), ("causal", "in order", 2))
    ]
    run(world, MeshSpec(ring=1 if ulysses == 4 else 2, ulysses=ulysses, layout=layout), cases)


def slopes_of_tensor_ranks(spec: MeshSpec) -> list[float]:
    mesh = spec.build("cpu")
    q, k = torch.zeros(1, 8, 4, SIZE), torch.zeros(1, 8, 4, SIZE)
    v = torch.arange(8.0).view(1, 8, 1, 1).expand(1, 8, 4, SIZE).contiguous()
    local = [shard(x, mesh, 1) for x in (q, k, v)]
    return unshard(attend(*local, Pattern(alibi=True), mesh=mesh), mesh, 1)[0, -1, :, 0].tolist()


def test_slopes_are_those_of_the_heads_of_the_whole_model(world):
    """Eight heads on two tensor ranks, each of which spreads its four over two ulysses ranks."""
    by_rank = world.run(slopes_of_tensor_ranks, ranks=4, spec=MeshSpec(ulysses=2, tp=2))
    place = torch.arange(8.0, dtype=torch.float64)
    weights = (-torch.tensor([2.0**-head for head in range(1, 9)])[:, None].double() * (7 - place)).softmax(-1)
    for rank, got in enumerate(by_rank):
        tensor_rank = rank % 2
        wanted = (weights @ place)[4 * tensor_rank : 4 * tensor_rank + 4]
        torch.testing.assert_close(torch.tensor(got), wanted.float(), rtol=1e-5, atol=1e-5)


def test_scores_of_ten_thousand_do_not_overflow(world):  # A2
    cases = [Case(tuple(PATTERNS[name].items()), length=32, memory=2, magnitude=1e4) for name in ("causal", "window and sinks", "alibi")]
    for results in world.run(compare, ranks=4, spec=MeshSpec(ring=4), cases=cases):
        for rank_errors, _ in results:
            assert max(rank_errors) <= 1e-9


def later_changes(spec: MeshSpec, names: list[str], token: int) -> list[bool]:
    """Of each pattern: whether what stands before ``token`` is as it was, bit for bit, and the token itself is not."""
    mesh = spec.build("cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 48, heads, SIZE, generator=generator) for heads in (8, 2, 2)]
    held = positions(48, mesh)
    unchanged = []
    for name in names:
        pattern = Pattern(**PATTERNS[name])
        before, after = (attend(*(shard(x, mesh, 1) for x in inputs), pattern, mesh=mesh) for inputs in (tensors, _with(tensors, token)))
        same = torch.equal(before[:, held < token], after[:, held < token])
        other = not (held == token).any() or not torch.equal(before[:, held == token], after[:, held == token])
        unchanged.append(same and other)
    return unchanged


def _with(tensors: list[torch.Tensor], token: int) -> list[torch.Tensor]:
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[:, token] += 10
    return changed


@pytest.mark.parametrize("token", [1, 23, 47])
@pytest.mark.parametrize(
    "spec", [MeshSpec(ring=4), MeshSpec(ring=2, ulysses=2, layout="striped"), MeshSpec(ring=2, layout="contiguous")], ids=name_of
)
def test_what_comes_later_changes_nothing_before_bit_for_bit(world, spec, token):
    for unchanged in world.run(later_changes, ranks=spec.world, spec=spec, names=list(CAUSAL), token=token):
        assert dict(zip(CAUSAL, unchanged)) == dict.fromkeys(CAUSAL, True)


def round_trip(spec: MeshSpec, length: int) -> bool:
    mesh = spec.build("cpu")
    x = torch.arange(3 * length * 2).view(3, length, 2)
    local = shard(x, mesh, 1)
    assert torch.equal(local[0, :, 0] // 2, positions(length, mesh))
    assert torch.equal(unshard(local, mesh, 1), x)
    with pytest.raises(ValueError, match=str(length + 1)):
        positions(length + 1, mesh)
    return True


@pytest.mark.parametrize("spec", MESHES, ids=name_of)
def test_unshard_is_the_inverse_of_shard(world, spec):
    assert all(world.run(round_trip, ranks=spec.world, spec=spec, length=2 * spec.cp * 3))


def count_bytes(spec: MeshSpec, length: int, heads: int, kv_heads: int, fields: dict) -> tuple[int, int]:
    mesh = spec.build("cpu")
    local = length // spec.cp
    q = torch.randn(1, local, heads, SIZE, requires_grad=True)
    k, v = (torch.randn(1, local, kv_heads, SIZE, requires_grad=True) for _ in range(2))
    out = attend(q, k, v, Pattern(**fields), mesh=mesh)
    forward = mesh.traffic.bytes_sent
    out.sum().backward()
    return forward, mesh.traffic.bytes_sent - forward


@pytest.mark.parametrize("ulysses", [1, 2])
def test_only_kv_heads_travel(world, ulysses):
    row = 2 * 2 // ulysses * SIZE * 4  # keys and values of two KV heads in float32, or of one
    spec = MeshSpec(ring=4, ulysses=ulysses)
    all_to_alls = (6 + 2 + 2 + 6) * (64 // spec.cp) * SIZE * 4 * (ulysses - 1) // ulysses
    for forward, backward in world.run(count_bytes, ranks=spec.world, spec=spec, length=64, heads=6, kv_heads=2, fields=dict(causal=False)):
        assert forward == 3 * 16 * row + all_to_alls
        assert backward == 3 * 16 * row + 3 * 16 * row + all_to_alls


def test_a_window_sends_its_tail_to_one_neighbour(world):
    spec = MeshSpec(ring=4, layout="contiguous")
    measured = world.run(count_bytes, ranks=4, spec=spec, length=64, heads=6, kv_heads=2, fields=dict(window=6))
    row = 2 * 2 * SIZE * 4
    assert [forward for forward, _ in measured] == [5 * row] * 3 + [0]
    assert [backward for _, backward in measured] == [5 * row, 10 * row, 10 * row, 5 * row]


def corrupted(spec: MeshSpec, rank: int, hop: int) -> str | None:
    """What ring rank ``rank`` says when a bit of what comes to it at ``hop`` is flipped; None where nothing is amiss."""
    mesh = spec.build("cpu")
    ring = mesh.ring_transport
    ring.verify = True
    transfer, hops = ring._transfer, itertools.count(1)

    class Flip:
        def __init__(self, requests, x):
            self.requests, self.x = requests, x

        def wait(self):
            for request in self.requests:
                request.wait()
            self.x.view(torch.int32).view(-1)[7] ^= 1 << 3

    def transfer_badly(outgoing, target, incoming, source, tag):
        requests = transfer(outgoing, target, incoming, source, tag)
        return [Flip(requests, incoming[0])] if next(hops) == hop and incoming and ring.rank == rank else requests

    ring._transfer = transfer_badly
    q, k, v = (torch.randn(1, 8, 2, SIZE) for _ in range(3))
    said = None
    try:
        attend(q, k, v, Pattern(causal=False), mesh=mesh, where=" in layer 5")
    except HopCorrupted as error:
        said = str(error)
    dist.barrier()
    return said


@pytest.mark.parametrize("ring, hop", [(2, 1), (4, 3)])
def test_a_corrupted_hop_is_named_by_the_rank_that_it_came_to(world, ring, hop):
    """The last hop, for nobody waits for the rank that stops there."""
    said = world.run(corrupted, ranks=ring, spec=MeshSpec(ring=ring), rank=1, hop=hop)
    assert f"ring rank 1: what came from ring rank {(1 - hop) % ring} at hop {hop} of the forward in layer 5" in said.pop(1)
    assert said == [None] * (ring - 1)
    assert world.run(corrupted, ranks=ring, spec=MeshSpec(ring=ring), rank=-1, hop=hop) == [None] * ring


def count_all_to_alls(spec: MeshSpec, length: int, heads: int, kv_heads: int, size: int):
    mesh = spec.build("cpu")
    local = length // spec.cp
    q, k, v = (torch.randn(1, local, n, size, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    attend(q, k, v, Pattern(), mesh=mesh).sum().backward()
    return mesh.traffic.bytes_sent, mesh.traffic.exposed_seconds


def test_the_all_to_alls_are_counted_and_waited_for_in_the_open(world):
    """q, k, v and out, and their gradients: 3 of 4 parts of each leave the rank; 2 KV heads are repeated to 4."""
    expected = 2 * (8 + 4 + 4 + 8) * 16 * 16 * 4 * 3 // 4
    for sent, waited in world.run(count_all_to_alls, ranks=4, spec=MeshSpec(ulysses=4), length=64, heads=8, kv_heads=2, size=16):
        assert sent == expected and waited > 0
