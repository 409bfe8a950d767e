"""tiktoken's rank files give tiktoken's ids."""

import argparse
import base64
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given, settings

from pipelines.corpus.tokenizer import SPECIAL, load_tokenizer, parse_spec, train_bpe
from pipelines.corpus.tokenizer.byte import byte_letters
from pipelines.corpus.tokenizer.ranks import read_ranks
from pipelines.corpus.tokenizer.words import PATTERNS
from tests.unit.pipelines.corpus.test_words import CODE, TEXTS

# As tiktoken itself splits (tiktoken_ext.openai_public), and Llama 3 and Qwen with it.
SPLITS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s",
    "llama3": PATTERNS["llama3"],
    "qwen": PATTERNS["qwen"],
    "o200k": PATTERNS["o200k"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Rank files of a trained encoding, by the name of each split."""
    trained = train_bpe(iter([*CODE, "    " * 50 + "=" * 70 + "\n\n\n" * 9]), 900)
    byte = {letter: value for value, letter in byte_letters().items()}
    vocabulary = json.loads(trained.document)["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    lines = [base64.b64encode(bytes(byte[letter] for letter in t)).decode() + f" {i}\n" for i, t in enumerate(tokens)]
    folder = tmp_path_factory.mktemp("ranks")
    paths = {name: folder / f"{name}_base.tiktoken" for name in SPLITS}
    for path in paths.values():
        path.write_text("".join(lines))
    return paths


@pytest.fixture(scope="module")
def pairs(files):
    pairs = []
    for name, path in files.items():
        ranks = {token: rank for rank, token in enumerate(read_ranks(path))}
        theirs = tiktoken.Encoding(name, pat_str=SPLITS[name], mergeable_ranks=ranks, special_tokens={})
        pairs.append((name, load_tokenizer(parse_spec(f"tiktoken:{path}")[1]), theirs))
    return pairs


@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
@example(text="x = 1  \n  ")
@example(text="  \n ")
@example(text=" " * 997 + "=" * 501 + "\n" * 303)
@example(text="<|endoftext|><|fim_prefix|> <file_sep>")  # C8
@example(text="i ⭢ j naïve ﬁ 👩‍🚀")  # C9
def test_ids_equal_tiktokens(pairs, text):
    for name, ours, theirs in pairs:
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text), name
        assert ours.decode(ours.encode(text)) == text


def test_ids_equal_tiktokens_on_code(pairs):
    text = Path(argparse.__file__).read_text()
    for name, ours, theirs in pairs:
        assert ours._words is not None
        for variant in (text, text.replace("\n", "\r\n"), text.upper()):
            assert ours.encode(variant).tolist() == theirs.encode_ordinary(variant), name


def test_control_tokens_stand_where_they_are_published(pairs, files, tmp_path):
    ours = {name: tokenizer for name, tokenizer, _ in pairs}
    assert ours["cl100k"].special["<|endoftext|>"] == 100257 and ours["gpt2"].special["<|endoftext|>"] == 50256
    assert ours["cl100k"].special["<|fim_middle|>"] == 100259 and ours["llama3"].special["<|endoftext|>"] == 128002
    assert len(set(ours["o200k"].special.values())) == len(SPECIAL)
    assert ours["qwen"].name == "tiktoken:qwen" and str(files["qwen"]) not in ours["qwen"].document
    ours["qwen"].save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == ours["qwen"].fingerprint


def test_what_is_no_rank_file_is_refused_in_one_line(files, tmp_path):
    whole = files["gpt2"].read_text().splitlines(keepends=True)
    other = tmp_path / "tokenizer.model"
    other.write_text("".join(whole))
    assert load_tokenizer(f"tiktoken:llama3:{other}").name == "tiktoken:llama3"
    for spec, said in {
        f"tiktoken:{other}": "'tokenizer.model' splits text is not known; say one of gpt2, cl100k",
        f"tiktoken:p50k:{other}": "how 'p50k' splits",
        "tiktoken:gpt2:nowhere": "no rank file 'nowhere'",
    }.items():
        with pytest.raises(ValueError, match=said) as error:
            parse_spec(spec)
        assert "\n" not in str(error.value)
    for lines, said in (
        ([*whole[:9], "x\n"], "line 10 is not 'BASE64 RANK'"),
        (whole[:200], "are no tokens"),
        ([*whole[:300], *whole[301:]], "ranks aren't 0 to"),
        ([], "ranks aren't"),
    ):
        other.write_text("".join(lines))
        with pytest.raises(ValueError, match=said) as error:
            load_tokenizer(f"tiktoken:gpt2:{other}")
        assert "\n" not in str(error.value)
