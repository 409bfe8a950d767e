"""An adapter is the model with W + alpha / rank · B A in place of W: the same logits, and the gradients that follow from them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from tests.unit.workers.model.test_decoder import CONFIG, logits, tokens
from workers.attention import Pattern
from workers.model import Decoder, ModelConfig
from workers.model.adapter import AdapterConfig, adapters, add_adapters, count_parameters, init_adapters, merge
from workers.model.base import Base, fingerprint

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = AdapterConfig(rank=3, alpha=5.0, targets=ALL)


def adapted(config: ModelConfig = CONFIG, adapter: AdapterConfig = ADAPTER, seed: int = 0, trained: bool = True) -> Decoder:
    """A model with its adapter; ``trained`` moves B away from its zeros."""
    with torch.device("meta"):
        model = add_adapters(Decoder(config), adapter)
    model.to_empty(device="cpu")
    model.tie()
    model.init_weights(seed)
    init_adapters(model, seed)
    for module in adapters(model).values() if trained else ():
        torch.nn.init.normal_(module.lora_B.weight, std=0.1)
    return model


def plain(config: ModelConfig = CONFIG) -> Decoder:
    return adapted(config, AdapterConfig())


def loss(logits_BSV: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), torch.arange(24) % CONFIG.vocab_size)


@pytest.mark.parametrize(
    "variant", [CONFIG, dataclasses.replace(CONFIG, tie_embeddings=True, qkv_bias=True, qk_norm=True)], ids=["llama", "qwen"]
)
def test_equal_to_the_model_of_merged_weights_gradients_too(variant):
    """Autograd through W + s · B A, written out, is the reference."""
    model, text, positions = adapted(variant), tokens(24), torch.arange(24)[None]
    base = {name: parameter.detach() for name, parameter in plain(variant).named_parameters()}
    low = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters() if ".lora_" in name}
    whole = dict(base)
    for name in adapters(model):
        whole[f"{name}.weight"] = base[f"{name}.weight"] + 5 / 3 * low[f"{name}.lora_B.weight"] @ low[f"{name}.lora_A.weight"]
    expected = functional_call(plain(variant), whole, (text, positions, Pattern()))
    got = model(text, positions, Pattern())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, logits(plain(variant), text), atol=1e-2)
    loss(got).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == low.keys() and len(low) == 2 * 7 * variant.layers
    for (name, got), reference in zip(gradients.items(), torch.autograd.grad(loss(expected), list(low.values()))):
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")


def test_a_new_adapter_is_the_base_to_the_bit():
    text = tokens(24)
    assert torch.equal(logits(adapted(trained=False), text), logits(plain(), text))


def test_values_of_a_new_adapter_depend_on_seed_and_name_alone():
    first, again, other, fewer = (
        adapters(adapted(adapter=a, seed=s, trained=False))
        for a, s in ((ADAPTER, 3), (ADAPTER, 3), (ADAPTER, 4), (AdapterConfig(rank=3), 3))
    )
    for name, module in first.items():
        assert torch.equal(module.lora_A.weight, again[name].lora_A.weight) and not module.lora_B.weight.any()
        assert not torch.equal(module.lora_A.weight, other[name].lora_A.weight)
    for name, module in fewer.items():
        assert torch.equal(module.lora_A.weight, first[name].lora_A.weight)
    assert len({module.lora_A.weight[0, 0].item() for module in first.values()}) == 14  # no two alike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_the_sum_in_float32(dtype):
    model, text = adapted().to(dtype), tokens(24)
    before, names = logits(model, text), [name for name, _ in plain().named_parameters()]
    expected = {
        name: (module.weight.float() + 5 / 3 * module.lora_B.weight.float() @ module.lora_A.weight.float()).to(dtype)
        for name, module in adapters(model).items()
    }
    merge(model)
    assert [name for name, _ in model.named_parameters()] == names
    for name, weight in expected.items():
        torch.testing.assert_close(model.get_parameter(f"{name}.weight"), weight, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-8)
    torch.testing.assert_close(logits(model, text), before, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)


def test_what_trains_and_in_which_type_the_rest_is_held():
    config = dataclasses.replace(CONFIG, tie_embeddings=True, qk_norm=True, memory=2)
    opened = AdapterConfig(rank=2, targets=("v_proj",), train_norms=True, train_embeddings=True)
    with torch.device("meta"):
        model = add_adapters(Decoder(config), opened, torch.bfloat16)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    block = (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "self_attn.v_proj.lora_A",
        "self_attn.v_proj.lora_B",
    )
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in block} | {"norm.weight", "embed_tokens.weight"}
    assert trained == expected | {f"layers.{i}.self_attn.memory_{part}" for i in range(2) for part in "kv"}
    assert all((parameter.dtype == torch.float32) == parameter.requires_grad for parameter in model.parameters())


def test_parameters_are_counted():
    trained, total = count_parameters(CONFIG, AdapterConfig(rank=3, targets=("q_proj", "down_proj")))
    assert trained == 2 * 3 * (32 + 32 + 64 + 32) and total == trained + CONFIG.parameters
    assert count_parameters(CONFIG, AdapterConfig()) == (CONFIG.parameters, CONFIG.parameters)


# fmt: off
@pytest.mark.parametrize("fields, said", [
    (dict(rank=0), "adapter.rank is 0; it must be at least 1, or null for no adapter"),
    (dict(rank=2, alpha=0), "adapter.alpha is 0; it must be more than 0"),
    (dict(rank=2, targets=("q_proj", "qkv")), "adapter.targets has 'qkv'; it can have q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    (dict(rank=2, targets=()), "adapter.targets is empty"),
    (dict(train_norms=True), "adapter.train_norms is True, but adapter.rank is not set"),
    (dict(rank=17), "adapter.rank = 17 is more than the rank of k_proj, which is 16 × 32; choose at most 16, or leave k_proj out of adapter.targets"),
])
# fmt: on
def test_what_no_adapter_can_be(fields, said):
    with pytest.raises(ValueError) as caught:
        AdapterConfig(**fields).check_model(CONFIG)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def model_folder(folder: Path, value: float) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    weights = torch.zeros(300_000)
    weights[123_456:] = value
    save_file({"w": weights}, str(folder / "model.safetensors"))
    return folder


def test_a_base_that_is_gone_or_has_changed_is_noticed(tmp_path):
    base = Base.of(model_folder(tmp_path / "model", 1.0), seed=3)
    base.check()
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="base model .*/model is gone"):
        base.check()
    assert base.same_weights(Base.of(tmp_path / "moved", seed=4)) and not base.same_weights(Base.of(None, seed=3))
    model_folder(tmp_path / "model", 1.5)  # trained further: the same names, shapes and sizes
    with pytest.raises(ValueError, match="base model .*/model is not what it was trained on"):
        base.check()
    assert fingerprint(tmp_path / "model") != fingerprint(tmp_path / "moved")
    Base.of(None, seed=3).check()
