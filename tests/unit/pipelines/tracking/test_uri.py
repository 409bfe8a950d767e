"""The place of a record is absolute, one that MLflow can write to, and shown without its password."""

from pathlib import Path

import pytest

from pipelines.tracking.uri import absolute_uri, default_uri, public_uri


def test_the_default_place_is_absolute(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert default_uri(Path("runs/one")) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///here.db")
    assert default_uri(Path("runs/one")) == f"sqlite:///{tmp_path}/here.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example:5000")
    assert default_uri(Path("runs/one")) == "http://tracking.example:5000"


@pytest.mark.parametrize("wrong", ["./mlruns", "file:///tmp/mlruns", "sqlite:///", "sqlite://x.db", "sqlite:////tmp/a?b.db"])
def test_places_mlflow_cannot_write_to_are_refused(wrong):
    with pytest.raises(ValueError, match="tracking uri"):
        absolute_uri(wrong)


def test_a_password_stays_out_of_files_and_logs():
    secret = "postgresql://user:pa55@db.example:5432/mlflow"
    assert public_uri(secret) == "postgresql://user:***@db.example:5432/mlflow"
    assert public_uri("http://h:5000/x") == "http://h:5000/x"
