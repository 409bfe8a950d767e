"""``config.json`` of a Hugging Face model folder ↔ ``ModelConfig``.

Both of the ways in which transformers writes rotary positions are read: ``rope_theta`` and ``rope_scaling`` (to version 4),
``rope_parameters`` (from version 5). The first is written; version 5 reads it, too. What a config asks for and this
decoder does not do is refused by name: a model that loads and computes something else is worse than one that does not load.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from workers.model.config import ModelConfig

CONFIG_FILE = "config.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
HEAD_DIM = {"qwen3": 128}  # what a config of this type means that names none; others: hidden size / heads
CONTEXT = 2048  # of a model that never said: Llama's default for max_position_embeddings

SIZES = {
    "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "ffn_dim": "intermediate_size", "vocab_size": "vocab_size",
}  # fmt: skip
# Key → the only value (beside null) that this decoder computes.
ONLY = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0}
# Fields of ModelConfig that none of the architectures has; exported only at their default.
OURS_ALONE = ("sinks", "block", "stride", "memory", "segment", "top_blocks")


def is_model_folder(path: Path) -> bool:
    return (Path(path) / CONFIG_FILE).is_file()


def read_config(folder: Path) -> dict:
    """``config.json`` as it stands. Raises ValueError, naming the file, when there is none or it is not JSON of keys."""
    path = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} is not a model folder: {CONFIG_FILE} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is a {type(raw).__name__}; it must hold keys")
    return raw


def from_huggingface(raw: dict, where: str = CONFIG_FILE) -> ModelConfig:
    """The shape of the model that a ``config.json`` describes; keys it leaves out have transformers' defaults.

    Raises ValueError, one line, for an architecture that is not supported and for whatever would be computed otherwise.
    """
    kind = _kind(raw, where)
    if raw.get("auto_map"):
        raise ValueError(f"{where} has auto_map: the model needs code from its folder, which is never run; use one of {_supported()}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            raise ValueError(f"{where} has {key}: quantized weights cannot be read; import the original model, or a GGUF file")
    for key, only in ONLY.items():
        if raw.get(key, only) not in (None, only) and not (key == "attention_bias" and kind in ("mistral", "qwen2")):
            raise ValueError(f"{where} has {key} = {raw[key]!r}; only {only!r} is supported for {ARCHITECTURES[kind]}")
    for key in SIZES.values():
        if not isinstance(raw.get(key), int):
            raise ValueError(f"{where}: {key} is {raw.get(key)!r}; it must be a whole number")
    sizes = {ours: raw[theirs] for ours, theirs in SIZES.items()}
    try:
        theta, scaling = _rope(raw)
        return ModelConfig(
            **sizes, kv_heads=raw.get("num_key_value_heads"), head_dim=raw.get("head_dim") or HEAD_DIM.get(kind),
            norm_eps=raw.get("rms_norm_eps", 1e-6), rope_theta=theta, tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3", window=_window(raw, kind), rope_scaling=scaling,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def to_huggingface(config: ModelConfig, dtype: torch.dtype, *, like: dict | None = None, context: int | None = None) -> dict:
    """A ``config.json`` for this model.

    Args:
        dtype: of the weights in the files.
        like: the config that the model came with, for what says nothing of its shape (ids of control tokens).
        context: tokens it has been trained at; raises ``max_position_embeddings``, never lowers it. With dynamic scaling that
            key is the original length instead.

    Raises ValueError for a model that no architecture of transformers computes.
    """
    like = like or {}
    kind = _kind_of(config, like.get("model_type"))
    kept = {key: like[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range") if key in like}
    positions = max(like.get("max_position_embeddings") or 0, context or 0) or CONTEXT
    raw = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": positions,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **kept,
    }
    if config.rope_scaling is not None:
        given = {key: value for key, value in dataclasses.asdict(config.rope_scaling).items() if value is not None}
        if config.rope_scaling.rope_type == "dynamic":  # there the original length goes by this name, and only by it
            raw["max_position_embeddings"] = given.pop("original_max_position_embeddings")
        if config.rope_scaling.rope_type == "longrope":  # transformers 4 looks for the original length here alone
            raw["original_max_position_embeddings"] = given["original_max_position_embeddings"]
        raw["rope_scaling"] = given
    if kind == "mistral":
        raw["sliding_window"] = config.window
    elif kind in ("qwen2", "qwen3"):
        windowed = config.window is not None
        raw |= {"use_sliding_window": windowed, "sliding_window": config.window, "max_window_layers": 0 if windowed else config.layers}
    return raw


def _supported() -> str:
    return ", ".join(ARCHITECTURES.values())


def _kind(raw: dict, where: str) -> str:
    """The model type, from ``architectures`` where it is given: a model type also names classifiers and the like."""
    kind = raw.get("model_type")
    named = raw.get("architectures") or [ARCHITECTURES.get(kind, kind)]
    if kind in ARCHITECTURES and named == [ARCHITECTURES[kind]]:
        return kind
    asked = f"{', '.join(map(str, named))} (model_type {kind})"
    raise ValueError(f"{where}: the architecture {asked} is not supported; supported are {_supported()}")


def _kind_of(config: ModelConfig, before: str | None) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in OURS_ALONE:
        if getattr(config, name) != defaults[name]:
            raise ValueError(
                f"model.{name} = {getattr(config, name)!r} has no counterpart in {_supported()}: this model cannot be exported"
            )
    if config.positions != "rope":
        raise ValueError(f"model.positions = {config.positions!r} has no counterpart in {_supported()}: this model cannot be exported")
    if config.qk_norm and config.qkv_bias:
        raise ValueError(f"model.qk_norm with model.qkv_bias has no counterpart in {_supported()}: this model cannot be exported")
    if config.qk_norm or config.qkv_bias:
        return "qwen3" if config.qk_norm else "qwen2"
    # Llama has no window, and transformers refuses one whose hidden size is no multiple of the heads; Mistral is the same otherwise.
    return "mistral" if config.window is not None or config.dim % config.heads or before == "mistral" else "llama"


def _window(raw: dict, kind: str) -> int | None:
    """Tokens that every layer sees, itself included, in transformers as here; None is all of them."""
    layers = raw["num_hidden_layers"]
    if kind == "llama":
        return None
    if kind == "mistral":
        return raw.get("sliding_window", 4096)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    windowed = [index >= raw.get("max_window_layers", 28) for index in range(layers)] if window is not None else [False] * layers
    if raw.get("layer_types") is not None:
        windowed = [name == "sliding_attention" for name in raw["layer_types"]]
    if len(set(windowed)) > 1:
        raise ValueError(
            f"{sum(windowed)} of {len(windowed)} layers have a sliding window; only models whose layers all see alike are supported"
        )
    if any(windowed) and window is None:
        raise ValueError("layer_types says sliding_attention, but no sliding_window is in use")
    return window if any(windowed) else None


def _rope(raw: dict) -> tuple[float, dict | None]:
    """The rotary base, and the keys of its scaling."""
    given = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope_parameters differ by layer ({', '.join(given)}); only models whose layers are all alike are supported")
    theta = given.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    if given.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ValueError("partial_rotary_factor is not 1; only heads that are rotated whole are supported")
    legacy = given.pop("type", "default")
    kind = given.pop("rope_type", legacy)
    if kind == "default":
        return theta, None
    given = {key: value for key, value in given.items() if value is not None}
    longest = raw.get("max_position_embeddings") or CONTEXT
    if kind == "dynamic":  # transformers looks nowhere else for the original length
        given["original_max_position_embeddings"] = longest
    elif kind in ("yarn", "llama3", "longrope"):
        original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or longest
        given["original_max_position_embeddings"] = original
        if kind != "llama3":
            given.setdefault("factor", max(1.0, longest / original))
    return theta, {"rope_type": kind, **given}
