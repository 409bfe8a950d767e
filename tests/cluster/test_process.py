"""Windows of documents over Ray Data's actors: the same results as in one process, in order, also when an actor dies."""

import os
from pathlib import Path

import numpy as np
import pytest

from cluster.process import process_pieces
from pipelines.evaluation.pieces import DocumentPieces
from tests.unit.evaluation.shelves import write_shelves
from tests.unit.inference.test_process import BYTES
from tests.unit.model.test_decoder import decoder
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
