"""Weights and architectures against transformers itself: the same logits, gradients and greedy text, in both directions."""

import dataclasses
import json

import pytest
import torch

from workers.inference.generate import generate
from workers.model import ModelConfig, load_pretrained, save_pretrained
from workers.model.huggingface import from_huggingface, load_weights, read_config

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=192, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=128)
FAMILIES = {
    "llama, all heads": ("llama", dict(num_key_value_heads=6)),
    "llama, tied, grouped": ("llama", dict(num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "llama, one KV head of its own size": ("llama", dict(num_key_value_heads=1, head_dim=16)),
    "mistral, windowed": ("mistral", dict(num_key_value_heads=2, sliding_window=9)),
    "mistral": ("mistral", dict(num_key_value_heads=2, sliding_window=None)),
    "qwen2": ("qwen2", dict(num_key_value_heads=2)),
    "qwen2, tied, windowed": (
        "qwen2", dict(num_key_value_heads=3, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9, max_window_layers=0)
    ),
    "qwen3": ("qwen3", dict(num_key_value_heads=2, head_dim=16)),
    "qwen3, tied, windowed": (
        "qwen3",
        dict(num_key_value_heads=6, head_dim=8, tie_word_embeddings=True, use_sliding_window=True, sliding_window=7, max_window_layers=0),
    ),
}  # fmt: skip
SCALINGS: dict = {}


def make(folder, kind: str, changes: dict, dtype=torch.float32, shard="5GB"):
    """A model of random weights, as transformers saves it; every norm and bias has a value of its own."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES, **changes))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def logits_and_gradients(model, forward, tokens_BS):
    logits = forward(model, tokens_BS)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten()).backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def ours(model, tokens_BS):
    return model(tokens_BS, torch.arange(tokens_BS.shape[1])[None].expand_as(tokens_BS), model.config.pattern())


def theirs(model, tokens_BS):
    return model(tokens_BS, use_cache=False).logits


def assert_same(folder, reference, length: int = 40):
    tokens_BS = torch.randint(0, 192, (2, length), generator=torch.Generator().manual_seed(1))
    model = load_pretrained(folder)
    got, gradients = logits_and_gradients(model, ours, tokens_BS)
    wanted, their_gradients = logits_and_gradients(reference, theirs, tokens_BS)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert wanted.abs().max() > 1
    for name, gradient in gradients.items():
        theirs_too = their_gradients[name if name.startswith("lm_head") else f"model.{name}"]
        torch.testing.assert_close(gradient, theirs_too, rtol=1e-3, atol=1e-5 + 1e-4 * theirs_too.abs().max().item(), msg=name)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_greedy_text_are_those_of_transformers(family, tmp_path):
    kind, changes = FAMILIES[family]
    reference = make(tmp_path / "theirs", kind, changes)
    model = assert_same(tmp_path / "theirs", reference)
    prompt = list(range(5, 25))
    wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 20:]
    assert list(generate(model, prompt, 64)) == wanted.tolist()

    save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(reference)
    tokens_BS = torch.arange(40)[None]
    assert torch.equal(theirs(again, tokens_BS), theirs(reference, tokens_BS))
    assert read_config(tmp_path / "ours")["model_type"] == kind
