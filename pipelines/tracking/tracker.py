"""The recording of one run from the driver: a reader thread for its callbacks, a writer thread for MLflow."""

import io
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path, PurePosixPath

import yaml

from pipelines.tracking.lines import Tail, last_step
from pipelines.tracking.record import Record, TrackerInfo
from pipelines.tracking.uri import absolute_uri, public_uri
from pipelines.tracking.writer import Writer, first_line

logger = logging.getLogger(__name__)

POLL_S = 0.25  # how often the reader looks for new lines
SEND_S = 1.0  # how long the writer lets lines gather: one request a second at most while all is well
LONGEST_BACKOFF_S = 30.0


class Tracker:
    """Mirrors a run folder into MLflow from the background; nothing here waits for a server or raises because of one.

    1. `start` writes what is to be recorded into the folder and returns.
    2. `on_step` and `on_evaluation` get every new line once, from the reader thread; what they raise is logged. A resumed run
       doesn't show again what its folder already held.
    3. All else reaches the server about a second later, or when it is back. An outage is one warning, its end another.
       System metrics are those of the driver's machine.
    4. `close` waits a stated time for the rest and says what is left. `send`, or resuming the run, records it later.

    A line may carry `time` (Unix seconds); without it a metric's wall-clock time is the moment it was first sent.
    """

    def __init__(
        self,
        run_dir: Path,
        uri: str,
        experiment: str,
        run_name: str,
        *,
        on_step: Callable[[dict], None] | None = None,
        on_evaluation: Callable[[dict], None] | None = None,
    ):
        self.run_dir = Path(run_dir).resolve()
        self._uri, self._experiment, self._run_name = absolute_uri(uri), experiment, run_name
        self._callbacks = {"metrics": on_step, "evaluations": on_evaluation}
        self._record: Record | None = None
        self._reader: threading.Thread | None = None
        self._closing, self._abandoned, self._done = threading.Event(), threading.Event(), threading.Event()

    def start(self, config: dict, tags: dict[str, str]) -> None:
        """Begins to record. Raises ValueError where another process records this folder, OSError where it can't be written."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._record = record = Record(self.run_dir)
        shown = {name: last_step(self.run_dir / f"{name}.jsonl") if record.state else -1 for name in self._callbacks}
        plain = json.loads(json.dumps(config, default=str))
        record.begin(self._uri, self._experiment, self._run_name)
        if record.state["params_sent"] and record.state["config"] != plain:
            logger.warning(
                "%s goes on with another configuration: the parameters on record stay those of its first start, "
                "config.yaml among its artifacts is the one in force",
                self.run_dir,
            )
        record.update(
            status="RUNNING",
            status_sent=None,
            config=plain,
            tags=record.state.get("tags", {}),
            started=record.state.get("started", int(time.time() * 1000)),
        )
        for key, value in tags.items():
            record.tag(key, value)
        record.keep("config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode())
        record.save()
        # Daemons: a call that hangs in a dead network must not keep the process from ending.
        self._reader = threading.Thread(target=self._read, args=(shown,), name="run-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="mlflow-writer", daemon=True).start()

    @property
    def info(self) -> TrackerInfo:
        """Where the run is recorded; the run id is None until a server has answered."""
        return self._record.info()

    def set_tag(self, key: str, value: str) -> None:
        """Puts a tag on record; the last value of a key counts."""
        self._record.tag(key, value)

    def log_text(self, text: str, name: str) -> None:
        """Puts a text on record as the artifact `name` (a relative path). Raises ValueError for a path that leaves the record."""
        self._keep(name, text.encode())

    def log_figure(self, figure, name: str) -> None:
        """Puts a matplotlib figure on record as the artifact `name` (a relative path; PNG without a suffix)."""
        name = name if PurePosixPath(name).suffix else f"{name}.png"
        image = io.BytesIO()
        figure.savefig(image, format=PurePosixPath(name).suffix[1:], dpi=120)
        self._keep(name, image.getvalue())

    def close(self, status: str, timeout_s: float = 20) -> bool:
        """Ends the recording with status FINISHED, FAILED or KILLED; True once everything is on record.

        Waits `timeout_s` seconds at most, whatever the server does; then one warning says how much waits and how to send it.
        """
        if self._reader is None:  # `start` refused: there is nothing to flush
            return False
        deadline = time.monotonic() + timeout_s
        self._record.update(status=status, ended=int(time.time() * 1000))
        self._closing.set()
        self._reader.join(timeout_s)
        complete = self._done.wait(max(0.0, deadline - time.monotonic()))
        self._abandoned.set()
        try:
            self._record.save()
            if not complete:
                logger.warning(
                    "%d steps and evaluations of %s are not on record at %s yet; nothing is lost, they wait in the "
                    "folder. Resume the run, or when the server is back: "
                    'python -c "from pipelines.tracking import send; send(%r)"',
                    self.info.waiting,
                    self.run_dir,
                    self.info.uri,
                    str(self.run_dir),
                )
        except OSError as error:
            logger.warning("the state of the recording can't be written to %s: %s", self.run_dir, error)
        self._record.close()
        return complete

    def _keep(self, name: str, data: bytes) -> None:
        try:
            self._record.keep(name, data)
        except OSError as error:  # a full disk is no reason to end a run
            logger.warning("artifact %s is not recorded: %s", name, error)

    def _read(self, shown: dict[str, int]) -> None:
        tails = {name: Tail(self.run_dir / f"{name}.jsonl", after=shown[name]) for name, call in self._callbacks.items() if call}
        while True:
            last_round = self._closing.wait(POLL_S)
            for name, tail in tails.items():
                for row in tail.rows():
                    try:
                        self._callbacks[name](row)
                    except Exception:
                        logger.exception("%s: the callback for step %d failed", name, row["step"])
            if last_round:
                return

    def _write(self) -> None:
        try:
            self._record.tag("ringspan.version", metadata.version("ringspan"))
        except metadata.PackageNotFoundError:
            self._record.tag("ringspan.version", "not installed")
        revision = git_revision()
        if revision is not None:
            self._record.tag("git.dirty", str(revision[1]))
            for key in ("git.revision", "mlflow.source.git.commit"):  # the second is where MLflow's own pages look
                self._record.tag(key, revision[0])
        writer, backoff, away_since = Writer(self._record, self._uri, system_metrics=True), 1.0, None
        while not self._abandoned.is_set():
            last_round = self._closing.is_set()  # asked before the push, so that a last push sees the whole files
            try:
                more = writer.push()
            except Exception as error:  # whatever it is, the run goes on; what failed is tried again
                if self._abandoned.is_set():
                    return  # `close` has said what is left
                if away_since is None:
                    away_since = time.monotonic()
                    logger.warning(
                        "MLflow at %s takes nothing (%s); the run goes on, its metrics wait in %s",
                        public_uri(self._uri),
                        first_line(error),
                        self.run_dir,
                    )
                backoff = 1.0 if last_round else min(2 * backoff, LONGEST_BACKOFF_S)
                (self._abandoned if last_round else self._closing).wait(backoff)
                continue
            if away_since is not None:
                logger.warning(
                    "MLflow at %s is back after %.0f s; what waited is being sent%s",
                    public_uri(self._uri),
                    time.monotonic() - away_since,
                    f", except {writer.dropped_samples} samples of system metrics" if writer.dropped_samples else "",
                )
                backoff, away_since, writer.dropped_samples = 1.0, None, 0
            if last_round and not more:
                self._done.set()
                return
            self._closing.wait(0 if more else SEND_S)


def send(run_dir: Path, uri: str | None = None) -> TrackerInfo:
    """Records what waits in the folder of a run that has ended; with `uri` at another place, as a new run with everything.

    Raises ValueError where the folder was never tracked or is being recorded now, MlflowException where the server refuses.
    """
    run_dir = Path(run_dir).resolve()
    if not (run_dir / "tracking.json").exists():
        raise ValueError(f"{run_dir} holds no tracking.json: nothing was recorded from it")
    record = Record(run_dir)
    try:
        state = record.state
        # A password isn't in the file; whoever has it has it in the environment.
        uri = absolute_uri(uri or (os.environ.get("MLFLOW_TRACKING_URI") if ":***@" in state["uri"] else None) or state["uri"])
        record.begin(uri, state["experiment"], state["run_name"])
        writer = Writer(record, uri, system_metrics=False)
        while writer.push():
            pass
        return record.info()
    finally:
        record.close()


def add(run_dir: Path, artifacts: dict[str, bytes]) -> TrackerInfo | None:
    """Puts artifacts, by their names, on record beside what a run that has ended recorded; None where they aren't.

    A run that was never tracked takes none. Where the server is away they wait in the folder, as all else does; that, and a
    run that is being recorded now or whose folder can't be written, is one warning.
    """
    run_dir = Path(run_dir).resolve()
    if not (run_dir / "tracking.json").exists():
        return None
    try:
        record = Record(run_dir)
        try:
            for name, data in artifacts.items():
                record.keep(name, data)
        finally:
            record.close()
        return send(run_dir)
    except Exception as error:  # whatever it is, what was to be recorded has been told already
        logger.warning("%s is not on record beside %s: %s", ", ".join(artifacts), run_dir, first_line(error))
        return None


def git_revision(folder: Path | None = None) -> tuple[str, bool] | None:
    """The commit of `folder` (default: the working directory) and whether it is dirty.

    None where there is no git or no commit. Untracked files don't count as dirty: run folders and corpora are untracked
    by design.
    """
    answers = []
    for command in (["git", "rev-parse", "--verify", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]):
        try:
            answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
            answers.append(answer.stdout.strip())
        except (FileNotFoundError, subprocess.SubprocessError) as error:
            logger.info("no git revision on record: %s", error)
            return None
    return answers[0], bool(answers[1])
