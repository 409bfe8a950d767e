"""A GGUF file (llama.cpp's format) as a Hugging Face model: config, tensors, tokenizer.

llama.cpp rotates neighbouring values of a head where Hugging Face rotates halves, and its converter reorders the rows of
Llama's query and key projections for it; here they are put back. Quantized tensors are read as float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from workers.model.huggingface.config import ARCHITECTURES
from workers.model.huggingface.folder import Sizes

PERMUTED = ("llama", "mistral")  # architectures whose query and key rows the converter reorders
SUPPORTED = (*PERMUTED, "qwen2", "qwen3")
TENSORS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1: what each frequency is divided by
KEPT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# How text is split before byte pairs are merged, by ``tokenizer.ggml.pre``. GPT-2's pattern is built into "ByteLevel".
GPT2 = "gpt-2"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LETTERS}|\p{{N}}{{1,3}}|{REST}",
    "qwen2": rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LETTERS}|\p{{N}}|{REST}",
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # of ``tokenizer.ggml.token_type``


def open_gguf(path: Path) -> tuple[dict, GGUFTensors, str, dict[str, str]]:
    """The config, the tensors, tokenizer.json, and the other files of a model folder, by name.

    Raises ValueError, one line, for a file that is no GGUF, and by name for an architecture or a tokenizer that is not supported.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error
    kind = keys.get("general.architecture")
    if kind not in SUPPORTED:
        raise ValueError(f"{path}: the architecture {kind} is not supported; supported are {', '.join(SUPPORTED)}")
    if keys.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {keys['split.count']} parts; join them with llama.cpp's gguf-split first")
    try:
        tensors = GGUFTensors(reader, kind, keys, path)
        document, tokenizer_config = _tokenizer(keys, path)
        raw = _config(kind, keys, tensors, path)
    except KeyError as error:  # as files of a vocabulary alone
        raise ValueError(f"{path} is not a whole model: it has no {error.args[0]}") from error
    ids = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in raw}
    files = {"tokenizer_config.json": json.dumps(tokenizer_config, indent=1), "generation_config.json": json.dumps(ids, indent=1)}
    return raw, tensors, document, files


class GGUFTensors:
    """The tensors under Hugging Face's names; as ``FolderTensors``, ``sizes`` and ``read``."""

    def __init__(self, reader, kind: str, keys: dict, path: Path):
        self._path = path
        self._heads = keys[f"{kind}.attention.head_count"]
        self._kv_heads = keys.get(f"{kind}.attention.head_count_kv", self._heads)
        self._permuted = kind in PERMUTED
        self._tensors = {}
        self.rope_factors = None
        self.sizes: Sizes = {}
        for tensor in reader.tensors:
            if tensor.name == ROPE_FACTORS:
                self.rope_factors = np.array(tensor.data, dtype=np.float64).tolist()
                continue
            name = _their_name(tensor.name, path)
            self._tensors[name] = tensor
            shape = tuple(int(n) for n in reversed(tensor.shape))  # innermost first in the file
            self.sizes[name] = (shape, KEPT.get(tensor.tensor_type.name, torch.float32))

    def read(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        shape, dtype = self.sizes[name]
        tensor = self._tensors[name]
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"{self._path}: tensor {tensor.name} is of type {tensor.tensor_type.name}, which cannot be read") from error
        values = torch.from_numpy(np.array(numbers, dtype=np.float32)).reshape(shape)
        if self._permuted and "self_attn.q_proj" in name:
            values = _unpermuted(values, self._heads)
        if self._permuted and "self_attn.k_proj" in name:
            values = _unpermuted(values, self._kv_heads)
        return values.to(dtype)


def _unpermuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, K/2), (1, K/2 + 1), … back to halves."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _their_name(name: str, path: Path) -> str:
    if name in OUTER:
        return OUTER[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    if not (name.startswith("blk.") and block.isdecimal() and stem in TENSORS):
        raise ValueError(f"{path} has a tensor {name}, which the supported models ({', '.join(SUPPORTED)}) have no place for")
    return f"model.layers.{block}.{TENSORS[stem]}.{kind}"


def _config(kind: str, keys: dict, tensors: GGUFTensors, path: Path) -> dict:
    def get(name: str, *default):
        """Raises KeyError for a key that is not there and has no default."""
        value = keys.get(f"{kind}.{name}", *default) if default else keys[f"{kind}.{name}"]
        if isinstance(value, list):
            raise ValueError(f"{path}: {kind}.{name} differs by layer; only models whose layers are all alike are supported")
        return value

    dim, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", dim // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if get(name, head_dim) != head_dim:
            raise ValueError(f"{path}: {kind}.{name} is {get(name)}, not the head size {head_dim}; such models are not supported")
    window = get("attention.sliding_window", None)
    if window and kind not in PERMUTED:
        raise ValueError(f"{path}: {kind}.attention.sliding_window = {window} is not supported")
    kind_out = "mistral" if window else kind
    raw = {
        "architectures": [ARCHITECTURES[kind_out]],
        "model_type": kind_out,
        "vocab_size": tensors.sizes["model.embed_tokens.weight"][0][0],
        "hidden_size": dim,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),  # 1e-05, not 9.999999747378752e-06
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(kind, keys, tensors, path),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors.sizes,
        "torch_dtype": str(tensors.sizes["model.embed_tokens.weight"][1]).removeprefix("torch."),
    }
    if kind_out == "mistral":
        raw["sliding_window"] = window or None
    for theirs, ours in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if f"tokenizer.ggml.{theirs}_token_id" in keys:
            raw[ours] = keys[f"tokenizer.ggml.{theirs}_token_id"]
    return raw


def _rope_scaling(kind: str, keys: dict, tensors: GGUFTensors, path: Path) -> dict | None:
    given = {name.removeprefix(f"{kind}.rope.scaling."): value for name, value in keys.items() if name.startswith(f"{kind}.rope.scaling.")}
    given.setdefault("factor", keys.get(f"{kind}.rope.scale_linear", 1.0))  # as old files call it
    if given["factor"] in (0, 1):
        del given["factor"]
    rope_type = given.pop("type", "linear" if "factor" in given else "none")  # as llama.cpp reads a file that doesn't say
    given.pop("finetuned", None)
    if rope_type != "none":
        names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
        for name in given.keys() - names.keys():
            raise ValueError(f"{path}: {kind}.rope.scaling.{name} is not supported")
        if tensors.rope_factors is not None or rope_type not in ("linear", "yarn"):
            raise ValueError(f"{path}: {kind}.rope.scaling.type = {rope_type} is not supported; supported are none, linear and yarn")
        return {"rope_type": rope_type, **{names[name]: value for name, value in given.items()}}
    for name in given.keys() - {"factor", "original_context_length"}:  # which say nothing where nothing is scaled
        raise ValueError(f"{path}: {kind}.rope.scaling.{name} without a type of scaling is not supported")
    if tensors.rope_factors is not None:  # the divisors themselves, whatever formula gave them
        return {
            "rope_type": "longrope", "short_factor": tensors.rope_factors, "long_factor": tensors.rope_factors,
            "factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": keys[f"{kind}.context_length"],
        }  # fmt: skip
    return None


def _tokenizer(keys: dict, path: Path) -> tuple[str, dict]:
    """tokenizer.json and tokenizer_config.json from ``tokenizer.ggml.*``."""
    get = lambda name, default=None: keys.get(f"tokenizer.ggml.{name}", default)
    if get("model") != "gpt2":
        raise ValueError(f"{path}: the tokenizer {get('model')} is not supported; only byte-level byte-pair encoding (gpt2) is")
    pre, known = get("pre", "default"), (GPT2, "smollm", *SPLITS)
    if pre == "default":  # files from before there was such a key: whichever was meant, a guess would give other ids than training did
        raise ValueError(
            f"{path} does not say how text is split into words (tokenizer.ggml.pre); import the model's Hugging Face folder, or set the key to "
            f"one of {', '.join(known)}"
        )
    if pre not in known:
        raise ValueError(f"{path}: the pre-tokenizer {pre} is not supported; supported are {', '.join(known)}")
    tokens, types, merges = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, types))
        if kind in (CONTROL, USER_DEFINED)
    ]
    token_of = lambda name: tokens[get(f"{name}_token_id")] if get(f"{name}_token_id") is not None else None
    bos = token_of("bos")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(pre, bool(get("add_space_prefix", False))),
        "post_processor": _begin(bos, get("bos_token_id")) if get("add_bos_token", pre == "llama-bpe") and bos is not None else None,
        "decoder": _byte_level(False, True),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind != UNUSED},
            "merges": [merge.split(" ") for merge in merges],
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": token_of("eos"), "pad_token": token_of("padding"),
        "unk_token": token_of("unknown"), "clean_up_tokenization_spaces": False, "chat_template": keys.get("tokenizer.chat_template"),
    }  # fmt: skip
    return json.dumps(document, ensure_ascii=False), {key: value for key, value in config.items() if value is not None}


def _byte_level(prefix_space: bool, use_regex: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": use_regex}


def _pre_tokenizer(pre: str, prefix_space: bool) -> dict:
    if pre == GPT2:
        return _byte_level(prefix_space, True)
    if pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, _byte_level(prefix_space, True)]
    else:
        steps = [
            {"type": "Split", "pattern": {"Regex": SPLITS[pre]}, "behavior": "Isolated", "invert": False},
            _byte_level(prefix_space, False),
        ]
    return {"type": "Sequence", "pretokenizers": steps}


def _begin(token: str, token_id: int) -> dict:
    """A text begins with the begin-of-text token."""
    begin, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    known = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, second], "special_tokens": known}
