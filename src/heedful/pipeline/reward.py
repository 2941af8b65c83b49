"""The reward stage: rankings → reward model with its card."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heedful.config.reward import RewardConfig
from heedful.pipeline.context import Context
from heedful.records import Prompt, RewardCard
from heedful.runs.folder import StageFolder
from heedful.train.loop import tell

if TYPE_CHECKING:
    from heedful.data.tokenise import RankingSample, Tokenised
    from heedful.models.parts import ScalarModel
    from heedful.models.quantise import Rounding


def run_reward(context: Context, stage: StageFolder) -> dict[str, Any]:
    from heedful.models.export import save_reward, verify_reward
    from heedful.models.load import load_tokenizer
    from heedful.models.quantise import Rounding
    from heedful.pipeline.model_card import data_facts, write_model_card
    from heedful.train.reward import train_reward

    recipe, config = context.recipe, context.recipe.reward
    assert config is not None
    train, heldout, controls = _samples(context, config, load_tokenizer(context.sft_policy))
    rounding = Rounding([(Prompt(r.group_id, r.prompt), []) for r in context.rankings()[0]])
    model = _new_model(context, config, rounding)
    context.tell_moments("reward.optimizer", config.optimizer)
    card = train_reward(model, train.samples, heldout.samples, config, stage, seed=recipe.seed, controls=controls)
    tell(f"reward model: {_said(card)}; length alone {card.length_accuracy or 0:.1%}")
    card = replace(card, data={**card.data, **data_facts(recipe, *context.rankings())})
    save_reward(
        model.model, model.tokenizer, stage.model, score_mean=card.score_mean, score_std=card.score_std, card=card,
        heads=model.heads,
    )  # fmt: skip
    del model
    verify_reward(stage.model, device=context.hardware()["device"])  # what others load scores as what was trained
    write_model_card(stage.model)
    if config.audit:
        from heedful.pipeline.audit import audit_saved

        card = audit_saved(stage.model, context.rankings()[1], seed=recipe.seed, hardware=context.hardware())
    curve = [
        _on_share(context, config, share, train.samples, heldout.samples, stage) for share in config.learning_curve
    ]
    return {
        "card": card.to_json(),
        "num_rankings": train.num_kept,
        "num_dropped": train.dropped,
        "num_answers_dropped": dict(train.num_answers_dropped),
        "num_controls": len(controls),
        "min_accuracy": config.min_accuracy,
        **({"rounding": rounding.found} if rounding.found else {}),
        "learning_curve": [*curve, _point(1.0, train.num_kept, card)] if curve else [],
    }


def _new_model(context: Context, config: RewardConfig, rounding: Rounding | None = None) -> ScalarModel:
    from heedful.models.roles import build_scalar

    return build_scalar(
        context.sft_policy, new_head=True, seed=context.recipe.seed, lora=config.lora, rounding=rounding,
        **context.hardware(),
    )  # fmt: skip


def _samples(
    context: Context, config: RewardConfig, tokenizer: Any
) -> tuple[Tokenised[RankingSample], Tokenised[RankingSample], list[RankingSample]]:
    """Training and held-out rankings, and the gold controls of either."""
    from heedful.data import tokenise
    from heedful.data.heads import require_attributes
    from heedful.data.pairs import gold_ranks, training_ranks, without_controls

    limits: dict[str, Any] = {
        "max_tokens": config.max_tokens, "max_prompt_tokens": context.recipe.data.max_prompt_tokens
    }  # fmt: skip
    labels: dict[str, Any] = {
        "labels": config.labels, "margins": config.margin > 0,
        "keep_all_tied": config.ties == "half" or bool(config.attributes),
    }  # fmt: skip
    train, heldout = context.rankings()
    controls = [r for r in train + heldout if r.gold is not None]
    train, heldout = without_controls(train), [r for r in heldout if r.gold is None]
    samples = tokenise.rankings(train, [training_ranks(r) for r in train], tokenizer, **limits, **labels)
    heldout_samples = tokenise.rankings(heldout, [training_ranks(r) for r in heldout], tokenizer, **limits, **labels)
    require_attributes(samples.samples, config.attributes)
    told = f"Reward data: {samples.summary()}; held out: {heldout_samples.summary()}"
    if not controls:
        tell(told)
        return samples, heldout_samples, []
    control_samples = tokenise.rankings(controls, [gold_ranks(r) for r in controls], tokenizer, **limits)
    tell(f"{told}; gold controls, never trained on: {control_samples.summary()}")
    return samples, heldout_samples, control_samples.samples


def _on_share(
    context: Context,
    config: RewardConfig,
    share: float,
    train: Sequence[RankingSample],
    heldout: Sequence[RankingSample],
    stage: StageFolder,
) -> dict[str, Any]:
    """The same training on a share of the prompts; smaller shares are part of larger ones. Done once per stage."""
    from heedful.models.hardware import seed_everything
    from heedful.train.reward import train_reward

    part = StageFolder(stage.path / "learning_curve" / f"{share:g}", stage.name, stage.index)
    if not part.is_finished:
        order = random.Random(f"{context.recipe.seed}/learning curve").sample(range(len(train)), len(train))
        chosen = [train[i] for i in sorted(order[: max(1, round(share * len(train)))])]
        tell(f"Learning curve: {len(chosen)} of {len(train)} rankings")
        seed_everything(context.recipe.seed)  # new adapters: the same whether an earlier share was finished before
        card = train_reward(_new_model(context, config), chosen, heldout, config, part, seed=context.recipe.seed)
        tell(f"reward model on {share:.0%} of the rankings: {_said(card)}")
        part.finish(_point(share, len(chosen), card))
    return part.results


def _point(share: float, num_rankings: int, card: RewardCard) -> dict[str, Any]:
    return {
        "share": share, "num_rankings": num_rankings, "accuracy": card.accuracy, "accuracy_low": card.accuracy_low,
        "accuracy_high": card.accuracy_high, "loss": card.loss, "train_accuracy": card.train_accuracy,
    }  # fmt: skip


def _said(card: RewardCard) -> str:
    return (
        f"held-out accuracy {card.accuracy:.1%} [{card.accuracy_low:.1%}, {card.accuracy_high:.1%}] on "
        f"{card.num_pairs} pairs of {card.num_prompts} prompts"
    )
