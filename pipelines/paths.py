"""Paths that mean the same in every process of a run."""

from __future__ import annotations

import os
from pathlib import Path

import yaml


def check_folder(path: Path, what: str) -> None:
    """Raise ValueError unless ``path`` is a folder that can be written to, or can be made. Makes nothing."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{what} {path}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{what} {path}: {existing} cannot be written to; name another folder")


def absolute(path: str | os.PathLike, what: str) -> Path:
    """An absolute path, since workers have working directories of their own.

    Raises ValueError for a relative path inside a Ray job, whose working directory is a copy that goes away with it, and for a URI.
    """
    if "://" in str(path):
        raise ValueError(f"{what} is {str(path)!r}, an address, where only a path of this machine will do")
    try:
        path = Path(path).expanduser()
    except RuntimeError as error:  # ~name of nobody
        raise ValueError(f"{what} {path}: there is no such user's home folder; name another path") from error
    if not path.is_absolute() and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        raise ValueError(
            f"{what} is the relative path {str(path)!r}; inside a Ray job give an absolute path on storage that all nodes share"
        )
    return path.absolute()


def read_mapping(path: Path) -> dict:
    """The keys of a YAML or JSON file. Raises ValueError that names the file when it cannot be read or holds something else."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())[:200]}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is a {type(tree).__name__}; it must hold sections of keys")
    return tree
