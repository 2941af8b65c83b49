"""The evaluate stage: the policy before and after, on prompts that no stage has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heedful.pipeline.context import Context
from heedful.runs.folder import StageFolder
from heedful.runs.progress import tell


def run_evaluate(context: Context, stage: StageFolder) -> dict[str, Any]:
    from heedful.data import tokenise
    from heedful.data.files import write_jsonl
    from heedful.evaluate.gold import load_scorer, score_answers
    from heedful.evaluate.judge import judge
    from heedful.models.hardware import release_models
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
    release_models()
    after = _answers(context, after_path, "after", encoded)
    release_models()
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
    del policy  # the engine has a copy
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
