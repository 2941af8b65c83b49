"""What a person says: checked, stored once whatever is clicked or sent again, corrected by revisions, never lost."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading

import pytest
from sqlalchemy import select

from heedful.annotate.project import add_guideline, open_project
from heedful.annotate.queue import claim_next
from heedful.annotate.settings import FLAGS, SKIP_REASONS
from heedful.annotate.submissions import Refused, Said, find, last_submitted, save_draft, skip
from heedful.annotate.tables import Assignment, Submission, Trail
from toy_project import NOW, claim, in_order, items, make_people, make_project, new_postgresql, rank, work

PLAIN = {"overlap": 1, "overlap_share": 0.0, "gold_rate": 0.0, "repeat_rate": 0.0}


@pytest.fixture
def given(tmp_path):
    """(project, person, assignment of four cards)"""
    return give(tmp_path)


def give(tmp_path, num_answers=4, **settings):
    project = make_project(tmp_path, items(3, num_answers=num_answers), **PLAIN | settings)
    (person,) = make_people(project, 1)
    return project, person, claim(project, person)


def submissions(project):
    with project.database.reading() as session:
        return list(session.scalars(select(Submission).order_by(Submission.id)))


def cards(assignment):
    """Public ids in the order of the answers' ids."""
    return [card.public_id for card in sorted(assignment.shown, key=lambda card: card.answer.answer_id)]


def refused(project, assignment, said, **more):
    before = len(submissions(project))
    with pytest.raises(Refused) as caught:
        rank(project, assignment, said, **more)
    assert len(submissions(project)) == before
    return caught.value.code, caught.value.field


def test_what_was_said_is_stored_by_the_answers_ids_with_dense_ranks(tmp_path):
    project, _, assignment = give(tmp_path, attributes=("helpful",))
    a, b, c, d = cards(assignment)
    said = Said(
        {a: 3, b: 1, c: 3, d: 9}, flags={d: ["unsafe", "wrong", "wrong"], a: []},
        ratings={"helpful": {a: 2, b: 5, c: 2, d: 1}}, all_bad=True, reason="  because 因为 \n",
    )  # fmt: skip
    stored = rank(project, assignment, said, now=NOW + 42.5)
    (row,) = submissions(project)
    assert not stored.is_repeat and stored.submission.id == row.id
    assert row.said == {
        "ranks": {"a0": 2, "a1": 1, "a2": 2, "a3": 3}, "flags": {"a3": ["wrong", "unsafe"]},
        "ratings": {"helpful": {"a0": 2, "a1": 5, "a2": 2, "a3": 1}},
    }  # fmt: skip
    assert (row.revision, row.seconds, row.guideline_version, row.all_bad, row.reason, row.strength) == (
        1, 42.5, 1, True, "because 因为", None,
    )  # fmt: skip


BAD_RANKS = [0, 10, -1, 1.0, "1", True, None]


@pytest.mark.parametrize("bad", BAD_RANKS, ids=map(repr, BAD_RANKS))
def test_only_whole_ranks_from_1_to_9_are_taken(given, bad):
    project, _, assignment = given
    card = cards(assignment)[2]
    said = Said({**in_order(assignment).ranks, card: bad})
    assert refused(project, assignment, said) == ("bad_rank", f"ranks.{card}")


def test_an_untouched_or_half_done_ranking_is_refused(given):
    project, _, assignment = given
    a, b, c, d = cards(assignment)
    assert refused(project, assignment, Said({}))[0] == "unranked"
    assert refused(project, assignment, Said({a: 1, b: 2, d: 2})) == ("unranked", f"ranks.{c}")


def test_where_allowed_answers_may_stay_unranked_but_not_all(tmp_path):
    project, _, assignment = give(tmp_path, allow_unranked=True)
    a, b, *_ = cards(assignment)
    assert refused(project, assignment, Said({}))[0] == "unranked"
    rank(project, assignment, Said({a: 4, b: 2}))
    assert submissions(project)[0].said["ranks"] == {"a0": 2, "a1": 1}


def test_SEC_05_cards_of_another_assignment_are_refused(tmp_path):
    project = make_project(tmp_path, items(3), **PLAIN)
    me, other = make_people(project, 2)
    mine, theirs = claim(project, me), claim(project, other)
    foreign = cards(theirs)[0]
    assert refused(project, mine, in_order(theirs))[0] == "unknown_card"
    for part in ({"flags": {foreign: ["wrong"]}}, {"ratings": {"helpful": {foreign: 1}}}):
        assert refused(project, mine, in_order(mine, **part))[0] == "unknown_card"


def test_SEC_05_nobody_finds_or_submits_what_another_person_holds(tmp_path):
    project = make_project(tmp_path, items(3), **PLAIN)
    me, other = make_people(project, 2)
    mine, theirs = claim(project, me), claim(project, other)
    with project.database.reading() as session:
        assert find(session, me, mine.public_id).id == mine.id
        assert find(session, me, theirs.public_id) is None and find(session, me, "unknown") is None
        assert find(session, other, mine.public_id) is None
    assert refused(project, mine, in_order(mine), nonce=theirs.nonce)[0] == "stale"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"flags": {0: ["boring"]}}, "bad_flag"),
        ({"flags": {0: "wrong"}}, "bad_flag"),
        ({"flags": {0: [["wrong"]]}}, "bad_flag"),
        ({"flags": [1]}, "bad_form"),
        ({"ratings": {"kind": {0: 3}}}, "unknown_attribute"),
        ({"ratings": {"helpful": 3}}, "bad_form"),
        ({"strength": 2}, "no_strength"),
        ({"reason": "x" * 5001}, "too_long"),
        ({"reason": "a\0b"}, "bad_text"),
        ({"reason": "\ud83d"}, "bad_text"),
        ({"reason": 7}, "bad_form"),
    ],
)
def test_other_parts_are_checked(given, more, code):
    project, _, assignment = given
    first = cards(assignment)[0]

    def named(part):
        return {first if key == 0 else key: named(value) for key, value in part.items()} if type(part) is dict else part

    assert refused(project, assignment, in_order(assignment, **named(more)))[0] == code


def test_ratings_are_asked_of_every_answer_from_1_to_5(tmp_path):
    project, _, assignment = give(tmp_path, attributes=("helpful", "safe"))
    every = cards(assignment)
    full = {name: dict.fromkeys(every, 3) for name in ("helpful", "safe")}
    assert refused(project, assignment, in_order(assignment))[0] == "unrated"
    for bad in (0, 6, 2.5, "3", True, None):
        ratings = {**full, "safe": {**full["safe"], every[1]: bad}}
        assert refused(project, assignment, in_order(assignment, ratings=ratings)) == (
            "unrated", f"ratings.safe.{every[1]}",
        )  # fmt: skip
    rank(project, assignment, in_order(assignment, ratings=full))


def test_strength_is_said_of_two_answers_that_are_not_tied(tmp_path):
    project, _, assignment = give(tmp_path, num_answers=2)
    a, b = cards(assignment)
    assert refused(project, assignment, Said({a: 1, b: 1}, strength=1))[0] == "no_strength"
    for bad in (0, 4, True, "1", 1.5):
        assert refused(project, assignment, Said({a: 1, b: 2}, strength=bad))[0] == "bad_strength"
    rank(project, assignment, Said({a: 5, b: 2}, strength=3))
    assert submissions(project)[0].strength == 3


def test_settings_can_switch_strength_off_and_the_reason_off_or_on(tmp_path):
    project, _, assignment = give(tmp_path, num_answers=2, strength=False, reason="required")
    for reason in ("", " \n\t"):
        assert refused(project, assignment, in_order(assignment, reason=reason)) == ("reason_missing", "reason")
    assert refused(project, assignment, in_order(assignment, strength=1, reason="x"))[0] == "no_strength"
    (tmp_path / "off").mkdir()
    project, _, assignment = give(tmp_path / "off", reason="off")
    assert refused(project, assignment, in_order(assignment, reason="x"))[0] == "no_reason"


def test_messages_can_be_translated():
    error = Refused("bad_rank", "A rank must be a number from 1 to {max}.", field="ranks.x", max=9)
    [text] = error.args
    assert str(error) == text.template.format(**text.values) == "A rank must be a number from 1 to 9."


def test_plain_json_becomes_what_was_said_or_is_refused():
    assert Said.from_json({"ranks": {"x": 1}, "strength": None}) == Said({"x": 1})
    assert Said.from_json({"flags": {"x": ["wrong"]}, "all_bad": True}) == Said({}, {"x": ["wrong"]}, all_bad=True)
    bad = [[], "x", {"rank": {}}, {"ranks": []}, {"all_bad": 1}, {"strength": True}, {"reason": None}, {"ranks": None}]
    for data in bad:
        with pytest.raises(Refused) as caught:
            Said.from_json(data)
        assert caught.value.code == "bad_form"


def test_SEC_06_the_same_nonce_again_gives_the_stored_result_and_changes_nothing(given):
    project, _, assignment = given
    first = rank(project, assignment)
    again = rank(project, assignment, Said(dict.fromkeys(cards(assignment), 1), reason="other"), now=NOW + 9)
    assert again.is_repeat and again.submission.id == first.submission.id
    assert again.submission.said == first.submission.said and len(submissions(project)) == 1


def test_SEC_06_a_second_tab_cannot_overwrite(given):
    """It holds the page of before the first submission, or one that was loaded after it: both change nothing."""
    project, person, assignment = given
    rank(project, assignment)
    with project.database.reading() as session:
        fresh = find(session, person, assignment.public_id)
    assert fresh.nonce != assignment.nonce and fresh.state == "submitted"
    code, _ = refused(project, fresh, Said(dict.fromkeys(cards(fresh), 1)))
    assert code == "submitted"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_SEC_06_twelve_clicks_at_once_store_one_submission(kind, request, tmp_path):
    url = None if kind == "sqlite" else new_postgresql(request.getfixturevalue("postgresql_folder"))
    project = make_project(tmp_path, items(1), database=url, **PLAIN)
    (person,) = make_people(project, 1)
    assignment = claim(project, person)
    results, start = [], threading.Barrier(12)

    def click(i):
        start.wait()
        with project.database.reading() as session:
            mine = find(session, person, assignment.public_id)
        results.append(rank(project, mine, nonce=assignment.nonce, now=NOW + i))

    threads = [threading.Thread(target=click, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12 and sum(not result.is_repeat for result in results) == 1
    assert {result.submission.id for result in results} == {submissions(project)[0].id}


def test_a_correction_is_a_further_revision_with_a_trail(given):
    project, person, assignment = given
    rank(project, assignment, now=NOW + 30)
    with project.database.reading() as session:
        mine = find(session, person, assignment.public_id)
    assert refused(project, mine, in_order(mine), nonce="old", correct=True)[0] == "stale"
    better = Said(dict.fromkeys(cards(mine), 7))
    second = rank(project, mine, better, now=NOW + 90, correct=True)
    again = rank(project, mine, better, now=NOW + 91, correct=True, nonce=second.submission.nonce)
    assert again.is_repeat and not second.is_repeat
    first, last = submissions(project)
    assert (first.revision, first.seconds, last.revision, last.seconds) == (1, 30.0, 2, None)
    assert first.said["ranks"] == {"a0": 1, "a1": 2, "a2": 3, "a3": 4} and set(last.said["ranks"].values()) == {1}
    with project.database.reading() as session:
        entry = session.scalars(select(Trail).where(Trail.action == "correct ranking")).one()
        assert find(session, person, assignment.public_id).ended_at == NOW + 30
    assert (entry.who, entry.before, entry.after) == (person.pseudonym, first.said, last.said)


def test_the_guideline_that_was_shown_is_kept_with_the_submission(given):
    project, person, assignment = given
    with project.database.writing() as session:
        add_guideline(session, "New.", who="x", now=NOW)
    rank(project, assignment, guideline_version=1)
    second = claim(project, person)
    assert refused(project, second, in_order(second), guideline_version=3)[1] == "guideline_version"
    rank(project, second)
    assert [row.guideline_version for row in submissions(project)] == [1, 2]


def test_a_draft_comes_back_and_is_gone_when_submitted(given):
    project, person, assignment = given

    def draft(content, now=NOW):
        with project.database.writing() as session:
            mine = find(session, person, assignment.public_id)
            save_draft(session, mine, content, settings=project.settings, now=now)

    def stored():
        with project.database.reading() as session:
            return find(session, person, assignment.public_id)

    draft({"ranks": {"x": 1}, "reason": "半"}, now=NOW + 60)
    assert stored().draft == {"ranks": {"x": 1}, "reason": "半"} and stored().lease_until == NOW + 60 + 1800
    for bad in ([], "x", {"x": "y" * 20_001}):
        with pytest.raises(Refused):
            draft(bad)
    rank(project, assignment)
    assert stored().draft is None
    with pytest.raises(Refused) as caught:
        draft({})
    assert caught.value.code == "submitted" and stored().state == "submitted"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_draft_of_any_text_is_kept(kind, request, tmp_path):
    url = None if kind == "sqlite" else new_postgresql(request.getfixturevalue("postgresql_folder"))
    project = make_project(tmp_path, items(1), database=url, **PLAIN)
    (person,) = make_people(project, 1)
    draft = {"reason": "zero \0, half \ud83d, 'quotes\", 中文 🙂", "ranks": {"x": None}}
    with project.database.writing() as session:
        assignment = claim_next(session, person, project.settings, NOW)
        save_draft(session, assignment, draft, settings=project.settings, now=NOW)
    assert claim(project, person).draft == draft


def test_a_draft_on_a_lost_lease_is_refused(tmp_path):
    project = make_project(tmp_path, items(1), **PLAIN)
    slow, quick = make_people(project, 2)
    late = claim(project, slow)
    claim(project, quick, NOW + 3600)
    with pytest.raises(Refused) as caught, project.database.writing() as session:
        save_draft(session, find(session, slow, late.public_id), {}, settings=project.settings, now=NOW + 3601)
    assert caught.value.code == "taken"


def test_skipping_needs_a_known_reason_and_is_idempotent(given):
    project, person, assignment = given

    def skip_it(reason, note="", which=assignment):
        with project.database.writing() as session:
            skip(session, find(session, person, which.public_id), reason, note, now=NOW)

    bad = [("lazy", "", "bad_reason"), ("other", "x" * 5001, "too_long"), ("other", "\0", "bad_text")]
    for reason, note, code in bad:
        with pytest.raises(Refused) as caught:
            skip_it(reason, note)
        assert caught.value.code == code
    skip_it("other", " a note ")
    skip_it("upsetting", "again")
    with project.database.reading() as session:
        row = find(session, person, assignment.public_id)
        assert (row.state, row.skip_reason, row.skip_note) == ("skipped", "other", "a note")
    assert refused(project, assignment, in_order(assignment))[0] == "skipped"
    done = claim(project, person)
    rank(project, done)
    with pytest.raises(Refused) as caught:
        skip_it("other", which=done)
    assert caught.value.code == "submitted" and set(SKIP_REASONS) >= {"other", "upsetting"} and "wrong" in FLAGS


def test_last_submitted_are_newest_first_and_ones_own(tmp_path):
    project = make_project(tmp_path, items(6), **PLAIN | {"overlap": 2})
    me, other = make_people(project, 2)
    mine = [assignment.id for assignment in work(project, me, limit=4)]
    work(project, other, limit=2)
    claim(project, me)
    with project.database.reading() as session:
        assert [a.id for a in last_submitted(session, me, limit=3)] == mine[:0:-1]


KILLED = """
import sys
from heedful.annotate.project import open_project
from toy_project import *
project = open_project(sys.argv[1])
with project.database.reading() as session:
    person = session.get_one(Person, int(sys.argv[2]))
now = float(sys.argv[3])
while (assignment := claim(project, person, now)) is not None:
    rank(project, assignment, now=now)
    print(assignment.item.group_id, flush=True)  # the acknowledgement
    now += 1
"""


def test_a_killed_server_loses_nothing_that_it_acknowledged(tmp_path):
    """Killed with SIGKILL again and again at work; the soak over 5,000 submissions is in benchmarks/."""
    project = make_project(tmp_path, items(60), **PLAIN)
    (person,) = make_people(project, 1)
    project.database.dispose()
    acknowledged = []
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    for turn in range(3):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "project"), str(person.id), str(NOW + 100 * turn)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            acknowledged += [server.stdout.readline().strip() for _ in range(5 + 4 * turn)]
            server.send_signal(signal.SIGKILL)
            acknowledged += server.stdout.read().split()
    project = open_project(tmp_path / "project")
    with project.database.reading() as session:
        done = {a.id: a.item.group_id for a in session.scalars(select(Assignment)) if a.state == "submitted"}
    stored = [done[row.assignment_id] for row in submissions(project)]
    assert len(acknowledged) == len(set(acknowledged)) >= 27
    assert set(acknowledged) <= set(stored) and len(stored) == len(set(stored)) <= len(acknowledged) + 3
    assert len(work(project, person, now=NOW + 10**4)) == 60 - len(stored)


def test_said_is_not_changed_by_the_checks(given):
    project, _, assignment = given
    said = in_order(assignment)
    rank(project, assignment, said)
    assert said == in_order(assignment) and dataclasses.is_dataclass(said)


def test_what_claim_gives_can_be_shown_after_its_transaction(given):
    project, person, _ = given
    with project.database.writing() as session:
        assignment = claim_next(session, person, project.settings, NOW)
    assert assignment.item.prompt == [{"role": "user", "content": f"Question {assignment.item.group_id}"}]
    assert len({card.answer.text for card in assignment.shown}) == 4
