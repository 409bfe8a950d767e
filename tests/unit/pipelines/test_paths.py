from pathlib import Path

import pytest

from pipelines.paths import absolute

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def test_a_relative_path_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv(JOB, raising=False)
    monkeypatch.chdir(tmp_path)
    assert absolute("runs/a", "--out") == tmp_path / "runs/a"
    assert absolute(tmp_path / "b", "--out") == tmp_path / "b"


def test_the_home_folder_is_written_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute("~/runs", "--out") == tmp_path / "runs"


def test_inside_a_ray_job_a_relative_path_is_refused(monkeypatch):
    monkeypatch.setenv(JOB, "{}")
    with pytest.raises(ValueError, match="--out is the relative path 'runs/a'; inside a Ray job give an absolute path"):
        absolute("runs/a", "--out")
    assert absolute("/runs/a", "--out") == Path("/runs/a")
    assert absolute("~/a", "--out").is_absolute()


def test_an_address_is_no_path():
    with pytest.raises(ValueError, match="--out is 's3://bucket/x', an address"):
        absolute("s3://bucket/x", "--out")


def test_a_link_stays_as_it_was_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert absolute(tmp_path / "link" / "a", "--out") == tmp_path / "link" / "a"


def test_the_home_folder_of_nobody_is_refused():
    with pytest.raises(ValueError, match="--out ~nobody-of-this-name/runs: there is no such user's home folder"):
        absolute("~nobody-of-this-name/runs", "--out")
