"""Every stage in order, each resumable: sft → reward → ppo → evaluate → report.

    from heedful import pipeline
    from heedful.config.read import load_recipe

    report = pipeline.run(load_recipe("quickstart"))

A stage that is finished is never run again; an unfinished one goes on from its newest complete checkpoint. Every stage
loads what it needs from disk, so that a run continued after a kill is the run that was never killed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from heedful.config.recipe import STAGES, Recipe, Stage
from heedful.errors import ConfigError, DataError, GateError
from heedful.records import RewardCard
from heedful.runs.folder import RunFolder, StageFolder
from heedful.runs.progress import duration, peak_memory_bytes
from heedful.runs.resume import open_run
from heedful.train.loop import tell


def run(recipe: Recipe, *, existing: str = "refuse", only: Stage | None = None) -> Path:
    """Run the stages of ``recipe`` (or ``only`` one of them) in its run folder and return the report's path.

    Args:
        existing: when the run folder exists: "refuse" raises, "resume" goes on with it, "new" takes a numbered one.

    Raises:
        CheckpointError: the folder exists and ``existing`` is "refuse", or it holds a run of another recipe.
        GateError: the reward model is too weak for PPO.
    """
    if existing not in ("refuse", "resume", "new"):
        raise ConfigError(f"existing is {existing!r}; give refuse, resume or new")
    if only is not None and only not in recipe.stages:
        raise ConfigError(f"only is {only!r}; this recipe has the stages {', '.join(recipe.stages)}")
    _check_files(recipe)
    if recipe.evaluate and recipe.evaluate.gold:
        from heedful.evaluate.gold import load_scorer

        load_scorer(recipe.evaluate.gold)  # a wrong name shows now, not after the training
    with open_run(recipe, existing) as folder:
        return _run_in(folder, recipe, only)


def _check_files(recipe: Recipe) -> None:
    """Every local data file of the recipe is there, so that none turns out to be missing hours later.

    Raises:
        DataError: names the key and the file.
    """
    from heedful.data.shipped import data_path

    for key in ("demonstrations", "rankings", "prompts", "heldout_prompts", "heldout_rankings"):
        name = getattr(recipe.data, key)
        path = Path(data_path(name)) if name else None
        if path is not None and path.suffix and not path.exists():  # a name without suffix may be a hub data set
            raise DataError(f"data.{key}: {path}: no such file")


def _run_in(folder: RunFolder, recipe: Recipe, only: Stage | None) -> Path:
    from heedful.report.build import write_report

    context = Context(recipe, folder)
    stages = recipe.stages if only is None else (only,)
    tell(f"Run {folder.path}: {' → '.join(recipe.stages)}")
    for name in stages:
        stage = context.stage(name)
        if stage.is_finished:
            tell(f"{name}: finished already")
        else:
            folder.set_status("running", stage=name)
            _run_stage(context, stage)
        shutil.rmtree(stage.checkpoints, ignore_errors=True)  # the model is saved; nothing is resumed from here
    done = all(context.stage(name).is_finished for name in recipe.stages)
    folder.set_status("finished" if done else "interrupted", stage=stages[-1])
    report = write_report(folder.path)
    tell(f"Report: {report}")
    return report


def _run_stage(context: Context, stage: StageFolder) -> None:
    from heedful.models.hardware import release_memory, seed_everything

    started = time.perf_counter()
    seed_everything(context.recipe.seed)  # new adapters: the same whether the stages before ran in this process or not
    results = RUNNERS[cast(Stage, stage.name)](context, stage)
    release_memory()
    seconds = time.perf_counter() - started
    training_seconds, peak = _training_seconds(stage), peak_memory_bytes()
    stage.finish({**results, "seconds": seconds, "training_seconds": training_seconds, "peak_memory_bytes": peak})
    tell(f"{stage.name}: done in {duration(seconds)}")


def _training_seconds(stage: StageFolder) -> float:
    """Seconds spent in the stage's steps, those before an interruption included."""
    from heedful.runs.reader import read_stage

    return sum(x for x in read_stage(stage.path).column("run/seconds")[1] if x is not None)


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
        from heedful.models.load import resolve

        return resolve(self.recipe.model.name)

    @property
    def sft_policy(self) -> Path:
        """The policy before PPO: this run's SFT model, model.policy, or the base model itself."""
        from heedful.models.load import resolve

        if self.recipe.sft is not None:
            return self.model_of("sft")
        return resolve(self.recipe.model.policy) if self.recipe.model.policy else self.base

    @property
    def reward_model(self) -> Path:
        """This run's reward model, or model.reward."""
        from heedful.models.load import resolve

        if self.recipe.reward is not None:
            return self.model_of("reward")
        assert self.recipe.model.reward is not None
        return resolve(self.recipe.model.reward)

    def hardware(self) -> dict[str, Any]:
        """``device``, ``dtype`` and ``attention`` for every model of the run."""
        from heedful.models import hardware

        device = hardware.device(self.recipe.model.device)
        dtype = hardware.compute_dtype(device, self.recipe.model.dtype)
        return {"device": device, "dtype": dtype, "attention": self.recipe.model.attention}

    def read(self, load: Callable[..., list[Any]], name: str) -> list[Any]:
        """The records that ``load`` finds in a data file; package: names are files that ship with heedful."""
        from heedful.data.shipped import data_path

        return load(data_path(name), on_bad_row=self.recipe.data.on_bad_row)

    def rankings(self) -> tuple[list[Any], list[Any]]:
        """Training and held-out rankings; the same split for every stage of the run."""
        from heedful.data.load import load_rankings
        from heedful.data.splits import split

        data = self.recipe.data
        records = self.read(load_rankings, data.rankings) if data.rankings else []
        if data.heldout_rankings:
            return records, self.read(load_rankings, data.heldout_rankings)
        return split(records, data.heldout_fraction, seed=self.recipe.seed)

    def prompts(self, source: str | None, *, heldout: bool) -> list[Any]:
        """The prompts of a file, or else those of the training or held-out rankings."""
        from heedful.data.load import load_prompts
        from heedful.records import Prompt

        if source is not None:
            return self.read(load_prompts, source)
        return [Prompt(r.group_id, r.prompt, r.category, r.source, r.info) for r in self.rankings()[heldout]]


def _sft(context: Context, stage: StageFolder) -> dict[str, Any]:
    from heedful.data import tokenise
    from heedful.data.load import load_demonstrations
    from heedful.data.splits import split
    from heedful.models.export import save_policy
    from heedful.models.roles import build_policy
    from heedful.train.sft import train_sft

    recipe, config = context.recipe, context.recipe.sft
    assert config is not None and recipe.data.demonstrations is not None
    records = context.read(load_demonstrations, recipe.data.demonstrations)
    train, heldout = split(records, recipe.data.heldout_fraction / 2, seed=recipe.seed)
    policy = build_policy(context.base, lora=config.lora, **context.hardware())
    limits: dict[str, Any] = {"max_tokens": config.max_tokens, "too_long": config.too_long, "train_on": config.train_on}
    samples = tokenise.demonstrations(train, policy.tokenizer, **limits)
    heldout_samples = tokenise.demonstrations(heldout, policy.tokenizer, **limits).samples if heldout else []
    tell(f"SFT data: {samples.summary()}; {len(heldout_samples)} held out")
    results = train_sft(policy, samples.samples, heldout_samples, config, stage, seed=recipe.seed)
    save_policy(policy.model, policy.tokenizer, stage.model)
    return {**results, "num_dropped": samples.dropped, "num_truncated": samples.num_truncated}


def _reward(context: Context, stage: StageFolder) -> dict[str, Any]:
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


def _ppo(context: Context, stage: StageFolder) -> dict[str, Any]:
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
    mean, std = (card.score_mean, card.score_std) if card and config.normalize_scores else (0.0, 1.0)
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


def _evaluate(context: Context, stage: StageFolder) -> dict[str, Any]:
    from heedful.data import tokenise
    from heedful.data.files import write_jsonl
    from heedful.evaluate.gold import load_scorer, score_answers
    from heedful.evaluate.judge import judge
    from heedful.models.load import load_tokenizer
    from heedful.models.roles import build_scalar
    from heedful.rollout.score import LearnedReward

    recipe, config = context.recipe, context.recipe.evaluate
    assert config is not None
    scorer = load_scorer(config.gold) if config.gold else None
    before_path, after_path = (
        (context.sft_policy, context.model_of("ppo")) if recipe.ppo else (context.base, context.model_of("sft"))
    )
    records = context.prompts(recipe.data.heldout_prompts, heldout=True)
    encoded = tokenise.prompts(
        records, load_tokenizer(after_path), max_prompt_tokens=recipe.data.max_prompt_tokens
    ).samples[: config.max_prompts]
    prompts = [p for p, _ in encoded]
    before = _answers(context, before_path, "before", encoded)
    after = _answers(context, after_path, "after", encoded)
    scores: dict[str, tuple[list[float], list[float]]] = {}
    if scorer is not None:
        gold = [
            score_answers(scorer, prompts, [c.text for c in side], [c.finish_reason == "stop" for c in side])
            for side in (before, after)
        ]
        scores["gold"] = (gold[0], gold[1])
    if recipe.reward is not None or recipe.model.reward:
        model = build_scalar(context.reward_model, lora=None, trained=False, **context.hardware())
        read = LearnedReward(model, micro_batch_tokens=4096)
        scores["reward_model"] = (read(prompts, before), read(prompts, after))
    rows, metrics = judge(prompts, before, after, scores, seed=recipe.seed)
    write_jsonl(stage.path / "evaluation.jsonl", [row.to_json() for row in rows])
    for name in scores:
        m = metrics[name]
        tell(f"{name}: {m['before_mean']:.2f} → {m['after_mean']:.2f}, win rate {m['win_rate']:.1%} "
             f"[{m['win_rate_low']:.1%}, {m['win_rate_high']:.1%}] on {m['num_prompts']} held-out prompts")  # fmt: skip
    return {"metrics": metrics, "before": str(before_path), "after": str(after_path), "temperature": config.temperature}


def _answers(context: Context, path: Path, side: str, encoded: list[Any]) -> list[Any]:
    """One answer to every held-out prompt; both policies draw from the same random streams."""
    from heedful.data.chat import end_token_ids
    from heedful.models.roles import build_policy
    from heedful.rollout.engine import Request, Sampling
    from heedful.rollout.hf import HFEngine
    from heedful.runs.progress import Progress

    recipe, config = context.recipe, context.recipe.evaluate
    assert config is not None
    policy = build_policy(path, lora=None, trained=False, **context.hardware())
    engine = HFEngine(policy, end_token_ids(policy.tokenizer), batch_size=config.batch_size)
    limit = config.max_new_tokens or (recipe.ppo.sampling.max_new_tokens if recipe.ppo else 256)
    with Progress(f"Answers {side}", len(encoded)) as progress:

        def advance(newly_done: int) -> None:
            for _ in range(newly_done):
                progress.step()

        return engine.generate(
            [Request(p.id, 0, ids) for p, ids in encoded],
            Sampling(limit, config.temperature),
            seed=recipe.seed,
            on_done=advance,
        )


RUNNERS: dict[Stage, Callable[[Context, StageFolder], dict[str, Any]]] = {
    "sft": _sft,
    "reward": _reward,
    "ppo": _ppo,
    "evaluate": _evaluate,
}


def results(path: Path | str) -> dict[str, Any]:
    """The results of every finished stage of a run, by stage name."""
    return {stage.name: stage.results for stage in RunFolder.open(path).stages() if stage.is_finished}
