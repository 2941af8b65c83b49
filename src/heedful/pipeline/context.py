"""What every stage needs to know, and where earlier stages left their models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.config.recipe import STAGES, Recipe, Stage
from heedful.config.section import OptimizerConfig
from heedful.errors import ConfigError, ModelError
from heedful.runs.folder import RunFolder, StageFolder
from heedful.runs.progress import tell

if TYPE_CHECKING:
    from heedful.records import RewardCard


@contextmanager
def of_key(key: str) -> Iterator[None]:
    """What is wrong with a model names the key of the recipe that it came from."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error


@dataclass(frozen=True)
class Context:
    """What every stage needs to know: the recipe, the run folder, and where earlier stages left their models."""

    recipe: Recipe
    folder: RunFolder

    def stage(self, name: Stage) -> StageFolder:
        """The folder of a stage; its number is its place among all stages, whatever the recipe leaves out."""
        return self.folder.stage(name, STAGES.index(name) + 1)

    def model_of(self, name: Stage) -> Path:
        """The model that a stage of this run has left.

        Raises:
            ConfigError: the stage is not finished yet.
        """
        stage = self.stage(name)
        if not stage.is_finished:
            raise ConfigError(f"{self.folder.path}: the {name} stage is not finished; run `heedful {name}` first")
        return stage.model

    @property
    def base(self) -> Path:
        """The folder of the model that everything starts from."""
        return self._named("name")

    @property
    def sft_policy(self) -> Path:
        """The policy before PPO: this run's SFT model, model.policy, or the base model itself."""
        if self.recipe.sft is not None:
            return self.model_of("sft")
        return self._named("policy") if self.recipe.model.policy else self.base

    @property
    def reward_model(self) -> Path:
        """This run's reward model, or model.reward."""
        return self._named("reward") if self.recipe.reward is None else self.model_of("reward")

    @cached_property
    def reward_card(self) -> RewardCard | None:
        """What is known of ``reward_model``, read once; None where its folder has no card."""
        from heedful.models.export import load_reward_card

        return load_reward_card(self.reward_model)

    def _named(self, key: str) -> Path:
        """The folder of the model that a key of the recipe's model section names."""
        from heedful.models.load import resolve

        with of_key(f"model.{key}"):
            return resolve(getattr(self.recipe.model, key))

    @property
    def reward_is_stand_in(self) -> bool:
        """Whether ``reward_model`` is a language model that only stands in for one (see ``check``)."""
        return False

    def hardware(self) -> dict[str, Any]:
        """``device``, ``dtype`` and ``attention`` for every model of the run."""
        from heedful.models import hardware

        device = hardware.device(self.recipe.model.device)
        dtype = hardware.compute_dtype(device, self.recipe.model.dtype)
        return {"device": device, "dtype": dtype, "attention": self.recipe.model.attention}

    def tell_moments(self, key: str, optimizer: OptimizerConfig) -> None:
        """Say where the moments of AdamW are, when the recipe wants them in main memory."""
        from heedful.models.offload import is_apart

        if optimizer.offload:
            acts = is_apart(self.hardware()["device"])
            tell(f"{key}.offload: the moments of AdamW wait in main memory" if acts else
                 f"{key}.offload: nothing is moved, since this device computes in main memory")  # fmt: skip

    def read(self, load: Callable[..., list[Any]], name: str, **options: Any) -> list[Any]:
        """The records that ``load`` finds in a data file; package: names are files that ship with heedful."""
        from heedful.data.shipped import data_path

        return load(data_path(name), on_bad_row=self.recipe.data.on_bad_row, **options)

    def rankings(self) -> tuple[list[Any], list[Any]]:
        """Training and held-out rankings; the same split for every stage of the run."""
        from heedful.data.load import load_rankings
        from heedful.data.splits import split

        data, reward = self.recipe.data, self.recipe.reward
        ties: dict[str, Any] = {"keep_ties": reward is not None and (reward.ties == "half" or bool(reward.attributes))}
        records = self.read(load_rankings, data.rankings, **ties) if data.rankings else []
        if data.heldout_rankings:
            return records, self.read(load_rankings, data.heldout_rankings, **ties)
        return split(records, data.heldout_fraction, seed=self.recipe.seed)

    def prompts(self, source: str | None, *, heldout: bool) -> list[Any]:
        """The prompts of a file, or else those of the training or held-out rankings."""
        from heedful.data.load import load_prompts
        from heedful.records import Prompt

        if source is not None:
            return self.read(load_prompts, source)
        return [Prompt(r.group_id, r.prompt, r.category, r.source, r.info) for r in self.rankings()[heldout]]
