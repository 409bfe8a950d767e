"""Layouts without process groups: every token is held once, by whom the layout says."""

from types import SimpleNamespace

import pytest
import torch

from workers.attention.layout import positions, ring_runs, shard, unshard
from workers.mesh import LAYOUTS, MeshSpec


def mesh_like(ring: int, ulysses: int = 1, layout: str = "zigzag", cp_rank: int = 0):
    """What the layout asks of a mesh."""
    return SimpleNamespace(ring=ring, ulysses=ulysses, layout=layout, cp_rank=cp_rank, spec=MeshSpec(ring=ring, ulysses=ulysses))


def held(length: int, ring: int, ulysses: int = 1, layout: str = "zigzag") -> list[list[int]]:
    mesh = mesh_like(ring, ulysses, layout)
    return [positions(length, mesh, cp_rank=rank).tolist() for rank in range(ring * ulysses)]


def test_eight_tokens_on_a_ring_of_two():
    assert held(8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert held(8, 2, layout="contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert held(8, 2, layout="striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_ulysses_ranks_split_what_their_ring_rank_holds():
    assert held(8, 2, 2) == [[0, 1], [6, 7], [2, 3], [4, 5]]
    assert held(8, 1, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring, ulysses", [(1, 1), (2, 1), (3, 1), (8, 1), (1, 4), (2, 2), (3, 2)])
def test_every_token_is_held_once_and_in_ascending_order(layout, ring, ulysses):
    length = 2 * ring * ulysses * 3
    parts = held(length, ring, ulysses, layout)
    assert sorted(position for part in parts for position in part) == list(range(length))
    assert all(part == sorted(part) for part in parts)
    assert {len(part) for part in parts} == {length // (ring * ulysses)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_say_at_which_local_index_a_token_stands(layout):
    for rank, part in enumerate(held(24, 4, layout=layout)):
        for run in ring_runs(24, 4, rank, layout):
            assert part[run.offset : run.offset + run.length] == list(range(run.start, run.start + run.stride * run.length, run.stride))


@pytest.mark.parametrize("length", [1, 7, 10, 12])
def test_a_length_that_does_not_divide_is_refused_with_the_next_that_does(length):  # A3
    with pytest.raises(ValueError, match=rf"{length} tokens .* = 8; pad it to {-(-length // 8) * 8}"):
        positions(length, mesh_like(2, 2))


def test_one_rank_holds_everything():
    x = torch.arange(10).view(2, 5)
    assert positions(5, None).tolist() == [0, 1, 2, 3, 4]
    for mesh in (None, mesh_like(1)):
        assert shard(x, mesh, 1) is x and unshard(x, mesh, 1) is x


def test_shard_takes_the_held_positions_along_any_dim():
    x = torch.arange(8)
    assert shard(x, mesh_like(2, cp_rank=1), 0).tolist() == [2, 3, 4, 5]
    assert shard(x.expand(3, 8), mesh_like(2, cp_rank=0), 1).tolist() == [[0, 1, 6, 7]] * 3
    assert shard(x.expand(3, 8).t(), mesh_like(2, cp_rank=0), -2).tolist() == [[p] * 3 for p in (0, 1, 6, 7)]
