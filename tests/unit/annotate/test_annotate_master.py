"""Results out: every single judgement, views with a recipe, exclusions named, formats that read back, a data card."""

import json
from itertools import combinations
from math import comb

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from heedful.annotate.master import VIEWS, View, export, rankings, rows
from heedful.annotate.project import add_rankings
from heedful.annotate.quality.agreement import agreement
from heedful.annotate.quality.pairs import first_rankings, verdict
from heedful.annotate.quality.raters import measures
from heedful.annotate.results import num_characters, submitted
from heedful.annotate.submissions import Said, find, last_submitted, skip
from heedful.annotate.tables import Exclusion
from heedful.data.load import load_rankings
from heedful.data.pairs import consensus, to_pairs
from heedful.errors import DataError
from heedful.records import Answer, Judgement, Message, Ranking
from toy_project import NOW, claim, in_order, items, make_people, make_project, new_postgresql, rank, work

PLAIN = {"overlap": 2, "overlap_share": 0.0, "gold_rate": 0.0, "repeat_rate": 0.0}


def by_answer(assignment, ranks, **more):
    """Said with these ranks of a0, a1, …"""
    cards = {card.answer.answer_id: card.public_id for card in assignment.shown}
    return Said({cards[f"a{i}"]: value for i, value in enumerate(ranks) if value}, **more)


def exclude(project, person, reason="spam"):
    with project.database.writing() as session:
        session.add(Exclusion(person_id=person.id, reason=reason, created_at=NOW + 86_400))


@pytest.fixture
def ranked(tmp_path):
    """Five items of four answers: the first person ranks all in order, the second one of them in reverse."""
    project = make_project(tmp_path, items(5), **PLAIN)
    first, second = make_people(project, 2)
    work(project, first)
    rank(project, other := claim(project, second), by_answer(other, [4, 3, 2, 1], reason="reversed"), now=NOW + 10)
    return project, first, second, other.item.group_id


def test_the_master_holds_every_single_judgement(ranked):
    project, first, second, group = ranked
    found = {ranking.group_id: ranking for ranking in rankings(project)}
    assert sorted(found) == [f"g{i}" for i in range(5)]
    assert found[group].rankings == (
        Judgement(second.pseudonym, {"a0": 4, "a1": 3, "a2": 2, "a3": 1}, 10.0, "1"),
        Judgement(first.pseudonym, {"a0": 1, "a1": 2, "a2": 3, "a3": 4}, 50.0, "1"),
    )
    assert found[group].info["said"] == {second.pseudonym: {"reason": "reversed"}}
    other = next(ranking for name, ranking in found.items() if name != group)
    original = next(ranking for ranking in items(5) if ranking.group_id == other.group_id)
    assert other.answers == original.answers and other.prompt == original.prompt and other.category == "chat"


def test_exclusion_takes_the_work_out_and_lifting_brings_it_back(ranked):
    project, _, second, group = ranked
    before = rankings(project)
    exclude(project, second)
    without = {ranking.group_id: ranking for ranking in rankings(project)}
    assert len(without[group].rankings) == 1 and len(without) == 5
    assert rankings(project, View(with_excluded=True)) == before
    assert [one.excluded for one in submitted(project) if one.annotator == second.pseudonym] == [True]
    with project.database.writing() as session:
        session.execute(update(Exclusion).values(lifted_at=NOW + 2 * 86_400))
    assert rankings(project) == before


def test_only_what_was_ranked_is_in_the_master(tmp_path):
    project = make_project(tmp_path, items(4), **PLAIN)
    (person,) = make_people(project, 1)
    done, held = work(project, person, limit=1), claim(project, person)
    with project.database.writing() as session:
        skip(session, find(session, person, held.public_id), "not_my_field", now=NOW)
    claim(project, person)
    assert [ranking.group_id for ranking in rankings(project)] == [done[0].item.group_id]


def test_control_items_and_repetitions_are_for_quality_control_only(tmp_path):
    settings = PLAIN | {"gold_rate": 0.3, "repeat_rate": 0.4, "repeat_after_hours": 0.0}
    project = make_project(tmp_path, items(10) + items(5, gold=True, name="gold"), **settings)
    (person,) = make_people(project, 1)
    work(project, person)
    seen = submitted(project)
    num_gold = sum(one.gold is not None for one in seen)
    num_repeated = sum(one.repetition for one in seen)
    assert num_gold >= 3 and num_repeated >= 3 and len(seen) == 10 + num_gold + num_repeated
    found = rankings(project)
    assert len(found) == 10 and all(len(ranking.rankings) == 1 and ranking.gold is None for ranking in found)
    with_gold = rankings(project, View(with_gold=True))
    assert len(with_gold) == 10 + num_gold
    assert {ranking.gold for ranking in with_gold if ranking.gold} == {(("a0", "a3"),)}
    assert len(rows(project, "trl", View(with_gold=True))) == len(rows(project, "trl")) == 10 * 6


def test_what_quality_control_sees_is_what_stood_on_the_screen(tmp_path):
    project = make_project(tmp_path, items(1, num_answers=3), **PLAIN)
    (person,) = make_people(project, 1)
    assignment = claim(project, person)
    rank(project, assignment, by_answer(assignment, [2, 1, 2], all_bad=True), now=NOW + 7)
    (one,) = submitted(project)
    assert one.slots == {card.answer.answer_id: card.slot for card in assignment.shown}
    assert (one.ranks, one.all_bad, one.seconds, one.at) == ({"a0": 2, "a1": 1, "a2": 2}, True, 7.0, NOW + 7)
    assert one.num_characters == {f"a{i}": 11 for i in range(3)} and one.policies["a1"] == "policy-1"
    assert (one.annotator, one.gold, one.repetition, one.num_revisions) == (person.pseudonym, None, 0, 1)


def test_the_last_revision_counts_with_the_time_of_the_first(ranked):
    project, first, *_ = ranked
    with project.database.reading() as session:
        mine = last_submitted(session, first)[-1]
    rank(project, mine, Said({card.public_id: 5 for card in mine.shown}), correct=True, now=NOW + 5000)
    one = next(one for one in submitted(project) if one.num_revisions == 2)
    assert set(one.ranks.values()) == {1} and (one.seconds, one.at) == (50.0, NOW + 5000)
    judgements = [j for r in rankings(project) if r.group_id == one.group_id for j in r.rankings]
    assert {1} in [set(j.ranks.values()) for j in judgements if j.annotator == first.pseudonym]


def test_characters_are_counted_without_white_space():
    assert num_characters("ab c\n\t") == 3 and num_characters("你好 世界\u3000") == 4


def test_unranked_answers_stand_behind_all_others_together(tmp_path):
    project = make_project(tmp_path, items(1), **PLAIN | {"allow_unranked": True})
    (person,) = make_people(project, 1)
    rank(project, assignment := claim(project, person), by_answer(assignment, [0, 2, 1, 0]))
    (ranking,) = rankings(project)
    assert ranking.rankings[0].ranks == {"a0": 3, "a1": 2, "a2": 1, "a3": 3}
    assert len(to_pairs(ranking)) == comb(4, 2) - 1


def test_training_and_quality_control_agree_on_what_an_unranked_answer_means(tmp_path):
    """Worse than every ranked one; of two of them nothing is said, so that a short ranking is no heap of ties."""
    project = make_project(tmp_path, items(1, num_answers=5), **PLAIN | {"allow_unranked": True, "overlap": 2})
    for person in make_people(project, 2):
        rank(project, assignment := claim(project, person), by_answer(assignment, [1, 2, 0, 0, 0]))
    ((ranking,), seen) = rankings(project), submitted(project)
    assert {(pair.chosen[:8], pair.rejected[:8]) for pair in to_pairs(ranking)} == {
        (f"Answer {a}", f"Answer {b}") for a, b in combinations(range(5), 2) if verdict(seen[0].ranks, f"a{a}", f"a{b}")
    }
    assert seen[0].ranks == {"a0": 1, "a1": 2} and verdict(seen[0].ranks, "a1", "a4") == 1
    assert verdict(seen[0].ranks, "a3", "a4") is None
    assert all(not m.estimate for m in measures(seen) if m.kind == "ties")
    assert agreement(first_rankings(seen)).pair_rate.value == 1.0


@pytest.mark.parametrize(
    ("given", "margin"),
    [
        ([([1, 2], 3), ([1, 2], 1)], 2.0),
        ([([2, 1], 2), ([2, 1], None)], 2.0),
        ([([1, 2], 3), ([1, 2], 3), ([2, 1], 3)], 1.0),
        ([([1, 2], 3), ([1, 1], None)], 1.5),
        ([([1, 2], None)], None),
        ([([1, 2], 2), ([2, 1], 2)], None),
    ],
)
def test_strength_becomes_the_margin_towards_the_consensus(tmp_path, given, margin):
    project = make_project(tmp_path, items(1, num_answers=2), **PLAIN | {"overlap": 9})
    for person, (ranks, strength) in zip(make_people(project, len(given)), given):
        rank(project, assignment := claim(project, person), by_answer(assignment, ranks, strength=strength))
    (ranking,) = rankings(project)
    assert ranking.info.get("margin") == margin
    is_tied = len(set(consensus(ranking).values())) == 1
    assert [pair.margin for pair in to_pairs(ranking)] == ([] if is_tied else [margin])


def test_ratings_are_means_over_people_and_flags_are_kept(tmp_path):
    project = make_project(tmp_path, items(1, num_answers=2), **PLAIN | {"attributes": ("helpful",)})
    for person, rating in zip(make_people(project, 2), (2, 5)):
        a, b = sorted(claim(project, person).shown, key=lambda card: card.answer.answer_id)
        said = Said({a.public_id: 1, b.public_id: 2}, flags={b.public_id: ["wrong"]},
                    ratings={"helpful": {a.public_id: rating, b.public_id: 1}})  # fmt: skip
        rank(project, claim(project, person), said)
    (ranking,) = rankings(project)
    assert ranking.ratings == {"helpful": {"a0": 3.5, "a1": 1.0}}
    assert ranking.info["said"] == {f"rater-{i}": {"flags": {"a1": ["wrong"]}} for i in range(2)}


def test_judgements_that_came_along_come_out_again(tmp_path):
    brought = Ranking(
        "old", (Message("user", "Why?"),), (Answer("x", "A", kind="bait"), Answer("y", "B", score=0.5)),
        (Judgement("elsewhere", {"x": 2, "y": 1}, 3.0, "v0"),), consensus={"x": 2, "y": 1}, category="c", lang="zh",
        round=3, source="s", info={"k": [1]}, ratings={"safe": {"x": 1.0}},
    )  # fmt: skip
    project = make_project(tmp_path, [brought], **PLAIN)
    assert rankings(project) == [brought]
    (person,) = make_people(project, 1)
    assignment = claim(project, person)
    rank(project, assignment, in_order(assignment))
    (ranking,) = rankings(project)
    assert [one.annotator for one in ranking.rankings] == ["elsewhere", person.pseudonym] and ranking.consensus is None


@pytest.fixture(scope="module")
def open_ended(tmp_path_factory):
    project = make_project(tmp_path_factory.mktemp("open"), **PLAIN | {"overlap": 1})
    return project, make_people(project, 1)[0]


@given(ranks=st.lists(st.integers(1, 9), min_size=2, max_size=9))
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_tie_pattern_gives_the_pairs_of_the_formula(open_ended, ranks):
    """C(N,2) less the pairs inside every tie, from the click to the preference pair, the better answer first."""
    project, person = open_ended
    name = f"t{len(rankings(project))}-"
    add_rankings(project, items(1, num_answers=len(ranks), name=name), now=NOW)
    rank(project, assignment := claim(project, person), by_answer(assignment, ranks))
    (ranking,) = (ranking for ranking in rankings(project) if ranking.group_id == f"{name}0")
    pairs = to_pairs(ranking)
    assert len(pairs) == comb(len(ranks), 2) - sum(comb(ranks.count(value), 2) for value in set(ranks))
    place = {answer.text: ranks[int(answer.id[1:])] for answer in ranking.answers}
    assert all(place[pair.chosen] < place[pair.rejected] for pair in pairs)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_master_reads_back_as_it_was_written(kind, request, tmp_path):
    url = None if kind == "sqlite" else new_postgresql(request.getfixturevalue("postgresql_folder"))
    project = make_project(tmp_path, items(4) + items(2, gold=True, name="gold"), database=url, **PLAIN)
    for person in make_people(project, 2):
        work(project, person)
    export(project, tmp_path / "out", to=("master",), view=View(with_gold=True))
    assert load_rankings(tmp_path / "out" / "rankings.jsonl") == rankings(project, View(with_gold=True))


PAIRS = [name for name in VIEWS if name not in ("master", "submissions")]


def test_every_format_reads_back_with_the_same_pairs(ranked, tmp_path):
    project, _, second, _ = ranked
    exclude(project, second)
    done = export(project, tmp_path / "out", to=tuple(VIEWS))
    want = {(p.prompt[-1].content, p.chosen, p.rejected) for r in rankings(project) for p in to_pairs(r)}
    assert len(want) == 5 * 6 == done.card.num_pairs
    names = {path.name for path in done.files}
    assert names > {"rankings.jsonl", "trl.jsonl", "verl.parquet", "card.json", "README.md"}
    for name in PAIRS:
        if name == "pairs":
            continue
        path = tmp_path / "out" / (f"{name}.parquet" if name == "verl" else f"{name}.jsonl")
        got = {
            (p.prompt[-1].content, p.chosen.strip(), p.rejected.strip())
            for ranking in load_rankings(path) for p in to_pairs(ranking)
        }  # fmt: skip
        assert got == want, name
    entry = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    assert entry["llama_factory"]["ranking"] is True
    submissions = (tmp_path / "out" / "submissions.jsonl").read_text().splitlines()
    assert len(submissions) == 5 and all(second.pseudonym not in line for line in submissions)


def test_the_card_names_who_is_left_out_why_and_since_when(ranked, tmp_path):
    project, first, second, _ = ranked
    before = export(project, tmp_path / "a").card
    exclude(project, second, "position | <b>love</b>")
    card = export(project, tmp_path / "b", agreement={"pairwise": 0.75}).card
    assert before.judgements_by_rater == {first.pseudonym: 5, second.pseudonym: 1} and not before.excluded
    assert card.judgements_by_rater == {first.pseudonym: 5} and card.num_judgements == 5 and card.num_items == 5
    assert card.excluded == (
        {"annotator": second.pseudonym, "reason": "position | <b>love</b>", "since": NOW + 86_400,
         "by": "command line", "num_judgements": 1},
    )  # fmt: skip
    text = (tmp_path / "b" / "README.md").read_text()
    assert "position \\| &lt;b>love&lt;/b>" in text and "2023-11-15" in text and "| pairwise | 0.750 |" in text
    assert second.name not in text and first.name not in text
    assert json.loads((tmp_path / "b" / "card.json").read_text()) == card.to_json()


def test_the_recipe_hash_changes_with_the_view_and_the_exclusions_only(ranked, tmp_path):
    project, first, second, _ = ranked

    def card(**view):
        return export(project, tmp_path / "out", view=View(**view)).card

    one = card()
    assert card() == one
    assert card(min_agree_fraction=0.9).recipe_hash != one.recipe_hash
    exclude(project, second)
    assert card().recipe_hash != one.recipe_hash and card().content_hash != one.content_hash


def test_pairs_that_too_few_agree_on_are_dropped_and_counted(tmp_path):
    project = make_project(tmp_path, items(1, num_answers=2), **PLAIN | {"overlap": 3})
    for person, ranks in zip(make_people(project, 3), ([1, 2], [1, 2], [2, 1])):
        rank(project, assignment := claim(project, person), by_answer(assignment, ranks))
    assert len(rows(project, "pairs", View(min_agree_fraction=0.6))) == 1
    assert rows(project, "pairs", View(min_agree_fraction=0.7)) == []
    with pytest.raises(DataError, match="no pair is left to write as trl"):
        export(project, tmp_path / "out", to=("trl",), view=View(min_agree_fraction=0.7))
    card = export(project, tmp_path / "out", to=(), view=View(min_agree_fraction=0.7)).card
    assert (card.num_pairs, card.num_pairs_dropped, card.num_pairs_tied) == (0, 1, 0)


def test_rounds_can_be_taken_apart(tmp_path):
    first, second = items(2, name="r"), items(2, name="s")
    later = [Ranking(r.group_id, r.prompt, r.answers, category="chat", round=1) for r in second]
    project = make_project(tmp_path, first + later, **PLAIN)
    work(project, make_people(project, 1)[0])
    assert {ranking.round for ranking in rankings(project, View(rounds=(1,)))} == {1}
    assert len(rows(project, "submissions", View(rounds=(1,)))) == 2


def test_nothing_ranked_and_unknown_views_are_refused(tmp_path):
    project = make_project(tmp_path, items(2), **PLAIN)
    with pytest.raises(DataError, match="nothing that this view takes is ranked yet"):
        export(project, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for name in ("../etc", "trlx"):
        with pytest.raises(DataError, match="there is no view"):
            rows(project, name)
        with pytest.raises(DataError, match="there is no view"):
            export(project, tmp_path / "out", to=(name,))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file; name a folder"):
        export(project, tmp_path / "file")
