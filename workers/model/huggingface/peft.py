"""An adapter alone, in the folder format of PEFT (``adapter_model.safetensors``, ``adapter_config.json``).

PEFT's names are those of the base's modules behind ``base_model.model.``; whole modules that trained beside the adapter
(norms, embeddings) are its ``modules_to_save``. The correction is alpha / rank · B A there as well.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.model.adapter import AdapterConfig
from workers.model.config import ModelConfig
from workers.model.huggingface.folder import new_folder
from workers.model.huggingface.weights import their_name

PREFIX = "base_model.model."


def save_adapter(
    folder: Path,
    trained: dict[str, torch.Tensor],
    adapter: AdapterConfig,
    model: ModelConfig,
    base: Path,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the tensors that trained, by name, as an adapter of the model folder ``base``. Raises ValueError when ``folder`` exists."""
    whole = sorted({name.split(".")[-2] for name in trained if ".lora_" not in name})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": adapter.rank, "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets), "modules_to_save": whole or None, "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
    if adapter.train_embeddings and model.tie_embeddings:  # PEFT ties the two by this key, and wants both in the file
        config["ensure_weight_tying"] = True
        trained = {**trained, "lm_head.weight": trained["embed_tokens.weight"].clone()}
    tensors = {PREFIX + their_name(name): tensor.to(dtype).contiguous() for name, tensor in trained.items()}
    with new_folder(folder) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
