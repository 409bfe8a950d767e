import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.unit.workers.model.test_decoder import CONFIG, decoder
from workers.attention import Pattern
from workers.mesh import MeshSpec
from workers.model import Decoder
from workers.parallel import parallelize
from workers.training.evaluate import evaluate, position_edges
from workers.training.window import IGNORE, Window, blank


@pytest.mark.parametrize(
    "context, edges", [(1, [0, 1]), (64, [0, 64]), (65, [0, 64, 65]), (128, [0, 64, 128]), (300, [0, 64, 128, 256, 300])]
)
def test_buckets_double_and_end_at_the_context(context, edges):
    assert position_edges(context) == edges


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """The mesh of a group that is this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield MeshSpec().build("cpu")
    dist.destroy_process_group()


def window(number: int, lengths: list[int]) -> Window:
    """Documents of these lengths, each with its own positions; the last tenth of the targets is not learnt."""
    generator = np.random.default_rng(number)
    size = sum(lengths)
    tokens, targets = (generator.integers(0, CONFIG.vocab_size, size).astype(np.int32) for _ in range(2))
    targets[-size // 10 :] = IGNORE
    positions = np.concatenate([np.arange(length) for length in lengths])
    documents = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return Window(number, tokens, targets, positions, documents)


def losses_one_by_one(model, windows) -> list[tuple[int, float]]:
    """(position, loss) of every target, each document run by itself."""
    found = []
    for w in windows:
        for document in np.unique(w.documents):
            part = w.documents == document
            tokens, targets, positions = (torch.from_numpy(x[part].astype(np.int64)) for x in (w.tokens, w.targets, w.positions))
            with torch.no_grad():
                loss = F.cross_entropy(model(tokens[None], positions[None], Pattern())[0], targets, reduction="none", ignore_index=IGNORE)
            found += [(int(p), float(value)) for p, value, t in zip(positions, loss, targets) if t != IGNORE]
    return found


@pytest.mark.parametrize("lengths", [[200], [70, 130], [3, 60, 137]], ids=str)
def test_every_target_counts_once_in_the_bucket_of_its_position(mesh, lengths):  # W8
    model, windows = decoder(), [window(number, lengths) for number in range(3)]
    result = evaluate(model, mesh, 200, iter(windows), 3)
    expected = losses_one_by_one(model, windows)
    assert result["targets"] == len(expected)
    assert result["loss"] == pytest.approx(np.mean([loss for _, loss in expected]), rel=1e-5)
    for bucket in result["loss_by_position"]:
        inside = [loss for position, loss in expected if bucket["start"] <= position < bucket["stop"]]
        assert bucket["targets"] == len(inside) and bucket["loss"] == pytest.approx(np.mean(inside), rel=1e-5)
    assert sum(bucket["targets"] for bucket in result["loss_by_position"]) == len(expected)


def test_a_context_of_one_bucket(mesh):
    result = evaluate(decoder(), mesh, 40, iter([window(0, [40])]), 1)
    assert [(b["start"], b["stop"], b["targets"]) for b in result["loss_by_position"]] == [(0, 40, 36)]


def test_windows_without_targets_change_nothing(mesh):
    model, one = decoder(), window(0, [100])
    alone, filled = (evaluate(model, mesh, 100, iter(windows), len(windows)) for windows in ([one], [one, blank(1, 100)]))
    assert alone == filled
    nothing = evaluate(model, mesh, 100, iter([blank(0, 100)]), 1)
    assert nothing == {"loss": 0.0, "targets": 0, "loss_by_position": []}


@pytest.mark.parametrize("fields", [{}, dict(window=8, segment=8)], ids=str)
def test_later_papers_are_scored_with_and_without_those_before(mesh, fields):
    config = dataclasses.replace(CONFIG, **fields)
    model = Decoder(config)
    model.init_weights(1)
    shelf = window(0, [90, 40])._replace(parts=np.repeat([0, 1, 2, 3], [30, 60, 17, 23]).astype(np.int32))
    found = {alone: evaluate(model, mesh, 130, iter([shelf]), 1, alone=alone) for alone in (False, True)}
    apart = shelf._replace(documents=shelf.parts, parts=None)
    whole = evaluate(model, mesh, 130, iter([apart]), 1)
    assert found[True]["loss"] == whole["loss"] and "later_loss" not in whole
    assert found[True]["targets"] == found[False]["targets"] == 117
    assert found[True]["later_targets"] == found[False]["later_targets"] == 60 + 10  # the last 13 targets are not learnt
    assert found[True]["later_loss"] != found[False]["later_loss"]
    first = [f["loss"] * f["targets"] - f["later_loss"] * f["later_targets"] for f in found.values()]
    assert first[0] == pytest.approx(first[1])  # a first paper has none before it


def test_no_gradient_is_kept(mesh):
    model = decoder()
    evaluate(model, mesh, 100, iter([window(0, [100])]), 1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_optimizers_parameters_are_the_models_again_afterwards(mesh):
    """Sharded weights give way to whole ones in a forward pass; a checkpoint right after must find the sharded ones."""
    with torch.device("meta"):
        model = Decoder(CONFIG)
    parallelize(model, mesh)
    model.to_empty(device="cpu")
    model.init_weights(0)
    before = dict(model.named_parameters())
    evaluate(model, mesh, 100, iter([window(0, [100])]), 1)
    assert [name for name, parameter in model.named_parameters() if parameter is not before[name]] == []
