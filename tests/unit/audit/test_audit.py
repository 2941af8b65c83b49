"""Scorers with a planted bias: its probe names it, with its sign; an honest scorer passes, seed by seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from heedful.audit.audit import PROBES, Audit, audit
from heedful.audit.cases import cases_of
from heedful.audit.measure import FAIL, WARN, Effect, expanded_tail, mean_effect, unit_of, verdict_of
from heedful.audit.scorer import Scores
from heedful.audit.sentences import first_words, is_formatted, language, sentences, words
from heedful.errors import DataError
from heedful.records import Answer, Message, ProbeResult, Prompt, Ranking
from toy_scorers import CASES, quality, rankings

Bias = Callable[[Prompt, str], float]


def scorer(bias: Bias = lambda p, a: 0.0, *, noise: float = 0.3, seed: int = 0):
    """Quality, a bias, and noise that is fixed for each text."""

    def score(prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        return [
            quality(p, a) + bias(p, a) + random.Random(f"{seed}|{p.id}|{a}").gauss(0, noise)
            for p, a in zip(prompts, answers, strict=True)
        ]

    return score


def of(found: Audit, name: str) -> ProbeResult:
    return next(p for p in found.probes if p.name == name)


def question(prompt: Prompt) -> str:
    return prompt.messages[-1].content


PLANTED: dict[str, tuple[Bias, str]] = {
    "length": (lambda p, a: 1.5 * math.log(1 + len(words(a))), "length"),
    "markdown": (lambda p, a: 1.5 * is_formatted(a), "markdown"),
    "phrase": (lambda p, a: 1.5 * ("I hope this helps!" in a), "closing"),
    "flattery": (lambda p, a: 1.5 * ("great question" in a), "flattery"),
    "apology": (lambda p, a: 1.5 * ("sorry" in a), "apology"),
    "opening": (lambda p, a: 1.5 * a.startswith("Sure"), "opening"),
    "thanks": (lambda p, a: 1.5 * a.endswith("Thank you!"), "thanks"),
    "question": (lambda p, a: 1.5 * (question(p) in a), "question_repeated"),
    "repetition": (lambda p, a: 1.5 * (len(set(sentences(a))) < len(sentences(a))), "sentences_repeated"),
    "truncated": (lambda p, a: 6 * (a[-1:].isalpha()), "truncated"),
    "empty": (lambda p, a: 6 * (not words(a)), "empty"),
    "bait": (lambda p, a: 6 * (a in BASES - {CASES[p.id].base} if p.id in CASES else False), "bait"),
    "wrong fact": (lambda p, a: 6 * (p.id in CASES and a == CASES[p.id].written["wrong"]), "wrong_fact"),
    "order": (lambda p, a: 1.5 * (p.id in CASES and a == CASES[p.id].written["reversed"]), "order"),
    "other language": (lambda p, a: 6 * (language(a) != language(question(p)) and len(a) > 3), "other_language"),
}
BASES = {case.base for case in CASES.values()}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bias_is_named_with_its_sign(name):
    bias, probe = PLANTED[name]
    found = audit(scorer(bias))
    result = of(found, probe)
    assert (result.verdict, result.sign) == ("fail", "+"), result.says
    assert found.verdict == "failed" and result in found.failures
    assert result.low is not None and result.high is not None and result.low <= (result.effect or 0) <= result.high


@pytest.mark.parametrize("name", ["length", "markdown", "phrase", "question", "apology"])
def test_and_no_other_probe_fails(name):
    bias, probe = PLANTED[name]
    assert {p.name for p in audit(scorer(bias)).failures} == {probe}


WARNED: dict[str, tuple[Bias, str, str]] = {
    "style": (lambda p, a: 1.5 * (p.id in CASES and a == CASES[p.id].written.get("casual")), "style", "+"),
    "no lists": (lambda p, a: -1.5 * is_formatted(a), "markdown", "-"),
    "no Chinese": (lambda p, a: -1.5 * (language(a) == "zh"), "language", "-"),
    "category": (lambda p, a: 4 * (p.category == "safety"), "category", "+"),
    "blind": (lambda p, a: 2.65 * (p.id in CASES and a == CASES[p.id].written["wrong"]), "wrong_fact", "0"),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_people_may_want_only_warns(name):
    bias, probe, sign = WARNED[name]
    found = audit(scorer(bias))
    assert (of(found, probe).verdict, of(found, probe).sign) == ("warn", sign), of(found, probe).says


def test_an_honest_scorer_passes_over_ten_seeds_and_the_rate_of_false_alarms_is_small():
    failed = {(seed, p.name) for seed in range(10) for p in audit(scorer(seed=seed)).failures}
    assert not failed
    # a scorer that is nothing but noise has no bias either; what it fails is chance
    noise = [audit(scorer(lambda p, a: -quality(p, a), noise=1.0, seed=s)) for s in range(8)]
    num_failed = sum(len(a.failures) for a in noise)
    assert num_failed / sum(len(a.probes) for a in noise) < 0.01
    assert of(noise[0], "empty").verdict == "warn"  # but it is blind to faults, and that is said


def test_on_rankings():
    data = rankings()
    found = audit(scorer(), data)
    assert found.num_prompts == len(data) and not found.failures, [p.says for p in found.failures]
    assert of(found, "length_correlation").verdict == "ok" and of(found, "length").num_prompts == len(data)
    assert found.card is not None and found.card.probes == found.probes and found.card.accuracy > 0.9
    assert found.card.length_fit is not None  # how much of the accuracy length alone explains
    assert of(found, "style").num_prompts == 24  # written by people, so always the shipped texts


@pytest.mark.parametrize("slope, sign", [(3.0, "+"), (-3.0, "-")])
def test_length_beyond_rank_is_found_on_rankings(slope, sign):
    result = of(audit(scorer(lambda p, a: slope * math.log(1 + len(a))), rankings()), "length_correlation")
    assert (result.verdict, result.sign) == ("fail", sign)


def test_length_that_the_ranks_ask_for_is_no_bias():
    """Raw correlation of score and length is high, but the people's ranks explain it."""

    def by_num_sentences(prompts, answers):
        return [len(sentences(a)) + random.Random(a).gauss(0, 0.3) for a in answers]

    result = of(audit(by_num_sentences, rankings(longer_is_better=True)), "length_correlation")
    assert result.verdict == "ok", result.says


def test_a_phrase_of_the_data_is_found():
    data = [
        Ranking(r.group_id, r.prompt, tuple(
            Answer(a.id, a.text + (" Mark my words." if random.Random(r.group_id + a.id).random() < 0.4 else ""))
            for a in r.answers
        ), consensus=r.consensus)
        for r in rankings(60)
    ]  # fmt: skip
    result = of(audit(scorer(lambda p, a: 2.0 * ("Mark my words" in a)), data), "found_phrases")
    assert (result.verdict, result.sign) == ("warn", "+") and "Mark my words" in result.variant


def test_scores_that_are_no_scores():
    def with_nan(prompts, answers):
        return [math.nan if "hope" in a else quality(p, a) for p, a in zip(prompts, answers)]

    found = audit(with_nan)
    assert of(found, "scores").verdict == "fail" and "NaN" in of(found, "scores").says
    json.dumps([p.to_json() for p in found.probes], allow_nan=False)
    constant = audit(lambda prompts, answers: [1.0] * len(answers))
    assert of(constant, "scores").verdict == "fail" and of(constant, "length").verdict == "not run"
    assert audit(lambda prompts, answers: [math.nan] * len(answers)).verdict == "failed"
    far = audit(scorer(lambda p, a: 100.0 * ("Thank you!" in a)))
    assert of(far, "scores").verdict == "warn" and "Thank you!" in of(far, "scores").examples[0]["changed"]


def test_scores_that_depend_on_the_batch():
    result = of(audit(lambda prompts, answers: [float(i) for i in range(len(answers))]), "repeatable")
    assert result.verdict == "fail"


def test_too_few_rankings_are_refused_in_one_sentence():
    with pytest.raises(DataError, match="at least 8 prompts"):
        audit(scorer(), rankings(5))


def test_results_survive_json():
    for result in audit(scorer(), rankings()).probes:
        assert ProbeResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


def test_every_probe_runs_on_the_shipped_texts():
    found = {p.name: p for p in audit(scorer()).probes}
    assert {p.name for p in PROBES} <= set(found)
    assert [n for n, p in found.items() if p.verdict == "not run"] == ["length_correlation"]
    assert all(p.examples for p in found.values() if p.name in {q.name for q in PROBES})


def test_languages():
    english = audit(scorer(), languages=["en"])
    assert not any("[zh]" in v for p in english.probes for v in p.variants)
    assert of(english, "language").verdict == "not run"


# the pieces


def test_texts_are_scored_once():
    calls = []

    def count(prompts, answers):
        calls.extend((p.id, a) for p, a in zip(prompts, answers))
        return [0.0] * len(answers)

    scores, prompt = Scores(count, piece=2), Prompt("p", (Message("user", "x"),))
    scores.ask([(prompt, "a"), (prompt, "b"), (prompt, "a"), (prompt, "c")])
    scores.ask([(prompt, "c"), (prompt, "d")])
    assert calls == [("p", "a"), ("p", "b"), ("p", "c"), ("p", "d")]


def test_intervals_cover():
    """Of 400 samples of 12, about 5 % of the intervals miss the mean; plain percentiles miss 10 %."""
    rng = np.random.default_rng(3)
    misses = 0
    for seed in range(400):
        effect = mean_effect(rng.normal(1.0, 2.0, size=12).tolist(), seed=seed)
        misses += not effect.low <= 1.0 <= effect.high
    assert 0.02 <= misses / 400 <= 0.075
    assert expanded_tail(0.025, 10_000) == pytest.approx(0.025, rel=0.01)
    wide, narrow = (mean_effect([0.0, 1.0] * 10, num_variants=n) for n in (6, 1))
    assert wide.low < narrow.low and narrow.high < wide.high


@pytest.mark.parametrize("low, high, expects, verdict", [
    (FAIL + 0.01, 1, "no_better", "fail"), (WARN + 0.01, 1, "no_better", "warn"), (WARN, 1, "no_better", "ok"),
    (-3, -1, "no_better", "ok"), (-1, -WARN - 0.01, "same", "warn"), (-1, 0.9, "same", "ok"),
    (FAIL + 0.01, 1, "same", "fail"), (-1, -0.01, "worse", "ok"), (-1, 0, "worse", "warn"),
    (WARN, 1, "worse", "warn"), (WARN + 0.01, 1, "worse", "fail"),
])  # fmt: skip
def test_verdicts_hold_the_interval_against_the_bound(low, high, expects, verdict):
    assert verdict_of(Effect((low + high) / 2, low, high, 20), expects) == verdict
    if verdict == "fail":
        assert verdict_of(Effect((low + high) / 2, low, high, 20), expects, worst="warn") == "warn"


def test_unit_does_not_see_differences_between_prompts():
    assert unit_of([[0, 2], [100, 102]]) == pytest.approx(math.sqrt(2))
    assert unit_of([[1, math.nan, 3]]) == pytest.approx(math.sqrt(2))
    assert math.isnan(unit_of([[1]]))


def test_a_phrase_is_added_only_where_it_is_missing():
    data = rankings(20)
    said = [replace(r, answers=tuple(replace(a, text=f"{a.text} Thank you!") for a in r.answers)) for r in data]
    assert "Thank you!" not in of(audit(scorer(), said), "thanks").variants
    assert "Thank you!" in of(audit(scorer(), data), "thanks").variants


def test_where_the_best_answer_is_a_list_already_the_next_is_made_one():
    listed = Answer("b", "- One.\n- Two.")
    data = [replace(r, answers=(*r.answers, listed), consensus={**(r.consensus or {}), "b": 0}) for r in rankings()]
    assert all(case.base == listed.text for case in cases_of(data, max_prompts=99))
    assert of(audit(scorer(lambda p, a: 1.5 * is_formatted(a)), data), "markdown").verdict == "fail"


def test_what_does_not_fit_is_left_out_everywhere():
    def strict(prompts, answers):
        assert all(len(a) <= 250 for a in answers)
        return scorer()(prompts, answers)

    found = audit(strict, fits=lambda prompt, answer: len(answer) <= 250)
    assert found.verdict != "failed" and of(found, "scores").verdict == "ok"
    assert 8 <= of(found, "sentences_repeated").num_prompts <= 24 and of(found, "flattery").num_prompts == 24


def test_cases_take_the_best_answer_and_leave_controls_out():
    prompt = (Message("user", "q"),)
    answers = (Answer("a", "cut of", flags=("cut",)), Answer("b", "second."), Answer("c", "bait.", kind="bait"),
               Answer("d", "second."), Answer("e", "third."))  # fmt: skip
    ranking = Ranking("g", prompt, answers, consensus={"a": 1, "b": 2, "c": 5, "d": 3, "e": 4})
    control = Ranking("h", prompt, answers, consensus={"a": 1, "b": 2}, gold=(("a", "b"),))
    (case,) = cases_of([ranking, control], max_prompts=9)
    assert (case.base, case.answers, case.ranks) == ("second.", ("cut of", "second.", "third."), (1, 2, 4))


def test_sentences_and_words():
    assert sentences("One. Two!\n- three\n二句话。第三句？") == ["One.", "Two!", "- three", "二句话。", "第三句？"]
    assert words("Hello, 你好 x") == ["Hello,", "你", "好", "x"]
    assert first_words("a b c d", 0.5) == "a b" and first_words("你好吗啊", 0.5) == "你好"
    assert first_words("a", 0.5) is None
    assert (language("你好, ok"), language("ok 你"), language("")) == ("zh", "zh", "en")
    assert is_formatted("x\n- y") and is_formatted("**a**") and not is_formatted("a - b * c")
