"""Puts a run folder on record in MLflow without ever holding up the run.

1. Rank 0 appends a line a step to `RUN/metrics.jsonl` and a line an evaluation to `RUN/evaluations.jsonl`.
2. A reader thread in the driver follows both and calls `on_step` and `on_evaluation`; it never talks to a server.
3. A writer thread, the only one that talks to MLflow, sends what the files hold beyond the last step on record.

The files are the queue: while the server is away nothing piles up in memory and nothing can be lost. What has been sent
stands in `RUN/tracking.json`; figures, texts and the configuration wait in `RUN/record/`. A run that crashed, a run that
resumes and `send` on a finished folder all go on from there.

Two traps. MLflow repeats a request whose answer was merely late, so one that failed may have been carried out: points
keep their timestamp when sent again (the server drops the copy), and a run is looked up by a key of our own. And MLflow's
system-metrics thread ends for good at its first failed request: it only measures here, the one writer sends.
"""

import fcntl
import hashlib
import io
import json
import logging
import os
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from importlib import metadata
from pathlib import Path, PurePosixPath

import yaml

from pipelines.report import Tail, TrackerInfo, clean_key, evaluation_points, flatten, last_step, step_points
from pipelines.ui import absolute_uri, default_uri, public_uri  # noqa: F401  default_uri belongs to this module's interface

logger = logging.getLogger(__name__)

POLL_S = 0.25  # how often the reader looks for new lines
SEND_S = 1.0  # how long the writer lets lines gather: one request a second at most while all is well
LONGEST_BACKOFF_S = 30.0
SYSTEM_SAMPLE_S = 10.0
SYSTEM_SAMPLES_KEPT = 1000  # ~3 h of an outage; older ones are dropped, and counted in the log
BATCH = 1000  # MLflow's limit of metrics a request


def git_revision(folder: Path | None = None) -> tuple[str, bool] | None:
    """The commit of `folder` (default: the working directory) and whether it is dirty; None where there is no git or no commit.

    Untracked files don't count as dirty: run folders and corpora are untracked by design.
    """
    answers = []
    for command in (["git", "rev-parse", "--verify", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]):
        try:
            answers.append(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True).stdout.strip())
        except (FileNotFoundError, subprocess.SubprocessError) as error:
            logger.info("no git revision on record: %s", error)
            return None
    return answers[0], bool(answers[1])


class _Record:
    """`RUN/tracking.json`: where the run is recorded and what of it has been sent. Held by one process at a time."""

    def __init__(self, run_dir: Path):
        self.folder, self.path = run_dir / "record", run_dir / "tracking.json"
        self._guard = threading.Lock()
        self.unsent = threading.Event()  # set while the folder of artifacts may hold something new
        self.unsent.set()
        self._saved = ""
        self._lock = (run_dir / "tracking.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"{run_dir} is being recorded by another process: wait for its end or choose another folder") from None
        except OSError as error:
            logger.warning("%s: no file locks here (%s); make sure that one process at a time records it", run_dir, error)
        self.state = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def update(self, **changes) -> None:
        with self._guard:
            self.state.update(changes)

    def tag(self, key: str, value: str) -> None:
        with self._guard:
            self.state["tags"] = {**self.state["tags"], clean_key(key): str(value)[:8000]}

    def begin(self, uri: str, experiment: str, run_name: str) -> None:
        """Points the record at a place. Another server than before knows nothing: all is sent again, to a new run."""
        place = {"uri": public_uri(uri), "experiment": experiment, "run_name": run_name}
        if any(self.state.get(key) != place[key] for key in ("uri", "experiment")):
            self.update(**place, **self.nothing_sent())
        self.update(**place)

    @staticmethod
    def nothing_sent() -> dict:
        return {"key": uuid.uuid4().hex, "run_id": None, "experiment_id": None, "metrics_sent": -1, "evaluations_sent": -1,
                "params_sent": False, "tags_sent": {}, "artifacts_sent": {}, "status_sent": None, "system_samples": 0}

    def save(self) -> None:
        with self._guard:
            text = json.dumps(self.state, indent=1)
            if text != self._saved:
                scratch = self.path.with_suffix(".tmp")
                scratch.write_text(text, encoding="utf-8")
                scratch.replace(self.path)
                self._saved = text

    def keep(self, name: str, data: bytes) -> None:
        """Puts an artifact where the writer finds it, whole or not at all."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or path.name.startswith("."):
            raise ValueError(f"artifact name {name!r}: use a relative path without '..' and without a leading dot")
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.tmp")
        scratch.write_bytes(data)
        scratch.replace(target)
        self.unsent.set()

    def waiting(self) -> int:
        count = 0
        for name in ("metrics", "evaluations"):
            tail = Tail(self.path.parent / f"{name}.jsonl", after=self.state[f"{name}_sent"])
            count += sum(1 for _ in tail.rows())
            tail.close()
        return count

    def info(self) -> TrackerInfo:
        return TrackerInfo(*(self.state[key] for key in ("uri", "experiment", "run_name", "run_id", "experiment_id")), self.waiting())

    def close(self) -> None:
        self._lock.close()


class _Writer:
    """Brings an MLflow server to the state of a run folder. Every part may fail and be called again."""

    def __init__(self, record: _Record, uri: str, system_metrics: bool):
        self.record, self.uri, self.system_metrics, self.client = record, uri, system_metrics, None
        self.run_id: str | None = None
        self._tails: dict[str, Tail] = {}
        self._batch: tuple[list, dict] = ([], {})  # metrics, and the marks to set once they are on record
        self._next_sample = 0.0
        self._samples: deque = deque(maxlen=SYSTEM_SAMPLES_KEPT)
        self.dropped_samples = 0

    def push(self) -> bool:
        """Sends what waits, at most one request of lines; True while more lines wait. Raises what MLflow raises."""
        if self.client is None:
            self._import_mlflow()
        if self.system_metrics and self.record.state["status"] == "RUNNING":
            self._sample_system()
        if self.run_id is None:
            self._attach()
        self._send_params()
        self._send_tags()
        more = self._send_lines()
        self._send_artifacts()
        state = self.record.state
        if not more and state["status"] not in ("RUNNING", state["status_sent"]):
            self.client.set_terminated(self.run_id, state["status"], state["ended"])
            self.record.update(status_sent=state["status"])
        self.record.save()
        return more

    def _import_mlflow(self) -> None:
        # ~3 CPU seconds, so here and not at the top. It must not call home from a training cluster nor write to stdout, and
        # its retries must not add up to the four minutes of its defaults: this file retries by itself.
        for name, value in (("MLFLOW_DISABLE_TELEMETRY", "true"), ("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"),
                            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")):
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        for chatty, level in (("mlflow", logging.WARNING), ("alembic", logging.WARNING), ("urllib3.connectionpool", logging.ERROR)):
            logging.getLogger(chatty).setLevel(level)
        self._system = SystemMetricsMonitor(self.run_id, tracking_uri=self.uri)
        self.mlflow, self.client = mlflow, mlflow.MlflowClient(tracking_uri=self.uri)

    def _sample_system(self) -> None:
        if time.monotonic() < self._next_sample:
            return
        self._next_sample = time.monotonic() + SYSTEM_SAMPLE_S
        self._system.collect_metrics()
        number, now = self.record.state["system_samples"], int(time.time() * 1000)
        self.dropped_samples += len(self._samples) == SYSTEM_SAMPLES_KEPT
        self._samples.append([self.mlflow.entities.Metric(f"system/{clean_key(k)}", v, now, number) for k, v in self._system.aggregate_metrics().items()])
        for monitor in self._system.monitors:
            monitor.clear_metrics()
        self.record.update(system_samples=number + 1)

    def _attach(self) -> None:
        state = self.record.state
        if state["run_id"] is not None:
            try:
                self.client.get_run(state["run_id"])
            except self.mlflow.exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                logger.warning("run %s is gone from %s: all of it is recorded again as a new run", state["run_id"], state["uri"])
                self.record.update(**self.record.nothing_sent())
        if state["run_id"] is None:
            experiment_id = self._experiment()
            own = f"tags.`ringspan.record` = '{state['key']}'"
            if not (runs := self.client.search_runs([experiment_id], own)):
                self.client.create_run(experiment_id, start_time=state["started"], run_name=state["run_name"], tags={"ringspan.record": state["key"]})
                runs = self.client.search_runs([experiment_id], own)
            for surplus in runs[1:]:  # left by requests that were carried out although their answer came too late
                self.client.delete_run(surplus.info.run_id)
            self.record.update(run_id=runs[0].info.run_id, experiment_id=experiment_id)
        # The process before this one may have died between a request and its note: the server knows better.
        for name, key in (("metrics", "loss"), ("evaluations", "heldout/loss")):
            sent = max((metric.step for metric in self.client.get_metric_history(state["run_id"], key)), default=-1)
            self.record.update(**{f"{name}_sent": sent})
            self._tails[name] = Tail(self.record.path.parent / f"{name}.jsonl", after=sent)
        if state["status"] == "RUNNING":
            self.client.update_run(state["run_id"], status="RUNNING", name=state["run_name"])
        self.run_id = state["run_id"]

    def _experiment(self) -> str:
        name = self.record.state["experiment"]
        found = self.client.get_experiment_by_name(name)
        if found is None:
            local = self.uri.startswith("sqlite:")  # a server chooses its own place
            place = (Path(self.uri.removeprefix("sqlite:///")).parent / "artifacts").as_uri() if local else None
            try:
                return self.client.create_experiment(name, artifact_location=place)
            except self.mlflow.exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(name)  # another run of ours was quicker
        return found.experiment_id

    def _send_params(self) -> None:
        if self.record.state["params_sent"]:
            return
        try:
            self.client.log_batch(self.run_id, params=[self.mlflow.entities.Param(k, v) for k, v in flatten(self.record.state["config"]).items()])
        except self.mlflow.exceptions.MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            logger.warning("parameters on record stay as they are, MLflow lets nobody change them (%s); the configuration in "
                           "force is the artifact config.yaml", _first_line(error))
        self.record.update(params_sent=True)

    def _send_tags(self) -> None:
        tags, sent = self.record.state["tags"], self.record.state["tags_sent"]
        if tags != sent:
            self.client.log_batch(self.run_id, tags=[self.mlflow.entities.RunTag(k, v) for k, v in tags.items() if sent.get(k) != v])
            self.record.update(tags_sent=tags)

    def _send_lines(self) -> bool:
        points, marks = self._batch
        more = bool(points)  # a batch that failed goes again as it was, and there may be more behind it
        if not points:
            for name, points_of in (("metrics", step_points), ("evaluations", evaluation_points)):
                for row in self._tails[name].rows():
                    now = int(row.get("time", time.time()) * 1000)
                    points += [self.mlflow.entities.Metric(key, value, now, step) for key, value, step in points_of(row)]
                    marks[f"{name}_sent"] = row["step"]
                    if len(points) >= BATCH * 9 // 10:
                        more = True
                        break
            while self._samples and len(points) < BATCH - 50:
                points += self._samples.popleft()
        if points:
            self.client.log_batch(self.run_id, metrics=points)
        self.record.update(**marks)
        self._batch = ([], {})
        return more

    def _send_artifacts(self) -> None:
        if not self.record.unsent.is_set():
            return
        self.record.unsent.clear()  # before looking: what arrives meanwhile sets it again
        try:
            for path in sorted(p for p in self.record.folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
                name, digest = path.relative_to(self.record.folder), hashlib.sha256(path.read_bytes()).hexdigest()
                if self.record.state["artifacts_sent"].get(str(name)) != digest:
                    self.client.log_artifact(self.run_id, str(path), name.parent.as_posix().removeprefix(".") or None)
                    self.record.update(artifacts_sent={**self.record.state["artifacts_sent"], str(name): digest})
        except Exception:
            self.record.unsent.set()
            raise


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

    def __init__(self, run_dir: Path, uri: str, experiment: str, run_name: str, *,
                 on_step: Callable[[dict], None] | None = None, on_evaluation: Callable[[dict], None] | None = None):
        self.run_dir, self._uri, self._experiment, self._run_name = Path(run_dir).resolve(), absolute_uri(uri), experiment, run_name
        self._callbacks = {"metrics": on_step, "evaluations": on_evaluation}
        self._record: _Record | None = None
        self._reader: threading.Thread | None = None
        self._closing, self._abandoned, self._done = threading.Event(), threading.Event(), threading.Event()

    def start(self, config: dict, tags: dict[str, str]) -> None:
        """Begins to record. Raises ValueError where another process records this folder, OSError where it can't be written."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._record = record = _Record(self.run_dir)
        shown = {name: last_step(self.run_dir / f"{name}.jsonl") if record.state else -1 for name in self._callbacks}
        plain = json.loads(json.dumps(config, default=str))
        record.begin(self._uri, self._experiment, self._run_name)
        if record.state["params_sent"] and record.state["config"] != plain:
            logger.warning("%s goes on with another configuration: the parameters on record stay those of its first start, "
                           "config.yaml among its artifacts is the one in force", self.run_dir)
        record.update(status="RUNNING", status_sent=None, config=plain, tags=record.state.get("tags", {}),
                      started=record.state.get("started", int(time.time() * 1000)))
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
                logger.warning("%d steps and evaluations of %s are not on record at %s yet; nothing is lost, they wait in the folder. "
                               "Resume the run, or when the server is back: python -c \"from pipelines.tracking import send; send(%r)\"",
                               self.info.waiting, self.run_dir, self.info.uri, str(self.run_dir))
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
        writer, backoff, away_since = _Writer(self._record, self._uri, system_metrics=True), 1.0, None
        while not self._abandoned.is_set():
            last_round = self._closing.is_set()  # asked before the push, so that a last push sees the whole files
            try:
                more = writer.push()
            except Exception as error:  # whatever it is, the run goes on; what failed is tried again
                if self._abandoned.is_set():
                    return  # `close` has said what is left
                if away_since is None:
                    away_since = time.monotonic()
                    logger.warning("MLflow at %s takes nothing (%s); the run goes on, its metrics wait in %s", public_uri(self._uri),
                                   _first_line(error), self.run_dir)
                backoff = 1.0 if last_round else min(2 * backoff, LONGEST_BACKOFF_S)
                (self._abandoned if last_round else self._closing).wait(backoff)
                continue
            if away_since is not None:
                logger.warning("MLflow at %s is back after %.0f s; what waited is being sent%s", public_uri(self._uri), time.monotonic() - away_since,
                               f", except {writer.dropped_samples} samples of system metrics" if writer.dropped_samples else "")
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
    record = _Record(run_dir)
    try:
        state = record.state
        # A password isn't in the file; whoever has it has it in the environment.
        uri = absolute_uri(uri or (os.environ.get("MLFLOW_TRACKING_URI") if ":***@" in state["uri"] else None) or state["uri"])
        record.begin(uri, state["experiment"], state["run_name"])
        writer = _Writer(record, uri, system_metrics=False)
        while writer.push():
            pass
        return record.info()
    finally:
        record.close()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
