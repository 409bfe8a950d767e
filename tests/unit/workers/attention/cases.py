"""What the attention tests share: patterns, a tile's pairs counted one by one, and the comparison of a mesh with the definition."""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import lru_cache
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tests import attention_reference
from workers.attention import Pattern, attend, plan
from workers.attention.emulated import emulate
from workers.attention.kernels import cpu, reference
from workers.attention.layout import shard
from workers.attention.tile import Tile
from workers.mesh import MeshSpec

SIZE = 8  # of a head
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

PATTERNS = {
    "causal": dict(),
    "bidirectional": dict(causal=False),
    "window": dict(window=5),
    "wide window": dict(window=25),
    "bidirectional window": dict(window=4, causal=False),
    "window and sinks": dict(window=7, sinks=2),
    "block": dict(block=6),
    "block and sinks": dict(block=6, sinks=1),
    "bidirectional blocks": dict(block=9, causal=False),
    "stride": dict(stride=3),
    "dilated window": dict(stride=4, window=20),
    "bidirectional stride and sinks": dict(stride=3, sinks=2, causal=False),
    "alibi": dict(alibi=True),
    "alibi, window and sinks": dict(alibi=True, window=11, sinks=3),
    "alibi and stride": dict(alibi=True, stride=2),
    "alibi and block": dict(alibi=True, block=10),
}
CAUSAL = {name: fields for name, fields in PATTERNS.items() if fields.get("causal", True)}


class Case(NamedTuple):
    """One comparison. ``documents`` is a name (see ``documents_for``) or the ids themselves, one tuple a batch row."""

    fields: tuple = ()
    documents: str | tuple = "none"
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    dtype: torch.dtype = torch.float64
    length: int = 29
    memory: int = 0
    small_pieces: bool = False
    backend: str = "auto"
    magnitude: float = 1.0


VALUES = dict(
    fields=[tuple(fields.items()) for fields in PATTERNS.values()],
    documents=["none", "in order", "a row each", "returning", "padding apart", "padding as a document"],
    heads=[(2, 2), (6, 2), (8, 1)],  # 1, 3 and 8 queries a key; one KV head is fewer than two ulysses ranks
    batch=[1, 3],
    dtype=[torch.float64, torch.float32],
    length=[29, 58],  # which divide on no mesh but the smallest: see MeshSpec.padded
    memory=[0, 3],
    small_pieces=[True, False],
    backend=["auto", "reference"],
)


def all_cases(fields: tuple) -> list[Case]:
    """Every combination of documents, heads and type; the other parameters by turns."""
    whole = itertools.product(*(VALUES[name] for name in ("documents", "heads", "dtype")))
    others = list(itertools.product(*(VALUES[name] for name in ("batch", "memory", "small_pieces", "backend"))))
    chance = random.Random(str(fields))
    return [
        Case(fields, documents, heads, batch, dtype, 29, memory, small, backend)
        for documents, heads, dtype in whole
        for batch, memory, small, backend in [chance.choice(others)]
    ]


def some_cases(count: int, seed) -> list[Case]:
    """``count`` cases, as good as random, in which every value of every parameter occurs."""
    chance = random.Random(str(seed))  # a string's own hash differs from run to run
    columns = []
    for values in VALUES.values():
        assert count >= len(values)
        column = (values * count)[:count]
        chance.shuffle(column)
        columns.append(column)
    return [Case(*row) for row in zip(*columns)]


def documents_for(case: Case, length: int) -> torch.Tensor | None:
    """Document ids of ``case`` whose sequences of ``case.length`` tokens are padded to ``length``."""
    index = torch.arange(length)
    match case.documents:
        case "none":
            return None
        case "in order":
            return index // 13
        case "a row each":
            return (torch.rand(case.batch, length, generator=torch.Generator().manual_seed(length)) < 0.1).cumsum(1)
        case "returning":  # a document's id comes back after another document
            return (index // 5) % 2
        case "padding apart":
            return torch.where(index < case.length, 0, -1)
        case "padding as a document":
            return torch.where(index < case.length, index // 20, 99)
    return torch.tensor(case.documents)


@contextlib.contextmanager
def pieces(small: bool):
    """Kernel calls and ladders so small that short sequences are cut into many."""
    constants = [(cpu, "SQUARE", 4), (cpu, "STRIP", 3), (reference, "ROWS", 5), (reference, "COLUMNS", 7), (plan, "RUNG_TOKENS", 12)]
    before = [getattr(module, name) for module, name, _ in constants]
    for module, name, value in constants if small else ():
        setattr(module, name, value)
    yield
    for (module, name, _), value in zip(constants, before):
        setattr(module, name, value)


class Expected(NamedTuple):
    """Rounded inputs and the definition's answer: q, k, v and the memory's; their gradients."""

    inputs: list[torch.Tensor]
    grad: torch.Tensor
    out: torch.Tensor
    grads: list[torch.Tensor]


@lru_cache(maxsize=512)
def expected(case: Case, length: int) -> Expected:
    generator = torch.Generator().manual_seed(7)
    (heads, kv_heads), rows = case.heads, (case.batch, length)
    shapes = [(*rows, heads), (*rows, kv_heads), (*rows, kv_heads), (case.memory, kv_heads), (case.memory, kv_heads), (*rows, heads)]
    *inputs, grad = (torch.randn(*shape, SIZE, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs[0] *= case.magnitude
    *inputs, grad = (x.to(case.dtype).double() for x in (*inputs, grad))
    wide = [x.clone().requires_grad_() for x in inputs]
    pattern = Pattern(documents=documents_for(case, length), **dict(case.fields))
    out = attention_reference.attention(*wide[:3], pattern, memory=wide[3:] if case.memory else None)
    out.backward(grad)
    return Expected(inputs, grad, out.detach(), [x.grad for x in wide[: 5 if case.memory else 3]])


def leaves(tensors, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Copies that gradients arrive at."""
    return [x.detach().to(dtype, copy=True).requires_grad_() for x in tensors]


def run(mesh, case: Case, pattern: Pattern, want: Expected) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """out, dq, dk, dv of this rank, and this rank's part of the memory's gradients."""
    local = leaves((shard(x, mesh, 1) for x in want.inputs[:3]), case.dtype)
    memory = leaves(want.inputs[3:], case.dtype) if case.memory else None
    out = attend(*local, pattern, mesh=mesh, backend=case.backend, memory=tuple(memory) if memory else None)
    out.backward(shard(want.grad, mesh, 1).to(case.dtype))
    return [out.detach(), *(x.grad for x in local)], [x.grad for x in memory or ()]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error relative to the largest value, NaN if there is one."""
    return ((got.double() - want).abs().max() / want.abs().max().clamp(min=0.1)).item() if want.numel() else 0.0


def errors(mesh, case: Case, length: int) -> tuple[list[float], list]:
    """Of a rank: the errors of its out, dq, dk and dv, and its part of the memory's gradients (as plain lists)."""
    with pieces(case.small_pieces):
        want = expected(case._replace(small_pieces=False, backend="auto"), length)
        pattern = Pattern(documents=documents_for(case, length), **dict(case.fields))
        own, of_memory = run(mesh, case, pattern, want)
    wanted = [shard(x, mesh, 1) for x in (want.out, *want.grads[:3])]
    return [error(x, y) for x, y in zip(own, wanted)], [x.double().tolist() for x in of_memory]


def check(results: list[tuple[list[float], list]], case: Case, length: int) -> None:
    """Every rank's errors are small, and the memory's gradients, summed over the ranks, the definition's."""
    for rank, (rank_errors, _) in enumerate(results):
        for name, value in zip(("out", "dq", "dk", "dv"), rank_errors):
            assert value <= TOLERANCE[case.dtype], f"{name} of rank {rank} is off by {value:.1e}: {case}"
    if case.memory:
        want = expected(case._replace(small_pieces=False, backend="auto"), length)
        for part, wanted in enumerate(want.grads[3:]):
            total = sum(torch.tensor(of_memory[part], dtype=torch.float64) for _, of_memory in results)
            assert error(total, wanted) <= TOLERANCE[case.dtype], f"gradient {part} of the memory: {case}"


def check_emulated(case: Case, ring: int, layout: str, verify: bool = False) -> None:
    length = MeshSpec(ring=ring).padded(case.length)
    expected(case._replace(small_pieces=False, backend="auto"), length)  # once, not on every thread
    with pieces(case.small_pieces):
        results = emulate(ring, lambda mesh: errors(mesh, case._replace(small_pieces=False), length), layout, verify)
    check(results, case, length)


def rank_positions(runs) -> torch.Tensor:
    """Global positions of the tokens of ``runs``, by local index."""
    return torch.cat([torch.arange(r.start, r.start + r.stride * r.length, r.stride) for r in runs])


def count_pairs(tiles: list[Tile], queries: int, keys: int) -> torch.Tensor:
    """How often ``tiles`` cover each pair of local indices, int [queries, keys], counted pair by pair."""
    counts = torch.zeros(queries, keys, dtype=torch.int64)
    for tile in tiles:
        i, j = torch.arange(tile.queries)[:, None], torch.arange(tile.keys)
        band = torch.ones(tile.queries, tile.keys, dtype=torch.bool)
        if tile.lower is not None:
            band &= j - i >= tile.lower
        if tile.upper is not None:
            band &= j - i <= tile.upper
        assert band.any(1).all(), f"a query of {tile} sees none of its keys"
        assert tile.pairs == tile.rungs * band.sum(), tile
        for rung in range(tile.rungs):
            counts[tile.q_start + rung * tile.shift + tile.step * i, tile.k_start + rung * tile.shift + tile.step * j] += band
    return counts


@st.composite
def pattern_fields(draw) -> dict:
    """Every legal combination of a pattern's fields but ``documents``."""
    reach = draw(st.sampled_from(["", "window", "block", "stride", "window and stride"]))
    fields = dict(causal=draw(st.booleans()))
    for name, most in (("window", 40), ("block", 20), ("stride", 9)):
        if name in reach:
            fields[name] = draw(st.integers(1, most))
    if reach:
        fields["sinks"] = draw(st.integers(0, 5))
    if fields["causal"]:
        fields["alibi"] = draw(st.booleans())
    return fields


@st.composite
def document_ids(draw, length: int) -> tuple[int, ...] | None:
    """No documents, documents in order, or ids that return."""
    kind = draw(st.sampled_from(["none", "in order", "returning"]))
    if kind == "none":
        return None
    ids = draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    if kind == "returning":
        return tuple(ids)
    return tuple(itertools.accumulate(int(x == 0) for x in ids))
