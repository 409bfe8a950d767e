"""A store of two short shelves of papers, written by hand: real sentences, document and section tokens, unit "collection"."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipelines.corpus.kind import END, Special, encode
from pipelines.corpus.store import ShardWriter, TokenStore, write_manifest
from pipelines.corpus.tokenizer import ByteTokenizer

PAPERS = {
    "rings/ring-attention": ("Ring attention", {
        "Abstract": "Blocks of keys and values travel round a ring of devices, so that a sequence may be as long as the devices are many.",
        "Method": "Each device keeps its queries. At every hop it computes attention of one block and merges it by the log of the sum.",
    }),
    "rings/striped-attention": ("Striped attention", {
        "Abstract": "A causal mask leaves some devices idle in ring attention. We give each device tokens from everywhere, as stripes.",
        "Results": "On long sequences the stripes are faster, because every hop has nearly the same work for every device.",
    }),
    "bread/sourdough": ("Sourdough", {
        "Abstract": "Flour and water ferment for a week. The yeast that lives on the grain makes the bread rise.",
        "Baking": "The oven is as hot as it can be. Steam in the first minutes lets the crust stay soft until the loaf has risen.",
    }),
}  # fmt: skip


def write_shelves(folder: Path, papers: dict = PAPERS, unit: str = "collection", held_out=()) -> TokenStore:
    folder.mkdir(parents=True)
    tokenizer = ByteTokenizer()
    names = list(papers)
    with ShardWriter(folder, 0, tokenizer) as writer:
        for number, (name, (title, sections)) in enumerate(papers.items()):
            shelf = name.partition("/")[0]
            last = number + 1 == len(names) or names[number + 1].partition("/")[0] != shelf
            parts = [Special("<|document|>"), f"{title}\n"]
            for heading, text in sections.items():
                parts += [Special("<|section|>"), f"{heading}\n{text}\n"]
            ids = encode(parts + ([END] if last or unit == "row" else []), tokenizer)
            source = "".join(f"{heading}\n{text}\n" for heading, text in sections.items()).encode()
            writer.add(name, source, "utf-8", None, ids, collection=shelf, details={"title": title})
        shard = writer.close()
    write_manifest(folder, tokenizer, [shard], [], unit=unit, held_out=held_out)
    return TokenStore.open(folder)


def tokens_of(store: TokenStore, first: int, last: int) -> np.ndarray:
    return np.concatenate([store[row] for row in range(first, last)])
