"""What a run folder says is drawn from the right numbers and told in full."""

import io
import json
import math

import pytest
from rich.console import Console

from pipelines.report import closing_report, evaluation_line, log_buckets, loss_by_position_figure, loss_figure, step_line
from pipelines.tracking import TrackerInfo


def a_row(step: int, **changes) -> dict:
    return {
        "step": step,
        "tokens": step * 64,
        "loss": 4.0 / step,
        "grad_norm": 1.25,
        "learning_rate": 1e-3,
        "tokens_per_second": 1000.0 * step,
        "peak_memory_bytes": 3 << 30,
        "loader_wait_seconds": 0.01,
        "exposed_comm_seconds": 0.0,
        "skipped_steps": 2,
        "mfu": 0.42,
        "slow": None,
    } | changes


def parts(*losses: float, width: int = 16) -> list[dict]:
    return [{"start": i * width, "stop": (i + 1) * width, "loss": loss, "targets": width - (i == 0)} for i, loss in enumerate(losses)]


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_text(renderable) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def test_what_earlier_papers_are_worth_is_told(tmp_path):
    row = {"step": 5, "tokens": 320, "loss": 3.5, "loss_by_position": parts(3.5)}
    assert evaluation_line(row) == "held-out loss at step 5: 3.5000"
    row |= {"later_loss": 3.25, "alone_later_loss": 3.5, "later_targets": 1200, "alone_loss": 3.6}
    told = "3.2500 with, 3.5000 without the earlier parts of its document (-0.2500, 1,200 targets)"
    assert evaluation_line(row) == f"held-out loss at step 5: 3.5000; {told}"
    (tmp_path / "evaluations.jsonl").write_text(lines(row))
    assert told in as_text(closing_report(tmp_path, None))


def test_octaves_weigh_by_targets_and_leave_out_what_has_none():
    stretches = [*parts(9.0, 5.0, 3.0, 1.0), {"start": 64, "stop": 80, "loss": math.nan, "targets": 0}]
    merged = log_buckets(list(reversed(stretches)))
    assert [(m["start"], m["stop"], m["targets"]) for m in merged] == [(0, 16, 15), (16, 32, 16), (32, 64, 32)]
    assert [m["loss"] for m in merged] == [9.0, 5.0, 2.0]
    uneven = [{"start": 4, "stop": 5, "loss": 1.0, "targets": 3}, {"start": 5, "stop": 8, "loss": 5.0, "targets": 1}]
    assert log_buckets(uneven) == [{"start": 4, "stop": 8, "loss": 2.0, "targets": 4}]


def test_the_loss_by_position_shows_the_first_and_the_last_evaluation():
    evaluations = [
        {"step": step, "tokens": step, "loss": loss, "loss_by_position": parts(loss, loss / 2, loss / 4, loss / 8)}
        for step, loss in ((0, 6.0), (5, 5.0), (10, 4.0))
    ]
    figure = loss_by_position_figure(evaluations)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    first, last = (patch.get_data() for patch in axes.patches)
    assert list(first.values) == [6.0, 3.0, pytest.approx(1.125)] and list(last.values) == [4.0, 2.0, pytest.approx(0.75)]
    assert list(first.edges) == [0.5, 16, 32, 64]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["step 0: mean 6.0000", "step 10: mean 4.0000"]
    assert len(loss_by_position_figure(evaluations[:1]).axes[0].patches) == 1
    with pytest.raises(ValueError, match="evaluations.jsonl holds none"):
        loss_by_position_figure([{"step": 0, "tokens": 0, "loss": 1.0}])


def test_the_loss_figure_holds_every_step_and_can_be_written(tmp_path):
    figure = loss_figure([a_row(step) for step in range(1, 8)])
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [64 * step for step in range(1, 8)]
    assert list(line.get_ydata()) == [4.0 / step for step in range(1, 8)]
    figure.savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one step"):
        loss_figure([])


def test_step_lines_have_one_width():
    rows = [
        a_row(1),
        a_row(999_999, tokens_per_second=1.25e9, loader_wait_seconds=120.5, peak_memory_bytes=5 << 20),
        a_row(12, loss=math.nan, grad_norm=math.inf),
        a_row(3, grad_norm=123456.0, tokens_per_second=999.0, loss=11.09035),
    ]
    texts = [step_line(row) for row in rows]
    assert len({len(text) for text in texts}) == 1, texts
    assert all(part in texts[0] for part in ("step       1", "4.0000", "1.25", "3.00 GiB", "0.01 s"))
    assert all(part in texts[1] for part in ("1.2G tok/s", "120.50 s", "5.0 MiB")) and "nan" in texts[2] and "inf" in texts[2]


def test_the_closing_report_tells_everything_and_how_to_see_more(tmp_path):
    run_dir = tmp_path / "my runs" / "one"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text(lines(*(a_row(step) for step in range(1, 11))))
    evaluations = [
        {"step": step, "tokens": 64 * step, "loss": loss, "loss_by_position": parts(loss, loss - 1)}
        for step, loss in ((0, 5.5), (10, 3.25))
    ]
    (run_dir / "evaluations.jsonl").write_text(lines(*evaluations))
    info = TrackerInfo(f"sqlite:///{run_dir.parent}/mlflow.db", "exp", "one", "abc", "1", waiting=0)
    text = as_text(closing_report(run_dir, info, completion="def add(a, b):"))
    for fact in (
        "5.5000 at step 0 → 3.2500 at step 10",
        "4.0000 → 0.4000 over 10 steps, 640 tokens",
        "6000 tokens/s (median), MFU 42%",
        "3.00 GiB on the fullest rank",
        f"ringspan ui --runs '{run_dir.parent}'",
        "def add(a, b):",
        str(run_dir),
    ):
        assert fact in text, text
    late = [line.split() for line in text.splitlines() if "16 – 31" in line]
    assert late == [["16", "–", "31", "4.5000", "2.2500", "-2.2500"]]
    assert [line for line in text.splitlines() if "skipped steps" in line][0].split()[-1] == "2"
    assert "not yet there" not in text

    remote = TrackerInfo("http://tracking:5000", "exp", "one", "abc", "7", waiting=3)
    text = as_text(closing_report(run_dir, remote))
    assert "http://tracking:5000/#/experiments/7/runs/abc" in text and "3 steps and evaluations wait" in text
    assert "ringspan ui" not in text


def test_a_slow_step_says_why(tmp_path):
    slow = "2.0 × the usual 1.00 s: loader, 1.19 s more"
    assert step_line(a_row(1, slow=slow)).endswith(f"slow, {slow}")
    (tmp_path / "metrics.jsonl").write_text(lines(a_row(1), a_row(7, slow=slow), a_row(8)))
    assert f"1; the last, 7, {slow}" in as_text(closing_report(tmp_path, None))


def test_the_closing_report_of_a_run_that_never_stepped(tmp_path):
    text = as_text(closing_report(tmp_path, None))
    assert "metrics.jsonl is empty or absent" in text and "held-out" not in text
    (tmp_path / "metrics.jsonl").write_text(lines(a_row(1)))
    assert "over 1 steps" in as_text(closing_report(tmp_path, None))
