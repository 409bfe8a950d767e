"""Which kernel suits which device, type, head size and pattern."""

import pytest
import torch

from workers.attention.block import BACKENDS, last_dense, resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "device, dtype, head_dim, alibi, name",
    [
        (CPU, torch.float32, 64, False, "cpu"),
        (CPU, torch.float64, 60, True, "cpu"),
        (CUDA, torch.bfloat16, 64, False, "cuda"),
        (CUDA, torch.float16, 256, False, "cuda"),
        (CUDA, torch.bfloat16, 264, False, "efficient"),
        (CUDA, torch.float32, 64, False, "efficient"),
        (CUDA, torch.bfloat16, 36, False, "reference"),
        (CUDA, torch.float32, 36, False, "reference"),
        (CUDA, torch.float64, 64, False, "reference"),
        (CUDA, torch.bfloat16, 64, True, "reference"),
    ],
    ids=str,
)
def test_auto_takes_the_fastest_that_can(device, dtype, head_dim, alibi, name):
    assert resolve("auto", device, dtype, head_dim, alibi).name == name


def test_a_backend_by_name():
    for device in (CPU, CUDA):
        assert resolve("reference", device, torch.float32, 64, True) is BACKENDS["reference"]
    assert resolve("efficient", CUDA, torch.float32, 64, True) is BACKENDS["efficient"]
    for name, backend in BACKENDS.items():
        assert backend.name == name


def test_a_backend_that_cannot_is_refused():
    for name in ("cuda", "efficient"):
        with pytest.raises(ValueError, match=f"'{name}' cannot run on cpu; use auto or reference"):
            resolve(name, CPU, torch.float32, 64)
    with pytest.raises(ValueError, match="'cpu' cannot run on cuda"):
        resolve("cpu", CUDA, torch.float32, 64)
    with pytest.raises(ValueError, match="'cuda' has no ALiBi"):
        resolve("cuda", CUDA, torch.bfloat16, 64, alibi=True)
    with pytest.raises(ValueError, match="'flash'; it must be one of auto, cpu, cuda, efficient, reference"):
        resolve("flash", CPU, torch.float32, 64)


def test_tensors_come_as_the_kernel_reads_them():
    x = torch.randn(2, 5, 3, 4)
    assert last_dense(x) is x and last_dense(x.transpose(1, 2)).stride(-1) == 1
    turned = x.transpose(2, 3)
    assert last_dense(turned).stride(-1) == 1 and torch.equal(last_dense(turned), turned)
    arranged = BACKENDS["cpu"].arrange(x)
    assert torch.equal(arranged, x) and arranged.transpose(1, 2).is_contiguous()
