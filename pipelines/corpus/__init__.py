"""From files to windows: sources → tokenizer → store → windows. `ingest` runs the first three on a Ray cluster.

Sources: `find`, `gitignore`, `archives`, `git`, `tables`, `remote`, read through `sources` and `decode`. What is kept: `rules`,
`licences`, `duplicates`, `holdout`. What differs by corpus: `kind`, of which `code` and `records` are two. Stores: `store`,
`unfinished`, `append`, `megatron`, `look`. Windows: `windows`, `packing`, `mix`.
"""

from pipelines.corpus.store import StoreError, TokenStore
from pipelines.corpus.tokenizer import Tokenizer, load_tokenizer
from pipelines.corpus.windows import Span, WindowPlan, held_out

__all__ = ["Span", "StoreError", "TokenStore", "Tokenizer", "WindowPlan", "held_out", "load_tokenizer"]
