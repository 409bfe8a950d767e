import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from workers.parallel.keep import SMALL_BYTES, VALUES, Keeper, compressed, restored
from workers.parallel.store import DiskStore, Store


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    return restored(*compressed(x), x.dtype)[: x.numel()]


@given(
    size=st.integers(1, 3 * VALUES + 1), seed=st.integers(0, 1000), power=st.integers(-44, 37),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_int8_is_off_by_at_most_a_254th_of_the_largest_value_of_its_block(size, seed, power, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(10.0**power).to(dtype)
    error = (there_and_back(x).double() - x.double()).abs()
    bound = torch.cat([part.double().abs().amax().expand(len(part)) for part in x.split(VALUES)]) / 254
    rounding = x.double().abs() * torch.finfo(dtype).eps + bound * torch.finfo(dtype).eps + torch.finfo(torch.float32).tiny
    assert (error <= bound * (1 + 1e-5) + rounding).all()


def test_an_outlier_spoils_its_own_block_only():
    x = torch.linspace(-1, 1, 4 * VALUES)
    x[VALUES] = 1e6
    error = (there_and_back(x) - x).abs()
    assert error[VALUES + 1 : 2 * VALUES].max() > 0.1
    assert error[:VALUES].max() < 1 / 254 and error[2 * VALUES :].max() < 1 / 254


def test_what_is_not_finite_stays_not_finite():
    for value in (math.nan, math.inf, -math.inf):
        x = torch.ones(2 * VALUES)
        x[3] = value
        back = there_and_back(x)
        assert not back[:VALUES].isfinite().any() and (back[VALUES:] == 1).all()
    assert (there_and_back(torch.zeros(VALUES)) == 0).all()


def keep(store: Store, compress: bool, x: torch.Tensor, weight: torch.Tensor):
    """What a keeper makes of tensors saved in a block: ``(tensor saved, what is kept)``, and the keeper."""
    keeper = Keeper(store, compress)
    with keeper.block(True, [weight]):
        return keeper, keeper.pack(x)


def big(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("view", ["whole", "transposed", "slice", "every other", "expanded"])
def test_a_tensor_comes_back_as_it_was(view, tmp_path):
    x = big(64, 128, 3)
    x = {"whole": x, "transposed": x.transpose(0, 2), "slice": x[8:40], "every other": x[:, ::2], "expanded": x[:1].expand(64, 128, 3)}[
        view
    ]
    keeper, kept = keep(DiskStore(str(tmp_path)), False, x, torch.empty(0))
    back = keeper.unpack(kept)
    assert torch.equal(back, x) and back.data_ptr() != x.data_ptr()
    if view in ("whole", "transposed"):
        assert back.stride() == x.stride()  # kernels are not equal to the bit on another order


def test_what_is_left_alone(tmp_path):
    weight = nn.Parameter(big(64, 64))
    statistic = big(64, 64)
    statistic.exact = True
    for x, on_disk, packed in (
        (weight, True, True), (weight.t(), True, True), (big(SMALL_BYTES // 4 - 1), True, True),
        (statistic, False, True), (torch.arange(5000), False, True),
        (statistic, True, False), (torch.arange(5000), True, False), (big(64, 64), False, False),
    ):  # fmt: skip
        _, kept = keep(DiskStore(str(tmp_path)) if on_disk else Store(), True, x, weight)
        assert isinstance(kept, torch.Tensor) == packed
        if packed:
            assert kept.data_ptr() == x.data_ptr()


def test_a_statistic_and_an_index_go_to_the_store_uncompressed(tmp_path):
    statistic = big(64, 64)
    statistic.exact = True
    for x in (statistic, torch.arange(5000)):
        keeper, kept = keep(DiskStore(str(tmp_path)), True, x, torch.empty(0))
        assert torch.equal(keeper.unpack(kept), x)


def test_what_several_operations_save_is_kept_once_and_changes_are_not_mixed_up(tmp_path):
    store = DiskStore(str(tmp_path))
    keeper = Keeper(store, False)
    x = big(64, 64)
    before = x.clone()
    with keeper.block(True, []):
        first, again = keeper.pack(x), keeper.pack(x.view(64, 64))
        x.mul_(2)
        changed = keeper.pack(x)
        passing = [keeper.pack(torch.full((64, 64), float(value))) for value in range(20)]  # each one's memory is the last one's
    assert first is again and store.size == 22 * x.numel() * 4
    assert torch.equal(keeper.unpack(first), before) and torch.equal(keeper.unpack(changed), x)
    assert [keeper.unpack(kept)[0, 0].item() for kept in passing] == list(range(20))


def test_places_are_used_again(tmp_path):
    store = DiskStore(str(tmp_path))
    keeper = Keeper(store, True)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)) for _ in range(3)))
    sizes = []
    for _ in range(3):
        x = big(128, 64).requires_grad_()
        for index, layer in enumerate(layers):
            with keeper.block(index == 0, layer.parameters()):
                x = layer(x)
        x.sum().backward()
        sizes.append(store.size)
    assert sizes[0] > 0 and sizes == [sizes[0]] * 3
    assert not list(tmp_path.iterdir())  # a file without a name: it cannot be left behind


def test_backward_fetches_one_block_ahead(monkeypatch, tmp_path):
    from workers.parallel import keep as module

    events = []
    monkeypatch.setattr(module.Parcel, "fetch", lambda parcel: events.append(("fetch", parcel.block)))
    plain = module.Parcel.get
    monkeypatch.setattr(module.Parcel, "get", lambda parcel: events.append(("get", parcel.block)) or plain(parcel))
    keeper = Keeper(DiskStore(str(tmp_path)), False)
    x = big(128, 64).requires_grad_()
    for index in range(4):
        with keeper.block(index == 0, []):
            x = x.exp()
        for parcel in keeper._shelf.parcels:
            parcel().block = index
    x.sum().backward()
    assert events == [("get", 3), ("fetch", 2), ("get", 2), ("fetch", 1), ("get", 1), ("fetch", 0), ("get", 0)]
