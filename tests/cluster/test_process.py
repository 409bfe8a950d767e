"""Windows of documents over Ray Data's actors: the same results as in one process, in order, also when an actor dies."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from cluster.process import process_pieces
from pipelines.evaluation.pieces import DocumentPieces
from tests.conftest import last_json, ringspan
from tests.unit.evaluation.shelves import write_shelves
from tests.unit.inference.test_process import BYTES
from tests.unit.model.test_decoder import decoder
from tests.unit.untrained import SMALL, untrained_run
from workers.inference.process import process
from workers.model import save_pretrained


class DeadlyPieces(DocumentPieces):
    """Kills the process that first reads piece 40."""

    def read(self, number):
        flag = Path(self.store.folder) / "died"
        if number == 40 and not flag.exists():
            flag.touch()
            os._exit(1)
        return super().read(number)


@pytest.mark.parametrize("kind", [DocumentPieces, DeadlyPieces])
def test_actors_give_what_one_process_gives(ray_cluster, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("cluster.process.BLOCK_TOKENS", 300)
    store, model = write_shelves(tmp_path / "store"), decoder(BYTES)
    save_pretrained(model, tmp_path / "model")
    pieces = kind(store, np.array([1, 0]), 24, 8, segment=50)
    found = list(process_pieces(pieces, tmp_path / "model", actors=2))
    assert len(found) == len(pieces) > 41 and (tmp_path / "store" / "died").exists() == (kind is DeadlyPieces)
    for number, result in enumerate(found):
        expected = process(model, DocumentPieces.read(pieces, number))
        for ours, theirs in zip(result, expected):
            assert np.allclose(ours, theirs, atol=1e-6)
        assert result.sums.shape == expected.sums.shape


@pytest.fixture(scope="module")
def shelf_run(tmp_path_factory):
    store = write_shelves(tmp_path_factory.mktemp("store") / "shelves")
    return untrained_run(tmp_path_factory.mktemp("runs") / "run", f"corpus.store={store.folder}", *SMALL, "training.context=400")


def test_evaluate_and_analyze_as_a_user_types_them(ray_head, shelf_run, tmp_path):
    done = ringspan("evaluate", "--checkpoint", shelf_run, "--context", 100, "--actors", 1, "--out", tmp_path / "out", "--json", env=ray_head.environment())
    assert done.returncode == 0, done.stderr
    value = last_json(done)
    assert value["targets"] == sum(row["targets"] for row in value["documents"]) > 700
    assert value["perplexity"] == pytest.approx(np.exp(value["loss"])) and {row["name"] for row in value["documents"]} == {"rings", "bread"}
    assert json.loads((tmp_path / "out/evaluation.json").read_text()) == value and (tmp_path / "out/evaluation.png").stat().st_size > 10_000
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/bread.md").write_text("# Sourdough\n\n## Abstract\n\nYeast makes bread rise.\n\n## Baking\n\nSteam keeps the crust soft.\n")
    ask = ("analyze", "--checkpoint", shelf_run, "--shelf", tmp_path / "papers", "--question", "What makes bread rise?", "--actors", 1)
    done = ringspan(*ask, "--sources", 2, "--max-tokens", 8, "--json", env=ray_head.environment())
    assert done.returncode == 0, done.stderr
    (answer,) = last_json(done)["answers"]
    assert [source["title"] for source in answer["sources"]] == ["Sourdough"] * 2 and answer["scored"] == 3
    assert answer["sources"][0]["relevance"] >= answer["sources"][1]["relevance"]
