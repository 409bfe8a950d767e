"""The one that talks to MLflow: brings a server to the state of a run folder.

Two traps. MLflow repeats a request whose answer was merely late, so one that failed may have been carried out: points
keep their timestamp when sent again (the server drops the copy), and a run is looked up by a key of our own. And MLflow's
system-metrics thread ends for good at its first failed request: it only measures here, the one writer sends.
"""

import hashlib
import logging
import os
import time
from collections import deque
from pathlib import Path

from pipelines.tracking.lines import Tail, clean_key, evaluation_points, flatten, step_points
from pipelines.tracking.record import Record

logger = logging.getLogger(__name__)

SYSTEM_SAMPLE_S = 10.0
SYSTEM_SAMPLES_KEPT = 1000  # ~3 h of an outage; older ones are dropped, and counted in the log
BATCH = 1000  # MLflow's limit of metrics a request


class Writer:
    """Brings an MLflow server to the state of a run folder. Every part may fail and be called again."""

    def __init__(self, record: Record, uri: str, system_metrics: bool):
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
        for name, value in (
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"),
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        ):
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
        self._samples.append(
            [self.mlflow.entities.Metric(f"system/{clean_key(k)}", v, now, number) for k, v in self._system.aggregate_metrics().items()]
        )
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
                self.client.create_run(
                    experiment_id, start_time=state["started"], run_name=state["run_name"], tags={"ringspan.record": state["key"]}
                )
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
            params = [self.mlflow.entities.Param(k, v) for k, v in flatten(self.record.state["config"]).items()]
            self.client.log_batch(self.run_id, params=params)
        except self.mlflow.exceptions.MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            logger.warning(
                "parameters on record stay as they are, MLflow lets nobody change them (%s); the configuration in "
                "force is the artifact config.yaml",
                first_line(error),
            )
        self.record.update(params_sent=True)

    def _send_tags(self) -> None:
        tags, sent = self.record.state["tags"], self.record.state["tags_sent"]
        if tags != sent:
            changed = [self.mlflow.entities.RunTag(k, v) for k, v in tags.items() if sent.get(k) != v]
            self.client.log_batch(self.run_id, tags=changed)
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


def first_line(error: Exception) -> str:
    """An error in one short line: MLflow's run over pages."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
