"""What ``ringspan bench attention`` measures: options become patterns and cases, or a ValueError of one line.

Everything that cannot run is refused here, before any process starts.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import product

import torch

from workers.attention import Hierarchy, Pattern, TopBlocks
from workers.attention.block import resolve
from workers.attention.hierarchical import summary_tiles
from workers.attention.layout import Run
from workers.attention.plan import make_plan
from workers.attention.segments import segments_of
from workers.mesh import LAYOUTS, MeshSpec

DTYPES = ("float32", "bfloat16", "float16", "float64")
FLAGS = {"causal": {}, "bidirectional": {"causal": False}, "alibi": {"alibi": True}}
FIELDS = ("window", "sinks", "block", "stride")
HIERARCHY, TOP = ("segment", "summaries", "reach"), ("keep", "keep_block")
NUMBERS = (*FIELDS, *HIERARCHY, *TOP)
SPELLING = "causal, bidirectional, alibi, window=N, sinks=N, block=N, stride=N, segment=N, summaries=N, reach=N, keep=N or keep_block=N, joined by +"


@dataclass(frozen=True)
class Case:
    """One row of the table: one sequence of ``tokens`` on ``ring`` × ``ulysses`` ranks. ``layout`` and ``backend`` are settled."""

    tokens: int
    pattern: str
    ring: int
    ulysses: int
    layout: str
    backend: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    forward_only: bool
    emulated: bool
    overlap: bool = True

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def processes(self) -> int:
        return 1 if self.emulated else self.ranks

    def __str__(self) -> str:
        ring = f"ring {self.ring}" + (f" × ulysses {self.ulysses}" if self.ulysses > 1 else "")
        return f"{self.tokens:,} tokens, {self.pattern}, {ring}, {self.layout}, {self.backend}"


@dataclass(frozen=True)
class Options:
    """The options as they were typed; lists are separated by commas."""

    tokens: str = "8192"
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    ring: str = "1,2"
    ulysses: str = "1"
    pattern: str = "causal"
    layout: str = "auto"
    dtype: str = "float32"
    backend: str = "auto"
    device: str = "auto"
    repeat: int = 3
    forward_only: bool = False
    emulated: bool = False
    overlap: bool = True


def parse_pattern(text: str) -> Pattern:
    """The pattern spelt ``text``, as ``window=512+sinks=4``: fields of ``Pattern``, joined by +.

    ``segment``, ``summaries`` and ``reach`` are those of a hierarchy; ``keep=K`` keeps the top K blocks, of ``keep_block`` tokens.
    """
    values: dict = {}
    for part in text.split("+"):
        name, equals, value = part.strip().partition("=")
        if (name in FLAGS) == bool(equals) or name not in (*FLAGS, *NUMBERS):
            near = difflib.get_close_matches(name, (*FLAGS, *NUMBERS), 1)
            hint = f"; the nearest is {near[0]}{'=N' if near[0] in NUMBERS else ''}" if near else ""
            raise ValueError(f"--pattern {text!r}: {part.strip()!r} is no part of a pattern{hint}; a pattern is {SPELLING}")
        given = FLAGS[name] if name in FLAGS else {name: _whole(value, f"--pattern {text!r}: {name}", least=int(name != "sinks"))}
        if name in values:
            raise ValueError(f"--pattern {text!r} names {name} twice")
        if {"causal", "bidirectional"} <= {name, *values}:
            raise ValueError(f"--pattern {text!r} is causal and bidirectional at once; choose one")
        values[name] = given
    merged = {key: value for given in values.values() for key, value in given.items()}
    hierarchy = {name: merged.pop(name) for name in HIERARCHY if name in merged}
    top = {name.removeprefix("keep_"): merged.pop(name) for name in TOP if name in merged}
    try:
        if hierarchy:
            merged["hierarchy"] = Hierarchy(**hierarchy)
        if top:
            merged["top"] = TopBlocks(**top)
        return Pattern(**merged)
    except ValueError as error:
        raise ValueError(f"--pattern {text!r}: {error}") from error


def make_cases(options: Options, device: torch.device) -> list[Case]:
    """Every combination of the lists, in the order of measurement: fewer ranks first, then fewer tokens.

    Raises ValueError for the first that cannot run on ``device``.
    """
    patterns = {text: parse_pattern(text) for text in dict.fromkeys(_parts(options.pattern, "--pattern"))}
    tokens, rings, ulysses = (_numbers(getattr(options, name), f"--{name}") for name in ("tokens", "ring", "ulysses"))
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    counts = {"--heads": options.heads, "--kv-heads": kv_heads, "--head-dim": options.head_dim, "--repeat": options.repeat}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    _check_choice("--layout", options.layout, ("auto", *LAYOUTS))
    _check_choice("--dtype", options.dtype, DTYPES)
    _check_heads(options.heads, kv_heads, ulysses)
    if options.emulated and ulysses != [1]:
        raise ValueError(f"--emulated has rings only, and --ulysses is {options.ulysses}; use --ulysses 1")
    if options.emulated and not options.overlap:
        raise ValueError("--emulated has no messages under way, so --no-overlap measures nothing there; leave one of them out")
    for text, pattern in patterns.items():
        if options.emulated and (pattern.hierarchy or pattern.top):
            raise ValueError(f"--emulated runs the ring alone, without the summaries of --pattern {text}; leave it out")
    for length, ring, u in product(tokens, rings, ulysses):
        multiple = MeshSpec(ring=ring, ulysses=u).length_multiple
        if length % multiple:
            below, above = length // multiple * multiple, MeshSpec(ring=ring, ulysses=u).padded(length)
            raise ValueError(
                f"--tokens {length} does not divide by 2 × ring × ulysses = 2 × {ring} × {u} = {multiple}; "
                f"use {f'{below} or ' if below else ''}{above}"
            )
    kernels = {
        text: resolve(options.backend, device, getattr(torch, options.dtype), options.head_dim, pattern.alibi).name
        for text, pattern in patterns.items()
    }
    cases = [
        Case(
            length, text, ring, u, pattern.best_layout if options.layout == "auto" else options.layout, kernels[text],
            options.heads, kv_heads, options.head_dim, options.dtype, options.forward_only, options.emulated, options.overlap,
        )
        for length, ring, u, (text, pattern) in product(tokens, rings, ulysses, patterns.items())
    ]  # fmt: skip
    return sorted(cases, key=lambda case: (case.processes, case.ranks, case.tokens))


def choose_device(options: Options) -> torch.device:
    """The device of ``--device``; auto takes CUDA when there is a GPU for every rank (an emulated ring needs one).

    Raises ValueError for CUDA without enough GPUs.
    """
    name = options.device
    _check_choice("--device", name, ("auto", "cpu", "cuda"))
    rings, ulysses = (_numbers(getattr(options, axis), f"--{axis}") for axis in ("ring", "ulysses"))
    needed = 1 if options.emulated else max(rings) * max(ulysses)
    found = torch.cuda.device_count()
    if name == "cuda" and found < needed:
        raise ValueError(f"--device cuda: {needed} ranks need a GPU each and there are {found}; --emulated runs a ring on one GPU")
    return torch.device("cuda" if name != "cpu" and 0 < needed <= found else "cpu")


def rank_plan(case: Case, pattern: Pattern, ring_rank: int, device: torch.device) -> list:
    """The hops of one ring rank, as ``attend`` makes and keeps them."""
    kernel = resolve(case.backend, device, getattr(torch, case.dtype), case.head_dim, pattern.alibi)
    local = case.tokens // case.ring
    return make_plan(pattern, local, local, case.ring, ring_rank, case.layout, kernel.split)


def visible_pairs(pattern: Pattern, tokens: int) -> int:
    """Pairs of a query and what it sees, a summary counting as a key, in a sequence of one document."""
    whole = [Run(0, 1, tokens, 0)]
    if pattern.top is not None:  # what is chosen depends on the tokens, how much does not
        block, keep = pattern.top.block, pattern.top.keep
        sizes = [min(block, tokens - start) for start in range(0, tokens, block)]
        return sum(size * (size + 1) // 2 + size * block * min(index, keep - 1) for index, size in enumerate(sizes))
    pairs = sum(tile.pairs for tile in pattern.tiles(whole, whole))
    if pattern.hierarchy is not None:
        segments = segments_of(pattern, pattern.hierarchy.segment, tokens, 0)
        pairs += sum(tile.pairs for tile in summary_tiles(segments, pattern.window, pattern.hierarchy, whole))
    return pairs


def _check_heads(heads: int, kv_heads: int, ulysses: list[int]) -> None:
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} does not divide by --kv-heads {kv_heads}; query heads share KV heads in equal parts")
    for u in ulysses:
        if heads % u or (kv_heads % u and u % kv_heads):
            raise ValueError(f"--heads {heads} and --kv-heads {kv_heads} do not divide by --ulysses {u}")


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(choices)}")


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{option} is {text!r}; give values separated by commas")
    return parts


def _numbers(text: str, option: str) -> list[int]:
    """Ascending, each once."""
    return sorted({_whole(part, option, least=1) for part in _parts(text, option)})


def _whole(text: str, what: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{what} is {text!r}; it must be a whole number") from None
    if value < least:
        raise ValueError(f"{what} is {value}; it must be at least {least}")
    return value
