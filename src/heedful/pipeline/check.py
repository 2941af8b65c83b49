"""The self-test of a recipe by itself, before any of its stages has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from heedful.config.recipe import Recipe
from heedful.errors import ConfigError
from heedful.pipeline.context import Context
from heedful.pipeline.ppo import ppo_prompts, ppo_roles
from heedful.pipeline.rewards import OWN, build_scoring, check_rewards
from heedful.runs.folder import RunFolder
from heedful.train.proofs import ANSWERS_END
from heedful.train.selftest import Proof, run_self_test


@dataclass(frozen=True)
class Checked:
    """What the self-test of a recipe found."""

    proofs: list[Proof]
    stand_ins: dict[str, str]
    """Part that no stage has trained yet → the model that stood in for it"""

    @property
    def passed(self) -> bool:
        """Whether every proof holds."""
        return all(proof.passed for proof in self.proofs)


class _BeforeTraining(Context):
    """Where a stage is not finished, the model that it starts from stands in for the one it will leave."""

    @property
    def sft_is_stand_in(self) -> bool:
        return self.recipe.sft is not None and not self.stage("sft").is_finished

    @property
    def reward_is_stand_in(self) -> bool:
        return self.recipe.reward is not None and not self.stage("reward").is_finished

    @property
    def sft_policy(self) -> Path:
        return self.base if self.sft_is_stand_in else super().sft_policy

    @property
    def reward_model(self) -> Path:
        return self.sft_policy if self.reward_is_stand_in else super().reward_model


def check(recipe: Recipe, *, on_proof: Callable[[Proof], None] | None = None) -> Checked:
    """Run the self-test of ``recipe`` on its own models, data and rewards; nothing is written.

    Stages that are finished in the recipe's run folder lend their models; for the others the base model stands in.

    Args:
        on_proof: is told each proof when it is done.

    Raises:
        ConfigError: the recipe has no ppo section.
    """
    from heedful.models.hardware import seed_everything
    from heedful.models.load import load_tokenizer
    from heedful.pipeline.stages import check_files
    from heedful.rollout.hf import build_engine

    if recipe.ppo is None:
        raise ConfigError("this recipe has no ppo section, so there is nothing to prove")
    check_files(recipe)
    check_rewards(recipe)
    context = _BeforeTraining(recipe, RunFolder(Path(recipe.output) / recipe.name, None))
    config = recipe.ppo
    if context.reward_is_stand_in:  # a stand-in has no card to scale by
        parts = {
            name: part.model_copy(update={"scaling": "none"}) if part.model == OWN else part
            for name, part in config.reward_parts.items()
        }
        config = config.model_copy(update={"rewards": parts})
    seed_everything(recipe.seed)
    prompts, _ = ppo_prompts(context, load_tokenizer(context.sft_policy))
    roles = ppo_roles(context, prompts)
    scoring = build_scoring(context, config, roles.reward, rounding=roles.rounding, offload=roles.offload)
    engine = build_engine(roles.policy, config.sampling)
    proofs: list[Proof] = []

    def take(proof: Proof) -> None:
        proofs.append(_judged(proof, context))
        if on_proof is not None:
            on_proof(proofs[-1])

    run_self_test(roles, scoring, prompts, config, engine, seed=recipe.seed, on_proof=take)
    stand_ins = {"SFT policy": recipe.model.name} if context.sft_is_stand_in else {}
    if context.reward_is_stand_in and roles.reward is not None:
        stand_ins["reward model"] = f"{recipe.model.name} with a random head"
    return Checked(proofs, stand_ins)


def _judged(proof: Proof, context: _BeforeTraining) -> Proof:
    """The proof, but what SFT will teach is not asked of a model that has not had it."""
    if proof.passed or proof.name != ANSWERS_END or not context.sft_is_stand_in:
        return proof
    return replace(proof, passed=True, measured=f"{proof.measured}; SFT is still to teach it", advice="")
