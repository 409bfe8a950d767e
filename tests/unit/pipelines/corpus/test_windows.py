import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.packing import best_fit, plan_pieces
from pipelines.corpus.windows import IGNORE, Span, WindowPlan, held_out
from tests.unit.pipelines.corpus.test_store import build


def document(length: int, first: str = "a") -> str:
    """A text that becomes `length` tokens, the last of them end_of_text."""
    return "".join(chr(ord(first) + i % 20) for i in range(length - 1))


def learnt(plan: WindowPlan, epoch: int) -> list[tuple[int, int]]:
    """(document, index) of every target of an epoch, through the spans."""
    return [
        (span.document, i)
        for g in range(epoch * len(plan), (epoch + 1) * len(plan))
        for span in plan.window(g)
        for i in range(span.start + span.context_only, span.stop)
    ]


def tokens_of(store) -> list[tuple[int, int]]:
    return [(d, i) for d, length in enumerate(store.lengths) for i in range(length)]


def test_every_token_is_a_target_once_an_epoch(tmp_path):  # W1
    store = build(tmp_path, [[document(5), document(2), "", document(3)], ["a"[:0], document(2)]])
    plan = WindowPlan(store, context=4, overlap=0)
    assert len(plan) == 3  # 4 · 3 + 1 · 2 + 2
    for epoch in (0, 1, 7):
        assert sorted(learnt(plan, epoch)) == tokens_of(store)
    assert plan.targets == store.tokens


def test_packing_of_the_given_lengths():  # W1 with lengths 5, 2, 3, 1
    pieces = plan_pieces(np.array([5, 2, 3, 1]), context=4, overlap=0)
    windows = [
        [(int(pieces.document[p]), int(pieces.start[p]), int(pieces.stop[p])) for p in range(*pieces.first[w : w + 2])]
        for w in range(len(pieces))
    ]
    assert windows == [[(0, 0, 4)], [(2, 0, 3), (0, 4, 5)], [(1, 0, 2), (3, 0, 1)]]


def test_overlap_is_context_and_never_a_window_of_its_own(tmp_path):  # W2
    store = build(tmp_path, [[document(1100)]])
    plan = WindowPlan(store, context=1000, overlap=300)
    assert len(plan) == 2
    spans = sorted((plan.window(g) for g in range(2)), key=lambda window: window[0].start)
    assert spans == [[Span(0, 0, 1000, 0)], [Span(0, 700, 1100, 300)]]
    tail = next(plan.read(g) for g in range(2) if plan.window(g)[0].start)
    assert (tail.targets[:300] == IGNORE).all() and (tail.targets[400:] == IGNORE).all()
    assert np.array_equal(tail.tokens[:400], store[0][699:1099])
    assert np.array_equal(tail.targets[300:400], store[0][1000:1100])
    assert plan_pieces(np.array([1000]), 1000, 300).stop.tolist() == [1000]
    assert plan_pieces(np.array([1001]), 1000, 300).start.tolist() == [0, 700]
    assert plan_pieces(np.array([1700]), 1000, 300).start.tolist() == [0, 700]
    assert plan_pieces(np.array([1701]), 1000, 300).start.tolist() == [0, 700, 1400]


def test_a_document_of_more_than_2_to_the_31_tokens():  # W3
    length = 2**31 + 10
    pieces = plan_pieces(np.array([3, length]), context=1 << 20, overlap=1 << 17)
    assert pieces.start.dtype == pieces.stop.dtype == np.int64
    own = pieces.document == 1
    assert pieces.stop[own].max() == length
    assert (pieces.stop - pieces.start - pieces.context_only)[own].sum() == length
    assert (pieces.start[own] >= 0).all()


def test_window_arrays_shift_and_mark_where_a_document_starts(tmp_path):
    store = build(tmp_path, [["abc", "", "de"]])
    plan = WindowPlan(store, context=9, overlap=1)
    end = store.tokenizer.end_of_text
    window = plan.read(0)
    assert window.tokens.tolist() == [end, 97, 98, 99, end, 100, 101, end, end]
    assert window.targets.tolist() == [97, 98, 99, end, 100, 101, end, IGNORE, IGNORE]
    assert window.documents.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert window.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    dtypes = [array.dtype for array in (window.tokens, window.targets, window.positions, window.documents)]
    assert dtypes == [np.int32, np.int32, np.int64, np.int32]
    going_on = WindowPlan(store, context=9, overlap=1, positions="continue").read(0)
    assert going_on.positions.tolist() == list(range(9))


@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_identical_documents_look_alike_in_one_window(tmp_path, positions):  # W5
    store = build(tmp_path, [["same text", "same text"]])
    window = WindowPlan(store, context=20, positions=positions).read(0)
    for array in (window.tokens, window.targets):
        assert np.array_equal(array[:10], array[10:])
    shift = 0 if positions == "restart" else 10
    assert np.array_equal(window.positions[:10] + shift, window.positions[10:])
    assert window.documents.tolist() == [0] * 10 + [1] * 10


lengths_and_contexts = st.integers(1, 12).flatmap(
    lambda context: st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.just(context), st.integers(0, context - 1))
)


@given(lengths_and_contexts)
@settings(max_examples=300)
def test_pieces_cover_each_target_once_and_fit(case):
    lengths, context, overlap = np.array(case[0]), case[1], case[2]
    pieces = plan_pieces(lengths, context, overlap)
    times = [np.zeros(length, int) for length in lengths]
    for d, start, stop, skip in zip(pieces.document, pieces.start, pieces.stop, pieces.context_only):
        assert 0 <= skip < stop - start <= context  # each piece teaches something
        assert skip == (overlap if start else 0)
        times[d][start + skip : stop] += 1
    assert all((count == 1).all() for count in times)
    assert pieces.first[0] == 0 and pieces.first[-1] == len(pieces.document)
    assert (np.diff(pieces.first) > 0).all() or not len(pieces)
    used = np.add.reduceat(pieces.stop - pieces.start, pieces.first[:-1]) if len(pieces) else np.zeros(0)
    assert (used <= context).all()


def naive_best_fit(sizes, capacity):
    room, bins = [], []
    for size in sizes:
        fitting = [b for b, left in enumerate(room) if left >= size]
        chosen = min(fitting, key=lambda b: room[b]) if fitting else len(room)
        if chosen == len(room):
            room.append(capacity)
        room[chosen] -= size
        bins.append(chosen)
    return room, bins


@given(st.integers(2, 5000).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
def test_best_fit_equals_the_definition(case):
    capacity, sizes = case[0], sorted(case[1], reverse=True)
    room, _ = naive_best_fit(sizes, capacity)
    bins = best_fit(np.array(sizes, np.int64), capacity)
    filled = np.bincount(bins, weights=sizes, minlength=len(room)) if sizes else np.zeros(0)
    assert sorted(capacity - filled) == sorted(room)


def test_a_million_documents_are_planned_in_seconds():
    lengths = np.random.default_rng(0).integers(1, 5000, 1_000_000)
    start = time.process_time()
    pieces = plan_pieces(lengths, context=32_768, overlap=4096)
    assert time.process_time() - start < 15  # about 3 s on an idle core
    assert len(pieces) <= 1.001 * lengths.sum() / 32_768


def test_order_depends_on_seed_and_epoch_alone(tmp_path):
    store = build(tmp_path, [[document(8)] * 40])
    plan = WindowPlan(store, 8, seed=3)
    epochs = [[plan.window(g) for g in range(e * len(plan), (e + 1) * len(plan))] for e in range(3)]
    np.random.seed(0)
    again = WindowPlan(store, 8, seed=3)
    assert [again.window(g) for g in reversed(range(3 * len(plan)))] == [w for e in reversed(epochs) for w in reversed(e)]
    assert epochs[0] != epochs[1] != epochs[2]
    other = WindowPlan(store, 8, seed=4)
    assert [other.window(g) for g in range(len(plan))] != epochs[0]
    # These numbers may never change, under any version of numpy: a run that is resumed relies on them.
    assert [w[0].document for w in epochs[1][:6]] == [9, 31, 27, 30, 7, 32]


def test_resume_after_epoch_2_sequence_17_on_any_number_of_groups(tmp_path):  # W7, plan side
    store = build(tmp_path, [[document(8)] * 40])
    plan = WindowPlan(store, 8, seed=1)
    whole = [plan.window(g) for g in range(4 * len(plan))]
    resumed = pickle.loads(pickle.dumps(plan))
    consumed = 2 * len(plan) + 18
    assert resumed.window(consumed) == whole[consumed]  # sequence 18 of epoch 2
    for groups in (1, 2, 5):
        steps = range(consumed // groups + 1, 4 * len(plan) // groups)
        got = [resumed.window(step * groups + rank) for step in steps for rank in range(groups)]
        assert got == whole[steps[0] * groups : steps[-1] * groups + groups]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    lengths = [3, 70, 1, 12, 33, 5, 64, 9, 2, 150, 17, 8]
    return build(tmp_path_factory.mktemp("uneven"), [[document(n) for n in lengths]])


def targets_of(plan: WindowPlan, g: int) -> int:
    return sum(span.stop - span.start - span.context_only for span in plan.window(g))


contexts = st.integers(1, 80).flatmap(lambda context: st.tuples(st.just(context), st.integers(0, context - 1)))


@given(before=contexts, after=contexts, done=st.integers(0, 400), seed=st.integers(0, 3))
@settings(max_examples=60)
def test_tokens_learnt_say_where_another_context_goes_on(uneven, before, after, done, seed):
    """Exactly in the plan itself; in another at the first sequence with as many targets before it, over all epochs."""
    plan = WindowPlan(uneven, *before, seed)
    done %= 3 * len(plan)
    tokens = sum(targets_of(plan, g) for g in range(done))
    assert plan.sequence_after(tokens) == done
    other = WindowPlan(uneven, *after, seed)
    first = other.sequence_after(tokens)
    taught = [targets_of(other, g) for g in range(first)]
    assert sum(taught) >= tokens > sum(taught[:-1]) or first == tokens == 0
    assert first // len(other) - tokens // other.targets in (0, 1)  # the epochs keep their length
    assert (other.fingerprint == plan.fingerprint) == (before == after)


def test_a_curriculum_reads_no_part_of_an_order_twice(uneven):
    """Contexts back and forth: each goes on behind what it has read before, and three passes read each plan some three times."""
    plans = [WindowPlan(uneven, context, 0, seed=5) for context in (16, 32, 64)]
    tokens, read = 0, {plan: [] for plan in plans}
    for turn in range(30):
        plan = plans[turn % 3]
        first = plan.sequence_after(tokens)
        read[plan] += range(first, first + 3)
        tokens += sum(targets_of(plan, g) for g in range(first, first + 3))
    for numbers in read.values():
        assert numbers == sorted(set(numbers))
    assert tokens > 3 * uneven.tokens


def test_a_plans_fingerprint_names_all_that_its_order_hangs_on(uneven):
    def named(context=8, overlap=2, seed=1, documents=None):
        return WindowPlan(uneven, context, overlap, seed, documents).fingerprint

    other = [named(), named(context=9), named(overlap=3), named(seed=2), named(documents=np.arange(5)), named(documents=np.arange(1, 6))]
    assert len(set(other)) == 6 and named() == named() == pickle.loads(pickle.dumps(WindowPlan(uneven, 8, 2, 1))).fingerprint


def test_a_subset_of_documents(tmp_path):
    store = build(tmp_path, [[document(9), document(4), document(30), "", document(2)]])
    plan = WindowPlan(store, 8, documents=np.array([4, 2, 2, 3]))
    assert {d for d, _ in learnt(plan, 0)} == {2, 4}
    assert sorted(learnt(plan, 0)) == [key for key in tokens_of(store) if key[0] in (2, 4)]
    copy = pickle.loads(pickle.dumps(plan))
    assert [copy.window(g) for g in range(9)] == [plan.window(g) for g in range(9)]
    assert len(pickle.dumps(WindowPlan(store, 8))) < 400


def test_a_plan_refuses_a_store_that_changed(tmp_path):
    data = pickle.dumps(WindowPlan(build(tmp_path, [["abc"]]), 8))
    build(tmp_path, [["abd"]])
    with pytest.raises(ValueError, match="changed since the windows were planned"):
        pickle.loads(data)


def test_wrong_arguments_are_refused_with_the_numbers(tmp_path):
    store = build(tmp_path / "a", [["abc", "de"]])
    cases = [
        (dict(context=0), "context is 0"),
        (dict(context=8, overlap=8), "overlap is 8; it must be at least 0 and less than the context of 8"),
        (dict(context=8, overlap=-1), "overlap is -1"),
        (dict(context=8, seed=-1), "seed is -1"),
        (dict(context=8, positions="reset"), "positions is 'reset'"),
        (dict(context=8, documents=[0, 2]), "documents 0–2 asked for, the store has 0–1"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            WindowPlan(store, **arguments)
    with pytest.raises(ValueError, match="none of the 2 documents"):
        WindowPlan(build(tmp_path / "b", [["", ""]]), 8)
    with pytest.raises(IndexError, match="sequence -1"):
        WindowPlan(store, 8).window(-1)


def test_held_out_is_stable_when_files_are_added(tmp_path):
    few = build(tmp_path / "few", [["x"] * 60])
    more = build(tmp_path / "more", [["x"] * 60, ["y"] * 60])
    train, out = held_out(few, 0.2, seed=5)
    train_more, out_more = held_out(more, 0.2, seed=5)
    assert 3 < len(out) < 25
    assert sorted([*train, *out]) == list(range(60))
    assert set(out) == {i for i in out_more if i < 60} and set(train) == {i for i in train_more if i < 60}
    assert set(held_out(few, 0.2, seed=6)[1]) != set(out)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_held_out_leaves_tokens_on_both_sides(tmp_path, fraction):
    store = build(tmp_path, [["", "a", "", "b", ""]])
    for side in held_out(store, fraction):
        assert store.lengths[side].sum() > 0
    assert held_out(store, 0)[1].tolist() == []
    with pytest.raises(ValueError, match="fraction is 1.0"):
        held_out(store, 1.0)
