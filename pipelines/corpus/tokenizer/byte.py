"""Bytes as tokens: nothing to train, nothing to download."""

from __future__ import annotations

import functools
import json

import numpy as np

from pipelines.corpus.tokenizer.base import SPECIAL, Tokenizer


class ByteTokenizer(Tokenizer):
    """One id a byte of UTF-8 (0–255), then the control ids. Nothing to train, nothing to download.

    The `i`-th byte of a multi-byte character has the offsets of that character.
    """

    def __init__(self):
        special = {token: 256 + i for i, token in enumerate(SPECIAL)}
        super().__init__(byte_document(), "byte", 256 + len(SPECIAL), special)

    def __reduce__(self):
        return ByteTokenizer, ()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(self.dtype)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + sum((code_points >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
        start = np.repeat(np.arange(len(code_points), dtype=np.int64), widths)
        return self.encode(text), np.stack([start, start + 1], axis=1)

    def decode(self, ids, skip_special: bool = False) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(f"ids must lie in 0–{self.vocab_size - 1}, got {ids.min()}–{ids.max()}")
        parts, last = [], 0
        for at in np.flatnonzero(ids >= 256):
            parts.append(ids[last:at].astype(np.uint8).tobytes())
            if not skip_special:
                parts.append(SPECIAL[ids[at] - 256].encode())
            last = at + 1
        parts.append(ids[last:].astype(np.uint8).tobytes())
        return b"".join(parts).decode("utf-8", errors="replace")


@functools.cache
def byte_document() -> str:
    """Byte tokens in the Hugging Face format: byte-pair encoding without a single merge, ids in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added_token(256 + i, token) for i, token in enumerate(SPECIAL)],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {letter[byte]: byte for byte in range(256)}, "merges": []},
        }
    )


def added_token(token_id: int, content: str) -> dict:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
