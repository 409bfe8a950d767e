import pytest
import torch
import torch.nn.functional as F

from tests.allocations import allocations
from workers.training.loss import IGNORE, token_losses


def inputs(tokens=50, dim=16, vocabulary=37, dtype=torch.float64, masked=0.3):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, dim, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, dim, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (2, tokens // 2), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < masked] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 50, 1024])
def test_chunks_equal_the_plain_loss(chunk):
    hidden, weight, targets = inputs()
    total, losses = token_losses(hidden, weight, targets, chunk=chunk)
    grads = torch.autograd.grad(total * 0.5, (hidden, weight))
    plain = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    expected = torch.autograd.grad(plain.sum() * 0.5, (hidden, weight))
    torch.testing.assert_close(total.double(), plain.sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.flatten().double(), plain, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grads, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nothing_to_learn_is_zero_and_not_nan():  # A7
    hidden, weight, targets = inputs(masked=1.1)
    total, losses = token_losses(hidden, weight, targets)
    total.backward()
    assert total.item() == 0 and not losses.any()
    assert not hidden.grad.any() and not weight.grad.any()


def test_large_logits_do_not_overflow():
    hidden, weight, targets = inputs(dtype=torch.float32)
    total, _ = token_losses(hidden * 1e3, weight * 1e2, targets)
    assert torch.isfinite(total)


def test_bf16_gradients_follow_fp32():
    hidden, weight, targets = inputs(dtype=torch.float32)
    exact = torch.autograd.grad(token_losses(hidden, weight, targets)[0], (hidden, weight))
    narrow = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    got = torch.autograd.grad(token_losses(*narrow, targets)[0], narrow)
    for ours, theirs in zip(got, exact):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs).abs().max() <= 0.03 * theirs.abs().max()


def test_without_gradients_none_are_formed():
    """An evaluation forms logits and nothing else: one matrix product a chunk."""
    hidden, weight, targets = inputs()
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        total, losses = token_losses(hidden, weight, targets)
    assert not total.requires_grad
    torch.testing.assert_close(total, losses.sum())
    assert sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")) == 1


def test_logits_of_the_whole_sequence_never_exist():
    """Peak of what the loss allocates: far below tokens × vocabulary."""
    tokens, vocabulary = 16_384, 8_192
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, tokens))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        token_losses(hidden, weight, targets)[0].backward()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0 < peak < tokens * vocabulary * 4 / 5


def test_memory_is_a_twentieth_of_that_of_whole_logits():
    """8,192 × 2,048 logits at the least ratio that is promised for 131,072 × 49,152 (see bench_switches --loss)."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 8192, 16, generator=generator), torch.randn(2048, 16, generator=generator)
    targets = torch.randint(0, 2048, (1, 8192), generator=generator)

    def chunked(hidden, weight):
        return token_losses(hidden, weight, targets, chunk=256)[0]

    def whole(hidden, weight):
        return F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")

    peaks, gradients = [], []
    for loss in (chunked, whole):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        measured = allocations(lambda: torch.autograd.grad(loss(*leaves), leaves))
        peaks.append(measured.peak)
        gradients.append(measured.result)
    assert peaks[1] >= 20 * peaks[0] and peaks[1] >= 8192 * 2048 * 4
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
