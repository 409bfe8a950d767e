"""Generation on one rank: prefill in chunks, then one token at a time from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from workers.inference.cache import KVCache
from workers.model import Decoder, load_pretrained
from workers.model.adapter import add_adapters, merge
from workers.model.huggingface import is_model_folder, load_weights
from workers.training import checkpoint as checkpoints

PREFILL_TOKENS = 2048  # the most logits and activations that a long prompt ever needs at once


def load_decoder(checkpoint: Path, device: str = "cpu") -> Decoder:
    """The model of a training checkpoint, whole on one device, whatever mesh wrote it; or of a model folder.

    An adapter is merged into its base. Raises ValueError when that base is gone or has changed.
    """
    if is_model_folder(checkpoint):
        return load_pretrained(checkpoint).to(device).eval()
    adapter, base = checkpoints.read_adapter(checkpoint)
    if base is not None:
        base.check()
    with torch.device("meta"):
        model = add_adapters(Decoder(checkpoints.read_model(checkpoint)), adapter)
    model.to_empty(device=device)
    model.tie()
    if base is not None:
        load_weights(model, Path(base.folder)) if base.folder is not None else model.init_weights(base.seed)
    checkpoints.load(checkpoint, model)
    return merge(model).eval()


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    new_tokens: int,
    *,
    stop: frozenset[int] = frozenset(),
    vocabulary: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    prefill: int = PREFILL_TOKENS,
    parts: list[int] | None = None,
) -> Iterator[int]:
    """Yield up to ``new_tokens`` ids that continue ``prompt``; ends at an id in ``stop``, which is not given.

    ``temperature`` 0 takes the likeliest token, else samples with ``seed``. ``vocabulary``: ids from there on (padding of
    the head) are never chosen. ``parts`` are the papers or files of the prompt's tokens; what is new belongs to the last.
    """
    assert prompt and prefill > 0 and (parts is None or len(parts) == len(prompt))
    if model.config.top_blocks is not None:
        raise ValueError("a model with model.top_blocks cannot generate yet: its choice needs the queries of whole blocks")
    device = model.embed_tokens.weight.device
    caches = [KVCache(model.config, len(prompt) + new_tokens, device=device) for _ in model.layers]
    generator = torch.Generator().manual_seed(seed)
    if parts is not None:
        parts = torch.tensor(parts + parts[-1:] * new_tokens)
    pending = prompt
    for _ in range(new_tokens):
        length = caches[0].length + len(pending)
        for start in range(0, len(pending), prefill):
            logits_V = _next_logits(model, pending[start : start + prefill], length, caches, device, parts)[:vocabulary]
        token = _choose(logits_V, temperature, generator)
        if token in stop:
            return
        yield token
        pending = [token]


def _next_logits(model: Decoder, tokens: list[int], length: int, caches: list[KVCache], device, parts: torch.Tensor | None) -> torch.Tensor:
    """Logits [V] of what follows ``tokens``; the caches hold what stands before them, and then them as well.

    ``length`` is that of the sequence as far as it is known, of which ``tokens`` may be a chunk.
    """
    first = caches[0].length
    tokens_BS = torch.tensor([tokens], device=device)
    positions_BS = torch.arange(first, first + len(tokens), device=device)[None]
    last = lambda hidden_BSD, weight_VD: weight_VD @ hidden_BSD[0, -1]  # the one row that is needed
    pattern = model.config.pattern(None, parts[: first + len(tokens)] if parts is not None else None)
    return model(tokens_BS, positions_BS, pattern, length=torch.tensor([[length]], device=device), head=last, caches=caches)


def _choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V.cpu().float() / temperature, 0), 1, generator=generator))
