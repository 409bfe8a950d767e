"""What cuts and joins tiles keeps every pair, once; what reads and adds through a tile reaches the tokens that it names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workers.attention.cases import count_pairs, pieces
from workers.attention.kernels import cpu, cuda, reference
from workers.attention.tile import Tile, band_tiles, coalesce, row_pieces, split_ladder, square_pieces, visible_pairs

PLACES = 200


@st.composite
def places(draw, tile: Tile) -> Tile:
    """The tile somewhere: alone, as a ladder that follows on, or as an interleaved one."""
    kind, distance = draw(st.sampled_from(["alone", "ladder", "interleaved"])), draw(st.integers(0, 50))
    tile = tile._replace(q_start=draw(st.integers(0, 4)), k_start=draw(st.integers(0, 4)), distance=distance)
    if kind == "alone":
        return tile._replace(step=draw(st.integers(1, 3)))
    rungs = draw(st.integers(2, 3))
    if kind == "ladder":
        return tile._replace(rungs=rungs, shift=tile.queries + draw(st.integers(0, 3)))
    return tile._replace(rungs=rungs, step=draw(st.integers(rungs, 4)), shift=1)


@st.composite
def bands(draw, inside: bool = True) -> Tile:
    """Any rectangle and band, placed somewhere; ``inside``: one whose every query sees a key, as kernels get them."""
    queries, keys = draw(st.integers(1, 25)), draw(st.integers(1, 25))
    limits = draw(st.sampled_from(["both", "both", "lower", "upper", "none"]))
    reach = (1 - queries, keys - 1) if inside else (-30, 30)
    first, second = (draw(st.integers(*reach)) for _ in range(2))
    if inside:
        first, second = sorted((first, second))
    whole = Tile(0, queries, 0, keys, first if limits in ("both", "lower") else None, second if limits in ("both", "upper") else None)
    return draw(places(draw(st.sampled_from(band_tiles(whole))) if inside else whole))


@st.composite
def squares(draw) -> Tile:
    side = draw(st.integers(1, 40))
    return draw(places(Tile(0, side, 0, side, None, 0)))


def counted(tiles) -> torch.Tensor:
    return count_pairs(tiles, PLACES, PLACES)


def distances(tiles) -> torch.Tensor:
    """The distance that the tiles tell for every pair, int [queries, keys]."""
    told = torch.zeros(PLACES, PLACES, dtype=torch.int64)
    for tile in tiles:
        i, j = torch.arange(tile.queries)[:, None], torch.arange(tile.keys)
        for rung in range(tile.rungs):
            at = (tile.q_start + rung * tile.shift + tile.step * i, tile.k_start + rung * tile.shift + tile.step * j)
            told[at] = tile.distance + tile.stride * (i - j)
    return told


def same(cut: list[Tile], tile: Tile) -> None:
    """``cut`` covers the pairs of ``tile``, each once, and knows how far they are apart."""
    visible = counted([tile])
    assert torch.equal(counted(cut), visible)
    assert torch.equal(distances(cut)[visible > 0], distances([tile])[visible > 0])


@settings(max_examples=300)
@given(tile=bands(inside=False))
def test_a_band_that_leaves_its_rectangle_is_cut_to_what_is_visible(tile):
    i, j = torch.arange(tile.queries)[:, None], torch.arange(tile.keys)
    band = torch.ones(tile.queries, tile.keys, dtype=torch.int64)
    band *= (j - i >= (-99 if tile.lower is None else tile.lower)) & (j - i <= (99 if tile.upper is None else tile.upper))
    wanted = torch.zeros(PLACES, PLACES, dtype=torch.int64)
    for rung in range(tile.rungs):
        wanted[tile.q_start + rung * tile.shift + tile.step * i, tile.k_start + rung * tile.shift + tile.step * j] += band
    cut = band_tiles(tile)
    assert torch.equal(counted(cut), wanted)
    assert torch.equal(distances(cut)[wanted > 0], distances([tile])[wanted > 0])


@given(tile=squares(), side=st.integers(1, 12))
def test_square_pieces_cover_the_square_once(tile, side):
    cut = square_pieces(tile, side)
    same(cut, tile)
    assert all(piece.full or (piece.causal and piece.queries <= side) for piece in cut)


@settings(max_examples=300)
@given(tile=bands(), rows=st.integers(1, 12))
def test_row_pieces_cover_the_band_once(tile, rows):
    cut = row_pieces(tile, rows)
    same(cut, tile)
    assert all(piece.queries <= rows for piece in cut)


@settings(max_examples=200)
@given(tile=st.one_of(bands(), squares()), alibi=st.booleans(), small=st.booleans())
def test_what_the_kernels_are_given_covers_the_band_once(tile, alibi, small):
    with pieces(small):
        for split in (cpu.split, reference.split, cuda.flash_split, cuda.efficient_split):
            cut = split(tile, alibi)
            same(cut, tile)
            same(coalesce(cut, one_distance=False), tile)
        if small:
            assert all(p.queries <= reference.ROWS and p.keys <= reference.COLUMNS for p in reference.split(tile, alibi))


@given(tile=bands(), tokens=st.integers(1, 100))
def test_a_ladder_in_parts_holds_few_tokens_a_part(tile, tokens):
    parts = split_ladder(tile, tokens)
    same(parts, tile)
    assert all(part.rungs == 1 or part.rungs * max(part.queries, part.keys) <= tokens for part in parts)
    # Parts are no smaller than they must be.
    assert all((part.rungs + 1) * max(part.queries, part.keys) > tokens for part in parts[:-1])


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
    one_distance=st.booleans(), along=st.sampled_from(["diagonal", "row", "column"]),
)  # fmt: skip
def test_tiles_that_join_cover_what_they_covered(sizes, one_distance, along):
    tiles, place = [], 0
    for gap, side, causal in sizes:
        place += gap
        queries, keys = place * (along != "row"), place * (along != "column")
        tiles.append(Tile(queries, side, keys, side, None, 0 if causal and side > 1 else None))
        place += side
    if along == "row":  # which share queries: of one height
        tiles = [tile._replace(queries=2, upper=None) for tile in tiles]
    if along == "column":
        tiles = [tile._replace(keys=2, upper=None) for tile in tiles]
    joined = coalesce(tiles, one_distance)
    assert torch.equal(counted(joined), counted(tiles)) and len(joined) <= len(tiles)


def test_neighbours_join_only_where_distance_does_not_matter():
    beside = [Tile(0, 4, 0, 4), Tile(0, 4, 4, 4)]
    assert coalesce(beside, one_distance=True) == [Tile(0, 4, 0, 8)]
    assert coalesce(beside, one_distance=False) == beside
    below = [Tile(0, 4, 0, 4), Tile(4, 2, 0, 4)]
    assert coalesce(below, one_distance=True) == [Tile(0, 6, 0, 4)]
    squares = [Tile(start, 4, start + 8, 4, None, 0) for start in (0, 5, 10)]
    assert coalesce(squares, one_distance=False) == [Tile(0, 4, 8, 4, None, 0, rungs=3, shift=5)]
    for other in (squares[1]._replace(distance=1), Tile(5, 4, 14, 4, None, 0), Tile(5, 4, 13, 5)):  # unlike in distance, diagonal, size
        assert coalesce([squares[0], other], one_distance=False) == [squares[0], other]
    sharing = [Tile(0, 4, 0, 2), Tile(2, 4, 2, 2)]  # queries, which a ladder's rungs must not
    assert coalesce(sharing, one_distance=False) == sharing


@given(queries=st.integers(1, 12), keys=st.integers(1, 12), lower=st.none() | st.integers(-14, 14), upper=st.none() | st.integers(-14, 14))
def test_visible_pairs_are_counted_without_looking(queries, keys, lower, upper):
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    band = (j - i >= (-99 if lower is None else lower)) & (j - i <= (99 if upper is None else upper))
    whole = Tile(0, queries, 0, keys, lower, upper)
    for tile in band_tiles(whole):
        own = band[tile.q_start : tile.q_start + tile.queries, tile.k_start : tile.k_start + tile.keys]
        assert visible_pairs(tile.queries, tile.keys, tile.lower, tile.upper) == (tile.queries * tile.keys if tile.full else own.sum())
        assert not tile.full or own.all()
    assert sum(tile.pairs for tile in band_tiles(whole)) == band.sum()


@given(tile=bands(), order=st.booleans())
def test_a_tile_reads_and_adds_where_its_tokens_stand(tile, order):
    """Also where rungs share keys, and in any memory order."""
    x = torch.randn(2, PLACES, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if order else x
    rungs = torch.arange(tile.rungs)[:, None] * tile.shift
    queries = tile.q_start + rungs + tile.step * torch.arange(tile.queries)
    keys = tile.k_start + rungs + tile.step * torch.arange(tile.keys)
    assert torch.equal(tile.q_of(x), x[:, queries]) and torch.equal(tile.k_of(x), x[:, keys])
    assert torch.equal(tile.q_of(x[1:]), x[1:, queries])
    assert tile.k_span == (keys.min(), keys.max() + 1)
    added, part = x.clone(), torch.randn(2, tile.rungs, tile.keys, 3, 2, dtype=torch.float64)
    tile.add_keys_(added, part)
    wanted = x.clone().index_add(1, keys.flatten(), part.flatten(1, 2))
    torch.testing.assert_close(added, wanted, rtol=0, atol=1e-12)


def test_rungs_that_share_keys_add_up():
    """A sliding window's strips: each key of the overlap counts for every rung that has it."""
    total = torch.zeros(1, 10)
    Tile(0, 2, 0, 5, 0, 3, rungs=3, shift=2).add_keys_(total, torch.ones(1, 3, 5))
    assert total.tolist() == [[1, 1, 2, 2, 3, 2, 2, 1, 1, 0]]


@pytest.mark.parametrize("n, side", [(1, 4), (4, 4), (5, 4), (1000, 64), (4096, 256), (4097, 256), (65536, 256)])
def test_squares_cost_few_calls(n, side):
    """Sizes double, so kernel calls grow with the logarithm; work is the square's half and what the small squares waste."""
    cut = square_pieces(Tile(0, n, 0, n, None, 0), side)
    assert sum(piece.pairs for piece in cut) == n * (n + 1) // 2
    assert len(cut) <= 3 + 2 * max(1, n // side).bit_length()
