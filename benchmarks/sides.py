"""What the comparisons with a peer share: a process for each side, results that belong to one task, and the table.

A side reads OUT/task.json, does its work in an environment of its own and leaves OUT/SIDE.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def parser(doc: str | None, *, out: str, trl: str, sides: Sequence[str]) -> argparse.ArgumentParser:
    """The options of every comparison."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="smollm2-135m", help="what all sides start from: alias or folder")
    found.add_argument("--trl_python", help=f"a python that has {trl}")
    found.add_argument("--out", type=Path, default=Path(out), help="where results are left")
    found.add_argument(
        "--only", choices=sides, action="append", help="run this side; those of the others are taken from --out"
    )
    found.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--heedful", default="{}", metavar="JSON", help="more keys of heedful's section of the recipe")
    found.add_argument("--side", help=argparse.SUPPRESS)  # of the process for one of heedful's sides
    return found


def _command(asked: argparse.Namespace, side: str, script: str) -> list[str]:
    """TRL's side is run by trl_side.py, any other by the script that compares."""
    if side == "trl":
        return [str(asked.trl_python), str(Path(__file__).with_name("trl_side.py")), str(asked.out)]
    return [sys.executable, script, "--side", side, "--out", str(asked.out), "--heedful", asked.heedful]


def leave(out: Path, side: str, result: Mapping[str, Any]) -> None:
    """The result of a side, where :func:`run` looks for it."""
    (out / f"{side}.json").write_text(json.dumps(result), encoding="utf-8")


def read(out: Path, name: str) -> Any:
    """A task or a result."""
    return json.loads((out / f"{name}.json").read_text(encoding="utf-8"))


def run(
    asked: argparse.Namespace, task: Mapping[str, Any], sides: Sequence[str], *, script: str
) -> dict[str, dict[str, Any]]:
    """Run the sides, or those of ``--only``, one after the other; the results of all that did this task."""
    chosen = [side for side in sides if side in (asked.only or sides)]
    if "trl" in chosen and not asked.trl_python:
        raise SystemExit("--trl_python names a python that has TRL; --only heedful's side goes without")
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "task.json").write_text(json.dumps(task, ensure_ascii=False), encoding="utf-8")
    for side in chosen:
        _run_side(side, _command(asked, side, script), asked.out, task)
    results = {}
    for side in sides:
        found = read(asked.out, side) if (asked.out / f"{side}.json").exists() else None
        if found is not None and found.get("task") == digest(task):
            results[side] = found
        elif found is not None:
            print(f"{asked.out / side}.json is of other data or settings and is left out")
    return results


def _run_side(side: str, words: Sequence[str], out: Path, task: Mapping[str, Any]) -> None:
    (out / f"{side}.json").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(task["threads"]), "HF_HUB_OFFLINE": "1"}
    started = subprocess.Popen(words, env=environment)
    _, status, usage = os.wait4(started.pid, 0)  # of this child alone; getrusage gives the larger side's peak to both
    if status or not (out / f"{side}.json").exists():
        raise SystemExit(f"the {side} side failed: {' '.join(words)}")
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    leave(out, side, read(out, side) | {"peak_memory_bytes": usage.ru_maxrss * unit, "task": digest(task)})


class Clock:
    """Marks between updates."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """An update begins, or the last one ends."""
        self.marks.append((time.perf_counter(), time.process_time()))

    def per_update(self) -> dict[str, list[float]]:
        """Seconds of every update, on the clock and summed over cores."""
        pairs = list(zip(self.marks, self.marks[1:]))
        return {
            "seconds": [after[0] - before[0] for before, after in pairs],
            "core_seconds": [after[1] - before[1] for before, after in pairs],
        }


PHASES = {"seconds_rollout": "rollout", "seconds_score": "scoring", "seconds_train": "training"}
"""Of an update of PPO by heedful: the metric and its name in a table."""


def train_ppo(
    roles: Any, config: Any, prompts: Sequence[Any], folder: Path, *, end_id: int | None, seed: int
) -> tuple[Clock, Any]:
    """Train by heedful's ``train_ppo``, scored by the roles' reward model alone; marks between updates, and the log.

    Args:
        end_id: the token that ends an answer; None lets every answer reach the limit.
    """
    from heedful.models.parts import LanguageModel
    from heedful.rollout.hf import HFEngine
    from heedful.rollout.score import LearnedReward, Scoring
    from heedful.runs.folder import StageFolder
    from heedful.runs.reader import read_stage
    from heedful.train import ppo

    clock = Clock()

    class TimedEngine(HFEngine):
        def sync(self, policy: LanguageModel, *, version: int) -> None:
            clock.mark()
            super().sync(policy, version=version)

    scoring = Scoring([LearnedReward(roles.reward, micro_batch_tokens=config.micro_batch_tokens)])
    stage = StageFolder(folder, "ppo", 3)
    engine = TimedEngine(roles.policy, [-1] if end_id is None else [end_id])
    clock.marks.clear()
    ppo.train_ppo(roles, scoring, prompts, config, stage, seed=seed, engine=engine)
    clock.mark()
    return clock, read_stage(stage.path)


def digest(task: Mapping[str, Any]) -> str:
    """What a result belongs to."""
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()


def title(side: str, result: Mapping[str, Any]) -> str:
    """The head of a side's column."""
    return f"{side} {result['version']}"


def run_recipe(recipe: Mapping[str, Any], *, threads: int | None = None) -> Path:
    """Run a recipe of one stage by ``heedful run`` in a process of its own, where its results are not there yet; the
    folder of the stage. Recipe and log lie beside the run."""
    folder = Path(recipe["output"]) / recipe["name"]
    if not list(folder.glob("stages/*/finished.json")):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(dict(recipe)), encoding="utf-8")
        command = [sys.executable, "-m", "heedful.cli.main", "run", str(file)]
        command += ["--resume"] if folder.exists() else []
        environment = {**os.environ, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
        with folder.with_suffix(".log").open("a") as log:
            subprocess.run(command, check=True, env=environment, stdout=log, stderr=log)
    (finished,) = folder.glob("stages/*/finished.json")
    return finished.parent


def table(columns: Sequence[Sequence[str]]) -> str:
    """Columns of equally many cells beside each other."""
    widths = [max(map(len, column)) for column in columns]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in zip(*columns))
