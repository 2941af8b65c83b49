"""Does it fit, and if not: the smallest set of switches of the recipe that makes it fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from heedful.config.recipe import Recipe, Stage
from heedful.config.section import LoraConfig
from heedful.plan.memory import plan_memory, waiting_models
from heedful.plan.parts import Setup, StagePlan
from heedful.plan.workload import StageWork

Verdict = Literal["fits", "tight", "does not fit"]
OWN_VALUE = ("reward", "policy")
"""What a value model of its own starts as."""
MARGIN = 0.9
"""Share of the usable memory below which a peak fits surely: the plan's own error is within a tenth."""


def verdict(peak_bytes: int, usable_bytes: int) -> Verdict:
    """Below 90 % of the usable memory, below all of it, or above."""
    if peak_bytes <= MARGIN * usable_bytes:
        return "fits"
    return "tight" if peak_bytes <= usable_bytes else "does not fit"


@dataclass(frozen=True)
class Switch:
    """One change of a recipe, as the command line writes it."""

    text: str
    cost: int
    """What it takes from speed or from what is trained, in a rank order: the sum is made small"""
    turn: Callable[[Setup], Setup]
    is_of_the_value: bool = False
    """Says where the value is; there is one answer to that"""


@dataclass(frozen=True)
class Remedy:
    """Switches that bring a stage below the memory of a device."""

    switches: tuple[str, ...]
    peak_bytes: int


def remedy(setup: Setup, stage: Stage) -> Remedy | None:
    """The cheapest switches with which the stage fits; () where it does as it is, None where none suffice."""
    usable = setup.machine.usable_bytes
    switches = _switches(setup, stage)
    sets = [chosen for num in range(len(switches) + 1) for chosen in itertools.combinations(switches, num)
            if sum(switch.is_of_the_value for switch in chosen) < 2]  # fmt: skip
    for chosen in sorted(sets, key=lambda chosen: sum(switch.cost for switch in chosen)):
        changed = setup
        for switch in chosen:
            changed = switch.turn(changed)
        peak = _peak(changed, stage)
        if verdict(peak, usable) == "fits":
            return Remedy(tuple(switch.text for switch in chosen), peak)
    return None


def not_yet(setup: Setup, stage: Stage) -> dict[str, int]:
    """Peaks that means which heedful does not have yet would bring, each alone, as the recipe stands."""
    plan = _plan(setup, stage)
    largest = plan.largest
    found: dict[str, int] = {}
    if setup.machine.num > 1:
        state = sum(size for name, size in largest.parts.items()
                    if name.endswith(("parameters", "gradients", "optimizer")))  # fmt: skip
        found[f"sharded over {setup.machine.num} devices"] = largest.total_bytes - state + state // setup.machine.num
    return {name: peak for name, peak in found.items() if peak < 0.98 * largest.total_bytes}


def _plan(setup: Setup, stage: Stage) -> StagePlan:
    return next(plan for plan in plan_memory(setup) if plan.stage == stage)


def _peak(setup: Setup, stage: Stage) -> int:
    return _plan(setup, stage).peak_bytes


def _switches(setup: Setup, stage: Stage) -> list[Switch]:
    """What heedful has for a stage and the recipe does not use yet, cheapest first."""
    if stage == "evaluate":
        return []
    recipe, section, work = setup.recipe, getattr(setup.recipe, stage), getattr(setup.work, stage)
    found = []
    if work is not None and work.largest.rows > (2 if stage == "reward" else 1):
        rows = 2 if stage == "reward" else 1
        tokens = rows * work.largest.row_tokens
        text = f"--{stage}.micro_batch_tokens {tokens}"
        found.append(Switch(text, 1, lambda s: _with(s, stage, {"micro_batch_tokens": tokens}, rows)))
    if stage == "ppo" and not section.offload_frozen:
        switch = Switch("--ppo.offload_frozen true", 1, lambda s: _with(s, stage, {"offload_frozen": True}))
        found += [switch] if waiting_models(switch.turn(setup)) else []
    if stage == "ppo" and not section.activation_checkpointing:
        found.append(Switch("--ppo.activation_checkpointing true", 2,
                            lambda s: _with(s, stage, {"activation_checkpointing": True})))  # fmt: skip
    optimizers = ("optimizer", "value_optimizer") if stage == "ppo" else ("optimizer",)
    all_weights = section.lora is None and (stage != "reward" or section.train != "head")  # else moments are few
    if setup.machine.kind != "cpu" and all_weights and not all(getattr(section, name).offload for name in optimizers):
        text = " ".join(f"--{stage}.{name}.offload true" for name in optimizers)
        moved = {name: getattr(section, name).model_copy(update={"offload": True}) for name in optimizers}
        found.append(Switch(text, 2, lambda s: _with(s, stage, moved)))
    if stage == "ppo" and section.frozen_weights == "float":
        found.append(Switch("--ppo.frozen_weights int8", 2, lambda s: _with(s, stage, {"frozen_weights": "int8"})))
    if stage == "ppo" and section.value_from in OWN_VALUE:
        found.append(Switch("--ppo.value_from trunk", 4, lambda s: _with(s, stage, {"value_from": "trunk"}), True))
    if stage == "ppo" and setup.base == setup.reward and section.roles is None and section.value_from in OWN_VALUE:
        text = "--ppo.roles shared" + (" --reward.lora.rank 16" if not (recipe.reward and recipe.reward.lora) else "")
        keys = {"roles": "shared", "lora": section.lora or LoraConfig()}
        found.append(Switch(text, 4, lambda s: _with(s, stage, keys), True))
    if section.lora is None:
        found.append(Switch(f"--{stage}.lora.rank 16", 3, lambda s: _with(s, stage, {"lora": LoraConfig()})))
    return found + _bases(setup, stage)


def _bases(setup: Setup, stage: Stage) -> list[Switch]:
    """Fewer bits for the base under adapters. In PPO int8 goes by ``frozen_weights``, and nf4 only where it moves no
    score: a run refuses it for most reward models that have the value's base."""
    section = getattr(setup.recipe, stage)
    if section.lora is None or section.lora.base != "float":
        return []
    if stage == "ppo" and section.roles is None and section.value_from == "reward":
        return []
    if stage == "ppo" and section.frozen_weights != "float":  # two keys for one base
        return []
    found = []
    for base, cost in (("int8", 2), ("nf4", 3)):
        if stage != "ppo" or base == "nf4":
            keys: dict[str, object] = {"lora": section.lora.model_copy(update={"base": base})}
            with_reward = stage == "ppo" and section.roles == "shared" and section.uses_own_reward
            text = f"--{stage}.lora.base {base}" + (f" --reward.lora.base {base}" if with_reward else "")
            found.append(Switch(text, cost, partial(_with, stage=stage, keys=keys)))
    return found


def _with(setup: Setup, stage: Stage, keys: dict[str, object], rows: int | None = None) -> Setup:
    recipe: Recipe = setup.recipe
    section = getattr(recipe, stage).model_copy(update=keys)
    work = setup.work
    if rows is not None:
        old: StageWork = getattr(work, stage)
        largest = dataclasses.replace(
            old.largest, rows=rows, counted_tokens=old.largest.counted_tokens * rows // old.largest.rows,
            num_per_step=old.largest.num_per_step * old.largest.rows // rows,
        )  # fmt: skip
        changes: dict[str, StageWork] = {stage: dataclasses.replace(old, largest=largest)}
        work = dataclasses.replace(work, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(setup, recipe=recipe.model_copy(update={stage: section}), work=work)


def checkpoint_disk(plans: list[StagePlan]) -> int:
    """The most disk that the run's folder takes: every model, and the checkpoints of one stage at a time."""
    models = sum(plan.disk_bytes.get("model", 0) for plan in plans)
    while_it_runs = ("checkpoints", "models that wait")
    return models + max((sum(plan.disk_bytes.get(x, 0) for x in while_it_runs) for plan in plans), default=0)
