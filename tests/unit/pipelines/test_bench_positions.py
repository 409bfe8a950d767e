"""``ringspan bench positions``: its exact reference, its text, what it scores, and wrong inputs in one line."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from pipelines.bench import angles
from pipelines.bench.extrapolation import ENCODINGS, TUNED, Experiment, Text, decoder, score, standard_library, train
from pipelines.bench.positions import Options, claims, figure, prepare, table
from pipelines.cli import main

SMALL = Experiment(context=16, multiples=(1, 2, 4), steps=30, batch=4, dim=32, layers=1, windows=3, seed=0, vocab_size=256)


@pytest.fixture(scope="module")
def text():
    return Text.split(standard_library(), SMALL.longest, SMALL.windows)


class TestAngles:
    def test_small_angles_are_the_product_and_large_ones_are_within_a_turn(self):
        found = angles.exact_angles([1, 5, 10**15], torch.tensor([1.0, 0.25], dtype=torch.float64))
        assert found[:2].tolist() == [[1.0, 0.25], [5.0, 1.25]]
        assert math.sin(found[2, 0]) == pytest.approx(math.sin(10**15), abs=1e-15)  # the C library reduces exactly

    def test_the_model_is_exact_far_out_and_naive_positions_are_not(self):
        found = angles.rows()
        assert len(found) == len(angles.SCALINGS) * len(angles.POSITIONS) * len(angles.METHODS)
        for position in angles.POSITIONS:
            assert angles.worst(found, "model", "angle", position) < 5e-7
            assert angles.worst(found, "model", "drift", position) < 1e-6
            assert 1e-6 < angles.worst(found, "model, bfloat16 heads", "drift", position) < 4e-3
            assert angles.worst(found, "bfloat16 positions", "angle", position) > 1
        assert angles.worst(found, "float32 angles", "angle", 1_000) < 1e-3
        assert angles.worst(found, "float32 angles", "angle", 10_000_000) > 0.1


class TestText:
    def test_one_long_document_in_ten_is_held_out_and_short_ones_are_left_out(self):
        documents = [np.full(length, number, np.uint8) for number, length in enumerate([9, 4, *[9] * 21])]
        text = Text.split(iter(documents), longest=8, windows=2)
        assert text.held_out.tolist() == [[0] * 9, [11] * 9]
        assert [document[0] for document in text.learnt] == [number for number in range(23) if number not in (0, 1, 11)]

    def test_batches_are_of_the_seed_and_stay_inside_a_document(self):
        text = Text([np.arange(100, 120), np.arange(40)], torch.zeros(1, 1))
        first, again, other = (next(text.batches(64, 10, seed)) for seed in (3, 3, 4))
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert (first.diff(dim=1) == 1).all() and first.shape == (64, 11)
        assert {*first[:, 0].tolist()} <= {*range(30), *range(100, 110)} and first[:, 0].max() >= 100 > first[:, 0].min()

    def test_documents_that_are_too_short(self):
        with pytest.raises(
            ValueError, match="1 documents have more than 8 tokens and 2 are needed; use a smaller --context or --multiples"
        ):
            Text.split(iter([np.zeros(9), np.zeros(8)]), 8, 2)


@pytest.mark.parametrize("multiple", SMALL.multiples)
def test_every_length_scores_the_same_targets_each_once(text, multiple):
    model, tokens = decoder(SMALL.model()), multiple * SMALL.context
    model.init_weights(0)
    expected = torch.zeros(3, SMALL.longest)
    for row, document in enumerate(text.held_out):
        for start in range(0, SMALL.longest, tokens):
            window = document[start : start + tokens + 1]
            with torch.no_grad():
                logits = model(window[None, :-1], torch.arange(tokens)[None], model.config.pattern())
            expected[row, start : start + tokens] = F.cross_entropy(logits[0], window[1:], reduction="none")
    torch.testing.assert_close(score(model, text.held_out, tokens), expected, rtol=1e-5, atol=1e-5)


def test_training_learns_and_depends_on_the_seed_alone(text):
    def trained() -> tuple[float, float]:
        model = decoder(SMALL.model())
        model.init_weights(0)
        before = score(model, text.held_out, 16).mean().item()
        train(model, text.batches(4, 16, 0), 30, tuning=False)
        return before, score(model, text.held_out, 16).mean().item()

    first = trained()
    assert first[1] < first[0] - 0.5 and trained() == first


def test_what_is_scored_at_a_multiple():
    scored = SMALL.scored(4)
    assert list(scored) == [*ENCODINGS, "rope, linear", "rope, dynamic", "rope, ntk", "rope, yarn", TUNED]
    assert scored["rope, yarn"].rope_scaling.factor == 4 and scored["rope, yarn"].rope_scaling.original_max_position_embeddings == 16
    assert scored["rope, ntk"].rope_theta > 4 * scored["rope"].rope_theta
    assert SMALL.scored(1)["rope, ntk"] == scored["rope"]
    assert SMALL.scored(1)[TUNED] == scored[TUNED]  # trained at the longest length, whatever it is scored at


def row(encoding: str, multiple: int, ratio: float) -> dict:
    return {"encoding": encoding, "multiple": multiple, "tokens": 16 * multiple, "perplexity": 5 * ratio, "ratio": ratio}


@pytest.mark.parametrize("ratio, holds", [(1.0299, True), (1.0301, False)])
def test_claims_follow_the_figures(ratio, holds):
    names = ("alibi", "rope, ntk", "rope, dynamic", "rope, yarn", TUNED)
    rows = [row(name, multiple, ratio if multiple > 1 else 1.0) for multiple in (1, 8, 16) for name in names]
    health = [{"method": "model", "position": angles.POSITIONS[-1], "drift": 2e-6}]
    found = claims(health, rows)
    assert [claim["holds"] for claim in found] == [False, *[holds] * 5]
    assert found[1]["claim"] == "ALiBi keeps within 3% perplexity at 8 L" and found[-1]["claim"].endswith("at 16 L")


def test_options_become_an_experiment():
    experiment, text = prepare(Options(quick=True, multiples="4, 2"))
    assert (experiment.context, experiment.multiples, experiment.longest) == (32, (1, 2, 4), 128) and text.held_out.shape == (4, 129)
    experiment, _ = prepare(Options(context=64, multiples="8, 2"))
    assert experiment.multiples == (1, 2, 8)


# fmt: off
@pytest.mark.parametrize("arguments, said", [
    (["--context", "0"], "--context is 0; it must be at least 1"), (["--dim", "100"], "--dim is 100; it must be a multiple of 32"),
    (["--multiples", "1,x"], "--multiples is '1,x'"), (["--multiples", "1,3,4"], "each must divide the largest"),
    (["--multiples", "1"], "each must divide the largest, which is more than 1"),
    (["--multiples", "0,2"], "--multiples is '0,2'"), (["--store", "/nowhere"], "/nowhere"), (["--seed", "-1"], "--seed is -1"),
    (["--context", "1000000000"], "documents have more than 16000000000 tokens"), (["--out", __file__], "is a file; name a folder"),
])
# fmt: on
def test_a_wrong_input_is_one_line(monkeypatch, arguments, said):
    monkeypatch.setattr("pipelines.bench.positions.measure", lambda *_: pytest.fail("it was measured"))
    result = CliRunner().invoke(main, ["bench", "positions", *arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1) and result.stderr.startswith("error: ")
    assert said in result.stderr


def test_a_quick_run_of_a_store_from_end_to_end(code_store, tmp_path):
    result = CliRunner().invoke(main, ["bench", "positions", "--quick", "--store", str(code_store), "--json", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert {(r["encoding"], r["multiple"]) for r in answer["rows"]} == {(name, m) for m in (1, 2, 4) for name in SMALL.scored(1)}
    for r in answer["rows"]:
        assert len(r["by_position"]) == r["multiple"] and 1 < r["perplexity"] < 1000
        assert r["perplexity"] == pytest.approx(math.prod(r["by_position"]) ** (1 / r["multiple"]))
        assert r["ratio"] == 1 or r["multiple"] > 1 or r["encoding"] in ("rope, dynamic", TUNED)
    assert json.loads((tmp_path / "out/positions.json").read_text()) == answer
    assert (tmp_path / "out/positions.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure(answer).axes) == 2 and "perplexity (ratio to L)" in table(answer)
