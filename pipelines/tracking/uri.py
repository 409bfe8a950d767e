"""Where runs are recorded: the MLflow tracking URI of a run folder, checked, absolute, and fit to be shown."""

import os
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit


def default_uri(run_dir: Path) -> str:
    """MLFLOW_TRACKING_URI where it is set, else a SQLite file beside the run folder; absolute either way."""
    return absolute_uri(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(run_dir).resolve().parent}/mlflow.db")


def absolute_uri(uri: str) -> str:
    """`uri` with a relative SQLite path made absolute: Ray's processes have other working directories.

    Raises ValueError for a folder or `file:` URI, which MLflow 3 no longer writes to, and for a path with `?` or `#`.
    """
    scheme = urlsplit(uri).scheme
    if scheme == "sqlite":
        path = uri.removeprefix("sqlite:///")
        if path == uri or not path or "?" in path or "#" in path:
            raise ValueError(f"tracking uri {uri!r}: write sqlite:////absolute/path/mlflow.db, without '?' and '#'")
        return f"sqlite:///{Path(path).absolute()}"
    if scheme in ("", "file") and not uri.startswith("databricks"):
        raise ValueError(
            f"tracking uri {uri!r}: MLflow has no file store any more; use sqlite:////absolute/path/mlflow.db "
            "or the address of a server, http://host:port"
        )
    return uri


def public_uri(uri: str) -> str:
    """`uri` without its password, for files, logs and reports."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")))
