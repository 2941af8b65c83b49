"""The two pages on PPO are complete and name nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from heedful.config.ppo import BestConfig, PPOConfig
from heedful.config.read import dotted_keys, load_recipe
from heedful.runs.metrics import HISTOGRAMS, METRICS, lookup

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONTROLS, REFERENCE = ((DOCS / name).read_text(encoding="utf-8") for name in ("11-ppo.md", "11b-ppo-reference.md"))
SECTIONS_IN_WORDS = ("optimizer", "value_optimizer")
"""Described once for both: their keys stand without the section's name."""


def test_every_key_is_explained():
    words = set(re.findall(r"[a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)*", CONTROLS))
    for key in dotted_keys(PPOConfig):
        section, _, last = key.rpartition(".")
        known = key in words or last == "<name>" or (section in SECTIONS_IN_WORDS and last in words)
        known |= section.startswith("rewards") and last in words  # in the example of several parts
        known |= any(other.startswith(f"{key}.") for other in words)  # a section whose keys are all there
        assert known, f"docs/11-ppo.md does not explain ppo.{key}"


def test_every_metric_that_the_pages_name_exists():
    for page in (CONTROLS, REFERENCE):
        for name in re.findall(r"(?<![\w/-])((?:ppo|run)/[a-z_0-9]+(?:/(?:<part>|[a-z_]+))?)", page):
            concrete = name.replace("<part>", "reward_model")
            assert lookup(concrete) or lookup(concrete, HISTOGRAMS), f"{name} is no metric and no histogram"


def test_the_reference_looks_at_every_alarming_metric():
    """A number of PPO that has a healthy range stands on one of the two pages; clocks and rates of learning aside."""
    for metric in METRICS:
        if metric.name.startswith("ppo/") and metric.healthy and not metric.is_timing:
            if metric.name.endswith(("_learning_rate", "_gradient_norm", "_mean")):
                continue
            assert metric.name in CONTROLS + REFERENCE, metric.name


def test_the_table_of_published_settings_is_true():
    rows = re.findall(r"^\| `([\w-]+)` \| (.+)\|$", REFERENCE, re.M)
    assert {name for name, _ in rows} == {p.stem for p in (DOCS.parent / "recipes").glob("*.yaml")}
    for name, rest in rows:
        leash, where, scores, clips, credit, updates, rates, _ = (cell.strip() for cell in rest.split(" | ", 7))
        ppo = load_recipe(name).ppo
        assert leash.startswith(f"{ppo.kl.coefficient:g}"), name
        assert (f"→ {ppo.kl.target:g} nats" in leash) if ppo.kl.target else ("→" not in leash), name
        assert ("guard" in leash, "outliers" in leash) == (bool(ppo.kl.guard), bool(ppo.kl.outliers)), name
        assert where == ("exact + exact" if ppo.kl.in_loss == "exact" else f"{ppo.kl.in_reward}, reward"), name
        scaling = {"none": "raw"}.get(ppo.score_scaling, ppo.score_scaling)
        assert scores == (f"{scaling}, ± {ppo.score_clip:g}" if ppo.score_clip else scaling), name
        assert clips == f"{ppo.clip_high:g}, {ppo.value_clip:g}" and ppo.clip_low == ppo.clip_high, name
        assert credit == f"{ppo.gamma:g}, {ppo.lam:g}", name
        assert updates == (f"{ppo.epochs} × {ppo.minibatches}" if ppo.minibatches > 1 else "1"), name
        given = [float(x) for x in re.findall(r"[\d.]+e-\d+", rates)]
        assert given == [ppo.optimizer.learning_rate, ppo.value_optimizer.learning_rate], name


def test_every_default_on_the_page_is_the_recipes():
    in_words = {"rewards": "the run's reward model", "value_lam": "as `lam`", "kl.in_loss": "none"}
    seen = 0
    for keys, defaults in re.findall(r"^\| (`[a-z_., `]+`) \| ([^|]+?) \|", CONTROLS, re.M):
        names = re.findall(r"`([\w.]+)`", keys)
        if not set(names) <= set(dotted_keys(PPOConfig)):
            continue  # another table
        for name, shown in zip(names, defaults.split(", "), strict=True):
            assert shown == in_words.get(name) or _value(shown) == _default(name), name
            seen += 1
    assert seen > 40


def _default(key: str) -> object:
    """The default of a dotted key; that of its section where the section has one."""
    value: object = PPOConfig()
    for word in key.split("."):
        value = getattr(value, word) if value is not None else None
    if value is None and key.startswith("best."):
        value = getattr(BestConfig(), key.removeprefix("best."))
    return value


def _value(shown: str) -> object:
    words: dict[str, object] = {"none": None, "true": True, "false": False}
    if shown in words:
        return words[shown]
    return float(shown) if re.fullmatch(r"[\d.e-]+", shown) else shown
