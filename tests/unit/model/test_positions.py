"""Rotary frequencies and their scalings beside transformers' and beside exact arithmetic; sinusoids beside the published formula."""

from __future__ import annotations


import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workers.model.positions import RopeScaling, inverse_frequencies

HEAD_DIM, THETA, ORIGINAL = 64, 10_000.0, 4096
FACTORS = [1 + i / 8 for i in range(HEAD_DIM // 2)]
GIVEN = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=8.0),
    "yarn, deepseek": dict(rope_type="yarn", factor=40.0, mscale=0.707, mscale_all_dim=1.0, beta_fast=24, beta_slow=2),
    "yarn, gpt-oss": dict(rope_type="yarn", factor=32.0, truncate=False),
    "yarn, given": dict(rope_type="yarn", factor=2.0, attention_factor=1.25),
    "yarn, one mscale": dict(rope_type="yarn", factor=2.0, mscale=0.5),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": dict(rope_type="longrope", factor=32.0, short_factor=FACTORS[::-1], long_factor=FACTORS),
    "longrope, given": dict(rope_type="longrope", attention_factor=1.1, short_factor=FACTORS, long_factor=FACTORS[::-1]),
}
SCALINGS = {name: RopeScaling(**{"original_max_position_embeddings": ORIGINAL, **given}) for name, given in GIVEN.items()}
LENGTHS = (100, ORIGINAL, ORIGINAL + 1, 10 * ORIGINAL)


def transformers_says(given: dict, length: int, head_dim: int = HEAD_DIM) -> tuple[torch.Tensor, float]:
    parameters = {"rope_theta": THETA, "original_max_position_embeddings": ORIGINAL, **given}
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=ORIGINAL, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[given["rope_type"]](config, "cpu", seq_len=length)


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("length", LENGTHS)
def test_frequencies_and_attention_scaling_are_those_of_transformers(name, length):
    frequencies, scaling = transformers_says(GIVEN[name], length)
    ours = inverse_frequencies(HEAD_DIM, THETA, SCALINGS[name], torch.tensor([[length]]))
    torch.testing.assert_close(ours.float().expand(1, 1, -1)[0, 0], frequencies, rtol=5e-6, atol=0)
    assert SCALINGS[name].attention_scaling == pytest.approx(scaling, rel=1e-12)
