"""From windows to each rank's part: shifted before sliced, padded to the mesh, documents only where they matter."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.attention_reference import visible
from workers.attention import Pattern
from workers.mesh import MeshSpec
from workers.model import ModelConfig
from workers.training.batch import _one_document, receive
from workers.training.window import IGNORE, Window, blank


def window(ids: list[int], documents: list[int] | None = None, number: int = 0) -> Window:
    """Tokens and their successors; the last one has none."""
    tokens = np.array(ids, np.int32)
    targets = np.append(tokens[1:], np.int32(IGNORE))
    documents = np.zeros(len(ids), np.int32) if documents is None else np.array(documents, np.int32)
    return Window(number, tokens, targets, np.arange(len(ids), dtype=np.int64), documents)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The mesh of a group that is this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield MeshSpec().build("cpu")
    dist.destroy_process_group()


def received(spec: MeshSpec, windows: list[Window]) -> dict:
    """What this rank holds, as lists."""
    mesh = spec.build("cpu")
    batch = receive(windows if mesh.is_leader else None, mesh, len(windows[0].tokens))
    documents = batch.pattern.documents
    return {name: getattr(batch, name).tolist() for name in ("tokens", "targets", "positions")} | {
        "documents": None if documents is None else documents.tolist()
    }


def test_targets_are_shifted_before_they_are_sharded(world):  # W4
    first, second = world.run(received, ranks=2, spec=MeshSpec(ring=2), windows=[window(list(range(8)))])
    assert first["tokens"] == [[0, 1, 6, 7]] and second["tokens"] == [[2, 3, 4, 5]]
    assert first["targets"] == [[1, 2, 7, IGNORE]] and second["targets"] == [[3, 4, 5, 6]]
    assert first["positions"] == [[0, 1, 6, 7]] and second["positions"] == [[2, 3, 4, 5]]
    assert first["documents"] is second["documents"] is None


def test_tensor_ranks_hold_the_same_and_all_ranks_all_documents(world):
    rows = [window([9, 8, 7, 6], [0, 0, 1, 1]), window([1, 2, 3, 4], [0, 1, 1, 1])]
    first, second = world.run(received, ranks=2, spec=MeshSpec(tp=2), windows=rows)
    assert first == second
    assert first["tokens"] == [[9, 8, 7, 6], [1, 2, 3, 4]]
    assert first["documents"] == [[0, 0, 1, 1], [0, 1, 1, 1]]


def test_seven_tokens_are_padded_for_a_ring_of_two(world):  # A3
    """No token is dropped; padding has no targets and is a document that no token belongs to."""
    parts = world.run(received, ranks=2, spec=MeshSpec(ring=2), windows=[window([5] * 7, [0, 0, 0, 1, 1, 1, 1])])
    assert parts[0]["tokens"] == [[5, 5, 5, 0]] and parts[1]["tokens"] == [[5, 5, 5, 5]]
    assert parts[0]["targets"] == [[5, 5, IGNORE, IGNORE]]
    assert parts[0]["documents"] == parts[1]["documents"] == [[0, 0, 0, 1, 1, 1, 1, -1]]


def test_one_rank_gets_the_whole_padded_to_an_even_length(one_rank):
    batch = receive([window([1, 2, 3]), blank(1, 3)], one_rank, 3)
    assert batch.tokens.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, IGNORE, IGNORE], [IGNORE] * 4]
    assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
    assert batch.pattern.causal and batch.pattern.documents is None


def of_parts(documents: list[int], parts: list[int]) -> Window:
    return window([5] * len(parts), documents)._replace(parts=np.array(parts, np.int32))


def test_parts_travel_beside_documents_and_count_from_their_documents_start(world):
    rows = [of_parts([0, 0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 3, 4, 5, 5])]
    for alone in (False, True):
        ranks = world.run(patterns, ranks=2, spec=MeshSpec(ring=2), windows=rows, alone=alone)
        for rank in ranks:
            papers, shelves = rank["hierarchical"]
            assert papers == [[0, 0, 1, 2, 3, 4, 5, 5]]
            assert shelves == (papers if alone else [[0, 0, 0, 0, 1, 1, 2, 2]])
            assert rank["dense"] == shelves
        assert ranks[0]["part"] + ranks[1]["part"] == [0, 0, 0, 0, 1, 2, 0, 1]  # zigzag: 0 1 6 7, 2 3 4 5


def patterns(spec: MeshSpec, windows: list[Window], alone: bool) -> dict:
    """What a hierarchical and a dense model are told of documents, and the number of each token's part."""
    mesh = spec.build("cpu")
    found = {}
    for name, fields in {"dense": {}, "hierarchical": dict(window=2, segment=2)}.items():
        model = ModelConfig(vocab_size=8, **fields)
        batch = receive(windows if mesh.is_leader else None, mesh, len(windows[0].tokens), model.pattern, alone)
        found[name] = batch.pattern.documents.tolist()
    return {**found, "hierarchical": (found["hierarchical"], batch.pattern.shelves.tolist()), "part": batch.part[0].tolist()}


def test_one_shelf_of_several_papers_needs_its_papers_alone(one_rank):
    model = ModelConfig(vocab_size=8, window=2, segment=2)
    batch = receive([of_parts([0, 0, 0, 0], [0, 0, 1, 1])], one_rank, 4, model.pattern)
    assert batch.pattern.documents.tolist() == [[0, 0, 1, 1]] and batch.pattern.shelves is None
    assert receive([window([5] * 4, [0, 0, 1, 1])], one_rank, 4, model.pattern).pattern.shelves.tolist() == [[0, 0, 1, 1]]


def test_a_window_reaches_the_rank_unchanged(one_rank):
    given_window = window([4, 5, 6, 7], [0, 0, 1, 1])._replace(positions=np.array([0, 1, 0, 1]))
    batch = receive([given_window], one_rank, 4)
    for name in ("tokens", "targets", "positions"):
        assert getattr(batch, name)[0].tolist() == getattr(given_window, name).tolist()
    assert batch.pattern.documents.tolist() == [[0, 0, 1, 1]]


@given(
    rows=st.lists(st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=6, max_size=6), min_size=1, max_size=3),
    rising=st.booleans(),
)
def test_documents_are_left_out_only_where_the_causal_order_separates_them(rows, rising):
    """Against the full mask: left out exactly if every learnt token, and all that it builds upon, sees the same without them."""
    marks = np.array([[mark for mark, _ in row] for row in rows])
    documents = marks.cumsum(1) if rising else marks
    targets = np.where([[learnt for _, learnt in row] for row in rows], 1, IGNORE)
    full = visible(Pattern(documents=torch.from_numpy(documents)), len(rows), 6)
    causal = visible(Pattern(), len(rows), 6)
    same_to = (full == causal).all(-1).cumprod(1)  # 1 as long as this token and all before it see the same
    needless = bool((same_to.bool() | torch.from_numpy(targets == IGNORE)).all())
    assert _one_document(targets, documents) == needless
