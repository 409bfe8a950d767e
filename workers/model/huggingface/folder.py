"""A model folder on disk: tensors by name out of its safetensors files, one at a time, and into a new folder.

Whatever has ``sizes`` (name → shape and dtype) and ``read(name)`` can be written: a folder, a model on a mesh, a GGUF file.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workers.model.huggingface.config import CONFIG_FILE

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What goes along with the weights, untouched. None of it is code.
CARRIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHARD_BYTES = 4 << 30
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class FolderTensors:
    """The tensors of a model folder: one file, or several with an index. Only headers are read until a tensor is asked for.

    Raises ValueError, one line, for a folder without safetensors, a damaged file, and a tensor that is not floating point.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._opened: tuple[Path, object] | None = None
        self._file_of: dict[str, Path] = {}
        self.sizes: Sizes = {}
        wanted = self._index()
        for path in dict.fromkeys(wanted.values()) if wanted else [self.folder / WEIGHTS]:
            with _readable(path):
                opened = self._open(path)
                for name in opened.keys():
                    header = opened.get_slice(name)
                    if header.get_dtype() not in DTYPES:
                        raise ValueError(f"{path}: {name} is of type {header.get_dtype()}; only {', '.join(DTYPES)} can be read")
                    if wanted is None or wanted.get(name) == path:
                        self._file_of[name] = path
                        self.sizes[name] = (tuple(header.get_shape()), DTYPES[header.get_dtype()])
        lost = wanted and [name for name in wanted if name not in self._file_of]
        if lost:
            raise ValueError(f"{wanted[lost[0]]} has no tensor {lost[0]}, though {INDEX} says so")

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or a part of it: no more than that part is copied from the file."""
        path = self._file_of[name]
        with _readable(path):
            opened = self._open(path)
            return opened.get_tensor(name) if part is None else opened.get_slice(name)[part]

    def _open(self, path: Path):
        if self._opened is None or self._opened[0] != path:
            self._opened = None  # one mapped file at a time
            self._opened = (path, safe_open(path, framework="pt"))
        return self._opened[1]

    def _index(self) -> dict[str, Path] | None:
        """The file of each tensor by the index; None where there is but one file."""
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder")
        index = self.folder / INDEX
        if (self.folder / WEIGHTS).is_file() and not index.is_file():
            return None
        if not index.is_file():
            pickled = sorted(path.name for pattern in PICKLED for path in self.folder.glob(pattern))
            if pickled:
                raise ValueError(
                    f"{self.folder} holds pickled weights only ({pickled[0]}), which could run code; convert them to safetensors first"
                )
            raise ValueError(f"{self.folder} holds neither {WEIGHTS} nor {INDEX}")
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            outside = [file for file in names.values() if Path(file).name != file]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files ({type(error).__name__}: {error})") from error
        if outside:
            raise ValueError(f"{index} names {outside[0]!r}; only files of the folder itself are read")
        return {name: self.folder / file for name, file in names.items()}


@contextlib.contextmanager
def _readable(path: Path):
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, under another name until it is whole: what carries the name is never half a model.

    Raises ValueError when ``folder`` exists and holds something.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; name a new folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_folder(
    folder: Path | None,
    config: dict,
    sizes: Sizes,
    read: Callable[[str], torch.Tensor],
    *,
    like: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Fill ``folder`` with ``config.json``, weights in files of at most ``shard_bytes`` and what ``like`` carries beside them.

    ``folder`` None only calls ``read``, in the same order: what the other ranks of a mesh do.
    """
    shards = _shards(sizes, shard_bytes)
    files = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {}
        for name in names:
            tensor = read(name)
            if folder is not None:
                shard[name] = tensor.to(device="cpu", dtype=sizes[name][1]).contiguous()
                files[name] = file
        if folder is not None:
            save_file(shard, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # the library lets only its user read it
    if folder is None:
        return
    if len(shards) > 1:
        total = sum(_bytes(size) for size in sizes.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in CARRIED if like is not None else ():
        if (Path(like) / name).is_file():
            shutil.copyfile(Path(like) / name, folder / name)


def _bytes(size) -> int:
    shape, dtype = size
    return math.prod(shape) * dtype.itemsize


def _shards(sizes: Sizes, limit: int) -> list[list[str]]:
    """Names in their order, a new file wherever the next would make one too large."""
    shards, held = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and held + _bytes(size) > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += _bytes(size)
    return shards
