"""``heedful annotate``: from nothing to a served project, every refusal in one sentence."""

import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from heedful.annotate import people
from heedful.annotate.project import open_project
from heedful.annotate.web.serve import check_address, is_loopback
from heedful.cli.main import main
from heedful.errors import ConfigError
from toy_project import NOW, work

PASSWORD = "correct horse battery"


pytestmark = pytest.mark.usefixtures("light_hashes")


@pytest.fixture
def folder(tmp_path):
    """A place with a guideline, items and a password."""
    (tmp_path / "guideline.md").write_text("Be *fair*.", encoding="utf-8")
    (tmp_path / "password").write_text(PASSWORD + "\n", encoding="utf-8")
    rows = [
        {"group_id": f"g{i}", "prompt": [{"role": "user", "content": f"Question {i}"}], "category": "chat",
         "answers": [{"id": "a", "text": f"yes {i}"}, {"id": "b", "text": f"no {i}"}]}
        | ({"gold": [["a", "b"]]} if i == 2 else {})
        for i in range(3)
    ]  # fmt: skip
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(folder, capsys):
    """``heedful annotate VERB PROJECT …`` → (exit code, standard output, standard error)."""

    def call(verb, *words):
        code = main(["annotate", verb, str(folder / "p"), *map(str, words)])
        said = capsys.readouterr()
        return code, said.out.strip(), said.err.strip()

    return call


@pytest.fixture
def made(run, folder):
    assert run("create", "--guideline", folder / "guideline.md", "--set", "overlap=2", "--set", "name=Round 1")[0] == 0
    assert run("add", folder / "items.jsonl")[0] == 0
    assert run("person", "ann", "--role", "admin", "--password_file", folder / "password")[0] == 0
    return run


def test_a_project_is_made_filled_and_given_an_admin(made, folder):
    project = open_project(folder / "p")
    assert (project.settings.overlap, project.settings.name) == (2, "Round 1")
    code, out, _ = made("add", folder / "items.jsonl")
    assert code == 0 and out == "0 items added, 0 of them control items; 3 were there"
    with project.database.reading() as session:
        person = people.enter(people.by_name(session, "ann"), PASSWORD)
        assert person is not None and person.role == "admin"
    code, out, _ = made("progress")
    assert out.splitlines()[0] == "chat: 0 of 4 rankings of 2 items, 0 in hand, 0 skipped; 1 control items"
    assert out.splitlines()[1] == f"ann ({person.pseudonym}, admin): 0 ranked"
    code, out, _ = made("guideline", folder / "guideline.md")
    assert (code, out) == (0, "version 2 is in force")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["overlap=0"], "--set overlap: Input should be greater than 0"),
        (["overlpa=2"], "keys are name, languages, overlap,"),
        (["overlap"], "give KEY=VALUE"),
        (["quotas={a: 1"], "is not YAML"),
    ],
)
def test_settings_that_are_wrong_are_named(run, folder, words, says):
    code, _, error = run("create", "--guideline", folder / "guideline.md", *(f"--set={word}" for word in words))
    assert code == 2 and says in error and not (folder / "p").exists()


def test_what_is_not_there_is_said_in_one_sentence(run, folder):
    for verb, *words in (["add", folder / "items.jsonl"], ["progress"], ["serve"], ["invite"], ["forget", "x"]):
        code, out, error = run(verb, *words)
        assert code == 2 and "no project here" in error and "\n" not in error and out == ""
    code, _, error = run("create", "--guideline", folder / "missing.md")
    assert code == 2 and "missing.md" in error
    (folder / "latin.md").write_bytes(b"caf\xe9")
    code, _, error = run("create", "--guideline", folder / "latin.md")
    assert code == 2 and "not UTF-8" in error


def test_rows_that_are_left_out_are_told_and_a_bad_one_adds_nothing(made, folder):
    rows = [
        {"group_id": "same", "prompt": "q", "answers": [{"id": "a", "text": "x"}, {"id": "b", "text": "x"}]},
        {"group_id": "fine", "prompt": "q", "answers": [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]},
        {"group_id": "no id", "prompt": "q", "answers": [{"text": "x"}, {"text": "y"}]},
    ]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, error = made("add", folder / "more.jsonl")
    assert code == 2 and "line 3: field 'answers[0]' must be an answer with a text id" in error and out == ""
    code, out, error = made("add", folder / "more.jsonl", "--on_bad_row", "skip")
    assert code == 0 and out.startswith("1 items added")
    assert "1 left out: identical_answers (first: " in error and "1 left out: wrong_type (first: " in error


def test_the_next_command_can_be_copied_whatever_the_folder_is_called(folder, capsys):
    assert main(["annotate", "create", str(folder / "my project"), "--guideline", str(folder / "guideline.md")]) == 0
    assert f"heedful annotate add '{folder / 'my project'}' FILE" in capsys.readouterr().out


def test_a_missing_library_is_named_with_its_remedy(folder):
    code = (
        "import sys; sys.modules['sqlalchemy'] = None; from heedful.cli.main import main; "
        f"sys.exit(main(['annotate', 'progress', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "needs sqlalchemy: pip install 'heedful[annotate]'" in done.stderr


def test_SEC_10_passwords_come_from_a_file_or_a_terminal_never_from_the_command(made, folder, monkeypatch):
    code, _, error = made("person", "ben")
    assert code == 2 and "--password_file" in error
    with pytest.raises(SystemExit):
        made("person", "ben", "--password", PASSWORD)
    (folder / "short").write_text("short\n", encoding="utf-8")
    code, _, error = made("person", "ben", "--password_file", folder / "short")
    assert code == 2 and "10 to 1,024" in error
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    typed = iter(["correct horse battery", "another", *["correct horse battery"] * 2])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    code, _, error = made("person", "ben")
    assert code == 2 and "differ" in error
    code, out, _ = made("person", "ben")
    assert code == 0 and re.fullmatch(r"ben is annotator, rater-\w{10} in results", out)


def test_a_forgotten_password_is_replaced(made, folder):
    (folder / "new").write_text("a brand new one\n", encoding="utf-8")
    code, _, error = made("person", "ann", "--password_file", folder / "new")
    assert code == 2 and "--new_password" in error
    code, _, error = made("person", "ben", "--new_password", "--password_file", folder / "new")
    assert code == 2 and "nobody is called 'ben'" in error
    assert made("person", "ann", "--new_password", "--password_file", folder / "new")[0] == 0
    with open_project(folder / "p").database.reading() as session:
        assert people.enter(people.by_name(session, "ann"), PASSWORD) is None
        assert people.enter(people.by_name(session, "ann"), "a brand new one") is not None


def test_people_are_excluded_closed_and_forgotten(made, folder, monkeypatch):
    made("person", "ben", "--password_file", folder / "password")
    code, out, _ = made("exclude", "ben", "--reason", "too fast")
    pseudonym = re.search(r"rater-\w+", out).group()
    assert out == f"the work of {pseudonym} is left out"
    assert made("progress")[1].splitlines()[-1].endswith("work left out: too fast")
    assert made("exclude", pseudonym, "--lift")[1] == f"the work of {pseudonym} is in again"
    assert made("close", "ben")[1] == f"the account of {pseudonym} is closed"
    assert made("close", "ben", "--open")[1] == f"the account of {pseudonym} is open"
    code, _, error = made("close", "ann")
    assert code == 2 and "last admin" in error
    code, _, error = made("forget", "ben")
    assert code == 2 and "--yes" in error
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "ben")
    assert made("forget", "ben")[0] == 2 and "ben (" in made("progress")[1]
    monkeypatch.setattr("builtins.input", lambda prompt: pseudonym)
    assert made("forget", "ben")[0] == 0 and f"- ({pseudonym}, deleted)" in made("progress")[1]
    code, _, error = made("exclude", "ben", "--reason", "too fast")
    assert code == 2 and "nobody is called 'ben'" in error


def test_tokens_and_invitations_are_printed_once(made, folder):
    code, token, _ = made("token", "ann", "--scope", "export", "--days", "2")
    assert code == 0 and re.fullmatch(r"heed_[\w-]{43}", token)
    with open_project(folder / "p").database.reading() as session:
        assert people.person_of_token(session, token, "export", time.time()).name == "ann"
    code, link, _ = made("invite", "--url", "https://rank.test/")
    assert re.fullmatch(r"https://rank\.test/join/[\w-]{43}", link)
    code, out, error = made("invite", "--url", "rank.test")
    assert code == 2 and "--url rank.test: give the address" in error and out == ""


def test_results_are_reported_and_exported(made, folder):
    code, _, error = made("export", "--out", folder / "out")
    assert code == 2 and "nothing" in error and "ranked yet" in error and not (folder / "out").exists()
    project = open_project(folder / "p")
    with project.database.writing() as session:
        ben = people.create_person(session, "ben", PASSWORD, "annotator", NOW)
    done = work(project, ben, now=NOW)  # the control item comes or does not, at a place drawn at random
    assert sum(not assignment.item.is_gold for assignment in done) == 2
    code, out, _ = made("export", "--out", folder / "out", "--to", "trl", "openrlhf")
    assert code == 0 and out.splitlines()[0] == "2 items, 2 rankings, 2 pairs"
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {"rankings.jsonl", "trl.jsonl", "openrlhf.jsonl", "card.json", "README.md"}
    assert {str(folder / "out" / name) for name in names} == set(out.splitlines()[1:])
    rows = [json.loads(line) for line in (folder / "out" / "rankings.jsonl").read_text().splitlines()]
    assert [row["rankings"][0]["annotator"] for row in rows] == [ben.pseudonym] * 2
    code, _, error = made("export", "--out", folder / "out2", "--to", "csv")
    assert code == 2 and "'csv'" in error and "trl_messages" in error
    code, _, error = made("export", "--out", folder / "out2", "--rounds", "7")
    assert code == 2 and "ranked yet" in error
    code, _, error = made("export", "--out", folder / "out2", "--min_agree", "70")
    assert code == 2 and "from 0 to 1" in error
    code, out, _ = made("report", "--json")
    assert code == 0 and list(json.loads(out)["raters"]) == [ben.pseudonym]
    code, out, _ = made("report")
    assert code == 0 and ben.pseudonym in out and "ben" not in out.replace(ben.pseudonym, "")


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "rank.test", ""])
def test_SEC_10_beyond_this_machine_only_with_tls_or_a_word(made, host):
    code, _, error = made("serve", "--host", host)
    assert code == 2 and "--tls_cert" in error and "--i_know_it_is_not_encrypted" in error
    with pytest.raises(ConfigError):
        check_address(host, tls=False, accepted=False)
    check_address(host, tls=True, accepted=False)
    check_address(host, tls=False, accepted=True)


def test_loopback():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.test", "1270.0.1"))


def test_what_cannot_be_served_is_said_in_one_sentence(made, folder):
    missing, no_key = folder / "missing.pem", folder / "password"
    for words, says in (
        (["--tls_cert", missing], "give both"),
        (["--tls_cert", missing, "--tls_key", missing], "cannot be used"),
        (["--tls_cert", no_key, "--tls_key", no_key], "cannot be used"),
        (["--host", "192.0.2.1", "--i_know_it_is_not_encrypted"], "cannot listen there"),
        (["--behind_proxy", "rank.test"], "give the proxy's IP address"),
    ):
        code, out, error = made("serve", *words)
        assert code == 2 and says in error and out == "", error


@pytest.fixture
def served(made, folder):
    """Starts a server of the project as its own process → its address."""
    running = []

    def start(*words):
        command = [sys.executable, "-m", "heedful.cli.main", "annotate", "serve", str(folder / "p"), "--port", "0"]
        log = open(folder / "log", "w")  # noqa: SIM115
        process = subprocess.Popen([*command, *map(str, words)], stdout=subprocess.PIPE, stderr=log, text=True)
        running.append((process, log))
        url = process.stdout.readline().strip()
        assert url, (folder / "log").read_text()
        return url, process

    yield start
    for process, log in running:
        process.kill()
        process.wait()
        process.stdout.close()
        log.close()


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def ask(url, context=None, **headers):
    """(status, headers) of a GET, whatever the status."""
    opener = urllib.request.build_opener(NoRedirect, urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers


def test_a_real_server_answers_counts_addresses_by_its_proxy_and_ends_cleanly(served, folder):
    url, process = served("--behind_proxy")
    status, headers = ask(f"{url}/account")
    assert status == 303 and headers["location"] == "/login?next=/account" and "server" not in headers
    _, headers = ask(f"{url}/login")
    assert headers["set-cookie"].startswith("__Host-heedful=") and "Secure" in headers["set-cookie"]
    assert "strict-transport-security" in headers
    for i in range(61):
        status, _ = ask(f"{url}/join/unknown", **{"x-forwarded-for": "10.9.9.9", "x-forwarded-proto": "https"})
        assert status == (404 if i < 60 else 429)
    assert ask(f"{url}/join/unknown", **{"x-forwarded-for": "10.9.9.8"})[0] == 404
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    log = (folder / "log").read_text()
    assert "GET /join/{token} 429" in log and "unknown" not in log and "Traceback" not in log


def test_without_a_proxy_forwarded_addresses_are_not_believed_and_without_an_admin_it_says_so(served, folder):
    with open_project(folder / "p").database.writing() as session:
        session.delete(people.by_name(session, "ann"))
    url, process = served()
    assert "heedful annotate person" in (folder / "log").read_text()
    for i in range(61):
        status, _ = ask(f"{url}/join/unknown", **{"x-forwarded-for": f"10.9.9.{i}"})
    assert status == 429
    assert "__Host-" not in ask(f"{url}/login")[1]["set-cookie"]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(served, folder):
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    url, _ = served("--tls_cert", cert, "--tls_key", key)
    assert url.startswith("https://127.0.0.1:")
    status, headers = ask(f"{url}/login", ssl.create_default_context(cafile=str(cert)))
    assert status == 200 and headers["set-cookie"].startswith("__Host-") and "strict-transport-security" in headers
