"""Weights into a model on whatever mesh it is on, and out of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workers.model.config import ModelConfig
from workers.model.decoder import OWN_OF_ATTENTION, Decoder
from workers.model.huggingface.config import from_huggingface, read_config, to_huggingface
from workers.model.huggingface.folder import SHARD_BYTES, FolderTensors, Sizes, new_folder, write_folder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BUFFERS = "rotary_emb.inv_freq"  # what old versions of transformers saved beside the weights


def their_name(name: str) -> str:
    """The name of one of our parameters in a Hugging Face file."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def check_weights(folder: Path, config: ModelConfig) -> FolderTensors:
    """The folder's tensors, if they are those of this model (see ``check_sizes`` and ``check_tied``)."""
    tensors = FolderTensors(folder)
    check_sizes(tensors.sizes, config, folder)
    check_tied(tensors, config, folder)
    return tensors


def check_sizes(sizes: Sizes, config: ModelConfig, where: Path) -> None:
    """Raise ValueError that names the first tensor that is missing, unknown or misshapen for this model."""
    with torch.device("meta"):
        model = Decoder(config)
    wanted = {their_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, shape in wanted.items():
        if name.endswith(OWN_OF_ATTENTION):
            continue
        if name not in sizes:
            raise ValueError(f"{where} has no tensor {name}, which this model needs")
        if sizes[name][0] != shape:
            raise ValueError(f"{where}: tensor {name} is {list(sizes[name][0])}; this model needs {list(shape)}")
    for name in sorted(sizes.keys() - wanted.keys()):
        if not name.endswith(BUFFERS) and not (name == HEAD and config.tie_embeddings):
            raise ValueError(f"{where} has a tensor {name}, which this model has no place for")


def check_tied(tensors, config: ModelConfig, where: Path) -> None:
    """A head that is the embedding need not be in the file; ValueError where it is, and says something else."""
    if config.tie_embeddings and HEAD in tensors.sizes and not torch.equal(tensors.read(HEAD), tensors.read(EMBEDDING)):
        raise ValueError(f"{where}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; set it to false there")


@torch.no_grad()
def load_weights(model: Decoder, folder: Path) -> set[str]:
    """Fill the parameters of a materialised model from a model folder, tensor by tensor; a rank reads only the part that it holds.

    Returns the names of those that no file has: learnt keys and pooling vectors, an adapter's.
    """
    tensors, left = check_weights(folder, model.config), set()
    for name, parameter in model.named_parameters():
        if their_name(name) not in tensors.sizes:
            left.add(name)
            continue
        if not isinstance(parameter, DTensor):
            parameter.copy_(tensors.read(their_name(name)))
            continue
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        assert shape == tuple(local.shape), (name, shape, local.shape)
        if local.numel():
            local.copy_(tensors.read(their_name(name), tuple(slice(start, start + size) for start, size in zip(offset, shape))))
    return left


def load_pretrained(folder: Path, mesh=None, **layout) -> Decoder:
    """The model of a Hugging Face folder in float32: whole on one CPU, or laid over ``mesh`` (then ``layout`` goes to ``parallelize``).

    Raises ValueError, one line, for an architecture that is not supported and for weights that are not those of the config.
    """
    from workers.parallel import parallelize  # which knows the model, as this module does

    folder = Path(folder)
    with torch.device("meta"):
        model = Decoder(from_huggingface(read_config(folder), str(folder / "config.json")))
    if mesh is not None:
        parallelize(model, mesh, **layout)
    model.to_empty(device=mesh.device if mesh is not None else "cpu")
    model.tie()
    load_weights(model, folder)
    return model


def save_pretrained(
    model: Decoder,
    folder: Path,
    *,
    like: Path | None = None,
    dtype: torch.dtype = torch.float32,
    context: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model as a folder that transformers opens. On a mesh a collective: tensors are gathered one at a time, rank 0 writes.

    Args:
        like: the model folder that it came from, whose tokenizer files and ids of control tokens go along.
        dtype: of the file. A model that was loaded from bfloat16 and not trained is written in bfloat16 without loss.
        context: tokens it was trained at (see ``to_huggingface``).

    Raises ValueError for a folder that exists, for a model that no architecture of transformers computes, and on a mesh with
    pipeline stages, whose ranks hold a part of the model each.
    """
    if len(model.layers) < model.config.layers:
        raise ValueError("a pipeline stage holds a part of the model; save it on a mesh without stages, or export a checkpoint")
    raw = to_huggingface(model.config, dtype, like=read_config(like) if like else None, context=context)
    sizes, read = model_tensors(model, dtype)
    distributed = dist.is_initialized()
    if not distributed or dist.get_rank() == 0:
        with new_folder(folder) as partial:
            write_folder(partial, raw, sizes, read, like=like, shard_bytes=shard_bytes)
    else:
        write_folder(None, raw, sizes, read, shard_bytes=shard_bytes)
    if distributed:
        dist.barrier()  # nobody opens it before it has its name


def model_tensors(model: Decoder, dtype: torch.dtype) -> tuple[Sizes, Callable[[str], torch.Tensor]]:
    """A model's weights as ``write_folder`` takes them. On a mesh each reading is a collective that gathers one tensor."""
    parameters = {their_name(name): parameter.detach() for name, parameter in model.named_parameters()}

    def read(name: str) -> torch.Tensor:
        parameter = parameters[name]
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    return {name: (tuple(parameter.shape), dtype) for name, parameter in parameters.items()}, read
