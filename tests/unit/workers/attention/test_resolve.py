"""Which FlashAttention is chosen, by what is installed and the GPU's generation, and what is said when it cannot be."""

import importlib.metadata
from importlib.machinery import ModuleSpec

import pytest
import torch

from workers.attention import block
from workers.attention.block import BACKENDS, resolve
from workers.attention.kernels import flash_attn

CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch):
    """A machine of one compute capability with some generations of FlashAttention."""

    def set_up(major: int | None, *generations: int):
        monkeypatch.setattr(block, "_generation", lambda device: major)
        monkeypatch.setattr(flash_attn, "installed", lambda generation: generation in generations)

    return set_up


@pytest.mark.parametrize(
    "major, generations, dtype, head_dim, alibi, name",
    [
        (10, (2, 3, 4), torch.bfloat16, 128, False, "flash4"),
        (10, (2, 3, 4), torch.bfloat16, 256, False, "flash2"),
        (10, (3,), torch.bfloat16, 128, False, "cuda"),
        (9, (2, 3, 4), torch.bfloat16, 128, False, "flash3"),
        (9, (2, 3, 4), torch.float16, 256, False, "flash3"),
        (9, (2, 4), torch.bfloat16, 64, False, "flash2"),
        (8, (2, 3, 4), torch.bfloat16, 64, False, "flash2"),
        (8, (), torch.bfloat16, 64, False, "cuda"),
        (12, (2, 4), torch.bfloat16, 64, False, "flash2"),
        (7, (2,), torch.float16, 64, False, "efficient"),
        (9, (2, 3, 4), torch.float32, 64, False, "efficient"),
        (9, (2, 3, 4), torch.float64, 64, False, "reference"),
        (9, (2, 3, 4), torch.bfloat16, 60, False, "reference"),
        (9, (2, 3, 4), torch.bfloat16, 64, True, "flash2"),
        (10, (3, 4), torch.bfloat16, 64, True, "reference"),
        (9, (2, 3, 4), torch.float32, 64, True, "reference"),
        (None, (), torch.bfloat16, 64, False, "cuda"),
    ],
    ids=str,
)
def test_auto_by_generation_and_what_is_installed(machine, major, generations, dtype, head_dim, alibi, name):
    machine(major, *generations)
    assert resolve("auto", CUDA, dtype, head_dim, alibi) is BACKENDS[name]


@pytest.mark.parametrize(
    "name, major, dtype, head_dim, alibi, message",
    [
        ("flash2", 9, torch.bfloat16, 64, False, "needs FlashAttention 2, which is not installed: pip install 'flash-attn>=2.7'"),
        ("flash3", 9, torch.bfloat16, 64, False, "needs FlashAttention 3, which is not installed: build it in hopper/"),
        ("flash4", 10, torch.bfloat16, 64, False, "needs FlashAttention 4, which is not installed: pip install flash-attn-4"),
        ("flash2", 9, torch.float32, 64, False, "does not compute float32, only bfloat16, float16; use auto or reference"),
        ("cuda", 9, torch.float32, 64, False, "does not compute float32, only bfloat16, float16"),
        ("efficient", 9, torch.float64, 64, False, "does not compute float64"),
        ("flash4", 10, torch.bfloat16, 256, False, "takes heads whose size is a multiple of 8 up to 128, not 256"),
        ("cuda", 9, torch.bfloat16, 60, False, "takes heads whose size is a multiple of 8 up to 256, not 60"),
        ("flash3", 9, torch.bfloat16, 64, True, "has no ALiBi; use auto or reference"),
        ("cuda", 7, torch.float16, 64, False, "has no kernels for compute capability 7.x, only for 8.x, 9.x, 10.x, 11.x, 12.x; use auto"),
    ],
    ids=str,
)
def test_a_backend_that_cannot_is_refused_in_one_line(machine, name, major, dtype, head_dim, alibi, message):
    machine(major)
    with pytest.raises(ValueError) as refusal:
        resolve(name, CUDA, dtype, head_dim, alibi)
    text = str(refusal.value)
    assert text.startswith(f"attention.backend {name!r} {message}") and "\n" not in text
    with pytest.raises(ValueError, match=f"'{name}' cannot run on cpu"):
        resolve(name, torch.device("cpu"), dtype, head_dim, alibi)


def test_a_generation_without_kernels_is_refused(machine):
    machine(8, 2, 3, 4)
    for name, only in (("flash3", "9.x"), ("flash4", "9.x, 10.x")):
        with pytest.raises(ValueError, match=f"'{name}' has no kernels for compute capability 8.x, only for {only}; use auto"):
            resolve(name, CUDA, torch.bfloat16, 64)
    assert resolve("flash2", CUDA, torch.bfloat16, 64).name == "flash2"


def test_every_name_is_offered():
    with pytest.raises(ValueError, match="one of auto, cpu, cuda, efficient, reference, flash2, flash3, flash4"):
        resolve("flash", CUDA, torch.bfloat16, 64)


def test_installed_looks_without_importing(monkeypatch):
    found = {"flash_attn_2_cuda": "flash-attn", "flash_attn_interface": None, "flash_attn": "flash-attn"}
    versions = {"flash-attn": "2.8.3.post2"}

    def version(distribution):
        if distribution not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    def installed(generation):
        flash_attn.installed.cache_clear()
        return flash_attn.installed(generation)

    monkeypatch.setattr(flash_attn, "find_spec", lambda name: ModuleSpec(name, None) if name in found else None)
    monkeypatch.setattr(flash_attn, "version", version)
    try:
        assert installed(2) and installed(3)
        assert not installed(4)  # the wheels of 2 hold flash_attn.cute as well
        versions["flash-attn-4"] = "4.0.0b36"
        assert installed(4)
        versions["flash-attn"] = "2.6.3"  # its functions take other arguments
        assert not installed(2)
        found.clear()
        assert not any(installed(generation) for generation in (2, 3, 4))
    finally:
        flash_attn.installed.cache_clear()
