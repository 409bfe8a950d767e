"""Questions about a shelf: relevance against its definition, sources that are what the model was given."""

import contextlib
import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from pipelines.cli import main
from pipelines.literature_analysis.analyze import analyze, prepare
from pipelines.literature_analysis.relevance import QuestionPieces, losses_of_questions, nearest, sections_of
from tests.unit.pipelines.evaluation.shelves import PAPERS, write_shelves
from tests.unit.pipelines.untrained import SMALL, untrained_run
from workers.inference.generate import generate, load_decoder
from workers.inference.process import Summary, process

QUESTION = "What makes the bread rise?"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_shelves(tmp_path_factory.mktemp("store") / "shelves")


@pytest.fixture(scope="module")
def run(tmp_path_factory, store):
    seen = ("model.window=64", "model.segment=32")
    return untrained_run(tmp_path_factory.mktemp("runs") / "run", f"corpus.store={store.folder}", *SMALL, "training.context=400", *seen)


def here(model):
    return lambda pieces: (process(model, pieces.read(number)) for number in range(len(pieces)))


@torch.no_grad()
def loss_of(model, passage, question, end_of_text) -> float:
    ids = torch.from_numpy(np.concatenate([[end_of_text], passage, question]).astype(np.int64))
    logits = model(ids[None, :-1], torch.arange(len(ids) - 1)[None], model.config.pattern())[0]
    return F.cross_entropy(logits[-len(question) :], ids[-len(question) :], reduction="sum").item()


def test_relevance_is_what_the_section_saves_of_the_question(run, store):
    asked = prepare(run, store, [QUESTION], sources=3, new_tokens=20)
    model = load_decoder(asked.source.weights)
    (answer,) = analyze(asked, here(model))
    question, end = asked.encoded[0], store.tokenizer.end_of_text
    alone = loss_of(model, question[:0], question, end)
    expected = {}
    for row, (title, sections) in enumerate(PAPERS.values()):
        edges = asked.papers.edges(row)
        for section, heading in zip(sections_of(edges, row, int(store.lengths[row])), ["", *sections]):
            gain = alone - loss_of(model, store[row][section.start : section.stop], question, end)
            expected[store.paths(row), title, heading] = gain / len(question)
    ranked = sorted(expected, key=expected.get, reverse=True)[:3]
    assert [(source.paper, source.title, source.section) for source in answer.sources] == ranked
    assert [source.relevance for source in answer.sources] == pytest.approx([expected[name] for name in ranked], abs=1e-5)
    assert answer.sections == answer.scored == 9


def test_the_answer_is_the_models_after_the_sources(run, store):
    asked = prepare(run, store, [QUESTION, "Which devices are idle?"], sources=2, new_tokens=12)
    model = load_decoder(asked.source.weights)
    answers, prompts = analyze(asked, here(model)), []
    for answer in answers:
        text = ""
        for source in reversed(answer.sources):  # the best stands last
            title, sections = PAPERS[source.paper]
            own = f"{title}\n<|section|>{source.section}\n{sections[source.section]}\n" if source.section else f"{title}\n"
            text += "<|document|>" + own
        assert answer.prompt_tokens == 1 + sum(source.tokens for source in answer.sources) + len(f"\nQuestion: {answer.question}\nAnswer:")
        assert answer.prompt_tokens + 12 <= 400
        prompts.append(text)
    assert len({tuple(answer.sources) for answer in answers}) == 2
    special, ids = store.tokenizer.special, [store.tokenizer.end_of_text]
    for piece in prompts[0].replace("<|document|>", "\0<|document|>\0").replace("<|section|>", "\0<|section|>\0").split("\0"):
        ids += [special[piece]] if piece in special else store.tokenizer.encode(piece).tolist()
    ids += store.tokenizer.encode(f"\nQuestion: {QUESTION}\nAnswer:").tolist()
    assert len(ids) == answers[0].prompt_tokens
    parts = [0] * (1 + answers[0].sources[1].tokens)
    parts += [1] * (len(ids) - len(parts))  # the question belongs to the best section
    said = generate(model, ids, 12, parts=parts, stop=frozenset(special.values()), vocabulary=store.tokenizer.vocab_size)
    assert answers[0].answer == store.tokenizer.decode(list(said)).rstrip("\ufffd").strip()


def test_a_section_longer_than_the_context_is_scored_in_windows(store):
    question = store.tokenizer.encode("device?")
    (section,) = sections_of(np.array([0]), 0, int(store.lengths[0]))
    pieces = QuestionPieces(store, [question], [(0, None), (0, section)], 40)
    every = [pieces.read(number) for number in range(len(pieces))]
    assert [piece.document for piece in every] == [0] + [1] * (len(every) - 1) and len(every) > 8
    assert all(len(piece.tokens) <= 40 and (piece.targets[-7:] == question).all() for piece in every)
    seen = np.concatenate([piece.tokens[1 : len(piece.tokens) - 6] for piece in every])
    assert set(seen.tolist()) == set(store[0].tolist())
    results = [every[0]._replace(document=d) for d in (0, 1, 1)]

    class Fake:
        def __init__(self, document, loss):
            self.document, self.losses = document, np.array([0.0, loss])

    assert losses_of_questions([Fake(r.document, loss) for r, loss in zip(results, (3.0, 5.0, 4.0))], 2).tolist() == [3.0, 4.0]


def test_the_nearest_are_by_direction_from_the_middle():
    shelf = [Summary(0, np.eye(3, dtype=np.float32)[:2] + 5, np.ones(2, np.float32), None),
             Summary(1, np.eye(3, dtype=np.float32)[2:] + 5, np.ones(1, np.float32), None)]  # fmt: skip
    middle = np.full(3, 5 + 1 / 3, np.float32)
    assert nearest(shelf, [middle + np.array([0, 2, 0], np.float32), middle + np.array([0, 0.1, 3], np.float32)], 2) == [
        [(0, 1), (0, 0)], [(1, 0), (0, 1)]
    ]  # fmt: skip


@pytest.mark.parametrize("options, error", [
    (dict(questions=["  "]), "no question"), (dict(sources=0), "--sources is 0"), (dict(candidates=0), "--candidates is 0"),
    (dict(context=500), "--context 500 is more than the 400"), (dict(new_tokens=300), "--max-tokens is 300"),
    (dict(questions=["why " * 60]), "too long for a context of 400"),
])  # fmt: skip
def test_wrong_input_is_refused(run, store, options, error):
    with pytest.raises(ValueError, match=error):
        prepare(run, store, **{"questions": [QUESTION], **options})


def test_the_command_takes_a_folder_of_papers(run, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def processing(weights, actors, verbose):
        yield here(load_decoder(weights)), sys.stdout

    monkeypatch.setattr("pipelines.commands.inference._processing", processing)
    (tmp_path / "bread.md").write_text(
        "# Sourdough\n\n## Abstract\n\nYeast makes bread rise.\n\n## Baking\n\nSteam keeps the crust soft.\n"
    )
    ask = ("analyze", "--checkpoint", str(run), "--shelf", str(tmp_path), "--question", QUESTION, "--sources", "2", "--max-tokens", "8")
    done = CliRunner().invoke(main, [*ask, "--json"])
    assert done.exit_code == 0, done.output
    (answer,) = json.loads(done.stdout)["answers"]
    assert [source["title"] for source in answer["sources"]] == ["Sourdough"] * 2 and answer["scored"] == 3
    assert answer["sources"][0]["relevance"] >= answer["sources"][1]["relevance"]
