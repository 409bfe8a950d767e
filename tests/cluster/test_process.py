"""Windows of documents over Ray Data's actors: the same results as in one process, in order, also when an actor dies."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import RayError

from cluster.process import process_pieces
from pipelines.evaluation.pieces import DocumentPieces
from tests.conftest import last_json, ringspan
from tests.unit.pipelines.evaluation.shelves import write_shelves
from tests.unit.pipelines.untrained import SMALL, untrained_run
from tests.unit.workers.inference.test_process import BYTES
from tests.unit.workers.model.test_decoder import decoder
from workers.inference.process import process
from workers.model import save_pretrained


class DeadlyPieces(DocumentPieces):
    """Kills the process that reads piece 40, the first time or always."""

    always = False

    def read(self, number):
        flag = Path(self.store.folder) / "died"
        if number == 40 and (self.always or not flag.exists()):
            flag.touch()
            os._exit(1)
        return super().read(number)


@pytest.fixture
def deadly(monkeypatch, tmp_path):
    monkeypatch.setattr("cluster.process.BLOCK_TOKENS", 300)
    save_pretrained(decoder(BYTES), tmp_path / "model")
    return DeadlyPieces(write_shelves(tmp_path / "store"), np.array([1, 0]), 24, 8, segment=50)


def test_actors_give_what_one_process_gives_also_when_one_dies(ray_cluster, deadly, tmp_path):
    found = list(process_pieces(deadly, tmp_path / "model", actors=2))
    assert len(found) == len(deadly) > 41 and (tmp_path / "store" / "died").exists()
    model = decoder(BYTES)
    for number, result in enumerate(found):
        expected = process(model, DocumentPieces.read(deadly, number))
        for ours, theirs in zip(result, expected):
            assert np.allclose(ours, theirs, atol=1e-6)
        assert result.sums.shape == expected.sums.shape


def test_a_window_that_kills_every_actor_ends_it(ray_cluster, deadly, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.process.DEATHS", 0)
    deadly.always = True
    with pytest.raises(RayError, match="died"):
        list(process_pieces(deadly, tmp_path / "model", actors=1))


def test_evaluate_as_a_user_types_it(ray_head, tmp_path):
    store = write_shelves(tmp_path / "store")
    run = untrained_run(tmp_path / "run", f"corpus.store={store.folder}", *SMALL)
    done = ringspan(
        "evaluate", "--checkpoint", run, "--context", 400, "--actors", 1, "--out", tmp_path / "out", "--json", env=ray_head.environment()
    )
    assert done.returncode == 0, done.stderr
    value = last_json(done)
    assert value["targets"] == store.tokens and json.loads((tmp_path / "out/evaluation.json").read_text()) == value
