"""What a run folder knows of its own recording: where it goes, what has been sent, and the artifacts that wait."""

import fcntl
import json
import logging
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipelines.tracking.lines import Tail, clean_key
from pipelines.tracking.uri import public_uri

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackerInfo:
    """Where a run is recorded. `waiting` counts the lines (steps and evaluations) not on record yet."""

    uri: str
    experiment: str
    run_name: str
    run_id: str | None
    experiment_id: str | None
    waiting: int


class Record:
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
        return {
            "key": uuid.uuid4().hex,
            "run_id": None,
            "experiment_id": None,
            "metrics_sent": -1,
            "evaluations_sent": -1,
            "params_sent": False,
            "tags_sent": {},
            "artifacts_sent": {},
            "status_sent": None,
            "system_samples": 0,
        }

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
        """How many lines of the run are not on record yet."""
        count = 0
        for name in ("metrics", "evaluations"):
            tail = Tail(self.path.parent / f"{name}.jsonl", after=self.state[f"{name}_sent"])
            count += sum(1 for _ in tail.rows())
            tail.close()
        return count

    def info(self) -> TrackerInfo:
        place = (self.state[key] for key in ("uri", "experiment", "run_name", "run_id", "experiment_id"))
        return TrackerInfo(*place, self.waiting())

    def close(self) -> None:
        self._lock.close()
