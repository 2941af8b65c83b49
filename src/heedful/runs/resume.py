"""Which folder a recipe runs in: a new one, the one that is there, or a numbered one beside it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from heedful.config.recipe import STAGES, Recipe
from heedful.errors import CheckpointError
from heedful.runs.folder import RunFolder


def open_run(recipe: Recipe, existing: str) -> RunFolder:
    """The locked run folder of ``recipe``.

    Args:
        existing: when the folder is there: "refuse" raises, "resume" goes on with it, "new" takes a numbered one.

    Raises:
        CheckpointError: the folder is there and ``existing`` is "refuse", or it holds a run of another recipe.
    """
    path = Path(recipe.output) / recipe.name
    if existing == "new":  # the new run's recipe bears its own name, so that it can be resumed by that name
        path = RunFolder.next_free(path)
        recipe = recipe.model_copy(update={"name": path.name})
    if existing != "resume" or not (path / "recipe.yaml").exists():
        return RunFolder.create(path, recipe.model_dump(mode="json"))
    there = RunFolder.open(path)
    difference = first_difference(_completed(there.recipe), recipe.model_dump(mode="json"), free=_free_keys(there))
    if difference:
        raise CheckpointError(
            f"{path} holds a run of another recipe: {difference}; give that recipe to resume it, or --new for a new run"
        )
    folder = RunFolder.open(path, write=True)
    folder.set_recipe(recipe.model_dump(mode="json"))
    return folder


def _completed(recipe: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe with the keys that an earlier version did not have: their defaults leave a run as it was."""
    try:
        return Recipe.model_validate(recipe).model_dump(mode="json")
    except ValueError:  # a key that this version does not have any more
        return recipe


def _free_keys(folder: RunFolder) -> set[str]:
    """Keys that may differ when a run goes on: the gate's override, sections of stages that have not begun, and
    everything but the place of the run where none has."""
    begun = {stage.name for stage in folder.stages()}
    free = {"ppo.accept_weak_reward"} | {name for name in STAGES if name not in begun}
    return free if begun else set(Recipe.model_fields) - {"name", "output"}


def first_difference(
    old: dict[str, Any], new: dict[str, Any], prefix: str = "", *, free: Collection[str] = ()
) -> str | None:
    """The first key, ``free`` ones aside, in which two resolved recipes differ, in words; None when there is none."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if f"{prefix}{key}" in free:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            found = first_difference(a, b, f"{prefix}{key}.", free=free)
            if found:
                return found
        elif a != b:
            return f"{prefix}{key} is {a!r} there and {b!r} here"
    return None
