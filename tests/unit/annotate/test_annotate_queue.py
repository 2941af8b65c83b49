"""The queue: one atomic claim on SQLite and on a real PostgreSQL, leases, control items, repetitions, quotas."""

import itertools
import threading
from collections import Counter

import pytest
from sqlalchemy import select, update

from heedful.annotate.project import add_rankings
from heedful.annotate.queue import claim_next, is_due
from heedful.annotate.submissions import Refused, save_draft, skip
from heedful.annotate.tables import Assignment, Exclusion, Item, Shown, Submission
from toy_project import NOW, claim, items, make_people, make_project, new_postgresql, rank, work

KINDS = ("sqlite", "postgresql")
ALONE = {"overlap": 1, "overlap_share": 0.0, "gold_rate": 0.0, "repeat_rate": 0.0}
"""Settings without anything but plain items for one person each."""


def database(kind, request):
    return None if kind == "sqlite" else new_postgresql(request.getfixturevalue("postgresql_folder"))


def in_threads(number, work):
    """Run ``work(i)`` in so many threads that start together; raises what one of them raised."""
    failed, start = [], threading.Barrier(number)

    def run(i):
        start.wait()
        try:
            work(i)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if failed:
        raise failed[0]


def rows(project):
    """(group id, pseudonym, repetition, state) of all assignments."""
    with project.database.reading() as session:
        query = select(Assignment).join(Item)
        return [(a.item.group_id, a.person.pseudonym, a.repetition, a.state) for a in session.scalars(query)]


@pytest.mark.parametrize("kind", KINDS)
def test_SEC_07_twelve_race_for_sixty_items_of_three_people_each(kind, request, tmp_path):
    project = make_project(tmp_path, items(60), database=database(kind, request), **ALONE | {"overlap": 3})
    people = make_people(project, 12)
    in_threads(12, lambda i: work(project, people[i]))
    done = rows(project)
    assert len(done) == 180 and {state for *_, state in done} == {"submitted"}
    assert set(Counter(group for group, *_ in done).values()) == {3}
    assert max(Counter((group, who) for group, who, *_ in done).values()) == 1
    with project.database.reading() as session:
        stored = list(session.scalars(select(Submission)))
    assert len(stored) == len({row.assignment_id for row in stored}) == 180


@pytest.mark.parametrize("kind", KINDS)
def test_SEC_07_leases_that_run_out_in_the_race_are_never_given_to_too_many(kind, request, tmp_path):
    """Two turns of three are waited out, so that leases expire and are submitted late; still every item gets two."""
    settings = ALONE | {"overlap": 2, "lease_minutes": 1.0}
    project = make_project(tmp_path, items(20), database=database(kind, request), **settings)
    people = make_people(project, 6)
    clock = itertools.count()

    def one(i):
        held = None
        for turn in range(60):
            now = NOW + 7 * next(clock)
            held = held or claim(project, people[i], now)
            if held is None or (turn % 3 and turn < 40):
                continue  # meanwhile the others' clocks run on, and some leases out
            try:
                rank(project, held, now=now)
            except Refused as refused:
                assert refused.code == "taken"
            held = None

    in_threads(6, one)
    for person in people:
        work(project, person, now=NOW + 10**7)
    submitted = Counter(group for group, _, _, state in rows(project) if state == "submitted")
    assert len(submitted) == 20 and set(submitted.values()) == {2}


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_item_goes_to_exactly_as_many_as_it_needs(kind, request, tmp_path):
    project = make_project(tmp_path, items(1), database=database(kind, request), **ALONE | {"overlap": 2})
    people, got = make_people(project, 8), []
    in_threads(8, lambda i: got.append(claim(project, people[i])))
    assert sum(assignment is not None for assignment in got) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_double_click_on_next_gives_one_item(kind, request, tmp_path):
    project = make_project(tmp_path, items(9), database=database(kind, request), **ALONE)
    (person,), got = make_people(project, 1), []
    in_threads(6, lambda i: got.append(claim(project, person).id))
    assert len(got) == 6 and len(set(got)) == 1 and len(rows(project)) == 1


def test_what_a_person_holds_comes_back_until_it_is_done(tmp_path):
    project = make_project(tmp_path, items(3), **ALONE)
    (person,) = make_people(project, 1)
    first = claim(project, person)
    again = claim(project, person, NOW + 60)
    assert (again.public_id, again.nonce) == (first.public_id, first.nonce)
    assert [card.public_id for card in again.shown] == [card.public_id for card in first.shown]
    rank(project, first)
    assert claim(project, person, NOW + 120).item_id != first.item_id


def test_an_expired_lease_goes_to_somebody_else_and_its_late_submission_is_refused(tmp_path):
    project = make_project(tmp_path, items(1), **ALONE)
    slow, quick = make_people(project, 2)
    late = claim(project, slow)
    assert claim(project, quick, NOW + 30 * 60) is None
    rank(project, claim(project, quick, NOW + 30 * 60 + 1), now=NOW + 31 * 60)
    with pytest.raises(Refused, match="Your time for this item ran out and others have ranked it") as caught:
        rank(project, late, now=NOW + 32 * 60)
    assert caught.value.code == "taken"
    assert claim(project, slow, NOW + 33 * 60) is None
    assert sorted(state for *_, state in rows(project)) == ["expired", "submitted"]


def test_an_expired_lease_can_be_submitted_while_nobody_else_took_the_item(tmp_path):
    project = make_project(tmp_path, items(1), **ALONE)
    slow, quick = make_people(project, 2)
    late = claim(project, slow)
    rank(project, late, now=NOW + 10 * 3600)
    assert claim(project, quick, NOW + 10 * 3600) is None


def test_after_a_lunch_the_same_item_comes_back_with_its_draft_and_order(tmp_path):
    project = make_project(tmp_path, items(5), **ALONE)
    (person,) = make_people(project, 1)
    first = claim(project, person)
    with project.database.writing() as session:
        save_draft(session, session.merge(first), {"reason": "so far"}, settings=project.settings, now=NOW)
    again = claim(project, person, NOW + 5 * 3600)
    assert (again.id, again.state, again.draft) == (first.id, "leased", {"reason": "so far"})
    assert [card.public_id for card in again.shown] == [card.public_id for card in first.shown]


def test_a_draft_prolongs_the_lease(tmp_path):
    project = make_project(tmp_path, items(1), **ALONE)
    slow, other = make_people(project, 2)
    held = claim(project, slow)
    with project.database.writing() as session:
        save_draft(session, session.merge(held), {}, settings=project.settings, now=NOW + 29 * 60)
    assert claim(project, other, NOW + 58 * 60) is None
    assert claim(project, other, NOW + 60 * 60) is not None


def test_a_skipped_item_goes_to_others_and_never_back(tmp_path):
    project = make_project(tmp_path, items(1), **ALONE)
    first, second = make_people(project, 2)
    with project.database.writing() as session:
        skip(session, claim_next(session, first, project.settings, NOW), "upsetting", now=NOW)
    assert claim(project, first) is None
    assert claim(project, second) is not None


def test_control_items_come_at_the_rate_at_places_that_nobody_can_tell(tmp_path):
    rankings = items(60) + items(20, gold=True, name="gold")
    project = make_project(tmp_path, rankings, **ALONE | {"overlap": 9, "gold_rate": 0.15})
    places = []
    for person in make_people(project, 2):
        groups = [assignment.item.group_id for assignment in work(project, person, limit=60)]
        assert len(set(groups)) == 60
        gold = [i for i, group in enumerate(groups) if group.startswith("gold")]
        assert len(gold) in (8, 9, 10) and gold[0] > 0
        places.append(gold)
    assert places[0] != places[1]
    assert len({b - a for gold in places for a, b in zip(gold, gold[1:])}) > 3


def test_control_items_run_out_and_are_never_given_twice(tmp_path):
    project = make_project(tmp_path, items(30) + items(2, gold=True, name="gold"), **ALONE | {"gold_rate": 0.5})
    (person,) = make_people(project, 1)
    groups = [assignment.item.group_id for assignment in work(project, person)]
    assert sorted(groups) == sorted({*(f"g{i}" for i in range(30)), "gold0", "gold1"})


@pytest.mark.parametrize("rate", [0.025, 0.09, 0.3, 1.0])
def test_the_rate_is_met_at_every_length(rate):
    had = []
    for number in range(2000):
        had.append(is_due(had, rate))
        assert abs(sum(had) - rate * number) <= 1 + rate
    assert not had[0] and not any(is_due([False] * number, 0.0) for number in range(100))


def test_SEC_04_places_of_control_items_are_drawn_evenly_and_follow_from_nothing_that_a_rater_knows():
    def places():
        had = []
        for _ in range(10):
            had.append(is_due(had, 0.2))
        return had.index(True), had.index(True, 5)

    drawn = [places() for _ in range(1000)]
    first, second = (Counter(part) for part in zip(*drawn))
    assert set(first) == {1, 2, 3, 4} and min(first.values()) > 180
    assert set(second) == {5, 6, 7, 8, 9} and min(second.values()) > 130


def test_control_items_that_are_added_late_do_not_come_all_at_once(tmp_path):
    project = make_project(tmp_path, items(60), **ALONE | {"gold_rate": 0.2})
    (person,) = make_people(project, 1)
    work(project, person, limit=30)
    add_rankings(project, items(20, gold=True, name="gold"), now=NOW)
    groups = [assignment.item.group_id for assignment in work(project, person, limit=25)]
    assert 4 <= sum(group.startswith("gold") for group in groups) <= 6


def test_repetitions_come_a_day_later_once_shuffled_anew_and_never_of_control_items(tmp_path):
    settings = ALONE | {"repeat_rate": 0.5, "gold_rate": 0.3}
    project = make_project(tmp_path, items(40, num_answers=2) + items(9, gold=True, name="gold"), **settings)
    (person,) = make_people(project, 1)
    first = work(project, person, limit=20)
    assert not any(assignment.repetition for assignment in first)
    rest = work(project, person, now=NOW + 25 * 3600)
    repeated = {a.item_id: a for a in rest if a.repetition}
    before = {a.item_id: a for a in first if not a.item.is_gold}
    assert len([a for a in rest if a.repetition]) == len(repeated) and set(repeated) == set(before)
    for item_id, assignment in repeated.items():
        old, new = ([card.answer_row_id for card in a.shown] for a in (before[item_id], assignment))
        assert sorted(old) == sorted(new) and old != new
    assert {a.item.overlap for a in repeated.values()} == {1}


def test_quotas_are_kept_and_what_has_none_comes_last(tmp_path):
    rankings = [r for name in ("chat", "safety", "writing") for r in items(30, category=name, name=name)]
    project = make_project(tmp_path, rankings, **ALONE | {"quotas": {"chat": 2.0, "safety": 1.0}})
    people = make_people(project, 3)
    got = [claim_and_rank(project, people[i % 3]) for i in range(30)]
    assert Counter(got) == {"chat": 20, "safety": 10}
    rest = [claim_and_rank(project, people[i % 3]) for i in range(60)]
    assert Counter(rest) == {"chat": 10, "safety": 20, "writing": 30} and set(rest[:30]) == {"chat", "safety"}


def claim_and_rank(project, person):
    assignment = claim(project, person)
    rank(project, assignment)
    return assignment.item.category


def test_items_begun_are_finished_first(tmp_path):
    project = make_project(tmp_path, items(50), **ALONE | {"overlap": 2})
    first, second = make_people(project, 2)
    begun = {a.item_id for a in work(project, first, limit=7)}
    assert {a.item_id for a in work(project, second, limit=7)} == begun


def test_the_order_of_the_cards_is_drawn_per_person_and_stored(tmp_path):
    project = make_project(tmp_path, items(1, num_answers=9), **ALONE | {"overlap": 9})
    orders, ids = set(), set()
    for person in make_people(project, 9):
        assignment = claim(project, person)
        cards = assignment.shown
        assert [card.slot for card in cards] == list(range(9))
        orders.add(tuple(card.answer.answer_id for card in cards))
        ids |= {assignment.public_id, assignment.nonce, *(card.public_id for card in cards)}
    assert len(orders) == 9 and len(ids) == 9 * 11 and min(map(len, ids)) >= 22
    with project.database.reading() as session:
        assert len(list(session.scalars(select(Shown)))) == 81


def test_every_slot_is_equally_likely_for_every_answer(tmp_path):
    project = make_project(tmp_path, items(90, num_answers=3), **ALONE)
    (person,) = make_people(project, 1)
    seen = Counter((card.slot, card.answer.answer_id) for a in work(project, person) for card in a.shown)
    assert len(seen) == 9 and all(10 <= count <= 50 for count in seen.values())  # 30 ± 4.5 standard deviations


def exclude(project, person, now=NOW):
    with project.database.writing() as session:
        session.add(Exclusion(person_id=person.id, reason="x", created_at=now))


def test_an_excluded_person_gets_nothing_and_their_items_go_out_again_until_they_return(tmp_path):
    project = make_project(tmp_path, items(4), **ALONE)
    spammer, honest = make_people(project, 2)
    work(project, spammer, limit=3)
    claim(project, spammer)
    assert claim(project, honest) is None
    exclude(project, spammer)
    assert claim(project, spammer) is None
    assert len(work(project, honest)) == 4
    with project.database.writing() as session:
        session.execute(update(Exclusion).values(lifted_at=NOW))
    assert claim(project, spammer) is not None  # what they held
