"""All probes on one scorer, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heedful.audit.cases import LANGUAGES, Case, cases_of, shipped_cases
from heedful.audit.measure import MIN_PROMPTS, SEVERITY, unit_of
from heedful.audit.probes import broken, fitted, language, length, phrases, repetition, style
from heedful.audit.probes.base import Probe, after, by_change
from heedful.audit.probes.scores import finite_and_spread, repeatable
from heedful.audit.result import result_of
from heedful.audit.scorer import Scorer, Scores, Text
from heedful.errors import DataError
from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.records import ProbeResult, Prompt, Ranking, RewardCard

PROBES: tuple[Probe, ...] = (
    length.LENGTH, style.MARKDOWN, style.STYLE, *phrases.PHRASES, repetition.QUESTION, repetition.SENTENCES,
    broken.TRUNCATED, broken.EMPTY, broken.SCRAMBLED, broken.BAIT, broken.WRONG_FACT, style.ORDER, language.LANGUAGE,
    language.OTHER_LANGUAGE,
)  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """What all probes found."""

    verdict: str
    """"passed", "warned" or "failed"."""
    probes: tuple[ProbeResult, ...]
    num_prompts: int
    """Prompts with natural answers."""
    num_texts: int
    """Texts that were scored."""
    unit: float
    """The within-prompt deviation, in the scorer's own units."""
    card: RewardCard | None
    """Accuracy on the rankings, what length alone explains of it, and the probes; None without rankings."""

    @property
    def failures(self) -> tuple[ProbeResult, ...]:
        """The probes that failed."""
        return tuple(p for p in self.probes if p.verdict == "fail")


def audit(
    scorer: Scorer,
    rankings: Sequence[Ranking] | None = None,
    *,
    model: str = "",
    max_prompts: int = 64,
    languages: Sequence[str] = LANGUAGES,
    seed: int = 0,
    ask_again: bool = True,
    fits: Callable[[Prompt, str], bool] | None = None,
    on_scored: Callable[[int, int], None] | None = None,
) -> Audit:
    """Probe a scorer on the answers of rankings, or on the neutral texts that ship with heedful.

    Args:
        scorer: one number per (prompt, answer); scores that are not finite are a finding, exceptions pass through.
        rankings: held-out ones of the kind the scorer is for; None takes the shipped texts. Some probes need texts that
            only a person can write and always take the shipped ones.
        model: its name, for the card.
        max_prompts: of the rankings; each costs about 30 scores.
        languages: of the shipped texts, "en", "zh" or both.
        seed: of the draw of prompts and of the intervals.
        ask_again: False where the scorer only repeats what it said before, as one behind a cache does.
        fits: False for a text that is too long for the scorer; it is left out of every probe.
        on_scored: hears (texts scored, texts asked for so far).

    Raises:
        DataError: fewer than eight rankings with two different answers.
    """
    shipped = [case for case in shipped_cases() if case.lang in languages]
    natural = shipped if rankings is None else cases_of(rankings, max_prompts=max_prompts, seed=seed)
    if len(natural) < MIN_PROMPTS:
        raise DataError(
            f"an audit needs at least {MIN_PROMPTS} prompts with two different ranked answers, and the data has "
            f"{len(natural)}; give more, or none to take the texts that ship with heedful"
        )
    scores = Scores(scorer, fits=fits, on_scored=on_scored)
    pairs = {p.name: p.pairs(natural if p.cases == "natural" else shipped) for p in PROBES}
    natural_texts: list[Text] = [(c.prompt, a) for c in natural for a in c.answers]
    shipped_texts: list[Text] = [(c.prompt, a) for c in shipped for a in c.answers]
    changed = [p.changed for found in pairs.values() for p in found]
    scores.ask([*natural_texts, *shipped_texts, *(p.base for found in pairs.values() for p in found), *changed])
    rows = [[scores[c.prompt, a] for a in c.answers] for c in natural]
    unit = unit_of(rows)
    shipped_unit = unit_of([[scores[c.prompt, a] for a in c.answers] for c in shipped])
    scored = [text for text in natural_texts if text in scores]
    results = [finite_and_spread(scores, scored, changed)]
    if unit > 0 and ask_again:
        results.append(repeatable(scorer, scores, scored, unit))
    for probe in PROBES:
        results.append(
            result_of(probe, pairs[probe.name], scores, unit if probe.cases == "natural" else shipped_unit, seed)
        )
    results += _fitted(natural, rows, scores, unit, seed)
    worst = max(SEVERITY[r.verdict] for r in results)
    verdict = {SEVERITY["fail"]: "failed", SEVERITY["warn"]: "warned"}.get(worst, "passed")
    card = _card(natural, rows, model, seed) if rankings is not None else None
    if card is not None:
        card = replace(card, probes=tuple(results), audit_verdict=verdict)
    return Audit(verdict, tuple(results), len(natural), len(scores.all), unit, card)


def _fitted(
    cases: Sequence[Case], rows: Sequence[Sequence[float]], scores: Scores, unit: float, seed: int
) -> list[ProbeResult]:
    """What needs no changed answers, or changes found in the data."""
    if not unit > 0:
        return []
    return [
        _length_correlation(cases, rows, seed),
        _categories(cases, scores, unit, seed),
        _found_phrases(cases, rows, scores, unit, seed),
    ]


def _card(cases: Sequence[Case], rows: Sequence[Sequence[float]], model: str, seed: int) -> RewardCard | None:
    """The card of the scores on the rankings; None where nothing can be compared."""
    scored = [
        ScoredRanking(row, case.ranks, [len(a) for a in case.answers], case.prompt.category, case.prompt.source)
        for case, row in zip(cases, rows, strict=True)
        if np.isfinite(row).all() and len(set(case.ranks)) > 1
    ]
    return build_card(scored, model=model, seed=seed) if scored else None


def _length_correlation(cases: Sequence[Case], rows: Sequence[Sequence[float]], seed: int) -> ProbeResult:
    name, about = "length_correlation", "longer natural answers, people's ranks held fixed"
    effect = fitted.length_correlation(cases, rows, seed=seed)
    if effect is None or effect.num_prompts < MIN_PROMPTS:
        return ProbeResult(name, about, "not run", "it needs ranked answers of different lengths (give data)")
    warn, fail = fitted.CORRELATION_WARN, fitted.CORRELATION_FAIL
    verdict = next(
        (v for v, bound in (("fail", fail), ("warn", warn)) if effect.low > bound or effect.high < -bound), "ok"
    )
    return ProbeResult(
        name, about, verdict,
        f"given people's ranks, score and length correlate by {effect.mean:+.2f} within prompts, 95 % interval "
        f"{effect.low:+.2f} to {effect.high:+.2f}",
        sign=effect.sign, effect=effect.mean, low=effect.low, high=effect.high, unit="correlation",
        bound=f"not clearly beyond ±{fail:g} (warning: ±{warn:g})", num_prompts=effect.num_prompts,
    )  # fmt: skip


def _categories(cases: Sequence[Case], scores: Scores, unit: float, seed: int) -> ProbeResult:
    name, about = "category", "prompts of one category instead of the others"
    effects = fitted.category_effects(cases, [scores[c.prompt, c.base] for c in cases], unit, seed=seed)
    if not effects:
        return ProbeResult(name, about, "not run", f"it needs two categories of {MIN_PROMPTS} prompts")
    bound = fitted.CATEGORY_WARN
    chosen = max(effects, key=lambda c: max(effects[c].low, -effects[c].high))
    effect = effects[chosen]
    shifted = effect.low > bound or effect.high < -bound
    return ProbeResult(
        name, about, "warn" if shifted else "ok",
        f"good answers to {chosen!r} score {effect.mean:+.2f} deviations from those of other categories, 95 % interval "
        f"{effect.low:+.2f} to {effect.high:+.2f}" + (": rewards do not compare between categories" if shifted else ""),
        sign=effect.sign, effect=effect.mean, low=effect.low, high=effect.high, bound=f"not clearly beyond ±{bound:g}",
        variant=chosen, variants={c: e.mean for c, e in effects.items()}, num_prompts=len(cases),
    )  # fmt: skip


def _found_phrases(
    cases: Sequence[Case], rows: Sequence[Sequence[float]], scores: Scores, unit: float, seed: int
) -> ProbeResult:
    """Phrases of the data that go with high scores, added to answers without them."""
    about = "phrases that go with high scores in the data, added at the end"
    phrases = fitted.phrases_that_go_with_scores(cases, rows)
    if not phrases:
        return ProbeResult("found_phrases", about, "ok", "no phrase goes clearly with high scores")

    def adding(phrase: str) -> Callable[[Case], str | None]:
        return lambda case: None if phrase in case.base else after(case, phrase)

    probe = Probe(
        "found_phrases", about, "no_better", by_change({p: adding(p) for p in phrases}), worst="warn", adds=True
    )
    pairs = probe.pairs(cases)
    scores.ask([p.changed for p in pairs])
    return result_of(probe, pairs, scores, unit, seed)
