"""Weights and architectures against transformers itself: the same logits, gradients and greedy text, in both directions."""

import dataclasses
import json
import re

import pytest
import torch

from workers.inference.generate import generate
from workers.model import ModelConfig, load_pretrained, save_pretrained
from workers.model.huggingface import FolderTensors, check_weights, from_huggingface, read_config, to_huggingface

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
SCALINGS = {
    "linear": dict(factor=2.5),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "yarn, DeepSeek's": dict(factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.0, beta_fast=8, truncate=False),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "longrope": dict(short_factor=[1.0, 1.1, 1.2, 1.5], long_factor=[1.0, 2.0, 3.0, 9.0], factor=4.0, original_max_position_embeddings=32),
}


def make(folder, kind: str, changes: dict, dtype=torch.float32, shard="5GB"):
    """A model of random weights, as transformers saves it; every norm and bias has a value of its own."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{**SIZES, **changes}))
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


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_of_the_positions(name, style, tmp_path):
    """As transformers 5 writes them, and as 4 did; in a sequence beyond the original length and, for longrope, in a shorter one."""
    scaling = {"rope_type": name.partition(",")[0], **SCALINGS[name]}
    changes = dict(num_key_value_heads=2, max_position_embeddings=32, rope_parameters={**scaling, "rope_theta": 2_000.0})
    reference = make(tmp_path / "theirs", "llama", changes)
    if style == "rope_scaling":
        raw = read_config(tmp_path / "theirs")
        del raw["rope_parameters"]
        scaling["type"] = scaling.pop("rope_type")
        (tmp_path / "theirs/config.json").write_text(json.dumps({**raw, "rope_theta": 2_000, "rope_scaling": scaling}))
    model = assert_same(tmp_path / "theirs", reference)
    reference.zero_grad()
    assert_same(tmp_path / "theirs", reference, length=12)

    save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens_BS = torch.arange(40)[None]
    torch.testing.assert_close(theirs(again, tokens_BS), theirs(reference, tokens_BS), rtol=0, atol=1e-6)
    written = read_config(tmp_path / "ours")
    assert from_huggingface(written) == model.config
    if name.startswith("longrope"):  # where transformers 4 looks for it
        assert written["original_max_position_embeddings"] == model.config.rope_scaling.original_max_position_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip_keeps_every_bit(dtype, tmp_path):
    """Also from several files, and into several."""
    make(tmp_path / "theirs", "qwen2", dict(num_key_value_heads=2), dtype, shard="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = load_pretrained(tmp_path / "theirs")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs", dtype=dtype, shard_bytes=50_000)
    assert (tmp_path / "ours/model.safetensors.index.json").exists()
    assert tensors_of(tmp_path / "ours") == tensors_of(tmp_path / "theirs")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert reloaded.dtype == dtype
    with pytest.raises(ValueError, match="exists already"):
        save_pretrained(model, tmp_path / "ours")


def tensors_of(folder) -> dict:
    """Type and bytes of every tensor."""
    tensors = FolderTensors(folder)
    return {name: (size, tensors.read(name).contiguous().view(torch.uint8).numpy().tobytes()) for name, size in tensors.sizes.items()}


RAW = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
    vocab_size=192,
)  # fmt: skip
QWEN = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral")
SUPPORTED = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
REFUSED = {
    "GPT2LMHeadModel": dict(architectures=["GPT2LMHeadModel"], model_type="gpt2"),
    "LlamaForSequenceClassification": dict(architectures=["LlamaForSequenceClassification"]),
    SUPPORTED: dict(architectures=None, model_type="gemma2"),
    "hidden_act = 'gelu'": dict(hidden_act="gelu"),
    "attention_bias = True": dict(attention_bias=True),
    "mlp_bias = True": dict(mlp_bias=True),
    "partial_rotary_factor = 0.5": dict(partial_rotary_factor=0.5),
    "partial_rotary_factor is not 1": dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.25)),
    "quantization_config": dict(quantization_config={"bits": 4}),
    "never run": dict(auto_map={"AutoModelForCausalLM": "modeling_evil.Model"}),
    "'proportional'": dict(rope_scaling=dict(rope_type="proportional", factor=2.0)),
    "mrope_section": dict(rope_scaling=dict(rope_type="linear", factor=2.0, mrope_section=[1, 1, 2])),
    "differ by layer": dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4), sliding_attention=dict(rope_theta=1e6))),
    "1 of 2 layers have a sliding window": QWEN | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "1 of 2 layers": QWEN | dict(use_sliding_window=True, sliding_window=8, layer_types=["full_attention", "sliding_attention"]),
    "no sliding_window": QWEN | dict(layer_types=["sliding_attention"] * 2),
    "hidden_size is None": dict(hidden_size=None),
    "for /": dict(max_position_embeddings="long", rope_scaling=dict(rope_type="yarn", original_max_position_embeddings=8)),
    "num_hidden_layers is 'two'": dict(num_hidden_layers="two"),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_would_be_computed_otherwise_is_refused_by_name(named):
    raw = {key: value for key, value in {**RAW, **REFUSED[named]}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        from_huggingface(raw, "here/config.json")
    assert str(caught.value).count("here/config.json") == 1 and "\n" not in str(caught.value)


def test_a_config_that_leaves_things_out_has_the_defaults_of_transformers():
    for kind, extra in {"llama": {}, "mistral": {"num_key_value_heads": 2}, "qwen2": {"num_key_value_heads": 2}, "qwen3": {}}.items():
        sizes = {key: value for key, value in RAW.items() if key not in ("architectures", "model_type")}
        theirs = transformers.AutoConfig.for_model(kind, **sizes, **extra)
        ours = from_huggingface(RAW | extra | dict(model_type=kind, architectures=None))
        assert ours.head_dim == getattr(theirs, "head_dim", 8) and ours.norm_eps == theirs.rms_norm_eps
        assert ours.window == (4096 if kind == "mistral" else None)
        assert ours.tie_embeddings == theirs.tie_word_embeddings and ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert from_huggingface(RAW | MISTRAL | dict(sliding_window=None)).window is None
    assert from_huggingface(RAW | QWEN | dict(use_sliding_window=True, max_window_layers=2)).window is None
    assert from_huggingface(RAW | dict(attention_bias=False, pretraining_tp=2, rope_scaling=None)).positions == "rope"
    yarn = dict(rope_type="yarn", original_max_position_embeddings=1024)
    assert from_huggingface(RAW | dict(max_position_embeddings=None, rope_scaling=yarn)).rope_scaling.factor == 2.0


@pytest.mark.parametrize(
    "fields",
    [
        dict(sinks=2, window=8), dict(memory=1), dict(segment=8, window=8), dict(block=8), dict(stride=2), dict(top_blocks=2),
        dict(positions="alibi"), dict(positions="sinusoidal"), dict(positions="none"), dict(qk_norm=True, qkv_bias=True),
    ],
)  # fmt: skip
def test_a_model_that_transformers_does_not_compute_is_not_exported(fields):
    config = ModelConfig(dim=16, heads=2, layers=1, ffn_dim=16, vocab_size=64, **fields)
    with pytest.raises(ValueError, match=f"model.{list(fields)[0]}.*cannot be exported"):
        to_huggingface(config, torch.float32)


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "model", "llama", dict(num_key_value_heads=2), shard="40KB")
    return tmp_path / "model"


def test_tensors_that_are_not_the_models_are_named(folder):
    config = from_huggingface(read_config(folder))
    cases = ((dict(layers=3), "no tensor model.layers.2"), (dict(layers=1), "model.layers.1.*no place"), (dict(ffn_dim=64), r"\[80, 48\]"))
    for changed, named in cases:
        with pytest.raises(ValueError, match=named):
            check_weights(folder, dataclasses.replace(config, **changed))


def test_no_pickle_and_no_path_out_of_the_folder_is_opened(folder, tmp_path):  # H6
    index = folder / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    for outside in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        index.write_text(json.dumps({"weight_map": {**tree["weight_map"], "model.norm.weight": outside}}))
        with pytest.raises(ValueError, match="only files of the folder itself"):
            load_pretrained(folder)
    index.unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights only .pytorch_model.bin"):
        load_pretrained(folder)


def test_a_damaged_file_is_named(folder):
    path = next(folder.glob("model-00002*"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=path.name):
        load_pretrained(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not an index"):
        load_pretrained(folder)


def test_a_failed_save_leaves_nothing(folder, tmp_path, monkeypatch):
    model = load_pretrained(folder)
    monkeypatch.setattr("workers.model.huggingface.folder.save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(model, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
