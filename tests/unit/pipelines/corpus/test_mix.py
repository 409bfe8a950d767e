import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.mix import Upsample, lines, mix, repeats
from pipelines.corpus.store import ShardWriter, TokenStore, write_manifest
from pipelines.corpus.tokenizer import ByteTokenizer
from pipelines.corpus.windows import WindowPlan


def sources(folder, lengths: dict[str, list[int]]) -> TokenStore:
    """A store with a root folder for each name, of documents of these lengths."""
    encoder = ByteTokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder, 0, encoder) as writer:
        for name, sizes in lengths.items():
            for i, size in enumerate(sizes):
                writer.add(f"{name}/{i}", b"x" * size, "utf-8", None, np.full(size, 120, encoder.dtype))
        shard = writer.close()
    write_manifest(folder, encoder, [shard], [])
    return TokenStore.open(folder)


def all_of(store) -> np.ndarray:
    return np.arange(len(store))


def test_long_documents_come_more_often_and_the_sources_keep_their_shares(tmp_path):
    store = sources(tmp_path, {"books": [900] * 10 + [20] * 100, "mail": [30] * 300 + [600] * 2})
    times = repeats(store, all_of(store), Upsample(500, 5))
    before, after = (mix(store, all_of(store), 500, t) for t in (None, times))
    for was, now in zip(before, after):
        assert abs(now.share - was.share) < 0.01
        long = lambda s: s.long_tokens / (s.tokens - s.long_tokens)
        assert abs(long(now) / long(was) - 5) < 1
    assert (times >= 1).all()
    assert lines(before, after)[1].startswith("mail: 10,200 tokens, 48.1% of all, 11.8% of them long → ")


def test_one_source_repeats_its_long_documents_alone(tmp_path):
    store = sources(tmp_path, {"a": [10, 100, 11, 0, 12, 101]})
    assert repeats(store, all_of(store), Upsample(50, 3)).tolist() == [1, 3, 1, 1, 1, 3]
    assert repeats(store, np.array([0, 1]), Upsample(50, 3)).tolist() == [1, 3]
    assert repeats(store, np.array([0, 2]), Upsample(50, 3)).tolist() == [1, 1]
    assert repeats(store, np.array([3]), Upsample(50, 3)).tolist() == [1]


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=1),
       st.integers(1, 30), st.integers(2, 6), st.integers(2, 50), st.integers(0, 3))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_each_target_is_learnt_as_often_as_its_document_is_due(tmp_path_factory, lengths, longer_than, factor, context, seed):
    store = sources(tmp_path_factory.mktemp("mix"), lengths)
    if not store.tokens:
        return
    times = repeats(store, all_of(store), Upsample(longer_than, factor))
    plan = WindowPlan(store, context, None, seed, repeats=times)
    learnt = [np.zeros(length, int) for length in store.lengths]
    for g in range(2 * len(plan), 3 * len(plan)):
        for span in plan.window(g):
            learnt[span.document][span.start + span.context_only : span.stop] += 1
    assert all((count == due).all() for count, due in zip(learnt, times))
    assert plan.targets == (store.lengths * times).sum()
    # Whole numbers hit the aim to within a document of each kind.
    tokens, grown = {}, {}
    for name, sizes in lengths.items():
        sizes = np.array(sizes)
        tokens[name] = sizes.sum()
        if tokens[name]:
            grown[name] = (sizes + (factor - 1) * sizes * (sizes > longer_than)).sum() / tokens[name]
    for name in grown:
        own = np.array([store.paths(i).startswith(f"{name}/") for i in range(len(store))])
        got = (store.lengths * times)[own].sum()
        assert abs(got - tokens[name] * max(grown.values())) <= 2 * max(lengths[name])


def test_wrong_options_are_refused_with_the_numbers():
    for options, said in ((dict(longer_than=0), "longer_than is 0"), (dict(factor=1), "factor is 1; it must be at least 2")):
        with pytest.raises(ValueError, match=said):
            Upsample(**options)
