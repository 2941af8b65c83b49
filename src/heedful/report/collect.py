"""Gathers what a run folder holds into one plain dict: the content of report.json and the source of the page.

Nothing is required: a run that failed, still runs, or has only some stages gives a dict with less in it.
"""

from __future__ import annotations

import math
from typing import Any

from heedful.errors import DataError
from heedful.records import EvaluationRow
from heedful.runs.files import read_lines
from heedful.runs.folder import RunFolder, StageFolder
from heedful.runs.reader import RunTable, read_samples, read_stage

POLICY_STAGES = ("ppo", "grpo", "rloo", "dpo")


def collect(run: RunFolder) -> dict[str, Any]:
    """Every number of the report, as plain JSON values."""
    stages = [_stage(stage) for stage in run.stages()]
    report: dict[str, Any] = {
        "run": run.name,
        "status": run.status,
        "recipe": run.recipe,
        "environment": run.environment,
        "stages": stages,
        "data": {stage["name"]: counts for stage in stages if (counts := _counts(stage["results"]))},
        "reward_card": reward_card(stages, run.recipe),
        "evaluation": _result(stages, "evaluate").get("metrics"),
    }
    report["verdict"] = verdict(report)
    return report


def evaluation_rows(run: RunFolder) -> tuple[list[EvaluationRow], int]:
    """The answers before and after, and how many rows could not be read."""
    rows, num_unreadable = [], 0
    for stage in run.stages():
        if stage.name == "evaluate":
            for row in read_lines(stage.path / "evaluation.jsonl"):
                try:
                    rows.append(EvaluationRow.from_json(row))
                except (DataError, TypeError, AttributeError):
                    num_unreadable += 1
    return rows, num_unreadable


def last_samples(stage: StageFolder, limit: int = 4) -> tuple[int, list[dict[str, Any]]]:
    """(step, rows) of the newest sample table of a stage; (0, []) when none was logged."""
    rows = read_samples(stage.path)
    if not rows:
        return 0, []
    step = rows[-1].get("step", 0)
    return step, [{k: v for k, v in row.items() if k != "step"} for row in rows if row.get("step") == step][:limit]


def names_compared(stages: list[dict[str, Any]]) -> tuple[str, str]:
    """What the two policies of the evaluation are called: ("SFT", "PPO")."""
    names = [stage["name"] for stage in stages]
    after = next((name.upper() for name in reversed(names) if name in POLICY_STAGES), "the trained policy")
    return ("SFT" if "sft" in names else "the starting model"), after


def verdict(report: dict[str, Any]) -> dict[str, Any]:
    """The first thing a reader wants to know: {"tone": "good" | "bad" | "open", "headline", "notes"}."""
    before, after = names_compared(report["stages"])
    evaluation = report["evaluation"] or {}
    judge = next((name for name in ("gold", "reward_model") if _has_win_rate(evaluation.get(name))), None)
    if judge is None:
        return {"tone": "open", "headline": _unfinished(report["status"]), "notes": []}
    numbers = evaluation[judge]
    low, high = numbers.get("win_rate_low"), numbers.get("win_rate_high")
    interval = f" [{100 * low:.0f}, {100 * high:.0f}]" if low is not None and high is not None else ""
    rate = f"win rate {100 * numbers['win_rate']:.0f} %{interval}"
    if interval and low > 0.5:
        tone, headline = "good", f"{after} beats {before} on held-out prompts: {rate}"
    elif interval and high < 0.5:
        tone, headline = "bad", f"{after} is worse than {before} on held-out prompts: {rate}"
    else:
        tone, headline = "open", f"No clear difference between {after} and {before} on held-out prompts: {rate}"
    notes = []
    if judge == "reward_model":
        notes.append(f"Judged by the reward model that {after} was trained on, so this is no independent evidence.")
        tone = "open" if tone == "good" else tone
    notes += _verdict_notes(report, before, after)
    return {"tone": tone, "headline": headline, "notes": notes}


def reward_card(stages: list[dict[str, Any]], recipe: dict[str, Any]) -> dict[str, Any] | None:
    """The card, the gate's verdict (min_accuracy, passed, accepted_weak) and the learning curve beside it."""
    card = _result(stages, "reward").get("card")
    if not isinstance(card, dict) or not _is_number(card.get("accuracy")):
        return None
    minimum = _section(recipe, "reward").get("min_accuracy")
    return {
        "card": card,
        "min_accuracy": minimum,
        "passed": card["accuracy"] >= minimum if _is_number(minimum) else None,
        "accepted_weak": bool(_section(recipe, "ppo").get("accept_weak_reward")),
        "learning_curve": _result(stages, "reward").get("learning_curve") or [],
    }


def _stage(stage: StageFolder) -> dict[str, Any]:
    table = read_stage(stage.path)
    return {
        "name": stage.name,
        "index": stage.index,
        "folder": stage.path.name,
        "is_finished": stage.is_finished,
        "last_step": table.last_step,
        "results": stage.results,
        "seconds": _first_number(stage.results.get("seconds")),
        "peak_memory_bytes": _first_number(stage.results.get("peak_memory_bytes"), table.last("run/peak_memory_bytes")),
        "memory": _section(stage.results, "memory"),
        "seconds_spent": {
            part: total for part in ("rollout", "score", "train") if (total := _total(table, f"ppo/seconds_{part}"))
        },
        "curves": {
            name: {"steps": steps, "values": [v if math.isfinite(v) else None for v in values]}
            for name, (steps, values) in table.columns.items()
        },
        "distributions": {
            name: [{"step": step, **histogram.to_json()} for step, histogram in first_middle_last(found)]
            for name, found in table.distributions.items()
        },
        "warnings": [f"step {step}: {text}" for step, text in table.warnings],
    }


def first_middle_last(found: list[Any]) -> list[Any]:
    """At most three of a list: its first, middle and last."""
    return [found[i] for i in sorted({0, (len(found) - 1) // 2, len(found) - 1})] if found else []


def _counts(results: dict[str, Any]) -> dict[str, Any]:
    """What a stage says of its data: ``num_…`` and everything under ``data``, nested names joined by a dot."""
    counts = {key: value for key, value in results.items() if key.startswith("num_") and not isinstance(value, dict)}
    for source in (results.get("data"), (results.get("card") or {}).get("data")):
        counts |= flatten(source if isinstance(source, dict) else {})
    return counts


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, names joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _verdict_notes(report: dict[str, Any], before: str, after: str) -> list[str]:
    """What limits or qualifies the headline."""
    notes = []
    policy = next((s for s in reversed(report["stages"]) if s["name"] in POLICY_STAGES), None)
    kl = policy and _first_number(policy["results"].get("kl_nats"), _last(policy, f"{policy['name']}/kl_nats"))
    if kl is not None:
        notes.append(f"{after} moved {kl:.2f} nats per answer away from its reference (KL).")
    ends = (report["evaluation"] or {}).get("end_token_rate")
    if isinstance(ends, dict) and _is_number(ends.get("before")) and _is_number(ends.get("after")):
        compared = "less often than" if ends["after"] < ends["before"] else "at least as often as"
        notes.append(
            f"Its answers end by themselves {compared} those of {before}: "
            f"{100 * ends['after']:.0f} % against {100 * ends['before']:.0f} %."
        )
    if report["status"].get("state") != "finished":
        notes.append(_unfinished(report["status"]))
    return notes


def _unfinished(status: dict[str, Any]) -> str:
    state = status.get("state")
    where = f" in stage {status['stage']}" if status.get("stage") else ""
    if state == "finished":
        return "The run is finished; no evaluation was part of it"
    why = f": {status['message']}" if status.get("message") else ""
    return f"The run is {'still running' if state == 'running' else state}{where}{why}"


def _result(stages: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The results of the last stage of a name, {} when there is none."""
    return next((stage["results"] for stage in reversed(stages) if stage["name"] == name), {})


def _section(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}


def _has_win_rate(numbers: Any) -> bool:
    return isinstance(numbers, dict) and _is_number(numbers.get("win_rate"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _first_number(*values: Any) -> float | None:
    return next((value for value in values if _is_number(value)), None)


def _last(stage: dict[str, Any], name: str) -> float | None:
    values = stage["curves"].get(name, {}).get("values", [])
    return next((value for value in reversed(values) if value is not None), None)


def _total(table: RunTable, name: str) -> float:
    return sum(value for value in table.column(name)[1] if math.isfinite(value))
