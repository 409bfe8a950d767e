"""From files to windows: sources → tokenizer → store → windows. `ingest` runs the first three on a Ray cluster."""

from pipelines.corpus.store import StoreError, TokenStore
from pipelines.corpus.tokenizer import Tokenizer, load_tokenizer
from pipelines.corpus.windows import Span, WindowPlan, held_out

__all__ = ["Span", "StoreError", "TokenStore", "Tokenizer", "WindowPlan", "held_out", "load_tokenizer"]
