import argparse
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from pipelines.corpus.tokenizer import (
    SPECIAL,
    ByteTokenizer,
    LibraryTokenizer,
    load_tokenizer,
    parse_spec,
    train_bpe,
)
from tests.allocations import growth

CORPUS = [Path(argparse.__file__).read_text(encoding="utf-8"), "class naïve:\n\tpass  # ﬁ 👩‍🚀\n" * 5]
HARD = ["", "\0", "i ⭢ j", "naïve ﬁ", "e\u0301", "👩‍🚀👨‍👩‍👧‍👦", "\r\n\f\x0b\x85\u2028", "  \t ", "\ufffd\ufeff", *SPECIAL, "<file_sep>"]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(iter(CORPUS), 400)


@pytest.fixture(scope="module", params=["byte", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "byte" else request.getfixturevalue("bpe")


@pytest.mark.parametrize("text", HARD)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_round_trip_and_offsets_of_any_text(tokenizer, text):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert np.array_equal(ids, tokenizer.encode(text))
    assert tokenizer.decode(ids) == text
    spans = list(dict.fromkeys(map(tuple, offsets.tolist())))
    pieces = sorted({i for start, end in spans for i in range(start, end)})
    assert pieces == list(range(len(text)))  # every character is covered
    if text.isascii():
        assert "".join(text[start:end] for start, end in offsets) == text


def test_offsets_slice_each_token_of_the_original_text(bpe):
    text = "class naïve:\n\tpass  # i ⭢ j\n"
    for tokenizer in (bpe, ByteTokenizer()):
        ids, offsets = tokenizer.encode_with_offsets(text)
        for token, (start, end) in zip(ids, offsets):
            shown = tokenizer.decode([token])
            # Part of a character shows U+FFFD on its own; its offsets are those of the whole character.
            assert text[start:end] == shown or ("\ufffd" in shown and not text[start:end].isascii())


@pytest.mark.parametrize("text", [*SPECIAL, "".join(SPECIAL), "x<|endoftext|>y <|fim_prefix|> <file_sep>"])
def test_text_never_becomes_a_control_id(tokenizer, text):
    control = set(tokenizer.special.values())
    assert not control & set(tokenizer.encode(text).tolist())
    assert not control & set(tokenizer.encode_with_offsets(text)[0].tolist())


def test_control_ids_show_by_name_or_not_at_all(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.end_of_text, *tokenizer.encode("é"), tokenizer.special["<|file_sep|>"]]
    assert tokenizer.decode(ids) == "a<|endoftext|>é<|file_sep|>"
    assert tokenizer.decode(ids, skip_special=True) == "aé"
    with pytest.raises(ValueError, match=f"ids must lie in 0–{tokenizer.vocab_size - 1}"):
        tokenizer.decode([tokenizer.vocab_size])


def test_bytes_equal_the_library_on_the_saved_file(tmp_path):
    ours = ByteTokenizer()
    ours.save(tmp_path)
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.encode_special_tokens = True
    for text in HARD:
        encoding = reference.encode(text, add_special_tokens=False)
        ids, offsets = ours.encode_with_offsets(text)
        assert encoding.ids == ids.tolist()
        assert encoding.offsets == list(map(tuple, offsets.tolist()))
    assert {t: reference.token_to_id(t) for t in SPECIAL} == ours.special
    assert reference.get_vocab_size() == ours.vocab_size == 264


def test_save_load_pickle_keep_the_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for copy in (load_tokenizer(tmp_path, name=tokenizer.name), pickle.loads(pickle.dumps(tokenizer))):
        assert type(copy) is type(tokenizer)
        assert (copy.fingerprint, copy.name, copy.special) == (tokenizer.fingerprint, tokenizer.name, tokenizer.special)
        assert np.array_equal(copy.encode("".join(HARD)), tokenizer.encode("".join(HARD)))


def test_training_is_deterministic_across_processes_and_threads(bpe):
    program = (
        "from pipelines.corpus.tokenizer import train_bpe; from tests.unit.pipelines.corpus.test_tokenizer import CORPUS; "
        "print(train_bpe(iter(CORPUS), 400).fingerprint)"
    )
    for threads in ("1", "4"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == bpe.fingerprint


def test_trained_size_is_exact_and_merges_help(bpe):
    assert bpe.vocab_size == 400
    assert len(bpe.encode(CORPUS[0])) < len(CORPUS[0]) / 2
    with pytest.raises(ValueError, match="bpe:100 is too small: 256 bytes and 8 control tokens need 264"):
        train_bpe(iter(CORPUS), 100)


# How published byte-level tokenizers split text before they merge: GPT-2, cl100k (Llama 3, Qwen), o200k.
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("pattern", [None, *PATTERNS])
def test_long_text_is_encoded_in_pieces_with_the_same_ids_and_offsets(bpe, pattern, monkeypatch):
    tokenizer = bpe
    if pattern:
        tree = json.loads(bpe.document)
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}
        level = {**tree["pre_tokenizer"], "use_regex": False}
        tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
        tokenizer = LibraryTokenizer(json.dumps(tree), pattern)
    monkeypatch.setattr("pipelines.corpus.tokenizer.library._PIECE_CHARACTERS", 10)
    line = "    it's = add(first1,  second)\r\n\n\n\tnaïve(x);\n  else\r\n  \n{1234,5678}//we'll\n\n"
    text = line * 50 + CORPUS[0][:60_000]
    assert len(list(tokenizer._pieces(text))) > 3000
    whole = tokenizer._library.encode(text, add_special_tokens=False)
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert whole.ids == ids.tolist() == tokenizer.encode(text).tolist()
    assert whole.offsets == list(map(tuple, offsets.tolist()))


def test_a_long_generated_header_is_encoded_in_bounded_memory(bpe):  # C5
    text = "int a;\n" * 600_000
    ids = []
    assert growth(lambda: ids.append(bpe.encode(text))) < 200 << 20  # 600 MB in one call
    assert len(ids[0]) > 600_000


def test_foreign_file_gets_the_missing_control_tokens_and_nothing_around_the_text(bpe, tmp_path):
    # As Qwen ships: its own control tokens, the FIM ones not marked as control, truncation and a template switched on.
    tree = json.loads(bpe.document)
    size = tree["added_tokens"][0]["id"]
    for i, content in enumerate(("<|endoftext|>", "<|im_start|>", "<|fim_prefix|>")):
        tree["added_tokens"][i] = {**tree["added_tokens"][i], "content": content, "special": content != "<|fim_prefix|>"}
    tree["added_tokens"] = tree["added_tokens"][:3]
    tree["model"]["vocab"] = {k: v for k, v in tree["model"]["vocab"].items() if v < size}
    tree["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tree["normalizer"] = {"type": "NFC"}
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [size + 1], "tokens": ["<|im_start|>"]}},
    }
    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(tree))
    foreign = load_tokenizer(path)
    assert foreign.name == "file:model/tokenizer.json"
    assert foreign.special["<|endoftext|>"] == size and foreign.special["<|fim_prefix|>"] == size + 2
    assert sorted(set(foreign.special.values()) - {size, size + 2}) == list(range(size + 3, size + 9))
    assert foreign.vocab_size == size + 9
    text = "def add(first, second): <|fim_prefix|><|im_start|>"
    assert np.array_equal(foreign.encode(text), bpe.encode(text))
    foreign.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == foreign.fingerprint


def test_a_file_that_loses_text_is_refused(tmp_path):
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="tokenizer words loses text: .* use a byte-level one"):
        LibraryTokenizer(library.to_str(), "words")
    ByteTokenizer().save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="tokenizer lower loses text"):
        LibraryTokenizer(library.to_str(), "lower")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"vocab": {}}, "added_tokens": []}', "\udcff"])
def test_a_file_that_is_no_tokenizer_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="not a tokenizer.json") as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


def test_spec(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert parse_spec("byte") == ("byte", None)
    assert parse_spec("bpe:4096") == ("bpe", 4096)
    assert parse_spec(str(tmp_path)) == ("file", tmp_path)
    for wrong in ("bpe:", "bpe:12", "bpe:x", "bpe:-300", "bpe:²", "bytes", "no/such/file.json"):
        with pytest.raises(ValueError, match="tokenizer") as error:
            parse_spec(wrong)
        assert "\n" not in str(error.value) and wrong in str(error.value)
