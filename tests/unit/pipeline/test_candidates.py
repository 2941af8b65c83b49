"""Who answers which prompt, which answers are worth ranking, baits and control items."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from heedful.pipeline.candidates import Sampled, Source, deal, differing, rankings_of, with_baits, with_gold
from heedful.records import Answer, Message, Prompt, Ranking

PROMPTS = [Prompt(f"p{i}", (Message("user", f"question {i}"),), "chat" if i % 2 else "safety") for i in range(200)]


def sources(*weights: float) -> list[Source]:
    return [Source(f"s{i}", f"m{i}", 1.0, weight) for i, weight in enumerate(weights)]


def dealt(weights: list[float], num_answers: int) -> list[list[str]]:
    wanted = dict.fromkeys((p.id for p in PROMPTS), num_answers)
    return [[s.name for s in given] for given in deal(PROMPTS, sources(*weights), wanted, 0).values()]


def test_equal_sources_give_equally_many_and_none_twice_to_a_prompt():
    of_prompts = dealt([1, 1, 1, 1, 1, 1], 4)
    assert all(len(set(given)) == 4 for given in of_prompts)
    counts = Counter(name for given in of_prompts for name in given)
    assert max(counts.values()) - min(counts.values()) <= 1
    met = Counter(pair for given in of_prompts for pair in combinations(sorted(given), 2))
    assert len(met) == 15 and min(met.values()) > 40, "everybody meets everybody"


def test_weights_are_met_to_within_one_answer():
    counts = Counter(name for given in dealt([0.85, 0.15], 4) for name in given)
    assert counts["s1"] in (119, 120, 121) and counts.total() == 800


def test_empty_and_like_answers_do_not_stay():
    answers = ["a long answer about bread", "", "A long  answer about bread", " \n", "something else entirely"]
    assert differing({i: Sampled("s", text, False) for i, text in enumerate(answers)}, 0.8) == [0, 4]


def answers_of(prompt: Prompt, num: int) -> list[Sampled]:
    return [Sampled(f"s{n}", f"answer {n} to {prompt.id} {'xyzw'[n] * 9}", is_cut=n == 3) for n in range(num)]


def test_baits_answer_another_prompt_of_the_category_and_are_marked():
    baited = with_baits(PROMPTS, 0.1, seed=0)
    assert len(baited) == 20 and baited != with_baits(PROMPTS, 0.1, seed=1)
    answers = {p.id: answers_of(p, 3 if p.id in baited else 4) for p in PROMPTS}
    found = rankings_of(PROMPTS, answers, baited, round=2, seed=0, threshold=0.8)
    assert len(found) == 200 and {len(r.answers) for r in found} == {4}
    wrote = {a.text: p for p in PROMPTS for a in answers[p.id]}
    for prompt, ranking in zip(PROMPTS, found, strict=True):
        assert ranking.group_id == f"{prompt.id}-r2" and ranking.round == 2 and not ranking.rankings
        baits = [a for a in ranking.answers if a.kind == "bait"]
        assert len(baits) == (prompt.id in baited)
        for bait in baits:
            assert bait.policy == "bait" and bait is ranking.answers[-1] and not bait.flags
            assert wrote[bait.text].id != prompt.id and wrote[bait.text].category == prompt.category
    assert found[0].answers[3].flags == ("cut",) or "p0" in baited


def test_a_prompt_with_one_answer_is_nothing_to_rank():
    answers = {p.id: answers_of(p, 1 if p.id == "p0" else 2) for p in PROMPTS}
    found = rankings_of(PROMPTS, answers, set(), round=0, seed=0, threshold=0.8)
    assert [r.group_id for r in found] == [p.id for p in PROMPTS[1:]]


def test_control_items_make_up_their_share_and_stand_anywhere():
    own = [Ranking(f"g{i}", PROMPTS[0].messages, (Answer("a", "x"), Answer("b", "y"))) for i in range(91)]
    gold = [Ranking(f"c{i}", PROMPTS[0].messages, (Answer("a", "x"), Answer("b", "y")), gold=(("a", "b"),))
            for i in range(30)]  # fmt: skip
    mixed, wanted = with_gold(own, gold, 0.09, seed=0)
    assert wanted == 9 and len(mixed) == 100
    places = [i for i, r in enumerate(mixed) if r.gold]
    assert len(places) == 9 and places != list(range(91, 100)) and places != list(range(9))
    assert len(with_gold(own, gold[:3], 0.09, seed=0)[0]) == 94
