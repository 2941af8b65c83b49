"""The plan of a recipe: shapes of its models, lengths of its data, this machine or a named one; nothing is loaded."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from heedful.config.recipe import Recipe
from heedful.errors import ModelError
from heedful.pipeline.lengths import of_data
from heedful.plan.fit import checkpoint_disk, not_yet, remedy, verdict
from heedful.plan.machine import Machine, this_machine
from heedful.plan.memory import plan_memory
from heedful.plan.parts import Setup, StagePlan
from heedful.plan.shape import NAMED, ModelShape, read_shape
from heedful.plan.time import StageTime, plan_time
from heedful.plan.workload import of_limits


def setup_of(recipe: Recipe, machine: Machine | None = None, *, shape: str | None = None) -> Setup:
    """What a plan of the recipe is made from.

    Args:
        machine: None = this one.
        shape: plan for this named shape instead of the recipe's models.

    Raises:
        ModelError: a model of which neither a folder nor a published shape is known.
    """
    if shape and shape.lower() not in NAMED:
        raise ModelError(f"shape {shape!r} is not in the list; it has {', '.join(NAMED)}")
    base_folder = None if shape else _folder_of(recipe.model.policy if _starts_at_policy(recipe) else recipe.model.name)
    base = _shape_of(shape or recipe.model.name, base_folder)
    reward = base
    if not shape and recipe.reward is None and recipe.model.reward:
        reward = _shape_of(recipe.model.reward, _folder_of(recipe.model.reward))
    more = []
    if recipe.ppo is not None:
        others = {part.model for part in recipe.ppo.reward_parts.values()} - {None, "run:reward"}
        more = [base if shape else _shape_of(name, _folder_of(name)) for name in sorted(x for x in others if x)]
    machine = machine or this_machine(recipe.model.device)
    work = of_limits(recipe, base.max_positions)
    if base_folder is not None:
        in_pieces = machine.kernel(recipe.model.attention) == "pieces"
        work = of_data(recipe, base_folder, base, in_pieces=in_pieces)
    return Setup(recipe, base, reward, machine, work, tuple(more))


def plan(recipe: Recipe, machine: Machine | None = None, *, shape: str | None = None) -> list[StagePlan]:
    """The memory of every stage of the recipe; the arguments of :func:`setup_of`."""
    return plan_memory(setup_of(recipe, machine, shape=shape))


def _starts_at_policy(recipe: Recipe) -> bool:
    return recipe.sft is None and recipe.model.policy is not None


def _folder_of(name: str | None) -> Path | None:
    """The folder of a model that is on this machine: a path, a converted model, or one in the hub's cache."""
    from heedful.models.cache import cache_folder

    if name is None:
        return None
    for path in (Path(name).expanduser(), cache_folder() / name.lower()):
        if (path / "config.json").is_file():
            return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return Path(found).parent
    return None


def _shape_of(name: str, folder: Path | None) -> ModelShape:
    if folder is not None:
        return read_shape(folder)
    plain = re.sub(r"-(hf|instruct|chat|base|it)$", "", name.rpartition("/")[2].lower())
    if plain in NAMED:
        return NAMED[plain]
    raise ModelError(
        f"model {name!r} is not on this machine, so its shape is unknown; fetch it with `heedful models pull`, or plan "
        f"with --shape and one of {', '.join(NAMED)}"
    )


def to_json(setup: Setup) -> dict[str, Any]:
    """The whole plan as plain values: memory by stage and phase, verdicts and remedies, time, disk."""
    plans, times = plan_memory(setup), {time.stage: time for time in plan_time(setup)}
    machine, base = setup.machine, setup.base
    written = "sdpa" if setup.kernel == "sdpa" else "eager"
    return {
        "machine": {**dataclasses.asdict(machine), "usable_bytes": machine.usable_bytes},
        "model": {"name": base.name, "num_parameters": base.num_causal, "layers": base.layers},
        "precision": f"{'bfloat16' if setup.s == 2 else 'float32'}, {written} attention",
        "lengths": setup.work.source,
        "stages": [_stage(setup, plan, times.get(plan.stage)) for plan in plans],
        "disk_bytes": checkpoint_disk(plans),
    }


def _stage(setup: Setup, plan: StagePlan, time: StageTime | None) -> dict[str, Any]:
    found = verdict(plan.peak_bytes, setup.machine.usable_bytes)
    cure = None if found == "fits" else remedy(setup, plan.stage)
    return {
        "stage": plan.stage,
        "peak_bytes": plan.peak_bytes,
        "peak_phase": plan.largest.name,
        "verdict": found,
        "remedy": None if cure is None else dataclasses.asdict(cure),
        "not_in_heedful_yet": {} if found == "fits" else not_yet(setup, plan.stage),
        "phases": [{"name": p.name, "total_bytes": p.total_bytes, "parts": p.parts} for p in plan.phases],
        "disk_bytes": plan.disk_bytes,
        "main_memory_bytes": plan.main_memory_bytes,
        "time": None if time is None else {
            "steps": time.steps, "step_seconds": time.step_seconds, "total_seconds": time.total_seconds,
            "phases": [dataclasses.asdict(work) for work in time.phases],
        },
    }  # fmt: skip
