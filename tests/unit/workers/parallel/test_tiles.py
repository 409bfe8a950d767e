import pytest
import torch

from tests.allocations import allocations
from workers.model.layers import MLP
from workers.parallel.tiles import in_tiles


def layer(dtype: torch.dtype) -> MLP:
    torch.manual_seed(0)
    return MLP(16, 48).to(dtype)


def gradients(mlp: MLP, x: torch.Tensor, tile: int | None):
    x = x.clone().requires_grad_()
    y = mlp(x) if tile is None else in_tiles(mlp, mlp.forward, tile, x)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return y, *torch.autograd.grad(y, [x, *mlp.parameters()], upstream)


@pytest.mark.parametrize("tile", [1, 7, 40, 1000])
def test_tiles_give_what_the_whole_gives(tile):
    mlp = layer(torch.float64)
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    for ours, theirs in zip(gradients(mlp, x, tile), gradients(mlp, x, None)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_has_no_gradient_and_the_others_keep_theirs():
    mlp = layer(torch.float64)
    mlp.up_proj.weight.requires_grad_(False)
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    for tile in (None, 7):
        mlp.zero_grad()
        (mlp(x) if tile is None else in_tiles(mlp, mlp.forward, tile, x)).square().sum().backward()
        assert mlp.up_proj.weight.grad is None
        if tile is None:
            expected = mlp.gate_proj.weight.grad
    torch.testing.assert_close(mlp.gate_proj.weight.grad, expected)


def test_bf16_gradients_do_not_lose_accuracy_over_many_tiles():
    """A sum of 512 tiles in bfloat16 would stop growing."""
    mlp = layer(torch.bfloat16)
    x = torch.randn(1, 2048, 16).bfloat16()
    whole, tiled = (gradients(mlp, x, tile)[2:] for tile in (None, 4))
    for ours, theirs in zip(tiled, whole):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm()


def test_what_is_as_wide_as_the_layer_exists_for_one_tile_only():
    mlp, x = layer(torch.float32), torch.randn(1, 8192, 16)
    upstream = torch.ones(1, 8192, 16)
    peaks = {}
    for tile in (None, 128):
        leaf = x.clone().requires_grad_()
        forward = allocations(lambda: mlp(leaf) if tile is None else in_tiles(mlp, mlp.forward, tile, leaf))
        backward = allocations(lambda: forward.result.backward(upstream))
        peaks[tile] = max(forward.peak, forward.held + backward.peak)
    wide = 8192 * 48 * 4
    assert peaks[None] >= 3 * wide
    assert peaks[128] <= 1.2 * wide  # in and out, 16 wide, and their gradients
