import pytest
import torch

from workers.attention.merge import merge_


def softmax_part(scores_QK, v_KD):
    """out [1, Q, 1, D] and lse [1, Q, 1] over some keys; a row of −inf scores has seen none."""
    lse = scores_QK.logsumexp(-1)
    weights = (scores_QK - lse.nan_to_num(neginf=0).unsqueeze(-1)).exp()
    return (weights @ v_KD)[None, :, None], lse[None, :, None]


@pytest.mark.parametrize("gap", [0.0, 100.0, -100.0, 1e4])
def test_parts_merge_to_the_whole(gap):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 64, generator=generator, dtype=torch.float64)
    scores[:, 32:] += gap
    v = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    out, lse = softmax_part(scores[:, :8], v[:8])
    for start in range(8, 64, 8):
        merge_(out, lse, *softmax_part(scores[:, start : start + 8], v[start : start + 8]))
    expected, expected_lse = softmax_part(scores, v)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seen", [(False, False), (True, False), (False, True)])
def test_rows_that_have_seen_no_key(seen):  # A1
    v = torch.randn(4, 8, dtype=torch.float64)
    parts = []
    for visible in seen:
        scores = torch.randn(3, 4, dtype=torch.float64) if visible else torch.full((3, 4), -torch.inf, dtype=torch.float64)
        parts.append(softmax_part(scores, v))
    expected = next(
        (part for part, visible in zip(parts, seen) if visible),
        (torch.zeros(1, 3, 1, 8).double(), torch.full((1, 3, 1), -torch.inf).double()),
    )
    expected = [x.clone() for x in expected]
    out, lse = parts[0]
    merge_(out, lse, *parts[1])
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
