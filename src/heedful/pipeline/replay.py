"""Running the batch again at which a run stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heedful.config.recipe import Recipe
from heedful.errors import CheckpointError
from heedful.pipeline.context import Context
from heedful.runs.folder import RunFolder

if TYPE_CHECKING:
    from heedful.train.rerun import Findings


def replay(path: Path | str) -> Findings:
    """Run the batch of a replay file again, on the models of its run and the weights in the file; writes nothing.

    The models of the earlier stages are looked up in the run folder that the file lies in, or else in the one that it
    came from. It runs on the device that it failed on, where there is one, otherwise on the CPU.

    Raises:
        CheckpointError: not a replay file, or its run is gone or has other models now.
    """
    from heedful.models.hardware import seed_everything
    from heedful.pipeline.ppo import ppo_roles
    from heedful.train import forensics
    from heedful.train.rerun import rerun

    path = Path(path)
    record = forensics.read(path)
    if record.recipe is None:
        raise CheckpointError(
            f"{path}: was written outside a run, so its models are not known; build the roles and call "
            f"heedful.train.rerun.rerun"
        )
    around = path.resolve().parent.parent.parent
    folder = RunFolder.open(around if (around / "recipe.yaml").is_file() else record.run)
    recipe = Recipe(**record.recipe)
    hardware = {**record.hardware, "device": _device(record.hardware["device"])}
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=hardware)})
    seed_everything(recipe.seed)
    roles = ppo_roles(Context(recipe, folder))
    record.put_weights(roles)
    return rerun(record, roles)


def _device(name: str) -> str:
    """The device if this machine has it, else the CPU."""
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError):  # a build without CUDA asserts
        return "cpu"
    return name
