"""The reward stage: rankings → reward model with its card."""

from __future__ import annotations

from typing import Any

from heedful.pipeline.context import Context
from heedful.runs.folder import StageFolder
from heedful.train.loop import tell


def run_reward(context: Context, stage: StageFolder) -> dict[str, Any]:
    from heedful.data import tokenise
    from heedful.data.pairs import consensus
    from heedful.models.export import save_reward
    from heedful.models.roles import build_scalar
    from heedful.train.reward import train_reward

    recipe, config = context.recipe, context.recipe.reward
    assert config is not None
    train, heldout = context.rankings()
    model = build_scalar(
        context.sft_policy, new_head=True, seed=recipe.seed, lora=config.lora, **context.hardware()
    )
    limits: dict[str, Any] = {"max_tokens": config.max_tokens, "max_prompt_tokens": recipe.data.max_prompt_tokens}
    samples = tokenise.rankings(train, [consensus(r) for r in train], model.tokenizer, **limits)
    heldout_samples = tokenise.rankings(heldout, [consensus(r) for r in heldout], model.tokenizer, **limits)
    tell(f"Reward data: {samples.summary()}; held out: {heldout_samples.summary()}")
    card = train_reward(model, samples.samples, heldout_samples.samples, config, stage, seed=recipe.seed)
    tell(
        f"reward model: held-out accuracy {card.accuracy:.1%} [{card.accuracy_low:.1%}, {card.accuracy_high:.1%}] on "
        f"{card.num_pairs} pairs of {card.num_prompts} prompts; length alone {card.length_accuracy or 0:.1%}"
    )
    save_reward(
        model.model, model.tokenizer, stage.model, score_mean=card.score_mean, score_std=card.score_std, card=card
    )
    return {
        "card": card.to_json(),
        "num_rankings": samples.num_kept,
        "num_dropped": samples.dropped,
        "num_answers_dropped": dict(samples.num_answers_dropped),
        "min_accuracy": config.min_accuracy,
    }
