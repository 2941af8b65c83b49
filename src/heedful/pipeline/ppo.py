"""The ppo stage: policy and reward model → better policy."""

from __future__ import annotations

from typing import Any

from heedful.config.recipe import Recipe
from heedful.errors import GateError
from heedful.pipeline.context import Context
from heedful.records import RewardCard
from heedful.runs.folder import StageFolder
from heedful.train.loop import tell


def gate(card: RewardCard | None, recipe: Recipe) -> str:
    """What the gate says of a reward model; raises GateError when PPO may not start."""
    assert recipe.ppo is not None
    minimum = recipe.reward.min_accuracy if recipe.reward else 0.70
    if card is None:
        problem = f"{recipe.model.reward} has no reward card, so its held-out accuracy is unknown"
    elif card.accuracy < minimum:
        problem = (
            f"the reward model orders only {card.accuracy:.1%} of held-out pairs as people do "
            f"(at least {minimum:.0%} is asked)"
        )
    else:
        return f"passed: held-out accuracy {card.accuracy:.1%} ≥ {minimum:.0%}"
    if recipe.ppo.accept_weak_reward:
        return f"overridden: {problem}"
    raise GateError(
        f"{problem}; PPO would optimise its mistakes. Collect more or cleaner rankings, or override with "
        f"--accept_weak_reward"
    )


def run_ppo(context: Context, stage: StageFolder) -> dict[str, Any]:
    from heedful.data import tokenise
    from heedful.models.export import load_reward_card, save_policy
    from heedful.models.roles import build_roles
    from heedful.rollout.score import LearnedReward
    from heedful.train.ppo import train_ppo

    recipe, config = context.recipe, context.recipe.ppo
    assert config is not None
    card = load_reward_card(context.reward_model)
    verdict = gate(card, recipe)
    tell(f"gate: {verdict}")
    mean, std = (card.score_mean, card.score_std) if card and config.score_scaling == "card" else (0.0, 1.0)
    roles = build_roles(
        context.sft_policy, context.reward_model, policy_lora=config.lora, value_lora=config.lora, value_shift=mean,
        value_scale=std, **context.hardware(),
    )  # fmt: skip
    asked = context.prompts(recipe.data.prompts, heldout=False)
    kept = _without_heldout(context, asked)
    prompts = tokenise.prompts(
        kept, roles.policy.tokenizer, max_prompt_tokens=recipe.data.max_prompt_tokens
    ).require_some("prompts")
    left_out = f", {len(asked) - len(kept)} left out because the evaluation asks them" if len(kept) < len(asked) else ""
    tell(f"PPO prompts: {prompts.summary()}{left_out}")
    reward = LearnedReward(roles.reward, micro_batch_tokens=config.micro_batch_tokens, mean=mean, std=std)
    results = train_ppo(roles, [reward], prompts.samples, config, stage, seed=recipe.seed)
    save_policy(roles.policy.model, roles.policy.tokenizer, stage.model)
    return {**results, "gate": verdict, "num_dropped": prompts.dropped, "num_heldout_left_out": len(asked) - len(kept)}


def _without_heldout(context: Context, prompts: list[Any]) -> list[Any]:
    """The prompts that the evaluation does not ask, whatever files they came in."""
    if context.recipe.evaluate is None:
        return prompts
    heldout = {p.messages for p in context.prompts(context.recipe.data.heldout_prompts, heldout=True)}
    return [p for p in prompts if p.messages not in heldout]
