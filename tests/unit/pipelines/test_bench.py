"""The bench's own arithmetic: patterns as they are spelt, refusals, pairs, bytes, and the emulated step beside ``attend``."""

from __future__ import annotations

import threading

import pytest
import torch

from pipelines.bench.attention import _Bench, run
from pipelines.bench.cases import Options, choose_device, make_cases, parse_pattern, rank_plan, visible_pairs
from pipelines.bench.figure import figure, table
from pipelines.bench.measure import emulated_step, inputs
from pipelines.bench.ranks import RankFailed
from tests import attention_reference
from workers.attention import Hierarchy, Pattern, TopBlocks, attend
from workers.attention.emulated import emulate
from workers.attention.layout import Run, positions

CPU = torch.device("cpu")
FIELDS = ("causal", "window", "sinks", "block", "stride", "alibi")


def cases(**options):
    return make_cases(Options(**options), CPU)


class TestParsePattern:
    @pytest.mark.parametrize("text, expected", [
        ("causal", Pattern()), ("bidirectional", Pattern(causal=False)), ("alibi", Pattern(alibi=True)), ("window=512", Pattern(window=512)),
        ("window=512+sinks=4", Pattern(window=512, sinks=4)), ("block=512", Pattern(block=512)), ("stride=64", Pattern(stride=64)),
        ("bidirectional+window=8", Pattern(causal=False, window=8)), ("causal + alibi + window=9", Pattern(alibi=True, window=9)),
    ])  # fmt: skip
    def test_the_fields_of_pattern(self, text, expected):
        found = parse_pattern(text)
        assert [getattr(found, name) for name in FIELDS] == [getattr(expected, name) for name in FIELDS]

    def test_summaries_and_top_blocks(self):
        assert parse_pattern("window=64+segment=32+reach=4").hierarchy == Hierarchy(32, 1, 4)
        assert parse_pattern("keep=4+keep_block=16").top == TopBlocks(16, 4)
        with pytest.raises(ValueError, match="hierarchy needs a causal window"):
            parse_pattern("segment=32")

    @pytest.mark.parametrize("text, said", [
        ("windw=512", "'windw=512' is no part of a pattern; the nearest is window=N"), ("window", "'window' is no part of a pattern"),
        ("causal=1", "'causal=1' is no part of a pattern"), ("window=many", "window is 'many'; it must be a whole number"),
        ("window=0", "window is 0; it must be at least 1"), ("window=8+sinks=-3", "sinks is -3; it must be at least 0"),
        ("window=8+window=9", "names window twice"), ("causal+bidirectional", "causal and bidirectional at once"), ("", "'' is no part"),
        ("sinks=4", "sinks = 4 need a window"), ("bidirectional+alibi", "do not combine"), ("window=8++sinks=1", "'' is no part"),
    ])  # fmt: skip
    def test_what_is_none(self, text, said):
        with pytest.raises(ValueError, match="--pattern") as error:
            parse_pattern(text)
        assert said in str(error.value)


def test_visible_pairs_of_top_blocks_are_those_that_are_computed():
    pattern, tokens = parse_pattern("keep=3+keep_block=16"), 150
    x = torch.randn(1, tokens, 2, 8)
    attend(x, x, x, pattern)
    run = [Run(0, 1, tokens, 0)]
    assert visible_pairs(pattern, tokens) == sum(tile.pairs for tile in pattern.kept(("selections", ""), list)[0].tiles(run, run))


def test_visible_pairs_of_a_hierarchy_count_its_summaries():
    pattern = parse_pattern("window=4+segment=8+summaries=2")
    expected = sum(min(q + 1, 4) + 2 * max(0, (q - 3) // 8) for q in range(40))
    assert visible_pairs(pattern, 40) == expected


class TestMakeCases:
    def test_every_combination_once_in_growing_order(self):
        found = cases(tokens="2048,512,512", ring="2,1", pattern="causal,window=64")
        assert [(case.ranks, case.tokens, case.pattern) for case in found] == [
            (ring, tokens, pattern) for ring in (1, 2) for tokens in (512, 2048) for pattern in ("causal", "window=64")
        ]

    def test_auto_is_settled(self):
        causal, window = cases(pattern="causal,window=64", ring="2")
        assert (causal.layout, window.layout, causal.backend) == ("zigzag", "contiguous", "cpu")
        assert {case.layout for case in cases(pattern="causal,window=64", layout="striped")} == {"striped"}

    @pytest.mark.parametrize("options, said", [
        ({"tokens": "1022", "ring": "4"}, "--tokens 1022 does not divide by 2 × ring × ulysses = 2 × 4 × 1 = 8; use 1016 or 1024"),
        ({"tokens": "2", "ring": "2"}, "use 4"), ({"tokens": "0"}, "--tokens is 0; it must be at least 1"),
        ({"tokens": "8k"}, "--tokens is '8k'; it must be a whole number"), ({"tokens": "512,"}, "give values separated by commas"),
        ({"ring": "0"}, "--ring is 0"), ({"heads": 6, "kv_heads": 4}, "--heads 6 does not divide by --kv-heads 4"),
        ({"heads": 0}, "--heads is 0"), ({"repeat": 0}, "--repeat is 0"),
        ({"heads": 6, "ulysses": "4", "tokens": "512"},
         "--heads 6 and --kv-heads 6 do not divide by --ulysses 4"),
        ({"layout": "spiral"}, "--layout is 'spiral'; it must be one of auto, zigzag, contiguous, striped"),
        ({"dtype": "int8"}, "--dtype is 'int8'"), ({"backend": "fastest"}, "attention.backend is 'fastest'"), ({"backend": "cuda"}, "cannot run on cpu"),
        ({"emulated": True, "ulysses": "2", "tokens": "512"}, "--emulated has rings only"),
    ])  # fmt: skip
    def test_what_cannot_run(self, options, said):
        with pytest.raises(ValueError) as error:
            cases(**options)
        assert said in str(error.value)

    def test_cuda_without_enough_gpus(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(ValueError, match="4 ranks need a GPU each and there are 1; --emulated"):
            choose_device(Options(device="cuda", ring="1,4"))
        assert choose_device(Options(ring="1,4")).type == "cpu"
        assert choose_device(Options(ring="1,4", emulated=True)).type == "cuda"


@pytest.mark.parametrize("text", ["causal", "bidirectional", "window=7+sinks=3", "block=16", "stride=8", "alibi"])
def test_pairs_are_those_of_the_mask(text):
    expected = attention_reference.visible(parse_pattern(text), 1, 64).sum().item()
    assert _Bench(CPU, 1).pairs(text, 64) == expected
    for ring, layout in ((4, "zigzag"), (2, "striped")):
        (case,) = cases(tokens="64", ring=str(ring), pattern=text, layout=layout)
        plans = [rank_plan(case, parse_pattern(text), rank, CPU) for rank in range(ring)]
        assert sum(hop.pairs for plan in plans for hop in plan) == expected


def sent_by_formula(case, rank: int) -> int:
    """By the plan: a row of keys and values, 2·G·D elements, for every row that is sent, forward and backward; and of
    accumulators for every row that was received, whose gradients go home. All float32."""
    plan = rank_plan(case, parse_pattern(case.pattern), rank, CPU)
    sent, received = (sum(stop - start for hop in plan for start, stop in getattr(hop, way)) for way in ("sent", "received"))
    return 2 * case.kv_heads * case.head_dim * 4 * (sent if case.forward_only else 2 * sent + received)


@pytest.mark.parametrize(
    "text, layout", [("causal", "zigzag"), ("window=24+sinks=2", "contiguous"), ("alibi", "zigzag"), ("stride=8", "striped")]
)
@pytest.mark.parametrize("ring", [1, 4])
def test_an_emulated_step_is_attend_and_sends_what_the_plan_says(text, layout, ring):
    (case,) = cases(tokens="128", ring=str(ring), pattern=text, layout=layout, heads=4, kv_heads=2, head_dim=16, emulated=True)
    pattern, whole = parse_pattern(text), inputs(case, 128, seed=0, device=CPU)
    held = emulate(ring, lambda mesh: positions(128, mesh), layout)
    found, sent = emulated_step(case, pattern, [tuple(x[:, p].contiguous() for x in whole) for p in held], CPU)
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    out = attend(q, k, v, parse_pattern(text))
    expected = (out, *torch.autograd.grad(out, (q, k, v), whole[3]))
    for rank, p in enumerate(held):
        for mine, all_of_it in zip(found[rank], expected, strict=True):
            torch.testing.assert_close(mine, all_of_it[:, p].detach(), rtol=1e-4, atol=1e-5)
        assert sent[rank] == sent_by_formula(case, rank)


def test_forward_only_sends_keys_and_values_alone():
    (case,) = cases(tokens="64", ring="2", heads=2, head_dim=8, emulated=True, forward_only=True)
    ranks = [inputs(case, 32, seed=rank, device=CPU) for rank in range(2)]
    found, sent = emulated_step(case, parse_pattern("causal"), ranks, CPU)
    assert [len(parts) for parts in found] == [1, 1]
    assert sent == [sent_by_formula(case, rank) for rank in range(2)] and sum(sent) > 0


def test_a_case_that_fails_leaves_the_others_measured(monkeypatch):
    def row(bench, case):
        if case.tokens == 512:
            raise RankFailed("rank 0 of 2: MemoryError")
        return {"seconds": 1.0, "share": 0.5, "seconds_range": [1.0, 1.0]}

    monkeypatch.setattr(_Bench, "row", row)
    said = []
    result = run(1, cases(tokens="256,512,1024", ring="2"), CPU, None, said.append)
    assert len(result["rows"]) == 2
    assert result["failed"] == [{"case": "512 tokens, causal, ring 2, zigzag, cpu", "error": "rank 0 of 2: MemoryError"}]
    assert said[-2] == "[2/3] 512 tokens, causal, ring 2, zigzag, cpu failed: rank 0 of 2: MemoryError"


def test_threads_of_an_emulated_ring_compute_with_one_thread_each():
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        thread = threading.Thread(target=lambda: found.append((torch.ones(4, 4) @ torch.ones(4, 4)).sum() and torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == [1]


def test_the_table_says_what_was_shortened_and_shared():
    row = {
        "tokens": 65_536, "pattern": "causal", "ring": 4, "ulysses": 1, "layout": "zigzag", "backend": "cpu",
        "heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "float32", "forward_only": False, "emulated": False, "overlap": True,
        "seconds": 1.0, "cpu_seconds": 4.0, "share": 0.9, "speedup": 1.8, "cpu_share": 0.95,
        "bytes_sent_by_busiest": 2**20, "peak_bytes": 2**30, "start_bytes": 2**29, "peak_is_of": "process",
        "kernel_tokens": 32_768, "kernel_threads": 2,
    }  # fmt: skip
    text = table({"rows": [row], "repeat": 3, "device": "cpu", "cores": 2})
    for said in ("32,768", "kernel at: the length", "2 cores are shared by more ranks", "cases run in growing order"):
        assert said in text
    assert len(figure([row]).axes) == 2
