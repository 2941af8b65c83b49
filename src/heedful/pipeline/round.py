"""Rounds: the newest policy answers, people rank, the reward model is trained anew, PPO makes the next policy.

    FOLDER/
      rounds.yaml        what all rounds have in common
      project/           the annotation project of all rounds
      anchors.jsonl      answers on which every round's reward model is standardised
      round-1/           prompts.jsonl, answers.jsonl, data/ (what people said), train.jsonl, heldout.jsonl, run/,
                         result.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.config.read import load_recipe
from heedful.config.recipe import Recipe
from heedful.config.rounds import RoundsConfig, load_rounds
from heedful.data.duplicates import normalise
from heedful.data.export import record_row
from heedful.data.load import load_prompts, load_rankings
from heedful.data.prompts import prompt_text
from heedful.data.shipped import data_path
from heedful.data.strata import draw, unlike
from heedful.data.writing import write_jsonl
from heedful.errors import ConfigError, DataError
from heedful.pipeline.sample import Policy, SampleConfig, require_annotate, sample
from heedful.records import Prompt, Ranking, RewardCard
from heedful.runs.files import read_json, write_json
from heedful.runs.progress import tell

if TYPE_CHECKING:
    from heedful.annotate.project import Project

RESULT = "result.json"


@dataclass(frozen=True)
class RoundStatus:
    """Where the newest round stands."""

    number: int
    num_there: int
    """Rankings by people"""
    num_wanted: int
    result: dict[str, Any] | None
    """None: people are at work"""


@dataclass(frozen=True)
class _Round:
    """One round's folder and what lies in it."""

    folder: Path
    number: int
    config: RoundsConfig

    @property
    def path(self) -> Path:
        return self.folder / f"round-{self.number}"

    @property
    def answers(self) -> Path:
        return self.path / "answers.jsonl"

    @property
    def rankings(self) -> Path:
        return self.path / "data" / "rankings.jsonl"

    @property
    def result(self) -> dict[str, Any] | None:
        return read_json(self.path / RESULT) if (self.path / RESULT).exists() else None

    @property
    def reward_model(self) -> Path:
        return self.path / "run" / "stages" / "02-reward" / "model"

    @property
    def policy(self) -> str:
        """What PPO made of it; of round 0 the first policy."""
        return str(self.path / "run" / "stages" / "03-ppo" / "model") if self.number else self.config.policy

    def other(self, number: int) -> _Round:
        return _Round(self.folder, number, self.config)


def next_step(
    folder: str | Path,
    *,
    close: bool = False,
    rate: Callable[[Path], None] | None = None,
    say: Callable[[str], None] = tell,
) -> RoundStatus:
    """Do what comes next in a folder of rounds: sample and wait for people; once they are done, train.

    Args:
        close: train on the rankings that are there, though not all are.
        rate: called with the project's folder after sampling; simulated raters, say.

    Raises:
        ConfigError: rounds.yaml or the recipe is wrong.
        DataError: too few prompts or rankings.
        HeedfulError: as :func:`~heedful.pipeline.sample.sample` and :func:`heedful.pipeline.run`.
    """
    folder = Path(folder)
    config = load_rounds(folder)
    number = 1
    while (this := _Round(folder, number, config)).result is not None:
        number += 1
    _recipe(this)  # what is wrong with it shows before people rank
    project = _project(this)
    if not this.answers.exists():
        _sample(this, project, say)
    if rate is not None and not this.rankings.exists():
        rate(project.folder)
    num_there, num_wanted = _progress(project, number)
    if not this.rankings.exists():
        if num_there < num_wanted and not close:
            return RoundStatus(number, num_there, num_wanted, None)
        _publish(this, project)
    return RoundStatus(number, num_there, num_wanted, _train(this, say))


def _recipe(this: _Round) -> Recipe:
    """The recipe of the round's own run: its rankings, from the policy that every round starts from."""
    start = this.other(this.number - 1 if this.config.start_from == "newest" else 0).policy
    recipe = load_recipe(this.config.recipe, [
        "--name", "run", "--output", str(this.path), "--sft", "null", "--model.policy", start,
        "--data.rankings", str(this.path / "train.jsonl"), "--data.heldout_rankings", str(this.path / "heldout.jsonl"),
    ])  # fmt: skip
    if recipe.reward is None or recipe.ppo is None:
        raise ConfigError(f"{this.config.recipe}: a round needs a recipe with a reward and a ppo section")
    return recipe


def _project(this: _Round) -> Project:
    """The project of all rounds, made where it is missing."""
    require_annotate("rounds need")
    from heedful.annotate.project import FILE, create_project, open_project
    from heedful.annotate.settings import Settings

    folder = Path(this.config.project) if this.config.project else this.folder / "project"
    if (folder / FILE).exists():
        return open_project(folder)
    if this.config.project:
        raise ConfigError(f"{folder}: no project is there; make one with heedful annotate create")
    text = Path(this.config.guideline).read_text(encoding="utf-8-sig")
    return create_project(folder, Settings(name=this.folder.resolve().name), text, now=time.time())


def _sample(this: _Round, project: Project, say: Callable[[str], None]) -> None:
    """Prompts that no round has asked yet, answered by the newest policy and the one before it."""
    config = this.config
    earlier = [
        ranking for k in range(1, this.number) for ranking in load_rankings(this.other(k).answers, keep_unranked=True)
    ]  # fmt: skip
    asked = {normalise(prompt_text(ranking)) for ranking in earlier}
    pool = unlike(load_prompts(data_path(config.prompts)))  # of like prompts the same one stays in every round
    left = [prompt for prompt in pool if normalise(prompt_text(prompt)) not in asked]
    if len(left) < config.num_prompts:
        raise DataError(
            f"{config.prompts}: {len(left):,} prompts are left that no round has asked, {config.num_prompts:,} are "
            f"asked for in each; add prompts"
        )
    prompts = this.path / "prompts.jsonl"
    write_jsonl(prompts, [prompt.to_json() for prompt in left])
    newest = this.number - 1
    policies = [Policy(this.other(newest).policy, f"round-{newest}", 1 - config.older_share)]
    if newest and config.older_share:
        policies.append(Policy(this.other(newest - 1).policy, f"round-{newest - 1}", config.older_share))
    recipe = _recipe(this)
    found = sample(
        prompts, policies,
        SampleConfig(
            num_answers=config.num_answers, temperatures=config.temperatures, max_new_tokens=config.max_new_tokens,
            max_prompt_tokens=recipe.data.max_prompt_tokens, num_prompts=config.num_prompts, quotas=config.quotas,
            round=this.number, bait_rate=config.bait_rate, gold_rate=config.gold_rate, seed=config.seed,
        ),
        out=this.answers, project=project.folder, gold=_new_controls(this, earlier, say), device=recipe.model.device,
        dtype=recipe.model.dtype, say=say,
    )  # fmt: skip
    counts = found.to_json()
    say(f"round {this.number}: {counts['num_rankings']:,} prompts with {counts['num_answers']:,} answers to rank")


def _new_controls(this: _Round, earlier: Sequence[Ranking], say: Callable[[str], None]) -> Path | None:
    """A file of the control items that no round has used; nobody meets one twice, so old ones reach newcomers only."""
    if this.config.gold is None:
        return None
    used = {ranking.group_id for ranking in earlier}
    controls = load_rankings(data_path(this.config.gold), keep_ties=True, keep_unranked=True)
    left = [control for control in controls if control.group_id not in used]
    if not left:
        say(f"{this.config.gold}: all control items have been used; this round has no new ones")
        return None
    write_jsonl(path := this.path / "gold.jsonl", [record_row(control) for control in left])
    return path


def _progress(project: Project, number: int) -> tuple[int, int]:
    from heedful.annotate.progress import of_round

    with project.database.reading() as session:
        return of_round(session, number)


def _publish(this: _Round, project: Project) -> None:
    from heedful.annotate.master import View
    from heedful.annotate.publish import publish

    publish(project, this.rankings.parent, view=View(rounds=(this.number,)))


def _train(this: _Round, say: Callable[[str], None]) -> dict[str, Any]:
    """Reward model on all rounds so far, its scores on one scale, then PPO; what came of it."""
    from heedful.pipeline.stages import run

    recipe = _recipe(this)
    train, heldout = _split(this, recipe)
    write_jsonl(this.path / "train.jsonl", [record_row(r) for r in train])
    write_jsonl(this.path / "heldout.jsonl", [record_row(r) for r in heldout])
    anchors = this.folder / "anchors.jsonl"
    if not anchors.exists():
        write_jsonl(anchors, [record_row(r) for r in heldout])
    read = {"device": recipe.model.device, "dtype": recipe.model.dtype, "say": lambda text: None}
    before = _accuracy(this.other(this.number - 1), this, read) if this.number > 1 else None
    if before:
        say(f"round {this.number}: {_told('the reward model of the round before', before)}")
    run(recipe, existing="resume", only="reward")
    after = _accuracy(this, this, read)
    say(f"round {this.number}: {_told('the new reward model', after)}")
    scale = standardise(this.reward_model, load_rankings(anchors, keep_ties=True), **read)
    scores = _scores_by_policy(this.reward_model, heldout, scale, read)
    run(recipe, existing="resume")
    judged = [r for r in [*train, *heldout] if r.round == this.number]
    results = {
        "round": this.number, "num_prompts": len(judged), "num_judgements": sum(len(r.rankings) for r in judged),
        "num_rankings_trained_on": len(train), "accuracy_before": before, "accuracy_after": after, "scale": scale,
        "scores_by_policy": scores, "reward_model": str(this.reward_model), "policy": this.policy,
        "evaluation": _evaluation(this),
    }  # fmt: skip
    write_json(this.path / RESULT, results)
    return results


def _split(this: _Round, recipe: Recipe) -> tuple[list[Ranking], list[Ranking]]:
    """Training rankings of all rounds so far, and this round's held-out ones.

    Which prompts are held out is drawn from the prompt alone, so that what one round holds out no other one trains on.
    """
    fraction, seed = recipe.data.heldout_fraction, this.config.seed

    def is_heldout(ranking: Ranking) -> bool:
        return int(draw(seed, "held out", normalise(prompt_text(ranking)))[:8], 16) < fraction * 16**8

    earlier = load_rankings(data_path(this.config.rankings)) if this.config.rankings else []
    of_rounds = [r for k in range(1, this.number + 1) for r in load_rankings(this.other(k).rankings, keep_ties=True)]
    train = [r for r in [*earlier, *of_rounds] if not is_heldout(r)]
    heldout = [r for r in of_rounds if r.round == this.number and is_heldout(r)]
    if not heldout or not any(r.round == this.number for r in train):
        raise DataError(
            f"{this.path}: {len(heldout):,} of this round's rankings are held out and {len(train):,} are left to train "
            f"on; rank more, or change data.heldout_fraction"
        )
    return train, heldout


def _accuracy(of: _Round, on: _Round, read: Mapping[str, Any]) -> dict[str, Any]:
    """How a round's reward model orders another round's held-out answers."""
    from heedful.pipeline.card import card_of_file

    card = card_of_file(str(of.reward_model), str(on.path / "heldout.jsonl"), seed=on.config.seed, **read)
    return {"value": card.accuracy, "low": card.accuracy_low, "high": card.accuracy_high, "num_pairs": card.num_pairs,
            "num_prompts": card.num_prompts}  # fmt: skip


def _told(model: str, accuracy: Mapping[str, Any]) -> str:
    return (
        f"{model} orders {accuracy['value']:.1%} [{accuracy['low']:.1%}, {accuracy['high']:.1%}] of "
        f"{accuracy['num_pairs']} held-out pairs of this round as people do"
    )


def standardise(reward_model: Path, anchors: Sequence[Ranking], **read: Any) -> dict[str, float]:
    """Write mean and deviation of the anchors' scores into a reward model's folder: 0 is then an average anchor, 1 a
    deviation above it, whatever the scale of the raw scores, so that rounds can be compared and PPO's KL coefficient
    means the same in each."""
    from heedful.models.export import CARD_FILE, load_reward_card
    from heedful.pipeline.model_card import write_model_card

    scores = _scores(reward_model, [(r, a.text) for r in anchors for a in r.answers], read)
    scale = {"mean": statistics.fmean(scores), "std": max(statistics.pstdev(scores), 1e-6)}
    card = load_reward_card(reward_model)
    assert card is not None, "the reward stage writes one"
    changed = {**card.to_json(), "score_mean": scale["mean"], "score_std": scale["std"]}
    write_json(reward_model / CARD_FILE, RewardCard.from_json(changed).to_json())
    for name in ("reward_norm.json", "config.json"):
        write_json(reward_model / name, {**read_json(reward_model / name), **scale})
    write_model_card(reward_model)
    return scale


def _scores(reward_model: Path, asked: Sequence[tuple[Ranking, str]], read: Mapping[str, Any]) -> list[float]:
    from heedful.pipeline.scorer import open_scorer

    scorer = open_scorer(str(reward_model), **read)
    return scorer([Prompt(r.group_id, r.prompt, r.category, r.source, r.info) for r, _ in asked], [t for _, t in asked])


def _scores_by_policy(
    reward_model: Path, heldout: Sequence[Ranking], scale: Mapping[str, float], read: Mapping[str, Any]
) -> dict[str, float]:
    """Mean standardised score of each policy's answers to this round's held-out prompts; baits apart."""
    answers = [(r, a) for r in heldout for a in r.answers]
    scores = _scores(reward_model, [(r, a.text) for r, a in answers], read)
    by_policy: dict[str, list[float]] = {}
    for (_, answer), score in zip(answers, scores, strict=True):
        by_policy.setdefault(answer.policy, []).append((score - scale["mean"]) / scale["std"])
    return {policy: statistics.fmean(found) for policy, found in sorted(by_policy.items())}


def _evaluation(this: _Round) -> dict[str, Any] | None:
    """The metrics of the run's evaluate stage, if the recipe has one."""
    from heedful.pipeline.stages import results

    found = results(this.path / "run").get("evaluate")
    return found["metrics"] if found else None
