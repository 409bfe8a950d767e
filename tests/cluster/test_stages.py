"""A run of two stages as its user starts it: two launches on one Ray, one folder, one record, the same losses as without Ray."""

from __future__ import annotations

import json

import pytest

from tests.conftest import last_json, ringspan
from tests.distributed.test_stages import RINGS, SETTINGS, run
from tests.distributed.training_cases import losses, rows


def test_two_stages_through_the_command(ray_head, world, code_store, tmp_path):
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "grows"
    settings = [f"corpus.store={code_store}", *SETTINGS, RINGS % (1, 2)]
    command = ["train", "code_completion/tiny", "--out", folder, "--json", *(part for value in settings for part in ("--set", value))]
    result = ringspan(*command, env=ray_head.environment())
    assert result.returncode == 0, result.stderr[-3000:]
    answer = last_json(result)
    assert answer["step"] == 9 and [row["step"] for row in answer["evaluations"]] == [0, 4, 9]
    assert "steps 1–4 · context 64 · mesh dp 1 × ring 1" in result.stderr
    assert "steps 5–9 · context 128 · mesh dp 1 × ring 2" in result.stderr
    assert [row["step"] for row in rows(folder)] == list(range(1, 10))
    history = MlflowClient(answer["tracking_uri"]).get_metric_history(json.loads((folder / "tracking.json").read_text())["run_id"], "loss")
    assert [(point.step, point.value) for point in history] == list(enumerate(losses(folder), 1))
    run(world, code_store, tmp_path / "without Ray", (1, 1))
    assert losses(folder) == pytest.approx(losses(tmp_path / "without Ray"), rel=1e-5)
