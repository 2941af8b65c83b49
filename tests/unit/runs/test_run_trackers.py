import sys
from types import ModuleType
from typing import Any

import pytest

from heedful.errors import ConfigError
from heedful.runs.folder import RunFolder
from heedful.runs.trackers import open_tracker
from heedful.runs.writer import StageWriter


class Recorder(ModuleType):
    """Stands in for a tracker's package and notes every call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []
        for function in ("init", "log", "finish", "set_experiment", "start_run", "log_dict", "log_metrics", "end_run"):
            setattr(self, function, lambda *a, _f=function, **k: self.calls.append((_f, a, k)))


@pytest.mark.parametrize(("kind", "log", "end"), [
    ("wandb", "log", "finish"), ("trackio", "log", "finish"), ("swanlab", "log", "finish"),
    ("mlflow", "log_metrics", "end_run"),
])  # fmt: skip
def test_finite_numbers_arrive_with_their_step(tmp_path, monkeypatch, kind: str, log: str, end: str) -> None:
    package = Recorder(kind)
    monkeypatch.setitem(sys.modules, kind, package)
    with RunFolder.create(tmp_path / "mine", {"seed": 7}) as run:
        stage = run.stage("ppo", 3)
        tracker = open_tracker(kind, run, stage)
        assert "mine/ppo" in str(package.calls) and "'seed': 7" in str(package.calls)
        with StageWriter(stage, trackers=[tracker]) as writer:
            writer.scalars(5, {"ppo/kl_nats": 0.5, "ppo/ratio_max": float("inf")})
    assert (log, ({"ppo/kl_nats": 0.5},), {"step": 5}) in package.calls
    assert package.calls[-1][0] == end


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "wandb", missing)
    with RunFolder.create(tmp_path / "mine", {}) as run:
        with pytest.raises(ConfigError, match=r"heedful\[trackers\]"):
            open_tracker("wandb", run, run.stage("sft", 1))
        with pytest.raises(ConfigError, match="known trackers are wandb, mlflow, trackio, swanlab"):
            open_tracker("wand", run, run.stage("sft", 1))
