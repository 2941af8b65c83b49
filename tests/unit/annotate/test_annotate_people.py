"""Accounts, exclusion, deletion and the trail they leave, on SQLite and on PostgreSQL."""

import threading
import time

import pytest
from sqlalchemy import select

from heedful.annotate import invitations, people, trail
from heedful.annotate.progress import by_category, by_person
from heedful.annotate.submissions import save_draft, skip
from heedful.annotate.tables import ApiToken, Assignment, Login, Person, Submission, Table
from heedful.errors import DataError
from toy_project import (
    NOW,
    claim,
    in_order,
    items,
    make_project,
    missing_postgresql,
    new_postgresql,
    postgresql_server,
    rank,
)

PASSWORD = "correct horse battery"


pytestmark = pytest.mark.usefixtures("light_hashes")


@pytest.fixture(scope="module")
def server():
    if reason := missing_postgresql():
        pytest.skip(reason)
    with postgresql_server() as folder:
        yield folder


@pytest.fixture(params=["sqlite", "postgresql"])
def project(request, tmp_path):
    url = new_postgresql(request.getfixturevalue("server")) if request.param == "postgresql" else None
    made = make_project(tmp_path, items(4), database=url, gold_rate=0.0, repeat_rate=0.0, overlap_share=0.0)
    with made.database.writing() as session:
        people.create_person(session, "ann", PASSWORD, "admin", NOW)
        people.create_person(session, "ben", PASSWORD, "annotator", NOW)
    yield made
    made.database.dispose()


def named(session, name):
    found = people.by_name(session, name)
    assert found is not None
    return found


def everything(project):
    """All that the database holds, as one text."""
    tables = Table.metadata.sorted_tables
    with project.database.reading() as session:
        return "\n".join(str(tuple(row)) for table in tables for row in session.execute(select(table)))


def actions(project):
    with project.database.reading() as session:
        return [(row.who, row.action, row.object) for row in reversed(trail.newest(session, limit=1000))]


@pytest.mark.parametrize(
    ("name", "password", "role", "says"),
    [
        ("ben", PASSWORD, "annotator", "taken"),
        (" ben ", PASSWORD, "annotator", "taken"),
        ("ｂｅｎ", PASSWORD, "annotator", "taken"),  # the same in NFKC
        ("", PASSWORD, "annotator", "1 to 64"),
        ("x" * 65, PASSWORD, "annotator", "1 to 64"),
        ("a\u202eb", PASSWORD, "annotator", "visible"),  # turns the direction of writing
        ("a\x00b", PASSWORD, "annotator", "visible"),
        ("mia", "123456789", "annotator", "10 to 1,024"),
        ("mia", "x" * 1025, "annotator", "10 to 1,024"),
        ("mia.longname", "Mia.LongName", "annotator", "easy to guess"),
        ("mia", "abababababab", "annotator", "easy to guess"),
        ("mia", PASSWORD, "owner", "annotator, reviewer, admin"),
    ],
)
def test_accounts_that_cannot_be(project, name, password, role, says):
    with pytest.raises(DataError, match=says), project.database.writing() as session:
        people.create_person(session, name, password, role, NOW)


def test_roles_are_steps():
    allowed = {role: [needed for needed in people.ROLES if people.role_allows(role, needed)] for role in people.ROLES}
    assert allowed == {
        "annotator": ["annotator"],
        "reviewer": ["annotator", "reviewer"],
        "admin": ["annotator", "reviewer", "admin"],
    }


def test_SEC_12_a_forgotten_person_is_nowhere_but_the_work_stays(project):
    with project.database.writing() as session:
        mia = people.create_person(session, "mia-the-rater", PASSWORD, "annotator", NOW)
        people.open_login(session, mia, NOW)
        people.create_token(session, mia, "annotate", NOW)
    first, second = claim(project, mia), None
    rank(project, first, in_order(first, reason="my secret reason"))
    second = claim(project, mia)
    with project.database.writing() as session:
        skip(session, session.merge(second, load=False), "other", "my secret note", now=NOW)
    third = claim(project, mia)
    with project.database.writing() as session:
        draft = {"ranks": {}, "reason": "my secret draft"}
        save_draft(session, session.merge(third, load=False), draft, settings=project.settings, now=NOW)
    before = everything(project)
    assert all(word in before for word in ("mia-the-rater", "secret reason", "secret note", "secret draft"))
    with project.database.writing() as session:
        people.forget(session, named(session, "mia-the-rater"), NOW + 5, by=named(session, "ann"))
    left = everything(project)
    assert "mia-the-rater" not in left and "secret note" not in left and "secret draft" not in left
    assert "secret reason" in left
    with project.database.writing() as session:
        again = people.by_pseudonym(session, mia.pseudonym)
        people.forget(session, again, NOW + 6, with_reasons=True)
        assert (again.deleted_at, again.name, again.password_hash) == (NOW + 5, None, None)
    assert "secret" not in everything(project)
    with project.database.reading() as session:
        assert session.scalar(select(Login.id)) is None and session.scalar(select(ApiToken.id)) is None
        [stored] = session.scalars(select(Submission)).all()
        assert len(stored.said["ranks"]) == 4
        states = session.scalars(select(Assignment.state).order_by(Assignment.id)).all()
        assert states == ["submitted", "skipped", "expired"], "what was in hand goes to somebody else"
    with project.database.writing() as session:
        assert people.create_person(session, "mia-the-rater", PASSWORD, "annotator", NOW).pseudonym != mia.pseudonym
        with pytest.raises(DataError, match="has been deleted"):
            people.enable(session, people.by_pseudonym(session, mia.pseudonym), NOW)
        with pytest.raises(DataError, match="has been deleted"):
            people.set_password(session, people.by_pseudonym(session, mia.pseudonym), PASSWORD, NOW)


def test_SEC_12_a_forgotten_name_is_not_left_in_the_files(tmp_path):
    project = make_project(tmp_path)
    with project.database.writing() as session:
        people.create_person(session, "mia-the-rater", PASSWORD, "annotator", NOW)

    def files():
        return b"".join(path.read_bytes() for path in project.folder.iterdir())

    assert b"mia-the-rater" in files()
    with project.database.writing() as session:
        people.forget(session, named(session, "mia-the-rater"), NOW)
    people.erase_remains(project.database)
    assert b"mia-the-rater" not in files()
    with project.database.reading() as session:
        assert session.scalar(select(Person.deleted_at)) == NOW


def test_SEC_11_every_change_is_in_the_trail_without_names_or_secrets(project):
    with project.database.writing() as session:
        ann, ben = named(session, "ann"), named(session, "ben")
        token = people.create_token(session, ben, "annotate", NOW, by=ben, request_id="r1")
        assert people.revoke_token(session, ben, token[:12], NOW, by=ben)
        people.set_role(session, ben, "reviewer", NOW, by=ann)
        people.set_password(session, ben, "another long one", NOW, by=ben)
        people.exclude(session, ben, "too fast", NOW, by=ann)
        people.reinstate(session, ben, NOW, by=ann)
        people.disable(session, ben, NOW, by=ann)
        people.enable(session, ben, NOW, by=ann)
        login = people.open_login(session, ben, NOW)
        people.close_login(session, login, NOW)
        people.close_logins(session, ben, NOW, by=ben)
        invitation = invitations.invite(session, "annotator", NOW, by=ann)
    joined = "joined-long-one"
    with project.database.writing() as session:
        invitations.join(session, invitation, "zoe", joined, NOW)
        people.forget(session, ben, NOW, by=ann)
    rows = actions(project)[-14:]
    a, b = ann.pseudonym, ben.pseudonym
    assert [(who, action) for who, action, _ in rows] == [
        (b, "create token"), (b, "revoke token"), (a, "change role"), (b, "change password"), (a, "exclude person"),
        (a, "reinstate person"), (a, "disable person"), (a, "enable person"), (b, "log in"), (b, "log out"),
        (b, "log out everywhere"), (a, "invite"), ("command line", "create person"), (a, "forget person"),
    ]  # fmt: skip
    assert {row[2] for row in rows[:11]} == {b}
    with project.database.reading() as session:
        log = str([(row.object, row.before, row.after) for row in trail.newest(session, limit=1000)])
    for secret in ("ben", "zoe", token, login, invitation, PASSWORD, joined):
        assert secret not in log


def test_exclusion_is_one_at_a_time_has_a_reason_and_can_be_lifted(project):
    ben = None
    with project.database.writing() as session:
        ben = named(session, "ben")
        for reason in ("", "  x ", "x" * 2001):
            with pytest.raises(DataError, match="Say why"):
                people.exclude(session, ben, reason, NOW)
        with pytest.raises(DataError, match="not left out"):
            people.reinstate(session, ben, NOW)
        people.exclude(session, ben, " length lover ", NOW, by=named(session, "ann"))
    with project.database.writing() as session:
        assert people.live_exclusion(session, ben).reason == "length lover"
        with pytest.raises(DataError, match="left out already"):
            people.exclude(session, ben, "again", NOW)
        [row] = [row for row in by_person(session) if row.name == "ben"]
        assert row.excluded_because == "length lover"
        people.reinstate(session, ben, NOW + 9)
        assert people.live_exclusion(session, ben) is None
        people.exclude(session, ben, "once more", NOW + 10)


def test_an_admin_always_remains(project):
    with project.database.writing() as session:
        ann, ben = named(session, "ann"), named(session, "ben")
        for change in (people.disable, people.forget, lambda s, p, now: people.set_role(s, p, "reviewer", now)):
            with pytest.raises(DataError, match="last admin"):
                change(session, ann, NOW)
        people.set_role(session, ben, "admin", NOW)
        people.disable(session, ann, NOW)
        with pytest.raises(DataError, match="last admin"):
            people.disable(session, ben, NOW)
        assert people.has_admin(session) and not people.has_admin(session, besides=ben.id)


def test_a_person_of_an_earlier_session_is_changed_as_well(project):
    with project.database.reading() as session:
        ben = named(session, "ben")
    with project.database.writing() as session:
        people.disable(session, ben, NOW)
    with project.database.writing() as session:
        assert named(session, "ben").disabled_at == NOW
    with project.database.writing() as session:
        people.enable(session, ben, NOW)
        people.set_role(session, ben, "reviewer", NOW)
        people.set_password(session, ben, "another long one", NOW)
    with project.database.writing() as session:
        assert people.enter(people.by_name(session, "ben"), "another long one").role == "reviewer"
        people.exclude(session, ben, "too fast", NOW)
    with project.database.writing() as session:
        people.reinstate(session, ben, NOW)
        people.forget(session, ben, NOW)
    with project.database.reading() as session:
        assert people.by_name(session, "ben") is None


def race(number, act):
    """``act`` from so many threads at once → what each returned or raised."""
    start, results = threading.Barrier(number), [None] * number

    def one(i):
        start.wait()
        try:
            results[i] = act(i)
        except DataError as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_SEC_07_one_invitation_makes_one_account_whoever_is_faster(project):
    with project.database.writing() as session:
        token = invitations.invite(session, "annotator", NOW)

    def join(i):
        with project.database.writing() as session:
            return invitations.join(session, token, f"racer {i}", PASSWORD, NOW).pseudonym

    results = race(8, join)
    assert len([result for result in results if isinstance(result, str)]) == 1
    with project.database.reading() as session:
        assert len([p for p in session.scalars(select(Person)) if (p.name or "").startswith("racer")]) == 1


def test_SEC_07_one_name_goes_to_one_account_whoever_is_faster(project):
    def create(_):
        with project.database.writing() as session:
            return people.create_person(session, "same", PASSWORD, "annotator", NOW).pseudonym

    results = race(8, create)
    assert len([result for result in results if isinstance(result, str)]) == 1
    assert all("taken" in str(result) for result in results if not isinstance(result, str))


def test_SEC_07_two_admins_cannot_close_each_other_at_the_same_moment(project):
    with project.database.writing() as session:
        people.set_role(session, named(session, "ben"), "admin", NOW)

    def close(i):
        with project.database.writing() as session:
            people.disable(session, named(session, ("ann", "ben")[i]), NOW)
            time.sleep(0.1)
        return "closed"

    results = race(2, close)
    assert sorted(map(str, results)) == ["This is the last admin; make another one first.", "closed"]
    with project.database.reading() as session:
        assert people.has_admin(session)


def test_SEC_07_work_is_left_out_once_whoever_decides_first(project):
    def exclude(i):
        with project.database.writing() as session:
            people.exclude(session, named(session, "ben"), f"reason {i}", NOW)
            time.sleep(0.05)
        return "done"

    assert [str(result) for result in race(4, exclude)].count("done") == 1
    with project.database.writing() as session:
        people.reinstate(session, named(session, "ben"), NOW)
        assert people.live_exclusion(session, named(session, "ben")) is None


def test_progress_counts_what_is_wanted_and_leaves_out_excluded_work(project):
    with project.database.writing() as session:
        ann, ben = named(session, "ann"), named(session, "ben")
    rank(project, claim(project, ben), now=NOW + 30)
    rank(project, claim(project, ann), now=NOW + 60)
    claim(project, ann, NOW + 61)
    with project.database.reading() as session:
        [row] = by_category(session)
        assert (row.category, row.num_items, row.num_wanted, row.num_submitted) == ("chat", 4, 4, 2)
        assert (row.num_leased, row.num_skipped, row.num_gold) == (1, 0, 0)
        assert [(p.name, p.num_submitted, p.last_at) for p in by_person(session)] == [
            ("ann", 1, NOW + 60),
            ("ben", 1, NOW + 30),
        ]
    with project.database.writing() as session:
        people.exclude(session, ben, "too fast", NOW)
    with project.database.reading() as session:
        assert by_category(session)[0].num_submitted == 1
