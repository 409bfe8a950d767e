"""Complete code at a cursor with a trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipelines.code_completion.fim import template
from pipelines.code_completion.prompt import Form, Prompt, build_prompt, parse_cursor
from pipelines.corpus.tokenizer import load_tokenizer
from pipelines.models.source import Source, open_source


@dataclass(frozen=True)
class Completion:
    """``text`` continues the file at the cursor, in the file's own line ends."""

    text: str
    prompt_tokens: int
    new_tokens: int
    files: list[str]
    checkpoint: str


def complete(
    path: Path,
    repo: Path,
    at: str,
    *,
    new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    context: int | None = None,
    gitignore: bool = True,
) -> Completion:
    """The text that the model at ``path`` (a run, a checkpoint or a model folder) puts at ``at`` (``FILE:LINE:COL``) of the repository.

    ``context`` is the most tokens of prompt and answer, by default (and at most) the length the model was trained at. Files
    that the repository's .gitignore files exclude are not shown to the model where ``gitignore``.
    Raises ValueError for input that is wrong, before the model is loaded.
    """
    source = open_source(path)
    if not repo.is_dir():
        raise ValueError(f"--repo {repo} is not a folder")
    cursor = parse_cursor(at, repo)
    if source.model.top_blocks is not None:
        raise ValueError(
            f"{source.folder} was trained with model.top_blocks, whose choice needs whole blocks of queries: it cannot generate yet"
        )
    context = source.context if context is None else context
    if context > source.context:
        raise ValueError(f"--context {context} is more than the {source.context} tokens that the model was trained at")
    if not 0 < new_tokens < context:
        raise ValueError(f"--max-tokens is {new_tokens}; it must be at least 1 and leave room for a prompt in {context} tokens")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature is {temperature}; it must be at least 0")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"--seed is {seed}; it must lie in 0–2⁶⁴ − 1")
    tokenizer = load_tokenizer(source.folder)
    if tokenizer.end_of_text >= source.model.vocab_size:
        raise ValueError(
            f"{source.folder} has no id for <|endoftext|>, which stands before each file; import the model with --special-tokens"
        )
    form = Form(source.unit, template(tokenizer) if source.infill else None)
    prompt = build_prompt(repo, cursor, tokenizer, context - new_tokens, form, gitignore)
    return _answer(prompt, source, tokenizer, new_tokens, temperature, seed)


def _answer(prompt: Prompt, source: Source, tokenizer, new_tokens: int, temperature: float, seed: int) -> Completion:
    from workers.inference.generate import generate, load_decoder

    model = load_decoder(source.weights)
    stop = source.stop.union(tokenizer.special.values())
    ids = list(generate(model, prompt.ids, new_tokens, stop=stop, vocabulary=tokenizer.vocab_size, temperature=temperature, seed=seed))
    text = tokenizer.decode(ids).rstrip("\ufffd")  # a character that was cut off by the limit
    if prompt.newline == "\r\n":
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    return Completion(text, len(prompt.ids), len(ids), prompt.files, str(source.weights))
