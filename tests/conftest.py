"""One local Ray for the whole session, started when a test first asks for it; commands run as a user types them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

# Nothing of a developer's own cluster or record may reach a test, or be reached by one.
for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)
os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="300")

# A busy machine is no reason for an example to fail.
hypothesis.settings.register_profile("ringspan", deadline=None)
hypothesis.settings.load_profile("ringspan")


def pytest_collection_modifyitems(items):
    """Tests marked ``gpu`` are skipped, and say so, where there is no CUDA device."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@dataclass(frozen=True)
class Head:
    """A running Ray head: ``address`` for drivers, ``dashboard`` for jobs."""

    address: str
    dashboard: str

    def environment(self) -> dict[str, str]:
        return {**os.environ, "RAY_ADDRESS": self.address}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory):
    """A head with eight logical CPUs and a dashboard; its processes end with the session."""
    port, dashboard = free_port(), free_port()
    log = tmp_path_factory.mktemp("ray") / "head.log"
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=8", f"--port={port}", f"--dashboard-port={dashboard}"]
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}  # jobs run the `python` of the head's PATH
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    head = Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}")
    deadline = time.monotonic() + 180
    while not _answers(f"{head.dashboard}/api/version"):
        assert process.poll() is None and time.monotonic() < deadline, f"no Ray head:\n{log.read_text()[-2000:]}"
        time.sleep(0.5)
    yield head
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture(scope="session")
def ray_cluster(ray_head):
    """This process as a driver of the session's Ray."""
    import ray

    ray.init(address=ray_head.address, logging_level="ERROR", log_to_driver=False)
    yield ray_head
    ray.shutdown()


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


def ringspan(*arguments, cwd=None, env=None, timeout=300) -> subprocess.CompletedProcess:
    """Run the command as a user does."""
    return subprocess.run([BIN / "ringspan", *map(str, arguments)], cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)


def last_json(result: subprocess.CompletedProcess) -> dict:
    """What ``--json`` printed: stdout must hold nothing else."""
    lines = result.stdout.strip().splitlines()
    assert len(lines) == 1, f"stdout holds {len(lines)} lines:\n{result.stdout}\n{result.stderr[-2000:]}"
    return json.loads(lines[0])


@pytest.fixture(scope="session")
def code_store(tmp_path_factory):
    """A byte-level token store of this project's own sources (real code), made without Ray."""
    from pipelines.corpus.code import Code
    from pipelines.corpus.ingest import in_process, ingest

    folder = tmp_path_factory.mktemp("store") / "sources"
    ingest(Code(), [ROOT / "workers", ROOT / "pipelines", ROOT / "cluster"], folder, run=in_process)
    return folder


@pytest.fixture(scope="session")
def world():
    """Gloo ranks without Ray; see ``tests.world``."""
    from tests.world import World

    world = World()
    yield world
    world.close()
