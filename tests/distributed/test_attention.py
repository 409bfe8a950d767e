"""Ring attention against its definition in float64: output and all gradients, on every layout and mesh."""

import itertools

import pytest
import torch

from tests import attention_reference
from workers.attention import Pattern, attend
from workers.attention.layout import positions, shard, unshard
from workers.mesh import MeshSpec

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def documents_for(name: str, batch: int, length: int) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(length)
    if name == "none":
        return None
    if name == "one row":
        return torch.arange(length) // 5
    if name == "per row":
        cuts = torch.rand(batch, length, generator=generator) < 0.15
        return cuts.cumsum(1)
    assert name == "returning"  # a document id that comes back after another document
    return (torch.arange(length) // 3) % 2


def compare(mesh, length: int, batch: int, heads: int, kv_heads: int, dtype, causal: bool, documents: str, magnitude: float = 1.0):
    """The largest error of out, dq, dk, dv of this rank, relative to the largest value of each."""
    generator = torch.Generator().manual_seed(7)
    q, grad = (torch.randn(batch, length, heads, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, length, kv_heads, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    q = (q * magnitude).to(dtype).double()
    pattern = Pattern(causal=causal, documents=documents_for(documents, batch, length))

    whole = [x.clone().requires_grad_() for x in (q, k.to(dtype).double(), v.to(dtype).double())]
    expected = attention_reference.attention(*whole, pattern)
    expected.backward(grad.to(dtype).double())

    local = [shard(x.detach(), mesh, 1).to(dtype).requires_grad_() for x in (q, k, v)]
    out = attend(*local, pattern, mesh=mesh)
    out.backward(shard(grad, mesh, 1).to(dtype))
    errors = []
    for got, want in zip((out, *(x.grad for x in local)), (expected, *(x.grad for x in whole))):
        want = want.detach()
        error = (got.detach().double() - shard(want, mesh, 1)).abs().max() / want.abs().max()
        assert torch.isfinite(got).all()
        errors.append(error.item())
    return errors


def compare_many(spec: MeshSpec, cases: list[dict]):
    mesh = spec.build("cpu")
    return [compare(mesh, **case) for case in cases]


MESHES = [
    MeshSpec(ring=ring, ulysses=ulysses, layout=layout)
    for ring, ulysses in [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2)]
    for layout in (("zigzag", "contiguous", "striped") if ring > 1 else ("zigzag",))
]


@pytest.mark.parametrize("spec", MESHES, ids=lambda s: f"ring{s.ring}-ulysses{s.ulysses}-{s.layout}")
def test_out_and_gradients_equal_the_definition(world, spec):
    cases = [
        dict(length=2 * spec.cp * chunk, batch=batch, heads=heads, kv_heads=kv_heads, dtype=dtype, causal=causal, documents=documents)
        for chunk, batch, (heads, kv_heads), dtype, causal, documents in itertools.product(
            (1, 7), (1, 3), ((2, 2), (6, 2)), (torch.float64, torch.float32), (True, False), ("none", "one row", "per row", "returning")
        )
    ]
    if spec.world > 2:  # every mesh sees every value of every parameter; small meshes see all their combinations
        cases = cases[:: 5 if spec.world < 8 else 11]
    for rank_errors in world.run(compare_many, ranks=spec.world, spec=spec, cases=cases):
        for case, errors in zip(cases, rank_errors):
            assert max(errors) <= TOLERANCE[case["dtype"]], (case, errors)


def test_scores_of_ten_thousand_do_not_overflow(world):  # A2
    case = dict(length=32, batch=1, heads=2, kv_heads=2, dtype=torch.float64, causal=True, documents="none", magnitude=1e4)
    for errors in world.run(compare_many, ranks=4, spec=MeshSpec(ring=4), cases=[case]):
        assert max(errors[0]) <= 1e-9


def round_trip(spec: MeshSpec, length: int):
    mesh = spec.build("cpu")
    x = torch.arange(3 * length * 2).view(3, length, 2)
    local = shard(x, mesh, 1)
    assert torch.equal(local[0, :, 0] // 2, positions(length, mesh))
    assert torch.equal(unshard(local, mesh, 1), x)
    with pytest.raises(ValueError, match=str(length + 1)):
        positions(length + 1, mesh)
    return True


@pytest.mark.parametrize("spec", MESHES, ids=lambda s: f"ring{s.ring}-ulysses{s.ulysses}-{s.layout}")
def test_unshard_is_the_inverse_of_shard(world, spec):
    assert all(world.run(round_trip, ranks=spec.world, spec=spec, length=2 * spec.cp * 3))


def count_bytes(spec: MeshSpec, length: int, heads: int, kv_heads: int):
    mesh = spec.build("cpu")
    local = length // spec.cp
    q = torch.randn(1, local, heads, 8, requires_grad=True)
    k, v = (torch.randn(1, local, kv_heads, 8, requires_grad=True) for _ in range(2))
    out = attend(q, k, v, Pattern(), mesh=mesh)
    forward = mesh.traffic.bytes_sent
    out.sum().backward()
    return forward, mesh.traffic.bytes_sent - forward


def test_only_kv_heads_travel(world):
    kv = 2 * 1 * 16 * 2 * 8 * 4
    for forward, backward in world.run(count_bytes, ranks=4, spec=MeshSpec(ring=4), length=64, heads=6, kv_heads=2):
        assert forward == 3 * kv
        assert backward == 3 * kv + 4 * kv
