"""The parts of the reward that a recipe names, checked early and built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.config.ppo import PPOConfig, RewardPart
from heedful.config.recipe import Recipe
from heedful.errors import ConfigError, GateError, ModelError
from heedful.pipeline.context import Context, of_key
from heedful.records import RewardCard
from heedful.runs.progress import tell

if TYPE_CHECKING:
    from heedful.models.heads import Heads
    from heedful.models.offload import Offload
    from heedful.models.quantise import Rounding
    from heedful.models.roles import Reward
    from heedful.rollout.cache import ScoreCache
    from heedful.rollout.scaling import Scaler
    from heedful.rollout.score import LastRead, RewardSource, Scoring

OWN = "run:reward"
"""This run's own reward model."""


def check_rewards(recipe: Recipe) -> None:
    """Every part of the reward is there, so that none turns out to be missing hours later; models are fetched.

    Raises:
        ConfigError: a function that cannot be imported or called, or a url that is none.
        GateError: a reward model whose card is too weak.
        ModelError: a model that does not exist, has no score head, or fewer outputs than ``head`` asks.
    """
    from heedful.models.load import num_outputs, resolve
    from heedful.rollout.sources import load_reward_function, reward_url

    if recipe.ppo is not None and recipe.ppo.uses_own_reward and recipe.reward is None:
        with of_key("model.reward"):
            num_outputs(resolve(recipe.model.reward or ""))
    for name, part in (recipe.ppo.reward_parts if recipe.ppo else {}).items():
        if part.function is not None:
            load_reward_function(name, part.function)
        elif part.url is not None:
            reward_url(part.url)
        elif part.model is not None and part.model != OWN:
            with of_key(f"ppo.rewards.{name}.model"):
                path = resolve(part.model)
            _check_model(name, part, path, recipe)
    if recipe.ppo is not None and recipe.ppo.disagreement_penalty:
        _check_ensemble(recipe, recipe.ppo)


def _check_ensemble(recipe: Recipe, config: PPOConfig) -> None:
    """There is an ensemble to disagree, and its score is scaled by numbers that hold for the disagreement too."""
    from heedful.models.load import resolve

    found = False
    for name, part in config.reward_parts.items():
        if part.model is None or part.head:
            continue
        if part.model == OWN and recipe.reward is not None:
            is_ensemble = recipe.reward.ensemble > 1
        else:
            model = recipe.model.reward if part.model == OWN else part.model
            is_ensemble = _ensemble(resolve(model or "")) is not None
        if _disagreement(name) in config.reward_parts:
            taken = f"ppo.rewards.{_disagreement(name)}"
            raise ConfigError(f"{taken}: ppo.disagreement_penalty needs that name; take another")
        found = found or is_ensemble
        scaling = part.scaling or config.score_scaling
        if is_ensemble and scaling not in ("card", "none"):
            raise ConfigError(
                f"ppo.disagreement_penalty is in units of the score, which {scaling!r} scaling of the reward {name} "
                "changes as it goes; take scaling card or none"
            )
    if not found:
        raise ConfigError(
            "ppo.disagreement_penalty: no reward model here is an ensemble; train one with reward.ensemble, or set the "
            "penalty to 0"
        )


def _disagreement(name: str) -> str:
    """The part that a reward's disagreement is."""
    return f"{name}_disagreement"


def _ensemble(path: Path) -> Heads | None:
    """The heads of a folder where they are an ensemble."""
    import torch

    from heedful.models.heads import load_heads

    heads = load_heads(path, torch.device("cpu"))
    return heads if heads is not None and heads.kind == "ensemble" else None


def build_scoring(
    context: Context, config: PPOConfig, own: Reward | None, *, cache: ScoreCache | None = None,
    rounding: Rounding | None = None, offload: Offload | None = None,
) -> Scoring:  # fmt: skip
    """The whole reward of a recipe, each part with its scaler.

    Args:
        own: this run's reward model; may be None where no part reads it.
        cache: holds the scores of reward models.
        rounding: holds further reward models as it says.
        offload: sends them away where it does so.

    Raises:
        ConfigError, GateError, ModelError: as :func:`check_rewards`.
    """
    from heedful.models.load import load_tokenizer
    from heedful.rollout.scaling import Fixed
    from heedful.rollout.score import Disagreement, LearnedReward, Scoring
    from heedful.rollout.sources import FunctionReward, HTTPReward

    sources: list[RewardSource] = []
    scalers: dict[str, Scaler] = {}
    models = _Models(context, own, cache, rounding, offload)
    for name, part in config.reward_parts.items():
        card = None
        if part.function is not None:
            sources.append(FunctionReward(name, part.function, weight=part.weight))
        elif part.url is not None:
            tokenizer = load_tokenizer(context.sft_policy)
            sources.append(HTTPReward(name, part.url, tokenizer, weight=part.weight,
                                      timeout_seconds=part.timeout_seconds, retries=part.retries))  # fmt: skip
        else:
            model, card = models.of(name, part)
            sources.append(LearnedReward(model, micro_batch_tokens=config.micro_batch_tokens, head=part.head,
                                         name=name, weight=part.weight))  # fmt: skip
            heads = models.ensemble(part) if config.disagreement_penalty else None
            if heads is not None:
                is_scaled = card is not None and (part.scaling or config.score_scaling) == "card"
                scalers[_disagreement(name)] = Fixed(0.0, card.score_std) if card and is_scaled else Fixed()
                weight = -config.disagreement_penalty * abs(part.weight)
                sources.append(Disagreement(model, heads, micro_batch_tokens=config.micro_batch_tokens,
                                            name=_disagreement(name), weight=weight))  # fmt: skip
        scalers[name] = scaler_of(name, part, config, card)
    return Scoring(sources, scalers)


def scaler_of(name: str, part: RewardPart, config: PPOConfig, card: RewardCard | None) -> Scaler:
    """The scaler of a part: its own ``scaling``, or ``score_scaling`` for models (none where that card is missing).

    Raises:
        ModelError: it is to be scaled by a card that is not there, or one whose scores have no spread.
    """
    from heedful.rollout.scaling import build_scaler

    kind = part.scaling or (config.score_scaling if part.model is not None else "none")
    if kind != "card":
        return build_scaler(kind)
    if card is None:
        if part.scaling == "card":
            raise ModelError(f"ppo.rewards.{name}: {part.model} has no reward card to scale by; take running or none")
        return build_scaler("none")
    if not card.score_std > 0:
        raise ModelError(f"ppo.rewards.{name}: the reward card of {part.model} says that all its scores are the same")
    return build_scaler("card", mean=card.score_mean, std=card.score_std)


class _Models:
    """The reward models of the parts, each loaded once."""

    def __init__(
        self, context: Context, own: Reward | None, cache: ScoreCache | None, rounding: Rounding | None,
        offload: Offload | None,
    ) -> None:  # fmt: skip
        self._context, self._own, self._cache = context, own, cache
        self._rounding, self._offload = rounding, offload
        self._loaded: dict[Path | None, LastRead] = {}

    def of(self, name: str, part: RewardPart) -> tuple[LastRead, RewardCard | None]:
        """The model that a part reads and its card."""
        from heedful.models.load import resolve
        from heedful.models.roles import build_reward
        from heedful.rollout.cache import cached
        from heedful.rollout.score import LastRead

        hardware = self._context.hardware()
        assert part.model is not None
        if part.model == OWN:
            assert self._own is not None
            if None not in self._loaded:
                own = cached(self._own, self._context.reward_model, hardware["dtype"], self._cache)
                self._loaded[None] = LastRead(own)
            return self._loaded[None], self._context.reward_card
        with of_key(f"ppo.rewards.{name}.model"):
            path = resolve(part.model).resolve()
        _check_model(name, part, path, self._context.recipe)
        if path not in self._loaded:
            tell(f"reward {name}: loading {part.model}")
            reward = build_reward(path, rounding=self._rounding, name=f"rewards.{name}", **hardware)
            if self._offload is not None:
                self._offload.take(reward.part)
            self._loaded[path] = LastRead(cached(reward, path, hardware["dtype"], self._cache))
        return self._loaded[path], _card_of(path, part.head)

    def ensemble(self, part: RewardPart) -> Heads | None:
        """The heads of the ensemble whose score a part reads; None where it reads something else."""
        from heedful.models.load import resolve

        if part.head or self._context.reward_is_stand_in:
            return None
        return _ensemble(self._context.reward_model if part.model == OWN else resolve(part.model or ""))


def _card_of(path: Path, head: int) -> RewardCard | None:
    """The card in a folder, with the mean and deviation of the head that is read."""
    import torch

    from heedful.models.export import load_reward_card
    from heedful.models.heads import load_heads

    card, heads = load_reward_card(path), load_heads(path, torch.device("cpu"))
    if card is None or heads is None or head == 0:
        return card
    return replace(card, score_mean=heads.means[head - 1], score_std=heads.deviations[head - 1])


def _check_model(name: str, part: RewardPart, path: Path, recipe: Recipe) -> None:
    """The folder of a part holds a reward model with the output that is asked for, and a card that is good enough."""
    from heedful.models.export import load_reward_card
    from heedful.models.heads import head_names
    from heedful.models.load import num_outputs
    from heedful.pipeline.ppo import gate

    with of_key(f"ppo.rewards.{name}.model"):
        outputs = num_outputs(path) + len(head_names(path))
    if part.head >= outputs:
        raise ModelError(
            f"ppo.rewards.{name}: head {part.head} of {part.model}, which has {outputs} outputs counted from 0"
        )
    card = load_reward_card(path)
    if card is None:
        return
    try:
        gate(card, recipe)
    except GateError as error:
        raise GateError(f"ppo.rewards.{name} ({part.model}): {error}") from None
