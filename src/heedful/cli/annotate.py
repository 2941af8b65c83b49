"""``heedful annotate VERB …``: projects in which people rank answers."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any, cast

from heedful.cli import simulate
from heedful.cli.numbers import whole
from heedful.errors import ConfigError, DataError
from heedful.records import Ranking

DESCRIPTION = """A project is a folder: settings (project.yaml), a guideline, items to rank, people, their rankings.

  heedful annotate create PROJECT --guideline FILE      make one
  heedful annotate add PROJECT FILE                     prompts with their answers
  heedful annotate person PROJECT NAME --role admin     the first account
  heedful annotate serve PROJECT                        the web app
  heedful annotate export PROJECT --out DIR             rankings for training"""
ROLES = ("annotator", "reviewer", "admin")
PERSON_HELP = "name, or pseudonym in results"


def add_parser(verbs: Any) -> None:
    """Register the verb with its sub-verbs."""
    top = verbs.add_parser(
        "annotate", help="let people rank answers, in a web app", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    subs = top.add_subparsers(dest="annotate_verb", metavar="VERB", required=True)
    _add_project_verbs(subs)
    _add_people_verbs(subs)
    simulate.add_options(_verb(subs, "simulate", simulate.run, simulate.ABOUT))
    serve = _verb(subs, "serve", run_serve, "serve the web app of a project")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=whole(0, 65535), default=8700, help="0 = any free one (default 8700)")
    serve.add_argument("--tls_cert", metavar="FILE", help="certificate (PEM)")
    serve.add_argument("--tls_key", metavar="FILE", help="its key (PEM)")
    serve.add_argument(
        "--behind_proxy", nargs="?", const="127.0.0.1", metavar="ADDRESS",
        help="browsers come through a proxy at ADDRESS (default 127.0.0.1) that ends TLS",
    )  # fmt: skip
    serve.add_argument(
        "--i_know_it_is_not_encrypted", action="store_true",
        help="listen beyond this machine without TLS: others in the network can read passwords",
    )  # fmt: skip


def _verb(subs: Any, name: str, handler: Any, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subs.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.add_argument("project", metavar="PROJECT", help="folder of the project")
    parser.set_defaults(handler=lambda arguments: _run(handler, arguments))
    return parser


def _add_project_verbs(subs: Any) -> None:
    create = _verb(subs, "create", run_create, "make a project")
    create.add_argument("--guideline", metavar="FILE", required=True, help="what makes an answer better (Markdown)")
    create.add_argument("--database", metavar="URL", help="postgresql+psycopg://… (default: SQLite in the folder)")
    create.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a setting, such as overlap=2"
    )
    add = _verb(subs, "add", run_add, "add items: prompts with 2 to 9 answers each")
    add.add_argument("file", metavar="FILE", help="rankings in any format of `heedful data inspect`, judged or not")
    add.add_argument("--format", default="auto", help="format of FILE (default: recognised)")
    add.add_argument(
        "--on_bad_row", choices=("error", "skip"), default="error",
        help="stop at the first row that cannot be used (default), or leave such rows out and count them",
    )  # fmt: skip
    guideline = _verb(subs, "guideline", run_guideline, "put a new version of the guideline in force")
    guideline.add_argument("file", metavar="FILE", help="Markdown")
    _verb(subs, "progress", run_progress, "how far a project is, by category and by person")
    export = _verb(subs, "export", run_export, "write the rankings for training, with a data card")
    export.add_argument("--out", metavar="DIR", required=True, help="folder for the files")
    export.add_argument(
        "--to", nargs="+", metavar="FORMAT", default=["trl_messages"],
        help="as in `heedful data convert` (default trl_messages); the master form is always written",
    )  # fmt: skip
    export.add_argument("--rounds", nargs="+", type=whole(0), metavar="N", help="these rounds alone (default: all)")
    export.add_argument("--min_agree", type=float, default=0.0, metavar="F", help="leave out pairs with less agreement")
    export.add_argument("--with_gold", action="store_true", help="keep control items in the master file")
    export.add_argument("--with_excluded", action="store_true", help="keep the work of excluded people")
    report = _verb(subs, "report", run_report, "agreement, control items, length and position bias, what to review")
    report.add_argument("--json", action="store_true", help="print JSON")


def _add_people_verbs(subs: Any) -> None:
    person = _verb(subs, "person", run_person, "make an account, or give an existing one a new password")
    person.add_argument("name", metavar="NAME")
    person.add_argument("--role", choices=ROLES, default="annotator", help="of a new account (default annotator)")
    person.add_argument("--password_file", metavar="FILE", help="its first line; - = standard input (default: ask)")
    person.add_argument("--new_password", action="store_true", help="the account exists: replace its password")
    invite = _verb(subs, "invite", run_invite, "print a link that makes one account")
    invite.add_argument("--role", choices=ROLES, default="annotator", help="of the account (default annotator)")
    invite.add_argument("--days", type=whole(1, 90), default=7, metavar="N", help="it works so long (default 7)")
    invite.add_argument("--url", default="http://127.0.0.1:8700", help="address of the app as browsers see it")
    token = _verb(subs, "token", run_token, "print a token for a program that acts as a person")
    token.add_argument("name", metavar="PERSON", help=PERSON_HELP)
    token.add_argument("--scope", choices=("annotate", "export"), default="annotate", help="rank, or read results")
    token.add_argument("--days", type=whole(1, 366), default=30, metavar="N", help="it works so long (default 30)")
    exclude = _verb(subs, "exclude", run_exclude, "leave a person's rankings out of reports and exports, or lift that")
    exclude.add_argument("name", metavar="PERSON", help=PERSON_HELP)
    how = exclude.add_mutually_exclusive_group(required=True)
    how.add_argument("--reason", metavar="TEXT", help="why; the data card repeats it")
    how.add_argument("--lift", action="store_true", help="take the rankings in again")
    close = _verb(subs, "close", run_close, "close a person's account (the rankings stay), or open it again")
    close.add_argument("name", metavar="PERSON", help=PERSON_HELP)
    close.add_argument("--open", action="store_true", help="open it again")
    forget = _verb(subs, "forget", run_forget, "delete a person; the rankings stay under the pseudonym")
    forget.add_argument("name", metavar="PERSON", help=PERSON_HELP)
    forget.add_argument("--with_reasons", action="store_true", help="empty the free texts beside the rankings as well")
    forget.add_argument("--yes", action="store_true", help="do not ask")


def _run(handler: Any, arguments: argparse.Namespace) -> int:
    try:
        return int(handler(arguments) or 0)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("heedful"):
            raise
        raise ConfigError(f"`heedful annotate` needs {error.name}: pip install 'heedful[annotate]'") from None


# --- projects -------------------------------------------------------------------------------------------------------


def run_create(arguments: argparse.Namespace) -> None:
    """``heedful annotate create``."""
    from heedful.annotate.project import create_project

    settings, text = _settings(arguments.settings), _text(arguments.guideline)
    made = create_project(arguments.project, settings, text, arguments.database, now=time.time())
    print(f"{made.folder} made; next: heedful annotate add {shlex.quote(str(made.folder))} FILE")


def run_add(arguments: argparse.Namespace) -> None:
    """``heedful annotate add``."""
    from heedful.annotate.project import COMMAND_LINE, add_rankings, open_project
    from heedful.data.load import load

    project = open_project(arguments.project)
    loaded = load(
        arguments.file, kind="rankings", format=arguments.format, on_bad_row=arguments.on_bad_row, keep_ties=True,
        keep_unranked=True,
    )  # fmt: skip
    added = add_rankings(project, cast(list[Ranking], loaded.records), now=time.time(), who=COMMAND_LINE)
    for reason, count in loaded.dropped.items():
        print(f"heedful: {count:,} left out: {reason} (first: {loaded.examples[reason]})", file=sys.stderr)
    for warning in added.warnings:
        print(f"heedful: {warning}", file=sys.stderr)
    print(f"{added.num_items:,} items added, {added.num_gold:,} of them control items; {added.num_known:,} were there")


def run_guideline(arguments: argparse.Namespace) -> None:
    """``heedful annotate guideline``."""
    from heedful.annotate.project import COMMAND_LINE, add_guideline, open_project

    text = _text(arguments.file)
    with open_project(arguments.project).database.writing() as session:
        row = add_guideline(session, text, who=COMMAND_LINE, now=time.time())
        print(f"version {row.version} is in force")


def run_progress(arguments: argparse.Namespace) -> None:
    """``heedful annotate progress``."""
    from heedful.annotate.progress import by_category, by_person
    from heedful.annotate.project import open_project

    with open_project(arguments.project).database.reading() as session:
        categories, everybody = by_category(session), by_person(session)
    for row in categories:
        print(
            f"{row.category or 'no category'}: {row.num_submitted:,} of {row.num_wanted:,} rankings of "
            f"{row.num_items:,} items, {row.num_leased:,} in hand, {row.num_skipped:,} skipped; "
            f"{row.num_gold:,} control items"
        )
    for person in everybody:
        state = "deleted" if person.deleted_at else "closed" if person.disabled_at else person.role
        left_out = f", work left out: {person.excluded_because}" if person.excluded_because else ""
        print(f"{person.name or '-'} ({person.pseudonym}, {state}): {person.num_submitted:,} ranked{left_out}")


def run_serve(arguments: argparse.Namespace) -> None:
    """``heedful annotate serve``."""
    import logging

    from heedful.annotate.web.serve import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for chatty in ("alembic", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    _say_if_nobody_can_enter(arguments.project)
    serve(
        arguments.project, host=arguments.host, port=arguments.port, tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key, behind_proxy=arguments.behind_proxy,
        i_know_it_is_not_encrypted=arguments.i_know_it_is_not_encrypted,
        ready=lambda url: print(url, flush=True),
    )  # fmt: skip


# --- people ---------------------------------------------------------------------------------------------------------


def run_person(arguments: argparse.Namespace) -> None:
    """``heedful annotate person``."""
    from heedful.annotate import people

    database, now = _database(arguments), time.time()
    with database.reading() as session:  # before a password is asked for
        found = people.by_name(session, arguments.name)
    if arguments.new_password and found is None:
        raise DataError(f"{arguments.project}: nobody is called {arguments.name!r}")
    if found is not None and not arguments.new_password:
        raise DataError(f"{arguments.project}: {arguments.name!r} has an account; --new_password replaces the password")
    password = _password(arguments.password_file)
    with database.writing() as session:
        if arguments.new_password:
            person = _person(session, arguments)
            people.set_password(session, person, password, now)
        else:
            person = people.create_person(session, arguments.name, password, arguments.role, now)
        print(f"{person.name} is {person.role}, {person.pseudonym} in results")


def run_invite(arguments: argparse.Namespace) -> None:
    """``heedful annotate invite``."""
    from heedful.annotate import invitations

    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {arguments.url}: give the address of the app, such as https://rank.example.org")
    with _database(arguments).writing() as session:
        token = invitations.invite(session, arguments.role, time.time(), days=arguments.days)
    print(f"{arguments.url.rstrip('/')}/join/{token}")


def run_token(arguments: argparse.Namespace) -> None:
    """``heedful annotate token``."""
    from heedful.annotate import people

    with _database(arguments).writing() as session:
        person = _person(session, arguments)
        token = people.create_token(session, person, arguments.scope, time.time(), days=arguments.days)
    print(token)


def run_exclude(arguments: argparse.Namespace) -> None:
    """``heedful annotate exclude``."""
    from heedful.annotate import people

    with _database(arguments).writing() as session:
        person = _person(session, arguments)
        if arguments.lift:
            people.reinstate(session, person, time.time())
        else:
            people.exclude(session, person, arguments.reason, time.time())
    print(f"the work of {person.pseudonym} is {'in again' if arguments.lift else 'left out'}")


def run_close(arguments: argparse.Namespace) -> None:
    """``heedful annotate close``."""
    from heedful.annotate import people

    with _database(arguments).writing() as session:
        person = _person(session, arguments)
        (people.enable if arguments.open else people.disable)(session, person, time.time())
    print(f"the account of {person.pseudonym} is {'open' if arguments.open else 'closed'}")


def run_forget(arguments: argparse.Namespace) -> None:
    """``heedful annotate forget``."""
    from heedful.annotate import people

    database = _database(arguments)
    with database.reading() as session:
        pseudonym = _person(session, arguments).pseudonym
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ConfigError("forget cannot be undone; say --yes")
        if input(f"Delete {arguments.name} for good? Type {pseudonym}: ").strip() != pseudonym:
            raise ConfigError("nothing was deleted")
    with database.writing() as session:
        people.forget(session, _person(session, arguments), time.time(), with_reasons=arguments.with_reasons)
    people.erase_remains(database)
    print(f"{pseudonym} has no name, no password and no notes any more; the rankings stay")


# --- results --------------------------------------------------------------------------------------------------------


def run_export(arguments: argparse.Namespace) -> None:
    """``heedful annotate export``."""
    from heedful.annotate.master import View
    from heedful.annotate.project import open_project
    from heedful.annotate.publish import publish

    if not 0 <= arguments.min_agree <= 1:
        raise ConfigError(f"--min_agree {arguments.min_agree:g}: give a part from 0 to 1")
    view = View(
        with_gold=arguments.with_gold, with_excluded=arguments.with_excluded, min_agree_fraction=arguments.min_agree,
        rounds=None if arguments.rounds is None else tuple(arguments.rounds),
    )  # fmt: skip
    made = publish(open_project(arguments.project), arguments.out, to=arguments.to, view=view)
    print(f"{made.card.num_items:,} items, {made.card.num_judgements:,} rankings, {made.card.num_pairs:,} pairs")
    for path in made.files:
        print(path)


def run_report(arguments: argparse.Namespace) -> None:
    """``heedful annotate report``."""
    from heedful.annotate.project import open_project
    from heedful.annotate.quality.report import report, text
    from heedful.annotate.results import submitted

    made = report(submitted(open_project(arguments.project)))
    print(json.dumps(made, ensure_ascii=False, indent=1) if arguments.json else text(made))


# --- what the words mean --------------------------------------------------------------------------------------------


def _settings(words: list[str]) -> Any:
    """KEY=VALUE words → Settings; values are YAML, as in recipes."""
    import yaml
    from pydantic import ValidationError

    from heedful.annotate.settings import Settings
    from heedful.config.read import wrong_key

    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in Settings.model_fields:
            raise ConfigError(f"--set {word}: give KEY=VALUE; keys are {', '.join(Settings.model_fields)}")
        try:
            given[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {word}: the value is not YAML ({str(error).splitlines()[0]})") from None
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"--set {wrong_key(error, Settings)}") from None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8 text; save it as UTF-8") from None


def _database(arguments: argparse.Namespace) -> Any:
    from heedful.annotate.project import open_project

    return open_project(arguments.project).database


def _person(session: Any, arguments: argparse.Namespace) -> Any:
    """The person whom NAME or PERSON means."""
    from heedful.annotate import people

    found = people.by_name(session, arguments.name) or people.by_pseudonym(session, arguments.name)
    if found is None:
        raise DataError(f"{arguments.project}: nobody is called {arguments.name!r}")
    return found


def _password(path: str | None) -> str:
    """Never from the command line itself: other users of the machine see its words."""
    import getpass

    if path == "-":
        return sys.stdin.readline().rstrip("\r\n")
    if path is not None:
        return (_text(path).splitlines() or [""])[0]
    if not sys.stdin.isatty():
        raise ConfigError("no terminal to ask for the password; give --password_file FILE (- = standard input)")
    first = getpass.getpass("Password (10 characters or more): ")
    if getpass.getpass("Again: ") != first:
        raise ConfigError("the two passwords differ")
    return first


def _say_if_nobody_can_enter(folder: str) -> None:
    from heedful.annotate.people import has_admin
    from heedful.annotate.project import open_project

    with open_project(folder).database.reading() as session:
        if not has_admin(session):
            command = f"heedful annotate person {shlex.quote(folder)} NAME --role admin"
            print(f"heedful: there is no admin yet; make one with `{command}`", file=sys.stderr)
