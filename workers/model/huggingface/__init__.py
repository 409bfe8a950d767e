"""Model folders in the Hugging Face format: ``config.json``, safetensors, ``tokenizer.json``. Nothing in them is ever run.

``config`` translates the architecture, ``folder`` reads and writes tensors, ``weights`` brings them into a model on a mesh
and out of it.
"""

from workers.model.huggingface.config import CONTEXT, from_huggingface, is_model_folder, read_config, to_huggingface
from workers.model.huggingface.folder import CARRIED, FolderTensors, new_folder, write_folder
from workers.model.huggingface.weights import check_sizes, check_weights, load_pretrained, load_weights, model_tensors, save_pretrained

__all__ = [
    "CARRIED", "CONTEXT", "FolderTensors", "check_sizes", "check_weights", "from_huggingface", "is_model_folder", "load_pretrained",
    "load_weights", "model_tensors", "new_folder", "read_config", "save_pretrained", "to_huggingface", "write_folder",
]  # fmt: skip
