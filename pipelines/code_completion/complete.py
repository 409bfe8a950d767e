"""Complete code at a cursor with a trained run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipelines.code_completion.prompt import Prompt, build_prompt, parse_cursor
from pipelines.config import load_config
from pipelines.corpus.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Completion:
    """``text`` continues the file at the cursor, in the file's own line ends."""

    text: str
    prompt_tokens: int
    new_tokens: int
    files: list[str]
    checkpoint: str


def checkpoint_of(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that ``path`` means: a run (its latest) or one checkpoint of it.

    Raises ValueError when there is none.
    """
    from workers.training import checkpoint as checkpoints

    path = path.resolve()
    if not path.is_dir():
        raise ValueError(f"--checkpoint {path} is not a folder; give a run or one of its checkpoints")
    if path.suffix == checkpoints.PARTIAL:
        raise ValueError(f"--checkpoint {path} was never finished; give the run, or a checkpoint without {checkpoints.PARTIAL}")
    if (path / "state.json").is_file():
        return path.parent.parent, path
    latest = checkpoints.latest(path / "checkpoints")
    if latest is None:
        raise ValueError(f"{path} holds no finished checkpoint; a run writes one every checkpoint.every steps and at its end")
    return path, latest


def complete(
    path: Path, repo: Path, at: str, *, new_tokens: int = 64, temperature: float = 0.0, seed: int = 0, context: int | None = None
) -> Completion:
    """The text that the run at ``path`` puts at ``at`` (``FILE:LINE:COL``) of the repository.

    ``context`` is the most tokens of prompt and answer, by default (and at most) the length the run was trained at.
    Raises ValueError for input that is wrong, before the model is loaded.
    """
    from workers.training.checkpoint import read_progress

    run, checkpoint = checkpoint_of(path)
    if not repo.is_dir():
        raise ValueError(f"--repo {repo} is not a folder")
    cursor = parse_cursor(at, repo)
    config = load_config(str(run / "config.yaml")).at(read_progress(checkpoint).step)
    trained = config.training.context
    if config.model.top_blocks is not None:
        raise ValueError(f"{run} was trained with model.top_blocks, whose choice needs whole blocks of queries: it cannot generate yet")
    context = trained if context is None else context
    if context > trained:
        raise ValueError(f"--context {context} is more than the {trained} tokens that the run was trained at")
    if not 0 < new_tokens < context:
        raise ValueError(f"--max-tokens is {new_tokens}; it must be at least 1 and leave room for a prompt in {context} tokens")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature is {temperature}; it must be at least 0")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"--seed is {seed}; it must lie in 0–2⁶⁴ − 1")
    tokenizer = load_tokenizer(run)
    prompt = build_prompt(repo, cursor, tokenizer, context - new_tokens)
    return _answer(prompt, checkpoint, tokenizer, new_tokens, temperature, seed)


def _answer(prompt: Prompt, checkpoint: Path, tokenizer, new_tokens: int, temperature: float, seed: int) -> Completion:
    from workers.inference.generate import generate, load_decoder

    model = load_decoder(checkpoint)
    stop = frozenset(tokenizer.special.values())
    ids = list(
        generate(model, prompt.ids, new_tokens, stop=stop, vocabulary=tokenizer.vocab_size, temperature=temperature, seed=seed)
    )
    text = tokenizer.decode(ids).rstrip("\ufffd")  # a character that was cut off by the limit
    if prompt.newline == "\r\n":
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    return Completion(text, len(prompt.ids), len(ids), prompt.files, str(checkpoint))
