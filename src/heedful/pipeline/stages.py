"""The stages of a recipe in order, in one run folder."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from heedful.config.recipe import Recipe, Stage
from heedful.errors import ConfigError, DataError, HeedfulError
from heedful.pipeline.context import Context
from heedful.pipeline.rewards import check_rewards
from heedful.plan.memory import plan_memory
from heedful.plan.parts import StagePlan
from heedful.runs.files import write_json
from heedful.runs.folder import RunFolder, StageFolder
from heedful.runs.progress import duration, tell
from heedful.runs.resume import open_run


def run(recipe: Recipe, *, existing: str = "refuse", only: Stage | None = None) -> Path:
    """Run the stages of ``recipe`` (or ``only`` one of them) in its run folder and return the report's path.

    Args:
        existing: when the run folder exists: "refuse" raises, "resume" goes on with it, "new" takes a numbered one.

    Raises:
        CheckpointError: the folder exists and ``existing`` is "refuse", or it holds a run of another recipe.
        GateError: the reward model is too weak for PPO.
    """
    if existing not in ("refuse", "resume", "new"):
        raise ConfigError(f"existing is {existing!r}; give refuse, resume or new")
    if only is not None and only not in recipe.stages:
        raise ConfigError(f"only is {only!r}; this recipe has the stages {', '.join(recipe.stages)}")
    check_files(recipe)
    if only in (None, "ppo"):
        check_rewards(recipe)
    if recipe.evaluate and recipe.evaluate.gold:
        from heedful.evaluate.gold import load_scorer

        load_scorer(recipe.evaluate.gold)  # a wrong name shows now, not after the training
    path = Path(recipe.output) / recipe.name
    if existing == "resume" and not (path / "recipe.yaml").exists():
        tell(f"{path}: no run is there yet, so it begins")
    with open_run(recipe, existing) as folder:
        return _run_in(folder, recipe, only)


def check_files(recipe: Recipe) -> None:
    """Every local data file of the recipe is there, so that none turns out to be missing hours later.

    Raises:
        DataError: names the key and the file.
    """
    from heedful.data.shipped import data_path

    for key in ("demonstrations", "rankings", "prompts", "heldout_prompts", "heldout_rankings"):
        name = getattr(recipe.data, key)
        path = Path(data_path(name)) if name else None
        if path is not None and path.suffix and not path.exists():  # a name without suffix may be a hub data set
            raise DataError(f"data.{key}: {path}: no such file")


def _run_in(folder: RunFolder, recipe: Recipe, only: Stage | None) -> Path:
    from heedful.report.build import write_report

    context = Context(recipe, folder)
    plans = _planned(context)
    stages = recipe.stages if only is None else (only,)
    tell(f"Run {folder.path}: {' → '.join(recipe.stages)}")
    for name in stages:
        stage = context.stage(name)
        if stage.is_finished:
            tell(f"{name}: finished already")
        else:
            folder.set_status("running", stage=name)
            _run_stage(context, stage, plans.get(name))
        shutil.rmtree(stage.checkpoints, ignore_errors=True)  # the model is saved; nothing is resumed from here
    done = all(context.stage(name).is_finished for name in recipe.stages)
    folder.set_status("finished" if done else "interrupted", stage=stages[-1])
    report = write_report(folder.path)
    tell(f"Report: {report}")
    return report


def _planned(context: Context) -> dict[str, StagePlan]:
    """The plan of every stage, told and kept in plan.json; {} where a model's shape is not known."""
    from heedful.pipeline.plan import setup_of, to_json

    try:
        setup = setup_of(context.recipe)
        plans = plan_memory(setup)
    except HeedfulError as error:
        tell(f"plan: none ({error})")
        return {}
    write_json(context.folder.path / "plan.json", to_json(setup))
    peaks = ", ".join(f"{plan.stage} {plan.peak_bytes / 2**30:.1f}" for plan in plans)
    tell(f"plan: GiB of memory at the most: {peaks}; usable here: {setup.machine.usable_bytes / 2**30:.1f}")
    return {plan.stage: plan for plan in plans}


def _run_stage(context: Context, stage: StageFolder, plan: StagePlan | None) -> None:
    from heedful.models.hardware import release_models, seed_everything
    from heedful.pipeline.memory import PeakMeter, compared

    started, meter = time.perf_counter(), PeakMeter(context.hardware()["device"])
    seed_everything(context.recipe.seed)  # new adapters: the same whether the stages before ran in this process or not
    results = _runner(cast(Stage, stage.name))(context, stage)
    memory = compared(meter, plan)
    release_models()
    seconds = time.perf_counter() - started
    training_seconds, peak = _training_seconds(stage), memory["measured_bytes"]
    stage.finish({**results, "seconds": seconds, "training_seconds": training_seconds, "peak_memory_bytes": peak,
                  "memory": memory})  # fmt: skip
    planned = f" (planned {memory['planned_bytes'] / 2**30:.2f}, {memory['error']:+.0%})" if memory.get("error") else ""
    tell(f"{stage.name}: done in {duration(seconds)}, peak {peak / 2**30:.2f} GiB{planned}")


def _training_seconds(stage: StageFolder) -> float:
    """Seconds spent in the stage's steps, those before an interruption included."""
    from heedful.runs.reader import read_stage

    return sum(x for x in read_stage(stage.path).column("run/seconds")[1] if x is not None)


def _runner(stage: Stage) -> Callable[[Context, StageFolder], dict[str, Any]]:
    """``run_<stage>`` of the stage's own file."""
    module = importlib.import_module(f"heedful.pipeline.{stage}")
    return cast(Callable[[Context, StageFolder], dict[str, Any]], getattr(module, f"run_{stage}"))


def results(path: Path | str) -> dict[str, Any]:
    """The results of every finished stage of a run, by stage name."""
    return {stage.name: stage.results for stage in RunFolder.open(path).stages() if stage.is_finished}
