"""Each backend's tile against the definition in float64, forward and backward."""

import pytest
import torch

from workers.attention.block import BACKENDS, resolve


def run(backend, dtype, queries, keys, causal, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(2, queries, 6, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, keys, 2, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    q, k, v, grad = (x.to(device=device, dtype=dtype) for x in (q, k, v, grad))
    out, lse = backend.forward(q, k, v, causal, 0.2)
    return out, lse, *backend.backward(grad, q, k, v, out, lse, causal, 0.2)


def definition(queries, keys, causal, dtype):
    generator = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(2, queries, 6, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, keys, 2, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    q, k, v, grad = (x.to(dtype).double().requires_grad_() for x in (q, k, v, grad))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(3, 2)) * 0.2
    if causal:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(3, 2))
    return out, scores.logsumexp(-1).transpose(1, 2), *torch.autograd.grad(out, (q, k, v), grad)


SHAPES = [(7, 7, True), (64, 64, True), (5, 33, False), (33, 5, False), (1, 1, True), (600, 600, True)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def check(name, dtype, shape, device):
    expected = definition(*shape, dtype)
    for got, want in zip(run(BACKENDS[name], dtype, *shape, device), expected):
        assert ((got.cpu().double() - want).abs().max() / max(1.0, want.abs().max())).item() <= TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_tile_equals_the_definition(name, dtype, shape):
    check(name, dtype, shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_tile_equals_the_definition(shape):
    check("cuda", torch.bfloat16, shape, "cuda")


def test_lse_is_float32_under_bf16():
    assert run(BACKENDS["cpu"], torch.bfloat16, 8, 8, True)[1].dtype == torch.float32


def test_backends_by_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve("auto", cpu, torch.float32, 64).name == "cpu"
    assert resolve("auto", cuda, torch.bfloat16, 64).name == "cuda"
    assert resolve("auto", cuda, torch.float32, 64).name == "reference"
    assert resolve("auto", cuda, torch.bfloat16, 36).name == resolve("auto", cuda, torch.bfloat16, 264).name == "reference"
    assert resolve("reference", cpu, torch.float32, 64).name == "reference"
    with pytest.raises(ValueError, match="cannot run on cpu"):
        resolve("cuda", cpu, torch.float32, 64)
    with pytest.raises(ValueError, match="one of auto, cpu, cuda, reference"):
        resolve("flash", cpu, torch.float32, 64)
