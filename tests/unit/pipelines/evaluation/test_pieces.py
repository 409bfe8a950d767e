import pickle
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.corpus.windows import WindowPlan
from pipelines.evaluation.pieces import DocumentPieces
from tests.unit.pipelines.evaluation.shelves import tokens_of, write_shelves


@lru_cache
def shelves():
    return write_shelves(Path(mkdtemp()) / "store")


@given(context=st.integers(1, 500), data=st.data(), unit=st.sampled_from(["row", "collection"]))
def test_every_target_is_scored_once_after_the_token_before_it(context, data, unit):  # W8
    store = shelves()
    overlap = data.draw(st.integers(0, context - 1))
    documents = np.array(data.draw(st.permutations(range({"row": 3, "collection": 2}[unit]))))
    pieces = DocumentPieces(store, documents, context, overlap, unit=unit, segment=37)
    spans = [(0, 1), (1, 2), (2, 3)] if unit == "row" else [(0, 2), (2, 3)]
    every = [pieces.read(number) for number in range(len(pieces))]
    assert [piece.number for piece in every] == list(range(len(every)))
    for document, which in enumerate(documents):
        ids = tokens_of(store, *spans[which])
        own = [piece for piece in every if piece.document == document]
        scored = np.concatenate([np.arange(p.start + p.context_only, p.start + len(p.targets)) for p in own])
        assert scored.tolist() == list(range(len(ids)))
        before = np.append(store.tokenizer.end_of_text, ids)
        part = np.repeat(np.arange(len(range(*spans[which]))), store.lengths[slice(*spans[which])])
        for piece in own:
            places = np.arange(piece.start, piece.start + len(piece.targets))
            assert len(places) <= context
            assert (piece.targets == ids[places]).all() and (piece.tokens == before[places]).all()
            assert (piece.parts == part[np.maximum(places - 1, 0)]).all()
            assert (piece.segments == np.maximum(places - 1, 0) // 37).all()


def test_marks_begin_segments(tmp_path):
    store = write_shelves(tmp_path / "store")
    special = store.tokenizer.special
    pieces = DocumentPieces(store, np.arange(3), 50, unit="row", marks=(special["<|document|>"], special["<|section|>"]))
    for row in range(3):
        edges = pieces.edges(row)
        assert len(edges) == 3 and edges[0] == 0
        assert (store[row][edges[1:]] == special["<|section|>"]).all()
    again = pickle.loads(pickle.dumps(pieces))
    assert all(np.array_equal(a, b) for a, b in zip(again.read(3), pieces.read(3)))


@given(context=st.integers(2, 400), data=st.data())
def test_a_windows_parts_are_the_rows_of_its_tokens(context, data):
    """Papers of a shelf are told apart, also where a window begins inside one, and no part is of two documents."""
    store = shelves()
    plan = WindowPlan(store, context, data.draw(st.integers(0, context - 1)))
    row_of = [np.repeat(np.arange(first, last), store.lengths[first:last]) for first, last in zip(store.documents, store.documents[1:])]
    for g in range(len(plan)):
        window, at = plan.read(g), 0
        seen = []
        for span in plan.window(g):
            read = np.maximum(np.arange(span.start, span.stop) - 1, 0)
            rows, parts = row_of[span.document][read], window.parts[at : at + len(read)]
            assert (np.diff(rows) == np.diff(parts)).all()
            seen += np.unique(parts).tolist()
            at += len(read)
        assert seen == list(range(len(seen)))
        assert (window.parts[at:] == len(seen)).all()
