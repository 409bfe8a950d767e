"""`serve` shows a recorded run to a real browser, ends cleanly, and refuses what can't work before anything starts."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pipelines.report import loss_by_position_figure, loss_figure
from pipelines.tracking import Tracker, TrackerInfo, default_uri
from pipelines.tracking.lines import read_rows
from pipelines.ui import serve

SERVE = "import sys; from pathlib import Path; from pipelines.ui import serve; sys.exit(serve(Path(sys.argv[1]), int(sys.argv[2])))"
LAST_LOSS = 1.2345


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, TrackerInfo]:
    """A folder of runs with one run of twenty steps on record, figures included."""
    patch = pytest.MonkeyPatch()
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    tracker = Tracker(run_dir, default_uri(run_dir), "ringspan", "tiny")
    patch.undo()
    tracker.start({"model": {"layers": 2}}, {"corpus.fingerprint": "abc"})
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 21):
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "tokens": 512 * step,
                        "loss": LAST_LOSS + (20 - step) / 8,
                        "grad_norm": 1.0,
                        "learning_rate": 1e-3,
                        "tokens_per_second": 900.0,
                        "peak_memory_bytes": 1 << 28,
                        "loader_wait_seconds": 0.0,
                        "exposed_comm_seconds": 0.0,
                        "skipped_steps": 0,
                    }
                )
                + "\n"
            )
    with (run_dir / "evaluations.jsonl").open("w") as file:
        for step, loss in ((0, 5.0), (20, 2.0)):
            parts = [{"start": s, "stop": 2 * s or 16, "loss": loss - i / 4, "targets": 16} for i, s in enumerate((0, 16, 32, 64, 128))]
            file.write(json.dumps({"step": step, "tokens": 512 * step, "loss": loss, "loss_by_position": parts}) + "\n")
    tracker.log_figure(loss_by_position_figure(read_rows(run_dir / "evaluations.jsonl")), "loss_by_position.png")
    tracker.log_figure(loss_figure(read_rows(run_dir / "metrics.jsonl")), "loss.png")
    assert tracker.close("FINISHED", timeout_s=120)
    return run_dir.parent, tracker.info


@pytest.fixture(scope="module")
def address(recorded) -> str:
    """The address of `serve` in a process of its own; afterwards SIGTERM must end it with 0 and leave no process behind."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(recorded[0]), str(port)], stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        assert f"http://127.0.0.1:{port}/#/experiments" in line, f"no address, but {line!r}"
        children = descendants(server.pid)
        assert children
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def browse(chromium: str, profile: Path, url: str, *what: str) -> str:
    """What headless chromium has at `url` once its scripts have run: a virtual clock waits for the requests of the page."""
    command = [
        chromium,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--window-size=1900,1100",
        "--virtual-time-budget=30000",
        f"--user-data-dir={profile}",
        *what,
        url,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_the_page_of_a_run_shows_its_loss(chromium, address, recorded, tmp_path):
    info = recorded[1]
    page = f"{address}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    dom = browse(chromium, tmp_path, page, "--dump-dom")
    text = re.sub(r"<[^>]+>", "\n", dom)
    cells = [line.strip() for line in text.splitlines() if line.strip()]
    assert "tiny" in cells and "loss" in cells and "heldout/loss" in cells
    assert str(LAST_LOSS) in cells[cells.index("loss") :][:5]


def test_the_figures_of_a_run_are_on_its_pages(chromium, address, recorded, tmp_path):
    info = recorded[1]
    page = f"{address}/#/experiments/{info.experiment_id}/runs/{info.run_id}/artifacts/loss_by_position.png"
    dom = browse(chromium, tmp_path, page, "--dump-dom")
    assert re.search(r'<img[^>]*alt="loss_by_position.png"[^>]*src="blob:', dom)  # fetched and drawn, not only listed
    assert "loss.png" in dom and "config.yaml" in dom
    with urllib.request.urlopen(f"{address}/get-artifact?path=loss_by_position.png&run_uuid={info.run_id}", timeout=30) as answer:
        assert answer.read().startswith(b"\x89PNG")


def test_only_this_machine_can_reach_the_pages(address):
    port = int(address.rpartition(":")[2])
    listening = {
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    }
    assert listening == {f"0100007F:{port:04X}"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["control-c", "terminal closed"])
def test_a_signal_ends_the_server_before_it_has_even_answered(recorded, number):
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(recorded[0]), str(free_port())], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (children := descendants(server.pid)):
        assert time.monotonic() < deadline and server.poll() is None
        time.sleep(0.05)
    server.send_signal(number)
    assert server.wait(30) == 0 and server.stdout.read() == ""
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_what_cannot_work_is_refused_before_anything_starts(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match="no mlflow.db"):
        serve(tmp_path, free_port())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{port} can't be used .*another --port"):
            serve(recorded[0], port)
    for port in (0, 65536):
        with pytest.raises(ValueError, match="from 1 to 65535"):
            serve(recorded[0], port)


def test_a_database_that_is_none_is_reported_with_the_servers_words(tmp_path, capsys):
    (tmp_path / "mlflow.db").write_text("this is no database")
    assert serve(tmp_path, free_port()) == 1
    assert re.search(r"ended with code \d+.*\n.*(?s:.*)not a database", capsys.readouterr().err)
