"""Before against after on held-out prompts: every scorer's mean and win rate, ends and lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from heedful.evaluate.compare import win_rate
from heedful.records import Completion, EvaluationRow, Prompt

Scores = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""scorer name → (scores before, scores after), one per prompt"""


def judge(
    prompts: Sequence[Prompt], before: Sequence[Completion], after: Sequence[Completion], scores: Scores, *, seed: int
) -> tuple[list[EvaluationRow], dict[str, Any]]:
    """One row per prompt, and the metrics of the evaluate stage's results.

    Win rates count ties as one half; their 95 % intervals resample prompts.
    """
    rows = [
        EvaluationRow(
            prompt_id=p.id,
            prompt=p.messages,
            category=p.category,
            before=b.text,
            after=a.text,
            before_scores={name: pair[0][i] for name, pair in scores.items()},
            after_scores={name: pair[1][i] for name, pair in scores.items()},
            before_finish=b.finish_reason,
            after_finish=a.finish_reason,
        )
        for i, (p, b, a) in enumerate(zip(prompts, before, after, strict=True))
    ]
    categories = sorted({p.category for p in prompts if p.category})
    metrics: dict[str, Any] = {}
    for name, (old, new) in scores.items():
        rows_of = {c: [i for i, p in enumerate(prompts) if p.category == c] for c in categories}
        metrics[name] = _compare(old, new, seed) | {
            "by_category": {c: _compare([old[i] for i in r], [new[i] for i in r], seed) for c, r in rows_of.items()}
        }
    metrics["end_token_rate"] = {"before": _ended(before), "after": _ended(after)}
    metrics["answer_tokens"] = {"before": _length(before), "after": _length(after)}
    return rows, metrics


def _compare(before: Sequence[float], after: Sequence[float], seed: int) -> dict[str, Any]:
    result = asdict(win_rate(list(before), list(after), seed=seed))
    return {
        "before_mean": sum(before) / len(before),
        "after_mean": sum(after) / len(after),
        "win_rate": result.pop("rate"),
        "win_rate_low": result.pop("low"),
        "win_rate_high": result.pop("high"),
        "num_prompts": len(before),
        **result,
    }


def _ended(completions: Sequence[Completion]) -> float:
    return sum(c.finish_reason == "stop" for c in completions) / len(completions)


def _length(completions: Sequence[Completion]) -> float:
    return sum(len(c.ids) for c in completions) / len(completions)
