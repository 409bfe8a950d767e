"""Paths that mean the same in every process of a run."""

from __future__ import annotations

import os
from pathlib import Path


def absolute(path: str | os.PathLike, what: str) -> Path:
    """An absolute path, since workers have working directories of their own.

    Raises ValueError for a relative path inside a Ray job, whose working directory is a copy that goes away with it.
    """
    path = Path(path).expanduser()
    if not path.is_absolute() and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        raise ValueError(f"{what} is the relative path {str(path)!r}; inside a Ray job give an absolute path on storage that all nodes share")
    return path.absolute()
