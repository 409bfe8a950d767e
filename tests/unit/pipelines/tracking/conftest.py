"""One real SQLite database of MLflow, and run folders to record there."""

from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def uri(tmp_path_factory) -> str:
    """One database for all: creating its tables is the slowest part of a record."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder
