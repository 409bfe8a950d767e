"""Layers with backward passes of their own, against autograd through the plain formula."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from workers.model.layers import RMSNorm, _Normalize, _SwiGLU
from workers.model.positions import _Rotate, rotary_table, rotate


def test_rms_norm_equals_torchs():
    x = torch.randn(3, 5, 16, requires_grad=True)
    norm = RMSNorm(16, 1e-5)
    torch.nn.init.normal_(norm.weight)
    grad = torch.randn(3, 5, 16)
    got = (norm(x), *torch.autograd.grad(norm(x), (x, norm.weight), grad))
    expected = F.rms_norm(x, (16,), norm.weight, 1e-5)
    for ours, theirs in zip(got, (expected, *torch.autograd.grad(expected, (x, norm.weight), grad))):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_keeps_the_type(dtype):
    x = torch.randn(2, 4, 8, dtype=dtype, requires_grad=True)
    out = _Normalize.apply(x, torch.ones(8, dtype=dtype), 1e-5)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == dtype


def test_gradients_by_finite_differences():
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    assert gradcheck(lambda x, w: _Normalize.apply(x, w, 1e-5), (leaf(2, 3, 4), leaf(4)))
    assert gradcheck(_SwiGLU.apply, (leaf(2, 3, 4), leaf(2, 3, 4)))
    cos, sin = (x.double() for x in rotary_table(torch.arange(3)[None], 4, 100.0))
    assert gradcheck(lambda x: _Rotate.apply(x, cos, sin), (leaf(1, 3, 2, 4),))


def test_swiglu_equals_the_formula():
    gate, up = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(2))
    expected = F.silu(gate) * up
    grad = torch.randn_like(expected)
    got = _SwiGLU.apply(gate, up)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(torch.autograd.grad(got, (gate, up), grad), torch.autograd.grad(expected, (gate, up), grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_rotation_is_relative():
    """q·k depends on the distance alone, also ten million tokens from the start."""
    q, k = torch.randn(2, 1, 1, 1, 64)

    def score(position, distance):
        table = [rotary_table(torch.tensor([[p]]), 64, 500_000.0) for p in (position, position - distance)]
        return (rotate(q, table[0]) * rotate(k, table[1])).sum()

    for distance in (0, 1, 1000):
        near = score(distance + 5, distance)
        torch.testing.assert_close(score(10_000_000, distance), near, rtol=1e-4, atol=1e-4)


def test_rotation_is_that_of_llama_checkpoints():
    x, position = torch.randn(1, 1, 1, 8), 3
    inverse = 1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8)
    angle = torch.cat([position * inverse] * 2)
    rotated_half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    expected = x * angle.cos() + rotated_half * angle.sin()
    torch.testing.assert_close(rotate(x, rotary_table(torch.tensor([[position]]), 8, 100.0)), expected)
