"""`mlflow server` on the database of a folder of runs, as a child that lives as long as the command."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

READY_S = 180  # a loaded laptop takes half a minute to import the server
GRACE_S = 5
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = "/#/experiments?workflowType=machine_learning"  # without the type MLflow's pages start with prompts and traces


def serve(runs: Path, port: int, host: str = "127.0.0.1", on_ready: Callable[[str], None] | None = None) -> int:
    """Serves MLflow's pages for the runs in `runs` until Ctrl-C, SIGTERM or the end of the terminal.

    Returns 0 then, and 1 where the server ends by itself. `on_ready` gets the address of the page once it answers; by
    default it is printed. Call it from the main thread: it handles signals.
    Beyond loopback only where `host` asks for it: MLflow's server knows no passwords. Raises ValueError, before anything
    starts, for a folder without `mlflow.db`, a host that isn't this machine's, and a port that is out of range or taken.
    """
    runs = Path(runs).resolve()
    database = runs / "mlflow.db"
    if not database.is_file():
        raise ValueError(f"{runs} holds no mlflow.db: give the folder that contains the run folders (ringspan train --out {runs}/NAME)")
    _check_free(host, port)
    if host not in LOOPBACK:
        print(f"anybody who reaches {host}:{port} can read and delete these runs: MLflow asks for no password", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        "1",
        "--backend-store-uri",
        f"sqlite:///{database}",
        "--artifacts-destination",
        (runs / "artifacts").as_uri(),
    ]
    # The job runner is seven more processes for features that tracking doesn't have; telemetry is nobody's business.
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    stop = threading.Event()
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in ends}
    try:
        with tempfile.TemporaryFile() as log:
            # A session of its own: Ctrl-C reaches us alone, and one signal to the group reaches the server's workers too.
            child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            try:
                url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
                return _watch(child, stop, url, on_ready or _announce, log)
            finally:
                _end(child)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_free(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port}: choose one from 1 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
            probe.bind((host, port))
    except OSError as error:
        raise ValueError(f"{host}:{port} can't be used ({error.strerror}): choose another --port") from None


def _watch(child: subprocess.Popen, stop: threading.Event, url: str, on_ready: Callable[[str], None], log) -> int:
    deadline, ready = time.monotonic() + READY_S, False
    while not stop.wait(0.25):
        if child.poll() is not None:
            reason = f"ended with code {child.returncode}"
        elif not ready and time.monotonic() > deadline:
            reason = f"doesn't answer after {READY_S} s"
        else:
            if not ready and _answers(url):
                ready = True
                on_ready(url + PAGE)
            continue
        log.seek(0)
        tail = log.read().decode(errors="replace").splitlines()[-15:]
        print(f"the MLflow server {reason}; its last lines:", *tail, sep="\n  ", file=sys.stderr)
        return 1
    return 0


def _answers(url: str) -> bool:
    # No proxy: the address is this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):  # not up yet; _watch gives up after READY_S
        return False


def _announce(url: str) -> None:
    print(f"MLflow is at {url} (Ctrl-C ends it)", flush=True)


def _end(child: subprocess.Popen) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, signal_number)
        except ProcessLookupError:  # the whole group is gone
            break
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    child.wait()
