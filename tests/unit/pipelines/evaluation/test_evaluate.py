"""Strided scoring against losses added up one by one."""

import contextlib
import json
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from ray.exceptions import RayTaskError

from pipelines.cli import main
from pipelines.evaluation.evaluate import Evaluation, open_store, prepare, score
from pipelines.evaluation.pieces import DocumentPieces
from pipelines.models.source import Source
from pipelines.tracking import Tracker
from tests.unit.pipelines.evaluation.shelves import write_shelves
from tests.unit.pipelines.untrained import SMALL, untrained_run
from tests.unit.workers.inference.test_process import BYTES
from tests.unit.workers.model.test_decoder import decoder
from workers.inference.generate import load_decoder
from workers.inference.process import process


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_shelves(tmp_path_factory.mktemp("store") / "shelves")


@pytest.fixture(scope="module")
def run(tmp_path_factory, store):
    return untrained_run(tmp_path_factory.mktemp("runs") / "run", f"corpus.store={store.folder}", "corpus.held_out=0.4", *SMALL)


@torch.no_grad()
def losses_one_by_one(model, store, context: int, stride: int) -> list[list[tuple[int, int, float]]]:
    """(position, tokens seen before it in its window, loss) of every target of each shelf: windows by hand."""
    shelves = []
    for first, last in zip(store.documents, store.documents[1:]):
        ids = np.concatenate([store[row] for row in range(first, last)]).astype(np.int64)
        read = torch.from_numpy(np.append(store.tokenizer.end_of_text, ids[:-1]))
        scored, found = 0, []
        for start in range(0, len(ids), stride):
            stop = min(start + context, len(ids))
            logits = model(read[None, start:stop], torch.arange(stop - start)[None], model.config.pattern())[0].log_softmax(-1)
            found += [(p, p - start, -float(logits[p - start, ids[p]])) for p in range(scored, stop)]
            scored = stop
            if stop == len(ids):
                break
        shelves.append(found)
    return shelves


@pytest.mark.parametrize("context, overlap", [(100, 50), (64, 0), (4096, 100)])
def test_loss_is_the_sum_over_the_count_each_scored_once(store, context, overlap):  # W8
    model = decoder(BYTES)
    pieces = DocumentPieces(store, np.arange(2), context, overlap)
    found = score(Evaluation(None, pieces, ["rings", "bread"]), (process(model, pieces.read(n)) for n in range(len(pieces))))
    shelves = losses_one_by_one(model, store, context, context - overlap)
    every = [target for shelf in shelves for target in shelf]
    assert found["targets"] == store.tokens == len(every)
    assert found["loss"] == pytest.approx(np.mean([loss for *_, loss in every]), abs=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    for row, shelf in zip(found["documents"], shelves):
        assert row["targets"] == len(shelf) and row["loss"] == pytest.approx(np.mean([loss for *_, loss in shelf]), abs=1e-5)
    for name, which in (("loss_by_position", 0), ("loss_by_context", 1)):
        assert sum(row["targets"] for row in found[name]) == len(every)
        for row in found[name]:
            inside = [target[2] for target in every if row["start"] <= target[which] < row["stop"]]
            assert row["targets"] == len(inside) and row["loss"] == pytest.approx(np.mean(inside), abs=1e-5)
    if overlap == 0 or context == 4096:
        assert found["faded_loss"] == pytest.approx(found["loss"])


def test_what_is_evaluated(run, store):
    whole = prepare(run, None)
    assert whole.names == ["rings", "bread"] and whole.pieces.context == 64
    assert len(prepare(run, store.folder, only_held_out=True).names) == 1
    assert prepare(run, None, documents=1).names == ["rings"]


def test_the_store_of_a_run_may_be_a_uri(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("pipelines.evaluation.evaluate.TokenStore.open", opened.append)
    monkeypatch.setattr("pipelines.evaluation.evaluate.of_model", lambda source, store: store)
    (tmp_path / "corpus.json").write_text('{"store": "s3://bucket/papers"}')
    open_store(Source(tmp_path, tmp_path, None, 1), None)
    assert opened == ["s3://bucket/papers"]


@pytest.mark.parametrize("options, error", [
    (dict(documents=0), "--documents is 0"), (dict(context=0), "--context is 0"), (dict(context=8, overlap=8), "--overlap 8"),
])  # fmt: skip
def test_wrong_options_are_refused(run, options, error):
    with pytest.raises(ValueError, match=error):
        prepare(run, None, **options)


def test_what_failed_in_an_actor_is_one_line(run, monkeypatch):
    def processing(pieces, weights, actors):
        raise RayTaskError(
            "submit", "Traceback:\n  File …\nValueError: no\nTo change retries, …", ValueError("the window\nis bad")
        ).as_instanceof_cause()

    monkeypatch.setattr("cluster.process.process_pieces", processing)
    monkeypatch.setattr("cluster.launch.connected", lambda **how: contextlib.nullcontext())
    done = CliRunner().invoke(main, ["evaluate", "--checkpoint", str(run)])
    assert done.exit_code == 1 and done.stderr.endswith("error: the windows could not be processed: ValueError: the window is bad\n")


def test_the_command_says_it_saves_it_and_puts_it_on_record(run, store, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def here(weights, actors, verbose):
        model = load_decoder(weights)
        yield lambda pieces: (process(model, pieces.read(number)) for number in range(len(pieces))), sys.stdout

    monkeypatch.setattr("pipelines.commands.inference._processing", here)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = Tracker(run, uri, "evaluations", "one")
    tracker.start({}, {})
    command = ["evaluate", "--checkpoint", str(run), "--context", "100", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*command, "--json"])  # while another process records the run
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert value["targets"] == sum(row["targets"] for row in value["documents"]) == store.tokens and value["store"] == store.address
    assert json.loads((tmp_path / "out/evaluation.json").read_text()) == value and (tmp_path / "out/evaluation.png").stat().st_size > 10_000
    assert "record" not in done.stderr and not (run / "record/evaluation").exists()
    assert tracker.close("FINISHED", 90)
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0 and uri in done.stderr and "each scored once" in done.stdout

    from mlflow import MlflowClient

    (folder,) = MlflowClient(uri).list_artifacts(tracker.info.run_id, "evaluation")
    kept = MlflowClient(uri).list_artifacts(tracker.info.run_id, folder.path)
    assert [artifact.path.rpartition("/")[2] for artifact in kept] == ["evaluation.json", "evaluation.png"]
