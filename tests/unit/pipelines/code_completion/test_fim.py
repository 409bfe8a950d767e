"""Fill-in-the-middle keeps to one file, learns every character once, cuts nothing off, and hangs on its place alone."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.code_completion.fim import TEMPLATES, Fim, Template, template
from pipelines.corpus.kind import END, Special, encode
from pipelines.corpus.store import ShardWriter, TokenStore, write_manifest
from pipelines.corpus.tokenizer import ByteTokenizer, LibraryTokenizer, train_bpe
from pipelines.corpus.windows import WindowPlan
from tests.unit.pipelines.corpus.test_store import build
from workers.training.window import IGNORE

BYTES = ByteTokenizer()
BPE = train_bpe(["def naïve(x):\n    return x + 'ﬁ ⭢ 👩‍🚀'\r\n" * 20], 300)
PREFIX, MIDDLE, SUFFIX = (BYTES.special[f"<|fim_{part}|>"] for part in ("prefix", "middle", "suffix"))
SEP, REPO = (BYTES.special[token] for token in ("<|file_sep|>", "<|repo_name|>"))


def restored(ids, tokenizer) -> str:
    """The text that a rewritten piece was made from."""
    ids = list(ids)
    mark = {part: ids.index(tokenizer.special[f"<|fim_{part}|>"]) for part in ("prefix", "suffix", "middle")}
    text = lambda a, b: tokenizer.decode(ids[a:b])
    if mark["suffix"] == mark["prefix"] + 1:  # SPM: the prefix and the middle run into each other
        return text(mark["middle"] + 1, None) + text(mark["suffix"] + 1, mark["middle"])
    return text(mark["prefix"] + 1, mark["suffix"]) + text(mark["middle"] + 1, None) + text(mark["suffix"] + 1, mark["middle"])


@given(
    text=st.text(min_size=1, max_size=60), tokenizer=st.sampled_from([BYTES, BPE]), spm=st.sampled_from([0.0, 1.0]),
    place=st.tuples(*[st.integers(0, 2**40)] * 4),
)  # fmt: skip
@settings(max_examples=300)
def test_every_character_is_there_once_and_the_place_decides(text, tokenizer, spm, place):
    row = tokenizer.encode(text)
    fim = Fim(1.0, spm)
    got = fim.rewrite(row, 0, len(row), 100, tokenizer, place)
    if "\ufffd" in text:
        assert got is row or np.array_equal(got, row)
        return
    assert restored(got, tokenizer) == text
    assert (got.tolist()[1] == tokenizer.special["<|fim_suffix|>"]) or not spm
    assert np.array_equal(got, pickle.loads(pickle.dumps(fim)).rewrite(row, 0, len(row), 100, tokenizer, place))


def test_empty_prefix_middle_and_suffix():  # W6
    row, seen = BYTES.encode("ab"), set()
    for i in range(200):
        for spm in (0.0, 1.0):
            got = Fim(1.0, spm).rewrite(row, 0, 2, 3, BYTES, (i,)).tolist()
            assert restored(got, BYTES) == "ab" and len(got) == 5
            if not spm:
                seen.add((got.index(SUFFIX) == 1, got.index(MIDDLE) == 4, got.index(MIDDLE) == got.index(SUFFIX) + 1))
    assert seen == {  # (no prefix, no middle, no suffix) of two characters: all six cuts
        (True, True, False), (True, False, True), (True, False, False), (False, True, True), (False, True, False), (False, False, True)
    }  # fmt: skip


def test_a_piece_that_does_not_fit_stays_plain():  # W6
    row = BYTES.encode("abcdef")
    assert Fim(1.0).rewrite(row, 0, 6, 2, BYTES, (1,)).tolist() == row.tolist()
    assert len(Fim(1.0).rewrite(row, 0, 6, 3, BYTES, (1,))) == 9


def test_a_piece_whose_ends_are_inside_a_character_stays_plain():  # W6
    row = BYTES.encode("a⭢b")
    for start, stop in ((0, 2), (2, 5), (0, 3)):
        assert Fim(1.0).rewrite(row, start, stop, 9, BYTES, (1,)).tolist() == row[start:stop].tolist()
    assert restored(Fim(1.0).rewrite(row, 1, 4, 9, BYTES, (1,)), BYTES) == "⭢"
    row = np.array([SEP, *"naïve.py\nx = 1\n".encode()], np.uint16)  # and so does one that begins inside one of its name
    assert Fim(1.0).rewrite(row, 4, len(row), 9, BYTES, (1,)).tolist() == row[4:].tolist()
    assert Fim(1.0).rewrite(row, 3, len(row), 9, BYTES, (1,)).tolist() != row[3:].tolist()


def test_names_and_control_tokens_stay_in_front_and_behind():
    row = np.array([REPO, *b"repo", SEP, *b"a/b.py\nx = 1\n", BYTES.end_of_text], np.uint16)
    head = [REPO, *b"repo", SEP, *b"a/b.py\n"]
    for i in range(50):
        got = Fim(1.0).rewrite(row, 0, len(row), 3, BYTES, (i,)).tolist()
        assert got[: len(head)] == head and got[-1] == BYTES.end_of_text
        assert restored(got[len(head) : -1], BYTES) == "x = 1\n"
        cut = Fim(1.0).rewrite(row, 8, len(row), 3, BYTES, (i,)).tolist()  # a window begins inside the name
        assert cut[:5] == [*b"b.py\n"] and restored(cut[5:-1], BYTES) == "x = 1\n"
        later = Fim(1.0).rewrite(row, len(head) + 2, len(row), 3, BYTES, (i,)).tolist()
        assert restored(later[:-1], BYTES) == "= 1\n"
    for start, stop in ((0, 8), (0, 5), (0, 1), (len(row) - 1, len(row))):  # nothing of the text is in these
        assert Fim(1.0).rewrite(row, start, stop, 9, BYTES, (1,)).tolist() == row[start:stop].tolist()


def test_rates():
    row = BYTES.encode("some text")
    got = [Fim(0.3, 0.25).rewrite(row, 0, 9, 9, BYTES, (7, 0, i, 0)).tolist() for i in range(4000)]
    told = [ids for ids in got if len(ids) > 9]
    assert abs(len(told) / 4000 - 0.3) < 0.03
    assert abs(sum(ids[1] == SUFFIX and ids[:2] == [PREFIX, SUFFIX] for ids in told) / len(told) - 0.25 - 0.75 * 0.19) < 0.06
    assert all(Fim(0.0).rewrite(row, 0, 9, 9, BYTES, (i,)).tolist() == row.tolist() for i in range(99))
    for wrong in (dict(rate=1.5), dict(rate=-0.1), dict(rate=0.5, spm_rate=2)):
        with pytest.raises(ValueError, match="it must lie in 0–1"):
            Fim(**wrong)


def with_tokens(*tokens: str) -> LibraryTokenizer:
    tree = json.loads(BPE.document)
    first = 1 + max(token["id"] for token in tree["added_tokens"])
    added = [{**tree["added_tokens"][0], "id": first + i, "content": token} for i, token in enumerate(tokens)]
    return LibraryTokenizer(json.dumps({**tree, "added_tokens": tree["added_tokens"] + added}), "file:other")


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_family_of_tokenizers_has_its_own_tokens(name):
    tokenizer = with_tokens(*(TEMPLATES[name] if name != "ringspan" else ()))
    found = template(tokenizer)
    assert found.name == name and tokenizer.decode([found.prefix, found.suffix, found.middle]) == "".join(TEMPLATES[name])
    assert found.infill([1], [2]) == [found.prefix, 1, found.suffix, 2, found.middle]
    got = Fim(1.0, 0.0).rewrite(tokenizer.encode("naïve"), 0, len(tokenizer.encode("naïve")), 99, tokenizer, (1,)).tolist()
    assert {found.prefix, found.suffix, found.middle} <= set(got)


def test_a_token_that_is_not_one_id_is_refused_by_name():
    with pytest.raises(ValueError, match="file:other: '<fim_middle>' of the starcoder template .* is not one id"):
        template(with_tokens("<fim_prefix>", "<fim_suffix>"))
    assert template(BYTES) == Template("ringspan", PREFIX, SUFFIX, MIDDLE)


def repository_store(folder, repositories: list[list[str]], tokenizer=BYTES, per_shard: int = 3) -> TokenStore:
    """A store of unit "collection": a document for each list of texts, in StarCoder2's format, over several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        (f"r{r}/{i}.py", f"r{r}", text, [*([Special("<|repo_name|>"), f"r{r}"] if i == 0 else []), Special("<|file_sep|>"), f"{i}.py\n{text}", *([END] if i == len(texts) - 1 else [])])
        for r, texts in enumerate(repositories) for i, text in enumerate(texts)
    ]  # fmt: skip
    shards = []
    for index in range(0, max(1, len(rows)), per_shard):
        with ShardWriter(folder, index // per_shard, tokenizer) as writer:
            for path, collection, text, parts in rows[index : index + per_shard]:
                writer.add(path, text.encode(), "utf-8", None, encode(parts, tokenizer), collection)
            shards.append(writer.close())
    write_manifest(folder, tokenizer, shards, [], unit="collection")
    return TokenStore.open(folder)


sources = st.lists(st.lists(st.text("ab\nï⭢", max_size=30), min_size=1, max_size=4), min_size=1, max_size=3)


@given(sources, st.integers(24, 90), st.integers(0, 6), st.sampled_from([BYTES, BPE]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_with_fim_every_character_of_every_file_is_learnt_once(tmp_path_factory, repositories, context, overlap, tokenizer, seed):  # W6
    store = repository_store(tmp_path_factory.mktemp("fim"), repositories, tokenizer)
    plan = WindowPlan(store, context, overlap, seed, rewriter=Fim(1.0))
    learnt: dict[int, list[tuple[int, np.ndarray]]] = {}
    for g in range(len(plan)):
        window, at = plan.read(g), 0
        spans = plan.window(g)
        for i, span in enumerate(spans):
            mine = window.targets[window.documents == i]
            assert (mine[: span.context_only] == IGNORE).all() and (mine[span.context_only :] != IGNORE).all()
            learnt.setdefault(span.document, []).append((span.start, mine[span.context_only :]))
            tokens = window.tokens[window.documents == i]
            assert np.array_equal(tokens[1 + span.context_only :], mine[span.context_only : -1])  # what is told is what was learnt
            at += len(mine)
        assert at <= context and (window.targets[at:] == IGNORE).all()
    fim = {tokenizer.special[f"<|fim_{part}|>"] for part in ("prefix", "suffix", "middle")}
    for document, parts in learnt.items():
        parts.sort(key=lambda part: part[0])
        ids = np.concatenate([ids for _, ids in parts])
        first, last = store.documents[document : document + 2]
        plain = np.concatenate([store[row] for row in range(first, last)])
        # A rewritten piece has the same bytes in another order.
        count = lambda ids: sorted(b"".join(_bytes(tokenizer, i) for i in ids if i not in fim))
        assert count(ids) == count(plain)
    again = [WindowPlan(store, context, overlap, seed, rewriter=Fim(1.0)).read(g) for g in reversed(range(len(plan)))][::-1]
    assert all(np.array_equal(a.targets, plan.read(g).targets) for g, a in enumerate(again))


def _bytes(tokenizer, i: int) -> bytes:
    """The bytes of one id: a byte-level letter stands for each."""
    if isinstance(tokenizer, ByteTokenizer):
        return bytes([i]) if i < 256 else f"<{i}>".encode()
    return tokenizer._library.id_to_token(int(i)).encode()


def test_another_epoch_cuts_elsewhere_and_held_out_windows_stay_plain(tmp_path):
    store = build(tmp_path, [["a text of some length, long enough to be cut"] * 4])
    plan, plain = WindowPlan(store, 80, seed=1, rewriter=Fim(1.0)), WindowPlan(store, 80, seed=1)
    epochs = [{plan.read(g).targets.tobytes() for g in range(e * 4, e * 4 + 4)} for e in range(2)]
    assert len(epochs[0] | epochs[1]) == 8
    copy = pickle.loads(pickle.dumps(plan))
    assert all(np.array_equal(copy.read(g).targets, plan.read(g).targets) for g in range(8))
    assert plan.fingerprint != plain.fingerprint and plan.fingerprint == WindowPlan(store, 80, seed=1, rewriter=Fim(0.2)).fingerprint
    with pytest.raises(ValueError, match="the 16 tokens that fill-in-the-middle keeps free"):
        WindowPlan(store, 18, 2, rewriter=Fim(1.0))


def test_the_repeats_of_a_document_are_cut_at_different_places(tmp_path):
    store = build(tmp_path, [["a text of some length, long enough to be cut"]])
    plan = WindowPlan(store, 80, seed=1, repeats=np.array([6]), rewriter=Fim(1.0))
    assert len(plan) == 6 and len({plan.read(g).targets.tobytes() for g in range(6)}) >= 5
