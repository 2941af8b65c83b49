"""The run folder, a contract that every stage, the report and the user's own scripts rely on.

runs/<name>/
  recipe.yaml          the resolved recipe: running it again gives this run
  environment.json     versions, machine, command line
  status.json          state (running | interrupted | failed | finished), stage, message
  report.html, report.json
  stages/01-sft/
    metrics.jsonl      one object per step
    histograms.jsonl   distributions, binned
    samples.jsonl      answers looked at during training
    tensorboard/       the same numbers for TensorBoard
    checkpoints/       to resume from
    rollouts/          answers of an unfinished PPO step
    model/             the result, loadable with plain transformers
    finished.json      written last; holds the stage's results
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import yaml

from heedful.errors import CheckpointError
from heedful.runs import environment
from heedful.runs.files import plain, read_json, write_bytes, write_json

try:
    import fcntl
except ImportError:  # Windows has no record locks: there, a run is not locked
    fcntl = None  # type: ignore[assignment]

State = Literal["running", "interrupted", "failed", "finished"]
_RECIPE, _STATUS, _ENVIRONMENT, _LOCK = "recipe.yaml", "status.json", "environment.json", "lock"

_locked_here: set[Path] = set()
# A record lock never conflicts within one process, so the process itself must remember what it holds.


@dataclass(frozen=True)
class StageFolder:
    """One stage of a run, for example ``runs/mine/stages/03-ppo``."""

    path: Path
    name: str
    index: int

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def histograms(self) -> Path:
        return self.path / "histograms.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def is_finished(self) -> bool:
        """True once :meth:`finish` has completed: everything else of the stage is then complete too."""
        return (self.path / "finished.json").is_file()

    @property
    def results(self) -> dict[str, Any]:
        """What the stage handed to :meth:`finish`; {} before that."""
        if not self.is_finished:
            return {}
        content = read_json(self.path / "finished.json")
        results = content.get("results") if isinstance(content, dict) else None
        return results if isinstance(results, dict) else {}

    def finish(self, results: dict[str, Any]) -> None:
        """Mark the stage finished; call it last, when the model and every file are on disk."""
        write_json(self.path / "finished.json", {"stage": self.name, "index": self.index, "results": results})


class RunFolder:
    """One run on disk. :meth:`create` and ``open(write=True)`` hold the run's lock until :meth:`close`.

    with RunFolder.create("runs/mine", recipe) as run:
        stage = run.stage("sft", 1)
        ...
        stage.finish({"heldout_loss_nats": 1.9})
        run.set_status("finished")
    """

    def __init__(self, path: Path, lock: _Lock | None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: str | os.PathLike[str], recipe: dict[str, Any]) -> RunFolder:
        """Make a new run and lock it.

        Raises:
            CheckpointError: a run or something else is already there, or another process is making it.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file, not a folder; choose another place for the run")
        # Names left by a create() that was killed before it wrote the recipe, its last act, do no harm.
        leftovers = {_LOCK, _STATUS, _ENVIRONMENT}
        found = {p.name for p in path.iterdir() if not p.name.endswith(".tmp")} if path.exists() else set()
        if _RECIPE not in found and found - leftovers:
            raise CheckpointError(f"{path} is not empty and holds no run; choose another place for the run")
        if _RECIPE in found:
            raise _exists(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot make the run folder: {error.strerror or error}") from error
        run = cls(path, _Lock(path))
        if (path / _RECIPE).exists():  # another process made it between the look and the lock
            run.close()
            raise _exists(path)
        write_json(path / _ENVIRONMENT, environment.snapshot())
        run.set_status("running")
        run.set_recipe(recipe)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, write: bool = False) -> RunFolder:
        """Open an existing run, by default only to read; with ``write`` the run is locked.

        Raises:
            CheckpointError: no run is there, or ``write`` and another process holds it.
        """
        path = Path(path)
        if not (path / _RECIPE).is_file():
            raise CheckpointError(f"{path} is not a run folder (it has no {_RECIPE}); check the path")
        run = cls(path, _Lock(path) if write else None)
        if write:
            run.set_status("running")
        return run

    @staticmethod
    def next_free(path: str | os.PathLike[str]) -> Path:
        """``path`` when nothing is there, else the first free one of ``path-2``, ``path-3``, …"""
        base, candidate, number = Path(path), Path(path), 1
        while candidate.exists():
            number += 1
            candidate = base.with_name(f"{base.name}-{number}")
        return candidate

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain values."""
        try:
            content = yaml.safe_load((self.path / _RECIPE).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise CheckpointError(f"{self.path / _RECIPE}: cannot be read ({error})") from error
        return content if isinstance(content, dict) else {}

    def set_recipe(self, recipe: dict[str, Any]) -> None:
        """Write recipe.yaml; done last when a run is made, and again when stages to come are changed."""
        self._require_lock()
        text = yaml.safe_dump(plain(recipe), sort_keys=False, allow_unicode=True, width=110)
        write_bytes(self.path / _RECIPE, text.encode("utf-8", "backslashreplace"))

    @property
    def environment(self) -> dict[str, Any]:
        """What :func:`environment.snapshot` gave when the run was made; {} when the file is missing."""
        path = self.path / _ENVIRONMENT
        return read_json(path) if path.is_file() else {}

    @property
    def status(self) -> dict[str, Any]:
        """The content of status.json; a run that says "running" while no process holds it reads "interrupted"."""
        path = self.path / _STATUS
        status: dict[str, Any] = read_json(path) if path.is_file() else {"state": "interrupted", "stage": None}
        if status.get("state") == "running" and not _is_locked(self.path):
            status["state"] = "interrupted"
        return status

    def set_status(self, state: State, stage: str | None = None, message: str = "") -> None:
        """Write status.json; ``stage`` names the stage at work, ``message`` why a run failed."""
        self._require_lock()
        write_json(self.path / _STATUS, {"state": state, "stage": stage, "message": message, "pid": os.getpid()})

    def stage(self, name: str, index: int) -> StageFolder:
        """The folder of stage number ``index`` (counted from 1); made when this run is open for writing."""
        folder = StageFolder(self.path / "stages" / f"{index:02d}-{name}", name, index)
        if self._lock is not None:
            folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    def stages(self) -> list[StageFolder]:
        """The stages on disk, in order."""
        found = []
        for path in sorted((self.path / "stages").glob("[0-9]*-*")):
            number, _, name = path.name.partition("-")
            if path.is_dir() and number.isdigit():
                found.append(StageFolder(path, name, int(number)))
        return sorted(found, key=lambda stage: (stage.index, stage.name))

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Note how the work ended (unless it was noted already), then let go of the lock."""
        if self._lock is not None and error is not None and self.status.get("state") == "running":
            interrupted = isinstance(error, KeyboardInterrupt)
            self.set_status(
                "interrupted" if interrupted else "failed", self.status.get("stage"), "" if interrupted else str(error)
            )
        self.close()

    def _require_lock(self) -> None:
        if self._lock is None:
            raise CheckpointError(f"{self.path} is open for reading only; open it with write=True")


def _exists(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} already holds a run; add --resume to continue it or --new to start another one")


class _Lock:
    """An exclusive lock on a run; the system lets go of it when the process dies, however it dies."""

    def __init__(self, run: Path) -> None:
        self._run = run.resolve()
        if self._run in _locked_here:
            raise CheckpointError(f"{run} is already being written by this process")
        self._handle = os.open(run / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is not None:
            try:
                fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _holder(self._handle)
                os.close(self._handle)
                raise CheckpointError(
                    f"{run} is being written by {holder}; wait for it or end it, or add --new to start another run"
                ) from error
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _locked_here.add(self._run)

    def release(self) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
        _locked_here.discard(self._run)


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _is_locked(run: Path) -> bool:
    """Whether a process, this one or another, is writing the run."""
    if run.resolve() in _locked_here:
        return True  # opening the file here and closing it again would let go of our own lock
    if fcntl is None or not (run / _LOCK).is_file():
        return False
    try:
        handle = os.open(run / _LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
