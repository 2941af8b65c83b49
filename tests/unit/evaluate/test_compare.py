"""Win rates, differences, length control, pair accuracy and gold scorers against known cases."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from heedful.errors import ConfigError, DataError, EngineError
from heedful.evaluate.accuracy import length_accuracy, pair_accuracy
from heedful.evaluate.agreement import panel_agreement
from heedful.evaluate.compare import mean_difference, win_rate, win_rate_by_category
from heedful.evaluate.gold import load_scorer, score_answers
from heedful.evaluate.length_control import win_rate_at_equal_length
from heedful.records import Answer, Judgement, Message, Prompt, Ranking


def test_ANN_06_ties_are_half_a_win() -> None:
    result = win_rate([0, 0, 0, 0], [1, 1, 0, -1])
    assert (result.num_wins, result.num_ties, result.num_losses) == (2, 1, 1)
    assert result.rate == 0.625
    wide = win_rate([0, 0, 0, 0], [1, 1, 0, -1], tie_width=1.0)
    assert (wide.rate, wide.num_ties, wide.low, wide.high) == (0.5, 4, 0.5, 0.5)


def test_win_rate_is_deterministic_and_turns_round_with_its_sides() -> None:
    rng = np.random.default_rng(3)
    before, after = rng.normal(size=60), rng.normal(size=60) + 0.4
    there, back = win_rate(before, after, seed=5), win_rate(after, before, seed=5)
    assert there == win_rate(before, after, seed=5)
    assert there.rate == pytest.approx(1 - back.rate)
    assert (there.low, there.high) == pytest.approx((1 - back.high, 1 - back.low))
    assert there.low < there.rate < there.high


def test_win_rate_interval_has_the_width_of_theory_and_covers() -> None:
    wide = win_rate(np.zeros(100), np.array([1.0] * 70 + [-1.0] * 30))
    half_width = 1.96 * math.sqrt(0.7 * 0.3 / 100)
    assert wide.low == pytest.approx(0.7 - half_width, abs=0.015)
    assert wide.high == pytest.approx(0.7 + half_width, abs=0.015)
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        result = win_rate(np.zeros(80), np.where(rng.random(80) < 0.65, 1.0, -1.0))
        covered += result.low <= 0.65 <= result.high
    assert 0.90 <= covered / 200 <= 0.985


def test_win_rate_by_category_and_mean_difference() -> None:
    by = win_rate_by_category([0, 0, 0], [1, -1, 1], ["qa", "chat", "qa"])
    assert {c: w.rate for c, w in by.items()} == {"chat": 0.0, "qa": 1.0}
    difference = mean_difference([1.0, 2.0, 3.0], [2.0, 2.0, 5.0])
    assert difference.mean == 1.0 and difference.low < 1.0 < difference.high and difference.num_prompts == 3
    shift = mean_difference([1.0, 2.0], [1.5, 2.5])
    assert (shift.low, shift.high) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("before", "after", "message"), [([], [], "at least one"), ([1], [1, 2], "one score"), ([math.nan], [1], "finite")]
)
def test_win_rate_refuses_bad_scores(before: list[float], after: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        win_rate(before, after)
    with pytest.raises(DataError, match=message):
        mean_difference(before, after)


def _judged_by_length(effect: float, quality: float, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Wins drawn from sigmoid(quality + effect · d) where d, the log ratio of lengths, is 0.5 ± 0.5."""
    rng = np.random.default_rng(seed)
    before = rng.integers(20, 60, size=600)
    gap = rng.normal(0.5, 0.5, size=600)
    wins = rng.random(600) < 1 / (1 + np.exp(-(quality + effect * gap)))
    return np.where(wins, 1.0, -1.0), before, before * np.exp(gap)


def test_length_control_takes_out_what_length_explains() -> None:
    after, before_lengths, after_lengths = _judged_by_length(effect=3.0, quality=0.0)
    zeros = np.zeros(len(after))
    assert win_rate(zeros, after).rate > 0.7
    rate, low, high = win_rate_at_equal_length(zeros, after, before_lengths, after_lengths)
    assert low < 0.5 < high and rate == pytest.approx(0.5, abs=0.07)
    after, before_lengths, after_lengths = _judged_by_length(effect=0.0, quality=1.0)
    rate, low, high = win_rate_at_equal_length(zeros, after, before_lengths, after_lengths)
    assert low > 0.5 and rate == pytest.approx(1 / (1 + math.exp(-1)), abs=0.08)


def test_length_control_without_any_difference_in_length_is_the_win_rate() -> None:
    after = np.array([1.0] * 30 + [-1.0] * 10 + [0.0] * 10)
    rate, low, high = win_rate_at_equal_length(np.zeros(50), after, [9] * 50, [9] * 50)
    assert rate == pytest.approx((35 + 0.5) / 51, abs=1e-6) and low < rate < high  # half a win and half a loss added
    rate, _, high = win_rate_at_equal_length(np.zeros(9), np.ones(9), range(9), range(1, 10))
    assert 0.5 < rate < high < 1.0
    with pytest.raises(DataError, match="two lengths"):
        win_rate_at_equal_length([0], [1], [3, 4], [3])


def test_pair_accuracy_weighs_prompts_leaves_out_ties_and_halves_equal_scores() -> None:
    result = pair_accuracy([[3, 2, 1], [1, 2], [5, 5]], [[1, 2, 2], [1, 2], [2, 1]])
    # prompt 0: pairs (0,1) and (0,2) right, (1,2) tied in the labels; prompt 1: wrong; prompt 2: equal scores
    assert result.value == pytest.approx((1 + 0 + 0.5) / 3)
    assert (result.num_prompts, result.num_pairs) == (3, 4)
    assert result == pair_accuracy([[3, 2, 1], [1, 2], [5, 5]], [[1, 2, 2], [1, 2], [2, 1]])
    # tied groups say nothing and do not count as prompts
    assert pair_accuracy([[1, 0], [7, 7]], [[1, 2], [1, 1]]).num_prompts == 1


def test_REW_08_orientation() -> None:
    """Higher score = better, rank 1 = best; swapping chosen and rejected gives 1 - accuracy."""
    rng = np.random.default_rng(0)
    scores = [[1.0 + e, 0.0] for e in rng.normal(0, 0.5, size=64)]
    right = pair_accuracy(scores, [[1, 2]] * 64)
    swapped = pair_accuracy(scores, [[2, 1]] * 64)
    assert right.value >= 0.95
    assert swapped.value == pytest.approx(1 - right.value)
    assert (swapped.low, swapped.high) == pytest.approx((1 - right.high, 1 - right.low))


def test_length_accuracy_says_how_often_the_longer_wins() -> None:
    assert length_accuracy([[10, 3], [2, 8]], [[1, 2], [1, 2]]).value == 0.5


@pytest.mark.parametrize(
    ("scores", "ranks", "message"),
    [
        ([[1, 2]], [], "1 lists of scores"),
        ([[1, 2]], [[1]], "prompt 0: 2 scores"),
        ([[1, math.inf]], [[1, 2]], "not finite"),
        ([[1, 2]], [[1, 1]], "every pair"),
        ([], [], "every pair"),
    ],
)
def test_pair_accuracy_refuses(scores: list, ranks: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pair_accuracy(scores, ranks)


def test_panel_agreement_on_a_hand_worked_group() -> None:
    def gold(prompt: Prompt, answer: str, *, finished: bool) -> float:
        return float(answer) if finished else -9.0

    group = Ranking(
        "g",
        (Message("user", "?"),),
        (Answer("a", "3"), Answer("b", "2"), Answer("c", "5", flags=("cut",))),
        (Judgement("x", {"a": 1, "b": 2, "c": 3}), Judgement("y", {"a": 1, "b": 1, "c": 2}),
         Judgement("z", {"a": 2, "b": 1, "c": 3})),
    )  # fmt: skip
    found = panel_agreement([group], gold)
    assert found["annotator_vs_gold"] == pytest.approx((1 + 1 + 2 / 3) / 3)  # y ties a and b: two pairs, both right
    assert found["majority_vs_gold"] == 1.0  # a-b is split and left out; a and b are above the cut answer
    # x-y: both pairs of y right; x-z: 2 of 3; y-z: the tie counts half, 2.5 of 3
    assert found["annotator_vs_annotator"] == pytest.approx((1 + 2 / 3 + 2.5 / 3) / 3)


def test_load_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = load_scorer("heedful.evaluate.panel:utility")
    prompt = Prompt("p7", (Message("user", "Hi"),), "chat")
    assert score_answers(scorer, [prompt, prompt], ["Hi there.", "Hi there."], [True, False])[1] < scorer(
        prompt, "Hi there.", finished=True
    )
    (tmp_path / "gold_of_test.py").write_text(
        "number = 3\n"
        "def one(prompt): return 1\n"
        "def nan(prompt, answer, finished): return float('nan')\n"
        "def fails(prompt, answer, finished): raise KeyError('x')\n"
    )
    (tmp_path / "broken_gold_of_test.py").write_text("1/0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in [
        ("heedful.evaluate.panel", "module:function"),
        (":utility", "module:function"),
        ("no_such_module_here:f", "cannot import"),
        ("broken_gold_of_test:f", "division by zero"),
        ("gold_of_test:missing", "no function 'missing'"),
        ("gold_of_test:number", "no function 'number'"),
        ("gold_of_test:one", "must accept"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_scorer(name)
    for name, message in [("nan", "p7"), ("fails", "p7.*KeyError")]:
        with pytest.raises(EngineError, match=message):
            score_answers(load_scorer(f"gold_of_test:{name}"), [prompt], ["x"], [True])
    sys.modules.pop("gold_of_test")


def test_evaluate_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys, heedful.evaluate.panel, heedful.evaluate.compare, heedful.evaluate.accuracy, "
        "heedful.evaluate.gold, heedful.evaluate.length_control, heedful.evaluate.agreement; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
