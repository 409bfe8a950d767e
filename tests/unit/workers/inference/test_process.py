"""Windows of a long document, merged, against the forward of the whole document."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipelines.evaluation.pieces import DocumentPieces
from tests.unit.pipelines.evaluation.shelves import tokens_of, write_shelves
from tests.unit.workers.model.test_decoder import CONFIG, decoder
from workers.inference.process import faded_losses, process, summaries

BYTES = dataclasses.replace(CONFIG, vocab_size=320)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_shelves(tmp_path_factory.mktemp("store") / "shelves")


@torch.no_grad()
def whole(model, ids: np.ndarray, end_of_text: int, parts=None):
    """Losses and representations of one forward over all of it."""
    tokens = torch.from_numpy(np.append(end_of_text, ids[:-1]).astype(np.int64))[None]
    hidden = model(tokens, torch.arange(len(ids))[None], model.config.pattern(None, parts), head=lambda x, w: (x, F.linear(x, w)))
    return F.cross_entropy(hidden[1][0], torch.from_numpy(ids.astype(np.int64)), reduction="none").numpy(), hidden[0][0].numpy()


def parts_read(store, first, last) -> torch.Tensor:
    rows = np.repeat(np.arange(last - first), store.lengths[first:last])
    return torch.from_numpy(np.append(rows[:1], rows[:-1]).astype(np.int32))[None]


@pytest.mark.parametrize("fields", [{}, dict(window=8, segment=16), dict(window=20)], ids=str)
def test_one_window_is_the_plain_forward(store, fields):
    model = decoder(dataclasses.replace(BYTES, **fields))
    pieces = DocumentPieces(store, np.array([0]), context=4096, segment=100)
    (result,) = [process(model, pieces.read(n)) for n in range(len(pieces))]
    ids = tokens_of(store, 0, 2)
    losses, hidden = whole(model, ids, store.tokenizer.end_of_text, parts_read(store, 0, 2))
    assert np.allclose(result.losses, losses, atol=1e-6)
    (summary,) = summaries([result])
    assert summary.counts.sum() == len(ids) and summary.counts[0] == 101  # of the first segment one token more: end_of_text
    assert np.allclose(summary.segments[1], hidden[101:201].mean(0), atol=1e-6)
    assert np.allclose(summary.whole, hidden.mean(0), atol=1e-6)


@pytest.mark.parametrize("overlap", [7, 9, 40])
def test_windows_of_a_model_that_sees_no_further_than_the_overlap_give_the_whole(store, overlap):
    model = decoder(dataclasses.replace(BYTES, window=4))
    assert model.config.receptive_field == 7
    pieces = DocumentPieces(store, np.array([1, 0]), 64, overlap, blind=6, segment=50)
    results = [process(model, pieces.read(n)) for n in range(len(pieces))]
    faded = list(faded_losses(results))
    for number, (document, rows) in enumerate(((0, (2, 3)), (1, (0, 2)))):
        ids = tokens_of(store, *rows)
        losses, hidden = whole(model, ids, store.tokenizer.end_of_text)
        parts = [part for part in faded if part[0] == document]
        assert [start for _, start, _ in parts] == np.cumsum([0, *(len(x) for *_, x in parts)])[:-1].tolist()
        assert np.allclose(np.concatenate([x for *_, x in parts]), losses, atol=1e-5)
        summary = list(summaries(results))[number]
        assert summary.document == document
        assert np.allclose(summary.counts, np.bincount(np.maximum(np.arange(len(ids)) - 1, 0) // 50), atol=1e-4)
        assert np.allclose(summary.whole, hidden.mean(0), atol=1e-5)
        assert np.allclose(summary.segments[2], hidden[101:151].mean(0), atol=1e-5)


def test_a_longer_field_than_the_overlap_shows(store):
    """The comparison above can fail: without the silent stretch the merged loss is another."""
    model = decoder(dataclasses.replace(BYTES, window=4))
    losses, _ = whole(model, tokens_of(store, 0, 2), store.tokenizer.end_of_text)
    pieces = DocumentPieces(store, np.array([0]), 64, 9)
    merged = np.concatenate([x for *_, x in faded_losses(process(model, pieces.read(n)) for n in range(len(pieces)))])
    assert not np.allclose(merged, losses, atol=1e-5) and np.abs(merged - losses).mean() < 0.1


MEMORY = """
import resource, sys
import numpy as np, torch
from pathlib import Path
from pipelines.evaluation.pieces import DocumentPieces
from tests.unit.pipelines.evaluation.shelves import write_shelves
from tests.unit.workers.model.test_decoder import decoder
from tests.unit.workers.inference.test_process import BYTES
from workers.inference.process import faded_losses, process, summaries
torch.set_num_threads(1)
length = int(sys.argv[1])
store = write_shelves(Path(sys.argv[2]) / sys.argv[1], {"a/b": ("Long", {"Text": "abcdefgh" * (length // 8)})})
model = decoder(BYTES)
pieces = DocumentPieces(store, np.array([0]), 1024)
process(model, pieces.read(0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(losses.sum() for *_, losses in faded_losses(process(model, pieces.read(n)) for n in range(len(pieces))))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_document(tmp_path):
    grown = [
        int(subprocess.run([sys.executable, "-c", MEMORY, str(n), str(tmp_path)], check=True, capture_output=True, text=True).stdout) / 1024
        for n in (8 << 10, 64 << 10)
    ]
    assert grown[1] < grown[0] + 8, f"MiB more than after the first window: {grown}"
