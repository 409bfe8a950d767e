"""The table of words gives the library's own ids: every pattern, any text, full tables, added tokens."""

import argparse
import json
import random
import sysconfig
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.corpus.tokenizer import LibraryTokenizer, train_bpe, words
from pipelines.corpus.tokenizer.words import PATTERNS, Words

CODE = [Path(argparse.__file__).read_text(encoding="utf-8"), "class naïve:\n\tpass  # ﬁ 👩‍🚀\n" * 5]
VARIANTS = ["trained", "digits", *PATTERNS]
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.text(st.characters(max_codepoint=127), max_size=12),
        st.sampled_from(["it's", "WE'LL", "x1234567", "\r\n", "\n\n\t", "'s", "//=\n/", "é", "👩‍🚀", "e\u0301", "ſ", "K", "\x85", "\xa0"]),
        st.builds(lambda c, n: c * n, st.sampled_from(" \t\n\r=a1/'\x1c\x0b"), st.integers(1, 300)),
    ),
    max_size=12,
).map("".join)


def variant(trained: LibraryTokenizer, name: str, change=lambda tree: None) -> LibraryTokenizer:
    tree = json.loads(trained.document)
    level = {**tree["pre_tokenizer"], "use_regex": False}
    if name == "digits":
        digits = {"type": "Digits", "individual_digits": True}
        tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tree["pre_tokenizer"]]}
    elif name != "trained":
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[name]}, "behavior": "Isolated", "invert": False}
        tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
        tree["normalizer"] = {"type": "NFC"} if name == "qwen" else None
    change(tree)
    return LibraryTokenizer(json.dumps(tree), name)


@pytest.fixture(scope="module")
def trained():
    return train_bpe(iter(CODE), 700)


@pytest.fixture(scope="module")
def pairs(trained):
    """Each tokenizer with the bare library on the same document."""
    pairs = []
    for name in VARIANTS:
        ours = variant(trained, name)
        library = tokenizers.Tokenizer.from_str(ours.document)
        library.encode_special_tokens = True
        assert ours._words is not None, name
        pairs.append((name, ours, library))
    return pairs


def same(ours, library, text: str) -> bool:
    return ours.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
@settings(max_examples=300, deadline=None)
@example(text="a" + " " * 70_000 + "1" + "\t" * 70_000)
@example(text="x = 1  \n  ")
@example(text="<|endoftext|><|fim_prefix|> <file_sep>")  # C8
@example(text="i ⭢ j naïve ﬁ 👩‍🚀")  # C9
def test_ids_equal_the_library_on_any_text(pairs, text):
    for name, ours, library in pairs:
        assert same(ours, library, text), name


def test_ids_equal_the_library_on_code(pairs):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    headers = sorted(Path(sysconfig.get_path("include")).rglob("*.h"))
    for path in random.Random(0).sample(files, 2) + headers[:3]:
        text = path.read_text(encoding="utf-8", errors="replace")
        for name, ours, library in pairs:
            assert same(ours, library, text), (name, path)
            assert same(ours, library, text.replace("\n", "\r\n")), (name, path)  # C4


def test_a_long_line_takes_linear_time_and_a_small_table(pairs):  # C5
    line = "=".join(f"v{i:x}" for i in range(40_000)) + " " * 100_000 + "é" * 100_000 + "x"  # 0.4 MB without a line end
    for name, ours, library in pairs[:3]:
        assert same(ours, library, line), name
        assert all(len(word) <= 64 for word in ours._words)


def test_a_full_table_starts_afresh():
    asked = []
    table = Words(lambda word: asked.append(word) or word.encode(), most=3)
    assert b"".join(map(table.__getitem__, "a b c a d a".split())) == b"abcada"
    assert asked == ["a", "b", "c", "d", "a"] and len(table) == 2
    assert table["x" * 1000] == b"x" * 1000 and len(table) == 2  # long words are not kept


def test_added_tokens_of_the_file_are_found_as_the_library_finds_them(trained):
    def add(tree, **changes):
        token = {**tree["added_tokens"][0], "content": "<tool>", "special": False, **changes}
        tree["added_tokens"].append({**token, "id": 1 + max(token["id"] for token in tree["added_tokens"])})

    text = "call <tool>x</tool>  [t m]  a[t m]b é <tool> 12345"
    for changes in ({}, {"lstrip": True}, {"rstrip": True}, {"content": "[t m]"}, {"content": "[t", "single_word": True}, {"content": "é"}):
        ours = variant(trained, "llama3", lambda tree: add(tree, **changes))
        library = tokenizers.Tokenizer.from_str(ours.document)
        library.encode_special_tokens = True
        assert same(ours, library, text) and same(ours, library, "no such token"), changes


def test_what_is_not_known_is_left_to_the_library(trained):
    def dropout(tree):
        tree["model"]["dropout"] = 0.5

    def other(tree):
        tree["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|x"

    assert variant(trained, "qwen", dropout)._words is None
    assert variant(trained, "qwen", other)._words is None
    text = "def add(a, b): return a + b"
    assert variant(trained, "qwen", other).decode(variant(trained, "qwen", other).encode(text)) == text


def test_a_pattern_that_splits_otherwise_is_found_out(trained, monkeypatch):
    monkeypatch.setitem(words._ASCII, PATTERNS["gpt2"], r" ?[A-Za-z]{1,9}|\s+|[^\sA-Za-z]+")
    assert variant(trained, "trained")._words is None
