"""``ringspan bench attention`` as its user meets it: a tiny run from end to end, and wrong inputs in one line."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from pipelines.cli import main
from tests.conftest import last_json, ringspan
from tests.unit.pipelines.test_bench import cases, sent_by_formula

FIELDS = {
    "tokens", "pattern", "ring", "ulysses", "layout", "backend", "heads", "kv_heads", "head_dim", "dtype", "overlap", "forward_only", "emulated",
    "seconds", "seconds_range", "cpu_seconds", "wait_seconds", "bytes_sent", "bytes_sent_by_busiest", "imbalance",
    "peak_bytes", "start_bytes", "peak_is_of",
    "pairs", "share", "speedup", "cpu_share", "kernel_tokens", "kernel_threads", "kernel_seconds", "kernel_seconds_one_thread",
}  # fmt: skip
SMALL = ("--heads", 4, "--kv-heads", 2, "--head-dim", 16, "--repeat", 1)


def test_ranks_are_processes(tmp_path):
    patterns = "causal,window=64"
    options = ("--tokens", 512, "--ring", "1,2", "--pattern", patterns, *SMALL)
    result = ringspan("bench", "attention", *options, "--json", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    answer = last_json(result)
    assert [(row["ring"], row["pattern"], row["layout"]) for row in answer["rows"]] == [
        (ring, *kind) for ring in (1, 2) for kind in (("causal", "zigzag"), ("window=64", "contiguous"))
    ]
    for row in answer["rows"]:
        assert row.keys() == FIELDS
        assert min(row[name] for name in ("seconds", "cpu_seconds", "share", "speedup", "cpu_share", "kernel_seconds")) > 0
        assert 0 < row["start_bytes"] <= row["peak_bytes"] < 2**31
    planned = cases(tokens="512", pattern=patterns, heads=4, kv_heads=2, head_dim=16)
    expected = [[sent_by_formula(case, rank) for rank in range(case.ring)] for case in planned]
    assert [(row["bytes_sent"], row["bytes_sent_by_busiest"]) for row in answer["rows"]] == [(sum(sent), max(sent)) for sent in expected]
    assert "device cpu · backend cpu · 4 cases" in result.stderr and "[4/4] 512 tokens, window=64, ring 2, contiguous, cpu" in result.stderr
    assert (tmp_path / "out/attention.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out/attention.json").read_text()) == answer


def test_ulysses_counts_its_all_to_alls_and_text_is_a_table():
    result = ringspan("bench", "attention", "--tokens", 512, "--ring", 1, "--ulysses", 2, *SMALL)
    assert result.returncode == 0, result.stderr
    heading, row = result.stdout.splitlines()[:2]
    assert heading.split()[:4] == ["tokens", "heads/KV", "pattern", "ring"] and row.split()[:5] == [
        "512",
        "4/2",
        "causal",
        "1×2u",
        "zigzag",
    ]


def test_ranks_are_threads():
    result = ringspan("bench", "attention", "--tokens", 512, "--ring", 16, "--emulated", *SMALL, "--json", "-v")
    assert result.returncode == 0, result.stderr
    (row,) = last_json(result)["rows"]
    assert row.keys() == FIELDS and row["peak_is_of"] == "all ranks" and row["imbalance"] == 1
    (case,) = cases(tokens="512", ring="16", heads=4, kv_heads=2, head_dim=16, emulated=True)
    assert row["bytes_sent"] == sum(sent_by_formula(case, rank) for rank in range(16))
    assert "kernel in one process, 512 tokens, 1 threads" in result.stderr


# fmt: off
@pytest.mark.parametrize("arguments, said", [
    (["--tokens", "1022", "--ring", "4"], "--tokens 1022 does not divide"), (["--tokens", "many"], "--tokens is 'many'"),
    (["--pattern", "windw=8"], "the nearest is window=N"), (["--heads", "6", "--kv-heads", "4"], "does not divide by --kv-heads 4"),
    (["--heads", "many"], "many"), (["--layout", "spiral"], "--layout is 'spiral'"),
    (["--ring", ""], "--ring is ''"), (["--device", "tpu"], "--device"),
    (["--emulated", "--ulysses", "2"], "--emulated has rings only"), (["--out", __file__], "is a file; name a folder"),
])
# fmt: on
def test_a_wrong_input_is_one_line_and_starts_nothing(monkeypatch, arguments, said):
    monkeypatch.setattr("pipelines.bench.ranks.Ranks.__init__", lambda *_: pytest.fail("a process was started"))
    result = CliRunner().invoke(main, ["bench", "attention", *arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1) and result.stderr.startswith("error: ")
    assert said in result.stderr


def test_a_rank_that_fails_is_reported_and_ends_the_others():
    from pipelines.bench.ranks import RankFailed, Ranks

    with Ranks(2, "cpu") as ranks:
        assert ranks.run(_rank_number) == [0, 1]
        with pytest.raises(RankFailed, match="rank 1 of 2: ValueError: the second"):
            ranks.run(_fails_on_the_second)
        assert not any(process.is_alive() for process in ranks._processes)


def test_a_rank_that_is_killed_is_reported():
    from pipelines.bench.ranks import RankFailed, Ranks

    with Ranks(1, "cpu") as ranks, pytest.raises(RankFailed, match="rank 0 of 1: it ended with exit code 9"):
        ranks.run(os._exit, status=9)


def _rank_number() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _fails_on_the_second() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the second")
    dist.barrier()
