"""tiktoken's rank files as a `tokenizer.json`, so that one form travels.

A rank file has a line a token: its bytes in base64, a space, its rank, which is its id. tiktoken joins, of all
neighbours whose joined bytes have a rank, those of the lowest, and takes a word that is a token whole. As merges that
is: every way in which two tokens make a third, in the order of the third's rank. How a text is split into words, and
the ids of control tokens, stand in no rank file; they go by the encoding's name.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
from pathlib import Path

from pipelines.corpus.tokenizer.byte import added_token, byte_letters
from pipelines.corpus.tokenizer.words import PATTERNS

PREFIX = "tiktoken:"
# As published. Llama 3 and Qwen have hundreds more, which are reserved or for chatting: those that end a text are here.
_CONTROL = {
    "gpt2": {"<|endoftext|>": 50256},
    "cl100k": {
        "<|endoftext|>": 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    },
    "o200k": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    "llama3": {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001},
    "qwen": {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
}


def parse_ranks(spec: str) -> tuple[str, Path]:
    """`tiktoken:cl100k:FILE` → (encoding, FILE); `tiktoken:FILE` where the file's name begins with the encoding's."""
    encoding, colon, file = spec.removeprefix(PREFIX).partition(":")
    if not colon:
        file = encoding
        encoding = next((name for name in PATTERNS if Path(file).name.startswith(name)), Path(file).name)
    if encoding not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise ValueError(f"tokenizer {spec!r}: how {encoding!r} splits text is not known; say one of {known}: tiktoken:cl100k:FILE")
    if not Path(file).is_file():
        raise ValueError(f"tokenizer {spec!r}: no rank file {file!r}; write tiktoken:FILE or tiktoken:{encoding}:FILE")
    return encoding, Path(file)


def ranks_document(encoding: str, path: Path) -> str:
    """The `tokenizer.json` of a rank file. ValueError in one line for a file that isn't one."""
    return _document(encoding, read_ranks(path))


def read_ranks(path: Path) -> tuple[bytes, ...]:
    """The tokens in the order of their ranks, which must be 0, 1, 2, …, with every byte among them."""
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            tokens[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"tokenizer {path}: line {number} is not 'BASE64 RANK' ({error})") from error
    ordered = tuple(tokens[rank] for rank in sorted(tokens))
    if len(tokens) == 0 or max(tokens) != len(tokens) - 1 or len(set(ordered)) != len(ordered):
        raise ValueError(f"tokenizer {path}: {len(tokens):,} tokens whose ranks aren't 0 to {len(tokens) - 1:,}, each once")
    missing = {bytes([byte]) for byte in range(256)} - set(ordered)
    if missing:
        raise ValueError(f"tokenizer {path}: {len(missing)} of the 256 bytes are no tokens, so not every text can be encoded")
    return ordered


@functools.lru_cache(maxsize=2)
def _document(encoding: str, tokens: tuple[bytes, ...]) -> str:
    letters = byte_letters()
    written = {token: "".join(letters[byte] for byte in token) for token in tokens}
    rank = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(a, b) for a, b in splits if a in rank and b in rank]
        merges += [(written[a], written[b]) for a, b in sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[encoding]}, "behavior": "Isolated", "invert": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added_token(i, content) for content, i in _CONTROL[encoding].items() if i >= len(tokens)],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "ignore_merges": True,
                "vocab": {written[token]: i for i, token in enumerate(tokens)},
                "merges": merges,
            },
        },
        ensure_ascii=False,
    )
