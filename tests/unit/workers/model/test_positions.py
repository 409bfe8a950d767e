"""Rotary frequencies and their scalings beside transformers' and beside exact arithmetic; sinusoids beside the published formula."""

from __future__ import annotations

import dataclasses
import json
import math
from decimal import Decimal, localcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.unit.workers.model.test_decoder import CONFIG, decoder, logits, tokens
from workers.attention import Pattern
from workers.inference.cache import KVCache
from workers.inference.generate import generate
from workers.model import ModelConfig
from workers.model.positions import RopeScaling, Sinusoids, inverse_frequencies, rotary_table, rotate

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


def transformers_config(given: dict, **sizes) -> LlamaConfig:
    parameters = {"rope_theta": THETA, "original_max_position_embeddings": ORIGINAL, **given}
    if given["rope_type"] in ("linear", "dynamic"):
        del parameters["original_max_position_embeddings"]
    shape = dict(hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=ORIGINAL)
    return LlamaConfig(rope_parameters=parameters, **{**shape, **sizes})


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("length", LENGTHS)
def test_frequencies_and_attention_scaling_are_those_of_transformers(name, length):
    given = GIVEN[name]
    frequencies, scaling = ROPE_INIT_FUNCTIONS[given["rope_type"]](transformers_config(given), "cpu", seq_len=length)
    ours = inverse_frequencies(HEAD_DIM, THETA, SCALINGS[name], torch.tensor([[length]]))
    torch.testing.assert_close(ours.float().expand(1, 1, -1)[0, 0], frequencies, rtol=2e-6, atol=0)
    assert SCALINGS[name].attention_scaling == pytest.approx(scaling, rel=1e-12)


SMALL = 32  # original length of the models below; their heads have 8 dims
SMALL_FACTORS = dict(short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 1.5, 3.0, 4.0])


@torch.no_grad()
def attentive(config: ModelConfig):
    """A decoder whose projections are large enough for positions to matter."""
    model = decoder(config)
    for block in model.layers:
        block.self_attn.q_proj.weight *= 30
        block.self_attn.k_proj.weight *= 30
    return model


def both_models(name: str):
    """The decoder and transformers' Llama with the same weights."""
    given = {**GIVEN[name], "original_max_position_embeddings": SMALL, **(SMALL_FACTORS if "longrope" in name else {})}
    ours = attentive(dataclasses.replace(CONFIG, rope_theta=THETA, rope_scaling=given))
    if given["rope_type"] in ("linear", "dynamic"):
        del given["original_max_position_embeddings"]
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64, vocab_size=64,
        rms_norm_eps=1e-5, max_position_embeddings=SMALL, rope_parameters={"rope_theta": THETA, **given},
    )  # fmt: skip
    theirs = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    theirs.load_state_dict({key if key.startswith("lm_head") else f"model.{key}": value for key, value in ours.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("name", GIVEN)
def test_logits_are_those_of_transformers(name):
    ours, theirs = both_models(name)
    plain = decoder(dataclasses.replace(ours.config, rope_scaling=None))
    plain.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for length in (SMALL, 3 * SMALL):
            text = tokens(length)
            expected = theirs(text).logits
            torch.testing.assert_close(logits(ours, text), expected, rtol=1e-4, atol=2e-6)
            # The comparison can fail: without scaling the logits are others (dynamic scales only beyond the original length).
            assert torch.allclose(logits(plain, text), expected, rtol=1e-4, atol=1e-5) == (name == "dynamic" and length == SMALL)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_generation_beyond_the_original_length_is_that_of_transformers(name):
    ours, theirs = both_models(name)
    prompt = tokens(SMALL - 4)
    mask = torch.ones_like(prompt)
    answer = theirs.generate(prompt, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(generate(ours, prompt[0].tolist(), 16)) == answer[0, SMALL - 4 :].tolist()
    long = tokens(2 * SMALL)[0].tolist()  # a chunk of a prompt knows how long the prompt is
    assert list(generate(ours, long, 4, prefill=7)) == list(generate(ours, long, 4))


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def exact_angles(positions: list[int], head_dim: int, theta: int) -> torch.Tensor:
    """Angles within a turn, float64 [S, F], from arithmetic of 60 digits."""
    with localcontext() as context:
        context.prec = 60
        inverse = [Decimal(theta) ** (Decimal(-2 * pair) / head_dim) for pair in range(head_dim // 2)]
        return torch.tensor([[float(position * x % (2 * PI)) for x in inverse] for position in positions], dtype=torch.float64)


def test_ten_million_tokens_cost_no_accuracy():
    positions = [0, 1, 4095, 999_983, 10_000_000, 2**24 + 1, 123_456_789]
    cos, sin = rotary_table(torch.tensor([positions]), HEAD_DIM, 500_000.0)
    angles = exact_angles(positions, HEAD_DIM, 500_000)
    for ours, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert (ours[0, :, 0].double() - exact).abs().max() < 5e-7
    naive = torch.tensor(positions).float().unsqueeze(-1) * inverse_frequencies(HEAD_DIM, 500_000.0).float()
    assert (naive.cos() - angles.cos()).abs().max() > 0.1  # the trap that the table avoids


@pytest.mark.parametrize("name", [name for name in GIVEN if "given" not in name])
def test_a_scaled_rotation_is_relative_ten_million_tokens_away(name):
    """q·k at distance 777 does not depend on where it is; in float64 arithmetic on the table's frequencies neither."""
    q, k = torch.randn(2, 1, 1, 1, HEAD_DIM)
    length = torch.tensor([[10_000_001]])

    def score(position: int) -> torch.Tensor:
        table = [rotary_table(torch.tensor([[p]]), HEAD_DIM, THETA, SCALINGS[name], length) for p in (position, position - 777)]
        return (rotate(q, table[0]) * rotate(k, table[1])).sum()

    spread = SCALINGS[name].attention_scaling ** 2
    turned = torch.polar(torch.ones(()).double(), 777 * inverse_frequencies(HEAD_DIM, THETA, SCALINGS[name], length).flatten())
    complex_q, complex_k = (torch.complex(*x.double().flatten().chunk(2)) for x in (q, k))
    exact = (complex_q * turned * complex_k.conj()).real.sum() * spread
    for position in (777, 10_000_000):
        torch.testing.assert_close(score(position).double(), exact, rtol=1e-4, atol=1e-4 * spread)


def test_each_row_and_each_document_has_its_own_length():
    positions = torch.tensor([[0, 5, 90], [0, 5, 9]])
    length = torch.tensor([[91, 91, 91], [10, 10, 10]])
    table = rotary_table(positions, 8, THETA, RopeScaling("dynamic", 4.0, 32), length)
    for row in range(2):
        alone = rotary_table(positions[row : row + 1], 8, THETA, RopeScaling("dynamic", 4.0, 32))
        assert all(torch.equal(ours[row], theirs[0]) for ours, theirs in zip(table, alone))
    assert not torch.equal(table[0][0, 1], table[0][1, 1])
    assert torch.equal(table[0][1], rotary_table(positions[1:], 8, THETA)[0][0])


YARN = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32)
LLAMA3 = dict(rope_type="llama3", factor=2.0, original_max_position_embeddings=32)
LONG = dict(rope_type="longrope", factor=2.0, original_max_position_embeddings=32, short_factor=[1.0] * 16, long_factor=[1.0] * 16)


@pytest.mark.parametrize("given, said", [
    (dict(rope_type="ntk"), "rope_scaling.rope_type is 'ntk'; it must be one of linear, dynamic, yarn, llama3, longrope"),
    (dict(factor=2.0), "rope_scaling.rope_type is not set"),
    (dict(rope_type="yarn", factr=2.0), "unknown key model.rope_scaling.factr; the nearest is factor"),
    (dict(rope_type="linear"), "rope_scaling.factor is not set; linear needs it"),
    (dict(rope_type="dynamic", factor=2.0), "rope_scaling.original_max_position_embeddings is not set; dynamic needs it"),
    (dict(rope_type="linear", factor=0.5), "rope_scaling.factor is 0.5; it must be at least 1"),
    (dict(rope_type="linear", factor="4"), "rope_scaling.factor is '4'; it must be a number"),
    (dict(rope_type="linear", factor=math.nan), "rope_scaling.factor is nan; it must be a number"),
    (dict(rope_type="linear", factor=2.0, beta_fast=32.0), "rope_scaling.beta_fast is 32.0, but linear has no such key"),
    (YARN | dict(original_max_position_embeddings=0), "original_max_position_embeddings is 0; it must be at least 2"),
    (YARN | dict(beta_fast=1.0, beta_slow=2.0), "beta_fast is 1.0; it must be at least beta_slow = 2.0"),
    (YARN | dict(truncate=1), "truncate is 1; it must be true or false"),
    (LLAMA3 | dict(low_freq_factor=4, high_freq_factor=4), "high_freq_factor is 4; it must be more than low_freq_factor = 4"),
    (LONG | dict(short_factor=[1.0]), "short_factor has 1 numbers; it must have model.head_dim / 2 = 16"),
    (LONG | dict(long_factor=2), "long_factor has 1 numbers"),
    (LONG | dict(long_factor=[0.0] * 16), "long_factor is 0.0; it must be more than 0"),
    (LONG | dict(factor=None), "neither factor nor attention_factor"),
])  # fmt: skip
def test_a_scaling_that_cannot_be(given, said):
    with pytest.raises(ValueError) as error:
        ModelConfig(rope_scaling=given)  # heads of 32
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("shape, said", [
    (dict(positions="alibi"), "model.rope_scaling is set, but model.positions is alibi"),
    (dict(head_dim=2, rope_scaling=dict(rope_type="dynamic", factor=2, original_max_position_embeddings=9)), "model.head_dim is 2; dynamic"),
    (dict(rope_theta=1.0, rope_scaling=dict(rope_type="yarn", factor=2, original_max_position_embeddings=9)), "model.rope_theta is 1.0; yarn"),
    (dict(positions="sinusoidal", rope_scaling=None, dim=33, heads=3), "model.dim is 33; sinusoidal positions need an even number"),
])  # fmt: skip
def test_a_model_that_cannot_be_scaled(shape, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(**{"rope_scaling": dict(rope_type="linear", factor=2), **shape})


@pytest.mark.parametrize("name", GIVEN)
def test_a_scaled_model_survives_its_state_file(name):
    config = ModelConfig(dim=256, heads=4, rope_scaling=SCALINGS[name])
    again = ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config and hash(again) == hash(config) and again.rope_scaling == SCALINGS[name]


def test_sinusoids_are_those_of_the_paper():
    table = Sinusoids(6)(torch.tensor([[0, 3, 10_000_000]]))
    for row, position in enumerate((0, 3, 10_000_000)):
        for pair in range(3):
            angle = position / 10_000 ** (2 * pair / 6)
            assert table[0, row, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[0, row, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("positions", ["none", "alibi", "sinusoidal", "rope"])
def test_one_layer_tells_the_order_of_what_came_before_unless_it_has_no_positions(positions):
    model, text = attentive(dataclasses.replace(CONFIG, layers=1, positions=positions)), tokens(12)
    with torch.no_grad():
        last, other = (model(t, torch.arange(12)[None], model.config.pattern())[0, -1] for t in (text, text[:, [1, 0, *range(2, 12)]]))
    change = (last - other).abs().max()
    assert change < 1e-6 if positions == "none" else change > 1e-5, change


def test_a_model_with_sinusoids_goes_on_from_a_cache():
    model, text = attentive(dataclasses.replace(CONFIG, positions="sinusoidal")), tokens(12)
    caches = [KVCache(model.config, 12) for _ in model.layers]
    with torch.no_grad():
        parts = [model(text[:, a:b], torch.arange(a, b)[None], Pattern(), caches=caches) for a, b in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), logits(model, text), rtol=1e-5, atol=1e-5)
