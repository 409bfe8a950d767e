"""Text to token ids and back: bytes, byte-pair encoding trained on the corpus, any `tokenizer.json`, tiktoken's ranks.

Every tokenizer here obeys three rules that the rest of Ringspan leans on:

1. `decode(encode(text)) == text` for every text without lone surrogates. A file whose normaliser rewrites text is
   refused, except Unicode composition (NFC, as in Qwen), which only touches decomposed characters.
2. Text never becomes a control id. A source that contains the literal `<|endoftext|>` is encoded as those
   thirteen characters; only code that asks for `special["<|endoftext|>"]` gets the id.
3. All that decides ids is one JSON document in the Hugging Face format: it is what `save` writes, what is hashed
   into `fingerprint`, and what travels to other processes. Byte tokens and tiktoken's rank files have such a document
   too, so an exported model opens elsewhere.
"""

from pipelines.corpus.tokenizer.base import FILE_NAME, SPECIAL, Tokenizer
from pipelines.corpus.tokenizer.byte import ByteTokenizer
from pipelines.corpus.tokenizer.library import LibraryTokenizer
from pipelines.corpus.tokenizer.load import load_tokenizer, parse_spec, train_bpe

__all__ = [
    "FILE_NAME",
    "SPECIAL",
    "ByteTokenizer",
    "LibraryTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "parse_spec",
    "train_bpe",
]
