import pytest
import torch

from workers.inference.cache import KVCache
from workers.model import ModelConfig

CONFIG = ModelConfig(dim=32, heads=4, kv_heads=2)


def keys(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, 2, 8)


@pytest.mark.parametrize("chunks", [[10], [1] * 10, [7, 3], [3, 0, 7]], ids=str)
def test_what_was_appended_comes_back_in_order(chunks):
    k, v, cache = keys(10), keys(10), KVCache(CONFIG, 10)
    for part_k, part_v in zip(k.split(chunks, 1), v.split(chunks, 1)):
        held_k, held_v = cache.append(part_k, part_v)
        assert held_k.shape[1] == held_v.shape[1] == cache.length
    assert torch.equal(held_k, k) and torch.equal(held_v, v)


def test_nothing_is_copied_on_the_way_out():
    cache = KVCache(CONFIG, 8, batch=2)
    first, _ = cache.append(keys(3, 2), keys(3, 2))
    later, _ = cache.append(keys(1, 2), keys(1, 2))
    assert first.data_ptr() == later.data_ptr()


def test_what_does_not_fit_is_refused_and_changes_nothing():  # I7
    cache = KVCache(CONFIG, 4)
    held, _ = cache.append(keys(3), keys(3))
    before = held.clone()
    with pytest.raises(ValueError, match="5 tokens do not fit a cache of 4"):
        cache.append(keys(2), keys(2))
    assert cache.length == 3 and torch.equal(held, before)
    cache.append(keys(1), keys(1))
    assert cache.length == cache.capacity == 4
