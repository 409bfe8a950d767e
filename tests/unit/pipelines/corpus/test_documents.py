"""Windows over documents of several rows: the laws that hold for any lengths, context, overlap, seed, mesh and resume point."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.packing import plan_pieces
from pipelines.corpus.store import ShardWriter, TokenStore, write_manifest
from pipelines.corpus.tokenizer import ByteTokenizer
from pipelines.corpus.windows import IGNORE, WindowPlan, document_lengths, document_names, held_out
from tests.allocations import growth

BYTES = ByteTokenizer()


def collections(folder, documents: list[list[int]], per_shard: int = 3, hold_out=()) -> TokenStore:
    """A store of unit "collection", whose rows have these lengths and count up: token i of a document is i % 251."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for d, lengths in enumerate(documents):
        ends = np.cumsum(lengths)
        rows += [(f"c{d}/src/{i}.py", f"c{d}", np.arange(end - n, end) % 251) for i, (n, end) in enumerate(zip(lengths, ends))]
    shards = []
    for index in range(0, len(rows), per_shard):
        with ShardWriter(folder, index // per_shard, BYTES) as writer:
            for path, collection, ids in rows[index : index + per_shard]:
                writer.add(path, b"", "utf-8", None, ids.astype(BYTES.dtype), collection)
            shards.append(writer.close())
    write_manifest(folder, BYTES, shards, [], unit="collection", held_out=hold_out)
    return TokenStore.open(folder)


def context_lengths(window) -> np.ndarray:
    """From how many tokens of its document each target is told, the one before it included; 0 where there is no target."""
    starts = np.flatnonzero(np.diff(window.documents, prepend=window.documents[0] - 1))
    place = np.arange(len(window.documents))
    seen = place - np.repeat(starts, np.diff(starts, append=len(place))) + 1
    return np.where(window.targets != IGNORE, seen, 0)


documents = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=6)
contexts = st.integers(1, 40).flatmap(lambda context: st.tuples(st.just(context), st.integers(0, context - 1)))


def times_learnt(plan: WindowPlan, store: TokenStore, numbers) -> list[np.ndarray]:
    """How often each target of each document is learnt in these sequences, from what is read of them."""
    times = [np.zeros(length, int) for length in document_lengths(store)]
    end = store.tokenizer.end_of_text
    for g in numbers:
        window, at = plan.read(g), 0
        for i, span in enumerate(plan.window(g)):
            mine = np.flatnonzero(window.documents == i)
            assert mine.tolist() == list(range(at, at + span.stop - span.start))
            at = mine[-1] + 1
            # Nothing but the document's own tokens is seen or learnt: they count up through all its rows.
            inputs = [end if i == 0 else (i - 1) % 251 for i in range(span.start, span.stop)]
            assert window.tokens[mine].tolist() == inputs
            told = [IGNORE] * span.context_only + [i % 251 for i in range(span.start + span.context_only, span.stop)]
            assert window.targets[mine].tolist() == told
            times[span.document][span.start + span.context_only : span.stop] += 1
        assert (window.targets[at:] == IGNORE).all() and (window.documents[at:] == len(plan.window(g))).all()
    return times


@given(documents, contexts, st.integers(0, 2**64 - 1), st.integers(1, 4), st.integers(0, 200))
@settings(max_examples=80, deadline=None)
def test_each_target_once_an_epoch_on_any_mesh_from_any_point(tmp_path_factory, lengths, shape, seed, dp, resume):
    store = collections(tmp_path_factory.mktemp("law"), lengths)
    assert document_lengths(store).tolist() == [sum(rows) for rows in lengths]
    if not store.tokens:
        with pytest.raises(ValueError, match="has a token"):
            WindowPlan(store, *shape, seed)
        return
    plan = WindowPlan(store, *shape, seed)
    for epoch in (0, 3):
        assert all((t == 1).all() for t in times_learnt(plan, store, range(epoch * len(plan), (epoch + 1) * len(plan))))
    # A restart elsewhere reads on: what dp groups have read before and after is the same sequences, none twice.
    resumed, stop = pickle.loads(pickle.dumps(plan)), 2 * len(plan)
    done = resume % stop
    after = [resumed.window(g) for rank in range(dp) for g in range(done + rank, stop, dp)]
    key = lambda window: [(s.document, s.start) for s in window]
    assert sorted(map(key, after)) == sorted(key(plan.window(g)) for g in range(done, stop))
    assert plan.sequence_after(sum(int((plan.read(g).targets != IGNORE).sum()) for g in range(done))) == done


@given(documents, contexts)
@settings(max_examples=60, deadline=None)
def test_rows_put_together_are_planned_as_one_document(tmp_path_factory, lengths, shape):
    """The plan knows lengths alone, so rows and shards leave no mark on the windows but in their parts."""
    store = collections(tmp_path_factory.mktemp("rows"), lengths)
    one = collections(tmp_path_factory.mktemp("one"), [[sum(rows)] for rows in lengths])
    if store.tokens:
        many, single = WindowPlan(store, *shape, 1), WindowPlan(one, *shape, 1)
        for g in range(2 * len(many)):
            assert all(np.array_equal(a, b) for a, b in zip(many.read(g)[:-1], single.read(g)[:-1]))
            assert single.read(g).parts.tolist() == single.read(g).documents.tolist()


@given(
    st.lists(st.sampled_from([0, 1, 7, 2**31 - 1, 2**31 + 10, 2**33]), min_size=1, max_size=4), st.integers(2**20, 2**24), st.integers(1, 8)
)
@settings(max_examples=30, deadline=None)
def test_lengths_beyond_32_bits_are_covered_once(lengths, context, part):  # W3
    overlap = context // part - 1
    if context - overlap < context // 8:
        return
    pieces = plan_pieces(np.array(lengths), context, overlap)
    for d, length in enumerate(lengths):
        own = pieces.document == d
        order = np.argsort(pieces.start[own])
        begin, stop = (pieces.start + pieces.context_only)[own][order], pieces.stop[own][order]
        assert (begin[1:] == stop[:-1]).all()
        assert (len(begin) == 0) == (length == 0) and (length == 0 or (begin[0], stop[-1]) == (0, length))


def test_a_strided_scoring_counts_each_target_once_and_knows_its_context(tmp_path):  # W8
    store = collections(tmp_path, [[100, 0, 600, 27]])
    context, overlap = 100, 30
    plan = WindowPlan(store, context, overlap)
    assert len(plan) == 10
    nll = lambda index: np.sin(index) ** 2 + 1  # of the target at that place of the document, whatever its window
    total, count, seen = 0.0, 0, {}
    for g in range(10):
        window = plan.read(g)
        (span,) = plan.window(g)
        length = context_lengths(window)
        scored = np.flatnonzero(window.targets != IGNORE)
        assert ((length > 0) == (window.targets != IGNORE)).all()
        total += nll(span.start + scored).sum()
        count += len(scored)
        seen |= {span.start + int(at): int(length[at]) for at in scored}
    assert count == store.tokens == len(seen) and np.isclose(total / count, nll(np.arange(store.tokens)).mean())
    for index, length in seen.items():
        window = max(0, -(-(index - context + 1) // (context - overlap)))
        assert length == index - window * (context - overlap) + 1
        assert length >= min(index + 1, overlap + 1)


def test_fifty_epochs_keep_two_orders_and_no_more_memory(tmp_path):
    store = collections(tmp_path, [[20, 30, 0, 4], [7]] * 40)
    plan = WindowPlan(store, 16)
    epoch = lambda e: [plan.read(g) for g in range(e * len(plan), (e + 1) * len(plan))]
    for e in range(3):
        epoch(e)

    def many():
        for e in range(3, 50):
            epoch(e)
            assert len(plan._orders) <= 2

    assert growth(many) < 8 << 20


def test_what_the_ingest_held_out_is_never_trained_on(tmp_path):
    lengths = [[5, 5], [6], [7], [8]]
    for number, (patterns, out) in enumerate(
        [
            (["c1"], [1]),
            (["c[23]"], [2, 3]),
            (["c2/src"], [2]),
            (["*/1.py"], [0]),
            (["c3/src/"], [3]),
            (["c1", "c0/*"], [0, 1]),
            (["none"], []),
        ]
    ):
        store = collections(tmp_path / str(number), lengths, hold_out=patterns)
        for fraction in (0, 0.5):
            train, held = held_out(store, fraction)
            assert held.tolist() == out and sorted([*train, *held]) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"holds out c\*, which is all it has"):
        held_out(collections(tmp_path / "all", lengths, hold_out=["c*"]), 0.05)


def test_collections_are_split_whole(tmp_path):
    store = collections(tmp_path, [[3, 4]] * 30)
    assert document_names(store)[:2] == ["c0", "c1"]
    train, out = held_out(store, 0.3, seed=1)
    assert 2 < len(out) < 20 and sorted([*train, *out]) == list(range(30))
    more = collections(tmp_path / "more", [[3, 4]] * 30 + [[1]] * 10)
    assert set(out) == {d for d in held_out(more, 0.3, seed=1)[1] if d < 30}
