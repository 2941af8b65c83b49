"""The ppo stage: policy and reward model → better policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heedful.config.ppo import RewardPart
from heedful.config.recipe import Recipe
from heedful.errors import GateError
from heedful.evaluate.spread import by_group, spread, table
from heedful.pipeline.context import Context
from heedful.pipeline.rewards import build_scoring
from heedful.records import Completion, Prompt, RewardCard, Rollout, TokenSample
from heedful.runs.files import read_json, write_json
from heedful.runs.folder import StageFolder
from heedful.runs.progress import tell

if TYPE_CHECKING:
    from heedful.models.roles import Roles
    from heedful.train.keep import Gold

SCORES_BEFORE = "scores_before.json"
"""In the stage's folder: the distribution of every part of the reward in the first step, by category."""


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
    elif card.audit_verdict == "failed":
        failures = [p for p in card.probes if p.verdict == "fail"]
        problem = (
            f"the audit of the reward model failed {len(failures)} of {len(card.probes)} probes: "
            f"{'; '.join(f'{p.name}: {p.says}' for p in failures[:3])}{'; …' if len(failures) > 3 else ''}"
        )
    else:
        audited = f", audit {card.audit_verdict}" if card.audit_verdict else ""
        return f"passed: held-out accuracy {card.accuracy:.1%} ≥ {minimum:.0%}{audited}"
    if recipe.ppo.accept_weak_reward:
        return f"overridden: {problem}"
    raise GateError(
        f"{problem}; PPO would optimise its mistakes. Collect more or cleaner rankings, or accept it: "
        f"ppo.accept_weak_reward: true in the recipe, --accept_weak_reward on the command line"
    )


def run_ppo(context: Context, stage: StageFolder) -> dict[str, Any]:
    """Train the policy; results of the stage."""
    from heedful.models.export import save_policy
    from heedful.models.load import load_tokenizer
    from heedful.rollout.cache import ScoreCache
    from heedful.rollout.hf import build_engine
    from heedful.train import checkpoint
    from heedful.train.ppo import train_ppo
    from heedful.train.selftest import require, run_self_test

    recipe, config = context.recipe, context.recipe.ppo
    assert config is not None
    verdict = "not asked: the reward is not a model of this run"
    if config.uses_own_reward:
        verdict = gate(context.reward_card, recipe)
    tell(f"gate: {verdict}")
    prompts, counts = ppo_prompts(context, load_tokenizer(context.sft_policy))
    roles = ppo_roles(context, prompts)
    # in the stage's own folder: a score that another run has left may differ in the last bit
    cache = ScoreCache(stage.path / "scores.sqlite")
    scoring = build_scoring(
        context, config, roles.reward, cache=cache, rounding=roles.rounding, offload=roles.offload
    )
    if config.offload_frozen:
        tell(f"offload_frozen: {roles.offload}")
    context.tell_moments("ppo.optimizer", config.optimizer)
    context.tell_moments("ppo.value_optimizer", config.value_optimizer)
    demonstrations = _demonstrations(context, roles.policy.tokenizer)
    engine = build_engine(roles.policy, config.sampling)
    if config.self_test and not checkpoint.exist(stage.checkpoints):  # a run that goes on has proved itself
        require(
            run_self_test(
                roles, scoring, prompts, config, engine, seed=recipe.seed,
                on_proof=lambda proof: tell(f"self-test: {proof}"),
            )
        )  # fmt: skip
    results = train_ppo(
        roles, scoring, prompts, config, stage, seed=recipe.seed, engine=engine,
        demonstrations=demonstrations, gold=_gold(recipe),
        on_first_scores=partial(_tell_scores, stage, {prompt.id: prompt.category for prompt, _ in prompts}),
    )  # fmt: skip
    trained_on_float = config.lora is None or config.lora.base == "float"
    save_policy(
        roles.policy.model, roles.policy.tokenizer, stage.model, base=context.sft_policy if trained_on_float else None
    )
    before = stage.path / SCORES_BEFORE  # not there where an older heedful took the first step
    results |= {"gate": verdict, **counts, "scores_before": read_json(before) if before.exists() else {}}
    return results | ({"rounding": roles.rounding.found} if roles.rounding.found else {})


def _tell_scores(stage: StageFolder, categories: dict[str, str], rollouts: list[Rollout]) -> None:
    """Print and keep how the raw scores are spread over the categories before PPO has moved anything."""
    found: dict[str, Any] = {}
    for name in rollouts[0].raw_parts:
        scores = [rollout.raw_parts[name] for rollout in rollouts]
        named = by_group(scores, [categories[rollout.completion.prompt_id] for rollout in rollouts])
        groups = {"all answers": spread(scores), **named}
        tell("\n".join([f"{name} before PPO:", *table(groups)]))
        found[name] = {group: numbers.to_json() for group, numbers in groups.items()}
    write_json(stage.path / SCORES_BEFORE, found)


def ppo_roles(context: Context, prompts: Sequence[tuple[Prompt, list[int]]] = ()) -> Roles:
    """The four parts as the recipe has them, from the models that the stages before left.

    ``prompts`` are what few bits are measured on; without them it is not measured.
    """
    from heedful.models.quantise import Rounding
    from heedful.models.roles import build_roles

    config = context.recipe.ppo
    assert config is not None
    reward_path = context.reward_model if config.uses_own_reward else None
    card = context.reward_card if reward_path else None
    # the value starts as the reward model, so it is in the units that the reward has after scaling and weighing
    own = next((p for p in config.reward_parts.values() if p.model == "run:reward"), RewardPart(model="run:reward"))
    scaled = card is not None and (own.scaling or config.score_scaling) != "none"
    rounding = Rounding(prompts, config.sampling.temperature, config.frozen_weights)
    mean, std = (card.score_mean, card.score_std) if card and scaled else (0.0, 1.0)
    return build_roles(
        context.sft_policy, reward_path, policy_lora=config.lora, value_lora=config.lora, value_from=config.value_from,
        value_shift=mean, value_scale=std / own.weight, new_reward_head=context.reward_is_stand_in,
        activation_checkpointing=config.activation_checkpointing, sharing=config.roles, rounding=rounding,
        offload_frozen=config.offload_frozen, **context.hardware(),
    )  # fmt: skip


def ppo_prompts(context: Context, tokenizer: Any) -> tuple[list[tuple[Prompt, list[int]]], dict[str, Any]]:
    """The encoded prompts that PPO answers, and how many were left out for what reason."""
    from heedful.data import tokenise

    data = context.recipe.data
    asked = context.prompts(data.prompts, heldout=False)
    kept = _without_heldout(context, asked)
    found = tokenise.prompts(kept, tokenizer, max_prompt_tokens=data.max_prompt_tokens)
    left_out = f", {len(asked) - len(kept)} left out because the evaluation asks them" if len(kept) < len(asked) else ""
    tell(f"PPO prompts: {found.summary()}{left_out}")
    return found.samples, {"num_dropped": found.dropped, "num_heldout_left_out": len(asked) - len(kept)}


def _demonstrations(context: Context, tokenizer: Any) -> list[TokenSample]:
    """What ppo.ptx mixes into the policy's loss."""
    from heedful.data import tokenise
    from heedful.data.load import load_demonstrations

    config = context.recipe.ppo
    assert config is not None
    if config.ptx is None:
        return []
    records = context.read(load_demonstrations, config.ptx.data or context.recipe.data.demonstrations or "")
    found = tokenise.demonstrations(records, tokenizer, max_tokens=config.ptx.max_tokens, too_long="drop")
    tell(f"PTX data: {found.summary()}")
    return found.samples


def _gold(recipe: Recipe) -> Gold | None:
    """The gold scorer, for keeping the best policy by it."""
    from heedful.evaluate.gold import load_scorer, score_answers

    assert recipe.ppo is not None
    if recipe.ppo.best is None or recipe.ppo.best.by != "gold":
        return None
    assert recipe.evaluate is not None and recipe.evaluate.gold is not None
    scorer = load_scorer(recipe.evaluate.gold)

    def gold(prompts: Sequence[Prompt], answers: Sequence[Completion]) -> list[float]:
        finished = [c.finish_reason == "stop" for c in answers]
        return list(score_answers(scorer, list(prompts), [c.text for c in answers], finished))

    return gold


def _without_heldout(context: Context, prompts: list[Any]) -> list[Any]:
    """The prompts that the evaluation does not ask, whatever files they came in."""
    if context.recipe.evaluate is None:
        return prompts
    heldout = {p.messages for p in context.prompts(context.recipe.data.heldout_prompts, heldout=True)}
    return [p for p in prompts if p.messages not in heldout]
