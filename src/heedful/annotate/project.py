"""A project: one folder with its settings, its database, the written criteria and the items to rank."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session, selectinload

from heedful.annotate import trail
from heedful.annotate.database import Database
from heedful.annotate.settings import Settings
from heedful.annotate.tables import Answer, GoldPair, Guideline, Item
from heedful.annotate.wording import Wording
from heedful.config.read import read_yaml, wrong_key
from heedful.errors import ConfigError, DataError
from heedful.records import Ranking

FILE = "project.yaml"
SQLITE = "project.sqlite"
NUM_ANSWERS = (2, 9)
"""One digit key ranks an answer."""
MANY_ANSWERS = 6
"""More than a person compares at ease."""
MAX_TEXT = 200_000
"""Characters of a prompt, an answer or a guideline."""
COMMAND_LINE = "command line"
"""Who did it, in the trail, where no signed-in person did."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""Characters that PostgreSQL or UTF-8 cannot hold."""


@dataclass(frozen=True, slots=True)
class Project:
    """An open project."""

    folder: Path
    settings: Settings
    database: Database


@dataclass(frozen=True, slots=True)
class Added:
    """What :func:`add_rankings` did."""

    num_items: int
    """New ones, control items included."""
    num_gold: int
    """Control items among them."""
    num_known: int
    """There already, with the same content."""
    warnings: tuple[str, ...] = ()


def create_project(
    folder: str | Path,
    settings: Settings,
    guideline_text: str,
    database: str | None = None,
    *,
    now: float,
    who: str = COMMAND_LINE,
) -> Project:
    """Make the folder, its project.yaml, its database and the first version of the guideline.

    Args:
        database: URL of an empty PostgreSQL database; None = ``project.sqlite`` in the folder.

    Raises:
        DataError: there is a project already, or the database cannot be used.
    """
    folder = Path(folder)
    if (folder / FILE).exists():
        raise DataError(f"{folder}: there is a project already; name another folder")
    if folder.is_file():
        raise DataError(f"{folder}: is a file; name a folder")
    guideline_text, opened = _readable(guideline_text), Database(database or _sqlite(folder))
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not database:
            (folder / SQLITE).touch(mode=0o600)  # names and password hashes lie in it
        opened.migrate()
        with opened.writing() as session:
            if session.scalar(select(func.count(Guideline.id))):
                raise DataError(f"{folder}: the database holds another project already; every project needs its own")
            add_guideline(session, guideline_text, who=who, now=now)
    except DataError:
        opened.dispose()
        if is_new and database:
            folder.rmdir()
        raise
    content = settings.model_dump(mode="json") | ({"database": database} if database else {})
    (folder / FILE).touch(mode=0o600)  # the URL may hold a password
    (folder / FILE).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return Project(folder, settings, opened)


def open_project(folder: str | Path) -> Project:
    """The project in ``folder``; a database of an older version is brought up to date.

    Raises:
        ConfigError: project.yaml is missing or wrong (names the key).
        DataError: the database cannot be used or is newer than this heedful.
    """
    folder = Path(folder)
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{folder}: no project here ({FILE} is missing); make one with heedful annotate create")
    content = read_yaml(path, "must be a mapping of keys such as name and overlap")
    url = content.pop("database", None)
    if url is not None and not isinstance(url, str):
        raise ConfigError(f"{path}: database must be a URL")
    try:
        settings = Settings.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {wrong_key(error, Settings)}") from None
    if url is None and not ((folder / SQLITE).is_file() and (folder / SQLITE).stat().st_size):
        raise DataError(f"{folder}: {SQLITE} is missing or empty; a new one would hide that rankings are lost")
    try:
        database = Database(url or _sqlite(folder))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    database.migrate()
    return Project(folder, settings, database)


def _sqlite(folder: Path) -> str:
    return f"sqlite:///{(folder / SQLITE).resolve()}"


def add_guideline(session: Session, text: str, *, who: str, now: float, request_id: str = "") -> Guideline:
    """A further version of the written criteria (Markdown), in force from now on; inside ``writing()``."""
    text = _readable(text)
    version = (session.scalar(select(func.max(Guideline.version))) or 0) + 1
    row = Guideline(version=version, text=text, created_at=now, created_by=who)
    session.add(row)
    trail.record(
        session, who=who, action="add guideline", object=f"guideline {version}", request_id=request_id, now=now,
        after={"num_characters": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()},
    )  # fmt: skip
    session.flush()
    return row


def _readable(text: str) -> str:
    """The text of a guideline as it is kept; raises DataError when it is empty, too long or cannot be stored."""
    text = storable(text.replace("\r\n", "\n").strip(), Wording("the guideline"))
    if not text:
        raise DataError(Wording("the guideline is empty; write down what makes an answer better"))
    if len(text) > MAX_TEXT:
        raise DataError(
            Wording("the guideline has {num:,} characters; {max:,} are allowed", num=len(text), max=MAX_TEXT)
        )
    return text


def guideline(session: Session) -> Guideline:
    """The version in force."""
    return session.scalars(select(Guideline).order_by(Guideline.version.desc()).limit(1)).one()


def storable(text: str, what: str) -> str:
    """The text itself. Raises DataError when a database cannot hold it (zero bytes, halves of characters)."""
    if _UNSTORABLE.search(text):
        raise DataError(
            Wording("{what} holds a zero byte or half a character, which no database keeps; remove it", what=what)
        )
    return text


def add_rankings(project: Project, rankings: Sequence[Ranking], *, now: float, who: str = COMMAND_LINE) -> Added:
    """Put items into the queue: all of them, or none when one is refused.

    A ranking with ``gold`` becomes a control item. Judgements that a ranking brings along are kept and come out again
    with the master file; they do not count as work done here. Of every category the share ``settings.overlap_share``,
    chosen by a hash of the group ids, is ranked by ``settings.overlap_on_share`` people.

    Raises:
        DataError: naming the group id, when answers are too few or too many, ids are not unique, a text cannot be
            stored, or a group of that id with other content is there.
    """
    warnings = list(dict.fromkeys(warning for ranking in rankings for warning in _check(ranking)))
    seen: set[str] = set()
    for ranking in rankings:
        if ranking.group_id in seen:
            raise DataError(f"the group {ranking.group_id} stands twice among the rankings to add")
        seen.add(ranking.group_id)
    with project.database.writing() as session:
        known = _known(session, seen)
        new = [ranking for ranking in rankings if ranking.group_id not in known]
        for ranking in rankings:
            if ranking.group_id in known and known[ranking.group_id] != _content(ranking):
                raise DataError(f"the group {ranking.group_id} is in the project with other content; give it a new id")
        shared = _shared(session, new, project.settings)
        _insert(session, new, shared, project.settings, now)
        added = Added(len(new), sum(r.gold is not None for r in new), len(rankings) - len(new), tuple(warnings))
        if new:
            trail.record(
                session, who=who, action="add items", object=f"{len(new)} items", now=now,
                after={"num_items": added.num_items, "num_gold": added.num_gold, "num_known": added.num_known},
            )  # fmt: skip
    return added


def _check(ranking: Ranking) -> Iterable[str]:
    """Warnings; raises DataError for what cannot be ranked or stored."""
    where = f"the group {ranking.group_id!r:.80}"
    low, high = NUM_ANSWERS
    if not low <= len(ranking.answers) <= high:
        raise DataError(f"{where} has {len(ranking.answers)} answers; {low} to {high} can be ranked")
    ids = {answer.id for answer in ranking.answers}
    if len(ids) < len(ranking.answers):
        raise DataError(f"{where} has two answers with the same id")
    lengths = [("group_id", ranking.group_id, 200), ("category", ranking.category, 100), ("lang", ranking.lang, 20),
               ("source", ranking.source, 200)]  # fmt: skip
    lengths += [("prompt", message.content, MAX_TEXT) for message in ranking.prompt]
    for answer in ranking.answers:
        lengths += [("answer id", answer.id, 200), ("policy", answer.policy, 200), ("kind", answer.kind, 20),
                    ("answer", answer.text, MAX_TEXT)]  # fmt: skip
    for name, text, limit in lengths:
        if len(storable(text, f"{where}: its {name}")) > limit:
            raise DataError(f"{where}: its {name} has {len(text):,} characters; {limit:,} are allowed")
    for pair in ranking.gold or ():
        if len(pair) != 2 or len(ids & set(pair)) != 2:
            raise DataError(f"{where}: gold {list(pair)!r:.80} must be (better, worse) ids of two of its answers")
    if _contradicts(ranking.gold or ()):
        raise DataError(f"{where}: its gold pairs contradict each other, so nobody could order the answers as they say")
    if ranking.gold is not None and not ranking.gold:
        raise DataError(f"{where} is a control item without any (better, worse) pair")
    if len(ranking.answers) > MANY_ANSWERS:
        yield f"{where} has {len(ranking.answers)} answers; above {MANY_ANSWERS} people rank carelessly"


def _contradicts(gold: Iterable[Sequence[str]]) -> bool:
    order: TopologicalSorter[str] = TopologicalSorter()
    for better, worse in gold:
        order.add(worse, better)
    try:
        order.prepare()
    except CycleError:
        return True
    return False


def _content(ranking: Ranking) -> Any:
    """What must be equal for two rankings to be the same item."""
    answers = [[a.id, a.text, a.policy, a.kind, list(a.flags), a.score] for a in ranking.answers]
    prompt = [message.to_json() for message in ranking.prompt]
    gold = sorted(map(list, ranking.gold)) if ranking.gold is not None else None
    return [prompt, answers, ranking.category, ranking.lang, ranking.round, ranking.source, gold]


def _known(session: Session, group_ids: Iterable[str]) -> dict[str, Any]:
    """The content of those groups that the project holds."""
    found = {}
    names_left = sorted(group_ids)
    while names_left:
        some, names_left = names_left[:500], names_left[500:]
        query = select(Item).where(Item.group_id.in_(some))
        for item in session.scalars(query.options(selectinload(Item.answers), selectinload(Item.gold_pairs))):
            answers = [[a.answer_id, a.text, a.policy, a.kind, a.flags, a.score] for a in item.answers]
            gold = list(map(list, item.gold)) if item.gold is not None else None
            found[item.group_id] = [item.prompt, answers, item.category, item.lang, item.round, item.source, gold]
    return found


def hashed(text: str) -> int:
    """31 bits, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def _shared(session: Session, new: Sequence[Ranking], settings: Settings) -> set[str]:
    """Group ids of the new items that several people shall rank.

    Shares are rounded along the categories, so that each is met to less than one item and so is the whole.
    """
    by_category: dict[str, list[str]] = defaultdict(list)
    for ranking in new:
        if ranking.gold is None:
            by_category[ranking.category].append(ranking.group_id)
    there: dict[str, list[int]] = {}
    for category, overlap in session.execute(select(Item.category, Item.overlap).where(Item.is_gold.is_(False))):
        there.setdefault(category, []).append(overlap)
    chosen: set[str] = set()
    num_items = 0
    for category in sorted({*by_category, *there}):
        old = there.get(category, [])
        before, num_items = num_items, num_items + len(old) + len(by_category[category])
        due = round(settings.overlap_share * num_items) - round(settings.overlap_share * before)
        due -= sum(overlap == settings.overlap_on_share for overlap in old)
        chosen.update(sorted(by_category[category], key=lambda name: hashed(f"overlap {name}"))[: max(0, due)])
    return chosen


def _insert(session: Session, new: Sequence[Ranking], shared: set[str], settings: Settings, now: float) -> None:
    """In bulk, since raters wait meanwhile."""
    if not new:
        return
    rows = {ranking.group_id: _item_row(ranking) for ranking in new}
    for name, row in rows.items():
        row |= {"overlap": settings.overlap_on_share if name in shared else settings.overlap, "created_at": now}
    session.execute(insert(Item), list(rows.values()))
    ids = {name: item_id for name, item_id in session.execute(select(Item.group_id, Item.id)) if name in rows}
    answers = [
        {"item_id": ids[ranking.group_id], "position": position, "answer_id": answer.id, "text": answer.text,
         "policy": answer.policy, "kind": answer.kind, "flags": list(answer.flags), "score": answer.score}
        for ranking in new for position, answer in enumerate(ranking.answers)
    ]  # fmt: skip
    session.execute(insert(Answer), answers)
    gold = {ids[ranking.group_id]: ranking.gold for ranking in new if ranking.gold}
    named = select(Answer.item_id, Answer.answer_id, Answer.id).join(Item).where(Item.is_gold.is_(True))
    numbers = {(item_id, name): number for item_id, name, number in session.execute(named)} if gold else {}
    pairs = [
        {"item_id": item_id, "better_id": numbers[item_id, better], "worse_id": numbers[item_id, worse]}
        for item_id, some in gold.items() for better, worse in dict.fromkeys(map(tuple, some))
    ]  # fmt: skip
    if pairs:
        session.execute(insert(GoldPair), pairs)


def _item_row(ranking: Ranking) -> dict[str, Any]:
    whole = ranking.to_json()
    return {
        "group_id": ranking.group_id, "prompt": whole["prompt"], "category": ranking.category, "lang": ranking.lang,
        "round": ranking.round, "source": ranking.source, "info": whole["info"], "is_gold": ranking.gold is not None,
        "place": hashed(ranking.group_id),
        "brought": {key: whole[key] for key in ("rankings", "consensus", "ratings") if whole[key]},
    }  # fmt: skip
