"""Builds the page: what ``collect`` found becomes sections, figures and escaped text in one HTML file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from heedful.errors import CheckpointError
from heedful.records import EvaluationRow
from heedful.report import card, figures
from heedful.report.collect import POLICY_STAGES, collect, evaluation_rows, flatten, last_samples, names_compared
from heedful.runs.files import write_bytes, write_json
from heedful.runs.folder import RunFolder
from heedful.runs.metrics import HISTOGRAMS, METRICS, Metric, lookup
from heedful.runs.progress import duration

MAIN_CURVES = {
    "sft/loss_nats", "reward/loss_nats", "reward/accuracy", "ppo/score_mean", "ppo/gold_mean", "ppo/kl_nats",
    "ppo/kl_coefficient", "ppo/entropy_nats", "ppo/answer_tokens_mean", "ppo/end_token_rate", "ppo/clip_fraction",
    "ppo/explained_variance", "ppo/policy_gradient_norm", "ppo/value_gradient_norm", "sft/gradient_norm",
    "reward/gradient_norm", "ppo/policy_loss", "ppo/value_loss",
}  # fmt: skip
"""Shown at once; every other curve is one click away."""
GUIDES = {"reward/accuracy": 0.5, "reward/loss_nats": math.log(2.0), "ppo/explained_variance": 0.0}
"""Dashed lines: chance level, or what a model that knows nothing reaches."""
MAX_ROWS = 100
MAX_CHARACTERS = 4000


@dataclass(frozen=True)
class Panel:
    """One figure with its words."""

    title: str
    name: str
    svg: str
    unit: str = ""
    healthy: str = ""
    labels: tuple[str, ...] = ()
    """One per colour; empty for a single curve."""
    last: str = ""
    is_main: bool = True


def write_report(run_path: str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None) -> Path:
    """Write ``report.html`` and ``report.json`` of a run, finished or not; the same run gives the same bytes.

    Args:
        run_path: a run folder.
        out: where to put the page; the JSON file goes beside it under the same name. None = into the run folder.

    Returns:
        The path of the page.

    Raises:
        CheckpointError: no run is there, one of its files is broken, or the report cannot be written.
    """
    run = RunFolder.open(run_path)
    report = collect(run)
    target = Path(out) if out is not None else run.path / "report.html"
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; give the name of a file for the report")
    if target.suffix.lower() not in (".html", ".htm"):
        target = target.with_name(target.name + ".html")
    page = render(run, report)
    write_json(target.with_suffix(".json"), report)
    write_bytes(target, page.encode("utf-8", "replace"))  # half characters cannot be shown
    return target


def render(run: RunFolder, report: dict[str, Any]) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("heedful.report", "."),
        autoescape=True,  # prompts and answers come from models and files
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number, "percent": percent, "duration": duration, "size": size, "label": label, "clip": clip,
        "stage_title": stage_title,
    }  # fmt: skip
    environment.globals |= {"range_of": range_of, "place_of": place_of, "interval_of": interval_of}
    rows, num_unreadable = evaluation_rows(run)
    before, after = names_compared(report["stages"])
    folders = {stage.path.name: stage for stage in run.stages()}
    judges, plain_metrics = split_metrics(report["evaluation"])
    return environment.get_template("page.html.j2").render(
        report=report,
        before=before,
        after=after,
        stages=[
            {
                **stage,
                "panels": curve_panels(stage),
                "shapes": distribution_panels(stage),
                "facts": _facts(stage["results"]),
                "samples": last_samples(folders[stage["folder"]]),
            }
            for stage in report["stages"]
        ],
        tiles=_tiles(report, after),
        judges=judges,
        plain_metrics=plain_metrics,
        by_category={name: bars for name, m in judges.items() if (bars := _bars(m.get("by_category"), "win_rate"))},
        card_view=card.view((report["reward_card"] or {}).get("card")),
        learning_curve=card.learning_curve((report["reward_card"] or {}).get("learning_curve")),
        card_bars=_bars(((report["reward_card"] or {}).get("card") or {}).get("accuracy_by_category"), "accuracy"),
        examples=choose_examples(rows),
        num_unreadable=num_unreadable,
        recipe=yaml.safe_dump(report["recipe"], sort_keys=False, allow_unicode=True, width=100),
    )


def curve_panels(stage: dict[str, Any]) -> list[Panel]:
    """The curves of a stage in the order of the metric list; a held-out curve is drawn with its training twin."""
    curves = stage["curves"]
    panels: list[Panel] = []
    for name in _in_order(curves, METRICS):
        room, _, word = name.rpartition("/")
        if word.startswith("heldout_") and f"{room}/{word.removeprefix('heldout_')}" in curves:
            continue
        twin = f"{room}/heldout_{word}"
        names = [name, twin] if twin in curves else [name]
        series = [figures.Series(curves[n]["steps"], curves[n]["values"]) for n in names]
        if not any(v is not None for one in series for v in one.values):
            continue
        metric = lookup(name) or _unlisted(name)
        last = [_last(curves[n]["values"]) for n in names]
        panels.append(
            Panel(
                title=_title(metric, word),
                name=name,
                svg=figures.curves(series, ident=f"c{stage['index']}-{len(panels)}", guide=GUIDES.get(name)),
                unit=metric.unit,
                healthy=metric.healthy,
                labels=("training", "held out") if len(names) == 2 else (),
                last=" / ".join(number(value) for value in last if value is not None),
                is_main=name in MAIN_CURVES or name.startswith("ppo/score/"),
            )
        )
    return panels


def distribution_panels(stage: dict[str, Any]) -> list[Panel]:
    """The distributions of a stage at its first, middle and last step."""
    panels: list[Panel] = []
    for name in _in_order(stage["distributions"], HISTOGRAMS):
        found = stage["distributions"][name]
        metric = lookup(name, HISTOGRAMS) or _unlisted(name)
        shapes = [(shape["edges"], shape["counts"]) for shape in found]
        panels.append(
            Panel(
                title=_title(metric, name.rpartition("/")[2]),
                name=name,
                svg=figures.distributions(shapes, ident=f"d{stage['index']}-{len(panels)}"),
                unit=metric.unit,
                healthy=metric.healthy,
                labels=tuple(f"step {s['step']}: {number(s['mean'])} ± {number(s['std'])}" for s in found),
            )
        )
    return panels


def _title(metric: Metric, word: str) -> str:
    """The metric's words, with the name of the part where it is one of several."""
    return metric.description + (f": {label(word)}" if "<" in metric.name else "")


def choose_examples(rows: list[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    """Which answers to show: the first of each category (so nobody picked them), those that lost most, the rest."""
    firsts: dict[str, EvaluationRow] = {}
    for row in rows:
        firsts.setdefault(row.category, row)
    shown = list(firsts.values())[:12]
    judged = [(gain, i) for i, row in enumerate(rows) if (gain := _gain(row)) is not None and gain < 0]
    worst = [rows[i] for _, i in sorted(judged)[:3] if rows[i] not in shown]
    rest = [row for row in rows if row not in shown and row not in worst]
    return {"shown": shown, "worst": worst, "rest": rest[:MAX_ROWS], "left_out": rest[MAX_ROWS:]}


def _gain(row: EvaluationRow) -> float | None:
    """How much the gold score (else the reward model's) rose."""
    for judge in ("gold", "reward_model"):
        before, after = row.before_scores.get(judge), row.after_scores.get(judge)
        if before is not None and after is not None:
            return after - before
    return None


def split_metrics(metrics: Any) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The metrics of the evaluation: those of a judge (with a win rate or means) and plain ones (before, after)."""
    found = {name: m for name, m in (metrics or {}).items() if isinstance(m, dict)}
    judges = {name: m for name, m in found.items() if "win_rate" in m or "after_mean" in m}
    plain_metrics = {name: m for name, m in found.items() if name not in judges and "before" in m and "after" in m}
    return judges, plain_metrics


def _bars(by_category: Any, key: str) -> list[tuple[str, float, float | None, float | None, str]]:
    """(category, rate, low, high, words) of numbers by category, each a rate or a dict with its interval."""
    bars = []
    for category, found in (by_category if isinstance(by_category, dict) else {}).items():
        numbers = found if isinstance(found, dict) else {key: found}
        rate, low, high = (numbers.get(k) for k in (key, f"{key}_low", f"{key}_high"))
        if not isinstance(rate, (int, float)):
            continue
        words = percent(rate, 0)
        if low is not None and high is not None:
            words += f" {interval_of(low, high)}"
        if numbers.get("num_prompts") is not None:
            words += f" of {numbers['num_prompts']}"
        bars.append((category, rate, low, high, words))
    return bars


def _tiles(report: dict[str, Any], after: str) -> list[tuple[str, str]]:
    """The few numbers to see first, as (value, words)."""
    evaluation, tiles = report["evaluation"] or {}, []
    for judge, words in (("gold", "gold score"), ("reward_model", "reward score")):
        m = evaluation.get(judge) or {}
        if m.get("before_mean") is not None and m.get("after_mean") is not None:
            tiles.append((f"{m['before_mean']:.2f} → {m['after_mean']:.2f}", f"{words}, before and after"))
    if report["reward_card"]:
        tiles.append((percent(report["reward_card"]["card"]["accuracy"]), "reward model, held-out accuracy"))
    ends = evaluation.get("end_token_rate") or {}
    if ends.get("after") is not None:
        tiles.append((percent(ends["after"], 0), f"answers of {after} that end by themselves"))
    seconds = [stage["seconds"] for stage in report["stages"] if stage["seconds"] is not None]
    if seconds:
        tiles.append((duration(sum(seconds)), "in all stages"))
    return tiles


def _facts(results: dict[str, Any]) -> dict[str, Any]:
    """Single results that no other section shows."""
    elsewhere = ("card", "data", "metrics", "seconds", "peak_memory_bytes", "memory")
    rest = {key: value for key, value in results.items() if key not in elsewhere and not key.startswith("num_")}
    return {key: value for key, value in flatten(rest).items() if not isinstance(value, list)}


def _in_order(found: dict[str, Any], known: tuple[Metric, ...]) -> list[str]:
    """Names in the order of the list; names that are not in it (an older or newer run) come last."""
    order = {metric.name: i for i, metric in enumerate(known)}

    def place(name: str) -> tuple[int, str]:
        metric = lookup(name, known)
        return (order[metric.name] if metric else len(order), name)

    return sorted(found, key=place)


def _unlisted(name: str) -> Metric:
    return Metric(name, "", "none", "", name)


def _last(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def number(value: Any) -> str:
    """A number with about four digits; anything else as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value == 0 or 1e-3 <= abs(value) < 1e5:
            text = f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
            return text.replace("-", "\u2212")
        return f"{value:.2e}".replace("-", "\u2212")
    return str(value)


def percent(value: Any, digits: int = 1) -> str:
    """A fraction as a percentage."""
    return f"{100 * value:.{digits}f}\u00a0%" if isinstance(value, (int, float)) else "–"


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def label(key: str) -> str:
    """A key as words: ``num_pairs`` → ``pairs``."""
    return " · ".join(word.removeprefix("num_").replace("_", " ") for word in key.split("."))


def stage_title(name: str) -> str:
    """What people call a stage."""
    return name.upper() if name in ("sft", *POLICY_STAGES) else {"reward": "Reward model"}.get(name, name.capitalize())


def interval_of(low: float, high: float, digits: int = 0) -> str:
    """An interval of fractions in percent: ``[70, 85]``."""
    return f"[{100 * low:.{digits}f}, {100 * high:.{digits}f}]"


def clip(text: str) -> str:
    """Text of bearable length."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS} more characters)"


def place_of(rate: float) -> str:
    """A fraction as a place on a bar, in percent."""
    return f"{100 * min(max(float(rate), 0.0), 1.0):.1f}"


def range_of(low: float, high: float) -> str:
    """CSS place and width of an interval of fractions on a bar."""
    left, right = float(place_of(low)), float(place_of(high))
    return f"left:{left:.1f}%;width:{max(right - left, 0.0):.1f}%"
