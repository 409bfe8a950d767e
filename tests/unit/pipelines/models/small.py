"""A small model folder and a small GGUF file, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch

from pipelines.corpus.tokenizer.byte import byte_document
from pipelines.models.gguf import OUTER, TENSORS
from workers.model import Decoder, ModelConfig, save_pretrained
from workers.model.huggingface import model_tensors

WORDS = ["in", "Ġin", "def", "12", "<|im_end|>"]
MERGES = ["i n", "Ġ in", "d e", "de f", "1 2"]
VOCAB = 256 + 8  # bytes, the words, what merging them passes through, one unused


def model(seed: int = 0, **fields) -> Decoder:
    """Random weights, of which no norm is 1 and no bias 0."""
    decoder = Decoder(ModelConfig(**{**dict(dim=32, heads=4, kv_heads=2, layers=2, ffn_dim=64, vocab_size=VOCAB), **fields}))
    decoder.init_weights(seed)
    for number, parameter in enumerate(decoder.parameters()):
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.1)
    return decoder


def tokens() -> tuple[list[str], list[int]]:
    """Spellings and types (1 normal, 3 control, 5 unused) of the vocabulary."""
    vocabulary = json.loads(byte_document())["model"]["vocab"]
    spelled = [*sorted(vocabulary, key=vocabulary.get), *WORDS[:4], "de", "Ġd", WORDS[4], "[PAD263]"]
    return spelled, [1] * 262 + [3, 5]


def tokenizer_document() -> str:
    """A tokenizer.json with one control token, which is none of Ringspan's."""
    spelled, _ = tokens()
    tree = json.loads(byte_document())
    tree["model"] |= {"vocab": {token: i for i, token in enumerate(spelled[:-1])}, "merges": [merge.split() for merge in MERGES]}
    tree["added_tokens"] = [{**tree["added_tokens"][0], "id": 262, "content": WORDS[4]}]
    tree["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(tree)


def folder(path: Path, dtype: torch.dtype = torch.float32, **fields) -> Decoder:
    """A model folder with a tokenizer; returns the model."""
    decoder = model(**fields)
    save_pretrained(decoder, path, dtype=dtype, context=512, shard_bytes=30_000)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 262}))
    (path / "tokenizer.json").write_text(tokenizer_document())
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": WORDS[4]}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 262}))
    return decoder


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the query and key rows of Llama."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    decoder: Decoder,
    kind: str = "llama",
    quantization=gguf.GGMLQuantizationType.F32,
    *,
    pre: str | None = "gpt-2",
    strings: dict | None = None,
    numbers: dict | None = None,
    extra: dict | None = None,
) -> Path:
    """The model as llama.cpp's converter writes it. ``strings``, ``numbers``: metadata to add; ``extra``: tensors to add."""
    config = decoder.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(512)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    spelled, types = tokens()
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(spelled)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(262)
    for key, value in (strings or {}).items():
        writer.add_string(key, value)
    for key, value in (numbers or {}).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    outer, inner = {theirs: ours for ours, theirs in OUTER.items()}, {theirs: ours for ours, theirs in TENSORS.items()}
    sizes, read = model_tensors(decoder, torch.float32)
    for name in sizes:
        values = read(name)
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, config.heads if "q_proj" in name else config.kv_heads)
        if name in outer:
            theirs = outer[name]
        else:
            _, _, layer, *stem, last = name.split(".")
            theirs = f"blk.{layer}.{inner['.'.join(stem)]}.{last}"
        wanted = quantization if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quants.quantize(values.detach().numpy(), wanted), raw_dtype=wanted)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
