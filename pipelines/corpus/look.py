"""What is in a store, in numbers, and samples of it as a model will see them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.corpus.store import TokenStore
from pipelines.corpus.windows import WindowPlan

_NO_EXTENSION, _NO_LICENCE = "(none)", "(none)"
_LONGEST = 1 << 20  # tokens of a window, mostly padding, that is shown of a small store


def overview(store: TokenStore) -> dict:
    """Counts of a store; `collections`, `licences` and `extensions` map a name to rows, bytes and tokens, most tokens
    first. Reads columns of names alone: neither texts nor tokens."""
    sizes = pc.binary_length(store.column("source")).to_numpy()
    extensions = (PurePosixPath(path).suffix or _NO_EXTENSION for path in store.column("path").to_pylist())
    licences = (licence or _NO_LICENCE for licence in store.column("licence").to_pylist())
    manifest = store.manifest
    return {
        "store": store.address,
        "fingerprint": store.fingerprint,
        "unit": store.unit,
        "documents": len(store.documents) - 1,
        "rows": len(store),
        "bytes": manifest["bytes"],
        "tokens": store.tokens,
        "bytes_per_token": manifest["bytes"] / store.tokens if store.tokens else None,
        "longest_row": int(store.lengths.max(initial=0)),
        "shards": len(store.shards),
        "tokenizer": manifest["tokenizer"],
        "counts": manifest["counts"],
        "held_out": manifest["held_out"],
        "skipped": manifest["skipped"],
        "collections": _by(store.column("collection").to_pylist(), sizes, store.lengths),
        "licences": _by(licences, sizes, store.lengths),
        "extensions": _by(extensions, sizes, store.lengths),
    }


def text(found: dict, most: int) -> str:
    """The overview for people, with the first `most` of each kind."""
    tokenizer, per = found["tokenizer"], found["bytes_per_token"]
    lines = [
        f"{found['rows']:,} rows in {found['documents']:,} documents, {found['bytes'] / 1e6:,.1f} MB, {found['tokens']:,} tokens"
        + (f" ({per:.2f} bytes each)" if per else ""),
        f"tokenizer {tokenizer['name']}, {tokenizer['vocab_size']:,} ids · a document is a {found['unit']}"
        f" · longest row {found['longest_row']:,} tokens · {found['shards']:,} shards",
    ]
    lines += [f"counted: {', '.join(f'{count:,} {what}' for what, count in found['counts'].items())}"] if found["counts"] else []
    lines += [f"held out: {', '.join(found['held_out'])}"] if found["held_out"] else []
    for what in ("collections", "licences", "extensions"):
        rows = found[what]
        lines.append(f"{what}: {len(rows):,}")
        for name, row in list(rows.items())[:most]:
            lines.append(f"  {name:<32} {row['rows']:>9,} rows {row['bytes'] / 1e6:>11,.2f} MB {row['tokens']:>15,} tokens")
        if len(rows) > most:
            lines.append(f"  and {len(rows) - most:,} more")
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in found["skipped"].items()) or "nothing"
    return "\n".join([*lines, f"skipped: {skipped}", f"store: {found['store']}"])


def sample_documents(store: TokenStore, count: int, tokens: int, seed: int = 0) -> list[dict]:
    """`count` places drawn evenly from all tokens of the store, each with up to `tokens` tokens of its row from there on.

    `{path, collection, start, stop, text}`; control tokens appear by name, and a character cut in two as U+FFFD.
    """
    _check(count, tokens)
    ends = np.cumsum(store.lengths)
    if not len(ends) or not ends[-1]:
        raise ValueError(f"{store.address} holds no token to show")
    samples = []
    for place in np.random.default_rng(seed).integers(0, ends[-1], count):
        row = int(np.searchsorted(ends, place, side="right"))
        start = int(place - ends[row] + store.lengths[row])
        start = max(0, min(start, int(store.lengths[row]) - tokens))  # not the bare end of a row that has more
        ids = store[row][start : start + tokens]
        where = {"path": store.paths(row), "collection": store.collection(row), "start": start, "stop": start + len(ids)}
        samples.append({**where, "text": store.tokenizer.decode(ids)})
    return samples


def sample_windows(store: TokenStore, count: int, context: int, seed: int = 0) -> list[dict]:
    """The first `count` windows of `context` tokens in the order of training with this seed, as text; `{window, text}`."""
    _check(count, context)
    if context > max(_LONGEST, store.tokens):
        raise ValueError(
            f"a window of {context:,} tokens: {store.address} holds {store.tokens:,}; show at most {max(_LONGEST, store.tokens):,}"
        )
    plan = WindowPlan(store, context, seed=seed)
    return [{"window": g, "text": store.tokenizer.decode(plan.read(g).tokens)} for g in range(min(count, len(plan)))]


def _by(names: Iterable[str], sizes: np.ndarray, lengths: np.ndarray) -> dict[str, dict[str, int]]:
    table = pa.table({"name": pa.array(names, pa.string()), "bytes": sizes, "tokens": lengths})
    table = table.group_by("name").aggregate([("name", "count"), ("bytes", "sum"), ("tokens", "sum")])
    rows = sorted(table.to_pylist(), key=lambda row: (-row["tokens_sum"], row["name"]))
    return {row["name"]: {"rows": row["name_count"], "bytes": row["bytes_sum"], "tokens": row["tokens_sum"]} for row in rows}


def _check(count: int, tokens: int) -> None:
    if count < 1 or tokens < 1:
        raise ValueError(f"{count} samples of {tokens} tokens: both must be at least 1")
