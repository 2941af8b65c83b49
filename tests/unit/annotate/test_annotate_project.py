"""A project's folder and what is put into its queue: everything or nothing, each item once, the share for agreement."""

import dataclasses
from collections import Counter

import pytest
import yaml
from sqlalchemy import func, select

from heedful.annotate.database import Database
from heedful.annotate.project import add_guideline, add_rankings, create_project, guideline, open_project
from heedful.annotate.settings import Settings
from heedful.annotate.tables import Answer, GoldPair, Item, Trail
from heedful.errors import ConfigError, DataError, HeedfulError
from heedful.records import Judgement, Message
from toy_project import NOW, items, make_project


def count(project, table=Item, *where):
    with project.database.reading() as session:
        return session.scalar(select(func.count()).select_from(table).where(*where))


def test_a_project_opens_as_it_was_created(tmp_path):
    settings = Settings(name="问答", overlap=2, quotas={"chat": 0.5}, attributes=("helpful",), reason="off")
    create_project(tmp_path / "p", settings, "  Line one\r\nLine two \n", now=NOW)
    project = open_project(tmp_path / "p")
    assert project.settings == settings and project.database.is_sqlite
    with project.database.reading() as session:
        version = guideline(session)
        assert (version.version, version.text, version.created_at) == (1, "Line one\nLine two", NOW)
    with pytest.raises(DataError, match="there is a project already"):
        create_project(tmp_path / "p", settings, "x", now=NOW)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"overlapp": 2}, r"project.yaml: overlapp: unknown key; known keys are name, languages, overlap"),
        ({"overlap": 0}, "project.yaml: overlap: "),
        ({"quotas": {"chat": -1}}, "project.yaml: quotas.chat: "),
        ({"database": 5}, "project.yaml: database must be a URL"),
    ],
)
def test_a_wrong_project_file_is_named_with_its_key(tmp_path, change, says):
    make_project(tmp_path)
    path = tmp_path / "project" / "project.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        open_project(tmp_path / "project")


def test_no_project_broken_yaml_and_a_lost_database_are_told(tmp_path):
    with pytest.raises(ConfigError, match="no project here"):
        open_project(tmp_path)
    make_project(tmp_path).database.dispose()
    (tmp_path / "project" / "project.sqlite").unlink()
    with pytest.raises(DataError, match="project.sqlite is missing"):
        open_project(tmp_path / "project")
    (tmp_path / "project" / "project.sqlite").touch()
    with pytest.raises(DataError, match="project.sqlite is missing or empty"):
        open_project(tmp_path / "project")
    for text, says in [
        ("name: x\na: [", "project.yaml line 2: not valid YAML"),
        ("overlap: 1\noverlap: 2", "line 2: not valid YAML: the key 'overlap' is there twice"),
        ("- x", "must be a mapping of keys such as name"),
        ("languages: en", r"languages: must be a list, such as \[a, b\]"),
        ("database: mysql://x/y", "project.yaml: the database must be sqlite"),
    ]:
        (tmp_path / "project" / "project.yaml").write_text(text)
        with pytest.raises(HeedfulError, match=says):
            open_project(tmp_path / "project")


@pytest.mark.parametrize(
    ("text", "url", "says"),
    [
        (" ", None, "guideline is empty"),
        ("x", "mysql://x/y", "must be sqlite"),
        ("x", "postgresql+psycopg://nobody@127.0.0.1:1/none", "cannot be used"),
    ],
)
def test_a_project_that_cannot_be_made_leaves_nothing_behind(tmp_path, text, url, says):
    with pytest.raises(DataError, match=says):
        create_project(tmp_path / "p", Settings(), text, url, now=NOW)
    assert not (tmp_path / "p").exists()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file; name a folder"):
        create_project(tmp_path / "file", Settings(), "x", now=NOW)


def test_gold_pairs_that_contradict_each_other_are_refused(tmp_path):
    project = make_project(tmp_path)
    for gold in ([("a0", "a1"), ("a1", "a0")], [("a0", "a1"), ("a1", "a2"), ("a2", "a0")]):
        with pytest.raises(DataError, match="contradict each other"):
            add_rankings(project, [changed(gold=gold)], now=NOW)
    assert add_rankings(project, [changed(gold=[("a0", "a1"), ("a0", "a2"), ("a1", "a2")])], now=NOW).num_gold == 1


def test_only_the_owner_reads_a_projects_files(tmp_path):
    project = make_project(tmp_path, items(1))
    modes = {path.name: path.stat().st_mode & 0o777 for path in project.folder.iterdir()}
    assert modes["project.yaml"] == 0o600 and set(modes.values()) == {0o600}
    assert {name.removeprefix("project.sqlite") for name in modes} >= {"", "-wal", "-shm"}


def test_two_projects_do_not_share_a_database(tmp_path):
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    create_project(tmp_path / "a", Settings(), "x", url, now=NOW)
    with pytest.raises(DataError, match="holds another project"):
        create_project(tmp_path / "b", Settings(), "x", url, now=NOW)
    assert not (tmp_path / "b" / "project.yaml").exists()
    assert open_project(tmp_path / "a").database.url == Database(url).url


def test_guidelines_get_versions_and_a_trail(tmp_path):
    project = make_project(tmp_path)
    with project.database.writing() as session:
        assert add_guideline(session, "Be fairer.", who="rater-1", now=NOW + 1).version == 2
    for text, says in [(" \n", "is empty"), ("x" * 200_001, "200,001 characters"), ("a\0b", "zero byte")]:
        with pytest.raises(DataError, match=says), project.database.writing() as session:
            add_guideline(session, text, who="rater-1", now=NOW)
    with project.database.reading() as session:
        assert guideline(session).text == "Be fairer."
        last = session.scalars(select(Trail).order_by(Trail.id.desc())).first()
    assert (last.who, last.action, last.object) == ("rater-1", "add guideline", "guideline 2")


def test_items_are_added_once_and_gold_ones_with_their_key(tmp_path):
    project = make_project(tmp_path)
    rankings = items(5) + items(2, gold=True, name="c")
    added = add_rankings(project, rankings, now=NOW)
    assert (added.num_items, added.num_gold, added.num_known) == (7, 2, 0)
    added = add_rankings(project, rankings + items(1, name="new"), now=NOW)
    assert (added.num_items, added.num_gold, added.num_known) == (1, 0, 7)
    assert count(project) == 8 and count(project, GoldPair) == 2 and count(project, Answer) == 32
    with project.database.reading() as session:
        pair = session.scalars(select(GoldPair).join(Item).where(Item.group_id == "c1")).one()
        names = {answer.id: answer.answer_id for answer in session.get_one(Item, pair.item_id).answers}
    assert (names[pair.better_id], names[pair.worse_id]) == ("a0", "a3")


def changed(**changes):
    return dataclasses.replace(items(1, name="bad")[0], **changes)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (items(1, num_answers=1, name="bad")[0], "'bad0' has 1 answers; 2 to 9"),
        (items(1, num_answers=10, name="bad")[0], "'bad0' has 10 answers; 2 to 9"),
        (changed(answers=items(1)[0].answers[:1] * 2), "two answers with the same id"),
        (changed(gold=(("a0", "a9"),)), "must be .better, worse. ids"),
        (changed(gold=(("a0", "a0"),)), "must be .better, worse. ids"),
        (changed(gold=()), "without any"),
        (changed(category="c" * 101), "its category has 101 characters"),
        (changed(prompt=(Message("user", "a\0b"),)), "its prompt holds a zero byte"),
        (changed(group_id="\ud800"), "its group_id holds a zero byte or half a character"),
        (changed(group_id="g1"), "g1 stands twice"),
        (changed(group_id="old0", category="other"), "old0 is in the project with other content"),
        (changed(group_id="old0", gold=(("a0", "a1"),)), "old0 is in the project with other content"),
    ],
)
def test_one_refused_item_leaves_nothing_behind(tmp_path, bad, says):
    project = make_project(tmp_path, items(1, name="old"))
    with pytest.raises(DataError, match=says):
        add_rankings(project, [*items(3), bad], now=NOW)
    assert count(project) == 1


def test_many_answers_warn(tmp_path):
    project = make_project(tmp_path)
    added = add_rankings(project, items(1, num_answers=6) + items(1, num_answers=7, name="many"), now=NOW)
    assert len(added.warnings) == 1 and "'many0' has 7 answers" in added.warnings[0]


def test_judgements_that_come_along_are_kept(tmp_path):
    ranking = changed(rankings=(Judgement("x", {"a0": 1, "a1": 2}),), ratings={"safe": {"a0": 3.0}})
    project = make_project(tmp_path, [ranking])
    with project.database.reading() as session:
        brought = session.scalars(select(Item.brought)).one()
    assert brought == {key: ranking.to_json()[key] for key in ("rankings", "ratings")}


def test_the_overlap_share_holds_in_every_category_and_over_several_additions(tmp_path):
    project = make_project(tmp_path, overlap=1, overlap_on_share=3, overlap_share=0.2)
    sizes = {"chat": 50, "safety": 25, "writing": 7, "maths": 3}
    for part in range(2):
        rankings = [r for name, size in sizes.items() for r in items(size, category=name, name=f"{name}-{part}-")]
        add_rankings(project, rankings + items(9, gold=True, category="chat", name=f"c{part}"), now=NOW)
    with project.database.reading() as session:
        rows = session.execute(select(Item.category, Item.overlap).where(Item.is_gold.is_(False))).all()
    shared = Counter(category for category, overlap in rows if overlap == 3)
    assert sum(shared.values()) == round(0.2 * 2 * sum(sizes.values()))
    for category, size in sizes.items():
        assert abs(shared[category] - 0.2 * 2 * size) <= 1
    assert {overlap for _, overlap in rows} == {1, 3}


def test_the_place_in_the_queue_does_not_follow_the_file(tmp_path):
    project = make_project(tmp_path, items(30))
    with project.database.reading() as session:
        order = list(session.scalars(select(Item.group_id).order_by(Item.place)))
    assert order != [f"g{i}" for i in range(30)] and sorted(order) != order
