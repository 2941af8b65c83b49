"""Experiment trackers behind one small protocol. Each is imported only when a recipe names it.

Every stage is one run of the tracker, named ``<run>/<stage>``, so that its steps count from the stage's own start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from heedful.errors import ConfigError
from heedful.runs.folder import RunFolder, StageFolder


class Tracker(Protocol):
    """A place that scalars are sent to."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the finite numbers of a step."""

    def close(self) -> None:
        """Send what is pending and end the tracker's run."""


def open_tracker(kind: str, run: RunFolder, stage: StageFolder, *, project: str = "heedful") -> Tracker:
    """Start a tracker for one stage.

    Args:
        kind: "wandb", "mlflow", "trackio" or "swanlab".

    Raises:
        ConfigError: the kind is unknown, or its package is not installed.
    """
    if kind not in _TRACKERS:
        raise ConfigError(f"unknown tracker {kind!r}; known trackers are {', '.join(_TRACKERS)}")
    try:
        module = importlib.import_module(kind)
    except ImportError as error:
        raise ConfigError(f"the tracker {kind!r} is not installed; run: pip install 'heedful[trackers]'") from error
    return _TRACKERS[kind](module, project, f"{run.name}/{stage.name}", run)


class _ModuleTracker:
    """W&B, trackio and SwanLab share one shape: the module logs to the run that ``init`` opened."""

    def __init__(self, module: ModuleType, **options: Any) -> None:
        self._module = module
        module.init(**options)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log(dict(scalars), step=step)

    def close(self) -> None:
        self._module.finish()


class _MLflow:
    def __init__(self, module: ModuleType, project: str, name: str, run: RunFolder) -> None:
        self._module = module
        module.set_experiment(project)
        module.start_run(run_name=name)
        module.log_dict(run.recipe, "recipe.yaml")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._module.end_run()


def _wandb(module: ModuleType, project: str, name: str, run: RunFolder) -> Tracker:
    return _ModuleTracker(module, project=project, name=name, group=run.name, config=run.recipe, dir=str(run.path))


def _trackio(module: ModuleType, project: str, name: str, run: RunFolder) -> Tracker:
    return _ModuleTracker(module, project=project, name=name, config=run.recipe, resume="allow")


def _swanlab(module: ModuleType, project: str, name: str, run: RunFolder) -> Tracker:
    folder = run.path / "swanlab"
    folder.mkdir(exist_ok=True)
    return _ModuleTracker(module, project=project, experiment_name=name, config=run.recipe, logdir=str(folder))


_TRACKERS: dict[str, Callable[[ModuleType, str, str, RunFolder], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _MLflow,
    "trackio": _trackio,
    "swanlab": _swanlab,
}
