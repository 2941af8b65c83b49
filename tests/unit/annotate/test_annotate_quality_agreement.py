"""annotate/quality/agreement.py against hand-worked cases, scipy, evalica's own interval and a slow loop."""

import itertools

import evalica
import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau, rankdata, spearmanr

from heedful.annotate.quality import agreement as quality
from heedful.annotate.quality.agreement import agreement, alpha, kendall_w, pair_rate, tau_of_pairs
from heedful.annotate.quality.pairs import verdicts
from heedful.annotate.submitted import Submitted


def ranking(who, item, ranks, **more):
    answers = [f"a{i}" for i in range(len(ranks))]
    return Submitted(
        annotator=who, group_id=item, category="chat", round=0, lang="en",
        ranks={a: int(r) for a, r in zip(answers, ranks) if r}, slots={a: i for i, a in enumerate(answers)},
        num_characters=dict.fromkeys(answers, 100), policies=dict.fromkeys(answers, "p"), at=0.0, **more,
    )  # fmt: skip


def noisy(num_items, num_answers, *, noise=1.0, people="rst", seed=0, prefix="i"):
    rng = np.random.default_rng(seed)
    rows = []
    for item in range(num_items):
        worth = rng.normal(size=num_answers)
        for who in people:
            seen = worth + noise * rng.normal(size=num_answers)
            rows.append(ranking(who, f"{prefix}{item}", rankdata(-np.round(seen, 1), method="dense")))
    return rows


def test_pair_agreement_counts_a_tie_as_half():
    two = [ranking("r", "i", [1, 2, 3]), ranking("s", "i", [1, 3, 2])]
    assert pair_rate(verdicts(two)).value == pytest.approx(2 / 3)
    tied = [ranking("r", "i", [1, 2, 3]), ranking("s", "i", [1, 2, 2])]
    assert pair_rate(verdicts(tied)).value == pytest.approx(2.5 / 3)
    assert pair_rate(verdicts(tied), decided=True).value == 1.0
    many = [*two, ranking("t", "i", [3, 2, 1])]  # r and s 2 of 3, r and t 0 of 3, s and t 1 of 3
    assert pair_rate(verdicts(many)).value == pytest.approx(3 / 9) and pair_rate(verdicts(many)).num == 9


def test_pair_agreement_against_a_slow_loop():
    rows = noisy(12, 4, people="rstu")
    agreed = []
    for one, other in itertools.combinations(rows, 2):
        if one.group_id == other.group_id:
            for x, y in itertools.combinations(sorted(one.ranks), 2):
                signs = [np.sign(s.ranks[y] - s.ranks[x]) for s in (one, other)]
                agreed.append((1 + signs[0] * signs[1]) / 2)
    figure = pair_rate(verdicts(rows))
    assert figure.value == pytest.approx(np.mean(agreed)) and figure.num == len(agreed)
    assert figure.low < figure.value < figure.high and figure.num_prompts == 12


def test_tau_b_of_two_people_is_scipys_and_pooled_by_counts():
    for seed in range(5):
        rows = noisy(1, 6, people="rs", seed=seed)
        ((_, _, tau, _),) = tau_of_pairs(verdicts(rows), min_prompts=1)
        x, y = (list(s.ranks.values()) for s in rows)
        assert tau == pytest.approx(kendalltau(x, y).statistic)
    rows = noisy(30, 4, people="rs")
    signs = {who: [] for who in "rs"}
    for s in rows:
        signs[s.annotator] += [np.sign(s.ranks[y] - s.ranks[x]) for x, y in itertools.combinations(sorted(s.ranks), 2)]
    r, s = (np.array(signs[who]) for who in "rs")
    ((_, _, tau, num),) = tau_of_pairs(verdicts(rows))
    assert tau == pytest.approx((r * s).sum() / np.sqrt((r**2).sum() * (s**2).sum())) and num == 30


def test_tau_of_pairs_knows_who_shares_what():
    rows = [*noisy(6, 4, people="rs"), *noisy(6, 4, people="st", prefix="j"), *noisy(2, 4, people="rt", prefix="k")]
    assert [(one, other, num) for one, other, _, num in tau_of_pairs(verdicts(rows))] == [("r", "s", 6), ("s", "t", 6)]
    assert tau_of_pairs(verdicts([])) == []


def test_kendalls_w_corrected_for_ties():
    by_hand = [ranking(who, "i", row) for who, row in zip("rst", ([1, 2, 3], [1, 3, 2], [1, 2, 3]))]
    # rank sums 3, 7, 8; S = 14; W = 12 S / (m² (n³ - n)) = 168 / 216
    w, spearman = kendall_w(by_hand)
    assert w == {"3": pytest.approx(7 / 9)} and spearman.value == pytest.approx((3 * 7 / 9 - 1) / 2)
    tied = [ranking("r", "i", [1, 2, 2, 3, 3]), ranking("s", "i", [1, 1, 2, 3, 4])]
    # mid-ranks 1 2.5 2.5 4.5 4.5 and 1.5 1.5 3 4 5; sums 2.5 4 5.5 8.5 9.5; S = 35; Σ (t³ - t) = 12 + 6;
    # W = 12 S / (m² (n³ - n) - m Σ)
    assert kendall_w(tied)[0]["2"] == pytest.approx(12 * 35 / (4 * 120 - 2 * 18))
    untied = [ranking("r", "i", [1, 2, 3, 4]), ranking("s", "i", [2, 1, 4, 3])]
    assert kendall_w(untied)[1].value == pytest.approx(spearmanr([1, 2, 3, 4], [2, 1, 4, 3]).statistic)


def test_random_raters_reach_one_mth_of_w_and_no_correlation():
    rows = noisy(400, 4, noise=1e6, people="rst")
    w, spearman = kendall_w(rows)
    assert w["3"] == pytest.approx(1 / 3, abs=0.04) and spearman.low < 0 < spearman.high


def test_alpha_by_hand():
    """Interval α = 1 - D_o / D_e; two people, two pairs of answers of one item each, and both ways round."""
    rows = [*(ranking(who, "i", [1, 2]) for who in "rs"), ranking("r", "j", [1, 2]), ranking("s", "j", [2, 1])]
    # values +1 +1 | +1 -1 and their mirrors: D_o = (0 + 4 + 0 + 4) / 4 = 2; of 8 values, 4 are +1 and 4 are -1:
    # D_e = 2·4·4·4 / (8·7) = 16/7
    assert alpha(verdicts(rows)).value == pytest.approx(1 - 2 * 7 / 16)


def test_alpha_does_not_know_the_names_of_the_answers():
    rows = noisy(40, 4)
    renamed = [ranking(s.annotator, s.group_id, list(s.ranks.values())[::-1]) for s in rows]
    by_worth = []  # answer a0 is always the best: one-sided names must not look like agreement by chance
    for item, group in itertools.groupby(rows, key=lambda s: s.group_id):
        group = list(group)
        order = np.argsort(np.sum([list(s.ranks.values()) for s in group], axis=0))
        by_worth += [ranking(s.annotator, item, np.array(list(s.ranks.values()))[order]) for s in group]
    values = [alpha(verdicts(x)).value for x in (rows, renamed, by_worth)]
    assert values == pytest.approx([values[0]] * 3)


def test_pitfall_1_items_of_different_size_do_not_raise_alpha():
    small, large = noisy(250, 4, seed=1), noisy(100, 9, seed=2, prefix="j")
    apart = [alpha(verdicts(x)).value for x in (small, large)]
    together = alpha(verdicts(small + large)).value
    assert max(*apart, together) - min(*apart, together) < 0.05
    raw = [
        evalica.alpha(_raw_ranks(x), distance="interval").alpha for x in (small, large, small + large)
    ]  # what is not done: ranks as they are
    assert raw[2] > max(raw[:2]) + 0.04


def _raw_ranks(rows):
    cells = {(s.annotator, f"{s.group_id} {a}"): r for s in rows for a, r in s.ranks.items()}
    return pd.Series(cells).unstack()


def test_pitfall_2_prompts_are_resampled_not_verdicts():
    rows = noisy(60, 9, seed=3)
    figure = alpha(verdicts(rows))
    table = verdicts(rows)
    cells = np.full((3, table.num_units), np.nan)
    cells[table.rater_V, table.unit_V] = table.verdict_V
    too_narrow = evalica.alpha_bootstrap(pd.DataFrame(cells), distance="interval", n_resamples=500, random_state=0)
    assert figure.high - figure.low > 1.3 * (too_narrow.high - too_narrow.low)


def test_the_interval_of_alpha_comes_from_the_same_number_as_evalicas(monkeypatch):
    """The identity behind the resamples, with missing verdicts and different numbers of people."""
    rows = [s for i, s in enumerate(noisy(20, 4, people="rstu")) if i % 5]
    monkeypatch.setattr(quality, "resampled_sums", lambda sums: sums.sum(0)[None])
    figure = alpha(verdicts(rows))
    assert figure.low == figure.high == pytest.approx(figure.value, abs=1e-12)


def test_pitfall_2_the_interval_covers_the_truth():
    truth = alpha(verdicts(noisy(3000, 4, seed=99))).value
    figures = [alpha(verdicts(noisy(40, 4, seed=seed))) for seed in range(40)]
    assert sum(f.low < truth < f.high for f in figures) >= 34


def test_pitfall_6_what_cannot_be_computed_says_why():
    single = agreement([ranking("r", "i", [1, 2, 3]), ranking("s", "j", [1, 2, 3])])
    for figure in (single.pair_rate, single.pair_rate_decided, single.alpha, single.tau_b, single.mean_spearman):
        assert figure.value is None and figure.undefined.startswith("undefined, because")
    tied = agreement([ranking(who, "i", [1, 1, 1]) for who in "rs"])
    assert tied.alpha.undefined == "undefined, because every pair is tied" and tied.pair_rate.value == 0.5
    assert tied.mean_spearman.value is None and tied.tau_b.value is None
    nothing = agreement([])
    assert nothing.alpha.value is None and nothing.w == {}


def test_excluded_raters_do_not_count():
    rows = noisy(20, 4, people="rs")
    contrary = [ranking("x", s.group_id, [5 - r for r in s.ranks.values()], excluded=True) for s in rows[::2]]
    assert agreement(rows + contrary).to_json() == agreement(rows).to_json()
