"""The door of the app, attacked: headers, forms of other sites, logins, tokens, sizes, faults, logs."""

import logging
import re
import threading
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from heedful.annotate import invitations, passwords, people
from heedful.annotate.tables import ApiToken, Login, Person
from heedful.annotate.web import account, pages, shield
from heedful.annotate.web.app import create_app
from heedful.annotate.web.door import Limits
from toy_project import NOW, items, make_project, missing_postgresql, new_postgresql, postgresql_server
from toy_rater import Clock

PASSWORD = "correct horse battery"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
TEMPLATES = Path(pages.__file__).parent / "templates"
OPEN = {"/login", "/logout", "/join/{token}", "/language", "/static"}
"""Paths for people without a login."""


pytestmark = pytest.mark.usefixtures("light_hashes")


@pytest.fixture
def clock():
    return Clock(NOW)


@pytest.fixture
def project(tmp_path):
    made = make_project(tmp_path, items(3))
    with made.database.writing() as session:
        for name, role in (("ann", "admin"), ("ben", "annotator"), ("eve", "annotator"), ("rio", "reviewer")):
            people.create_person(session, name, PASSWORD, role, NOW)
    return made


class Browser(TestClient):
    """Keeps its cookie and sends the form token of it, as the pages' forms do."""

    def token(self):
        cookie = self.cookies.get("heedful") or self.cookies.get("__Host-heedful")
        if cookie is None:
            self.get("/login")
            return self.token()
        return pages.form_token(cookie)

    def send_form(self, path, headers=None, **fields):
        return self.post(path, data={"form_token": self.token()} | fields, headers=headers)

    def log_in(self, name, password=PASSWORD, **fields):
        return self.send_form("/login", name=name, password=password, **fields)

    def is_in(self):
        return self.get("/account").status_code == 200


@pytest.fixture
def browse(project, clock):
    """Browsers at one running app."""
    apps = {}

    def make(*, secure=False, address="10.0.0.1", **limits):
        key = (secure, tuple(sorted(limits.items())))
        if key not in apps:
            apps[key] = create_app(project, clock=clock, secure_cookies=secure, limits=Limits(**limits))
        scheme = "https" if secure else "http"
        return Browser(apps[key], base_url=f"{scheme}://rank.test", follow_redirects=False, client=(address, 5000))

    return make


def person(project, name):
    with project.database.reading() as session:
        return people.by_name(session, name)


def routes(app):
    """(method, path with its parameters filled in, path as declared) of every route."""
    for route in app.routes:
        for inner in getattr(getattr(route, "original_router", None), "routes", [route]):
            for method in sorted(getattr(inner, "methods", None) or ()):
                yield method, re.sub(r"{\w+}", "unknown-unknown-unknown", inner.path), inner.path


# --- headers and pages ----------------------------------------------------------------------------------------------


def test_SEC_02_every_kind_of_answer_has_the_security_headers(browse, monkeypatch):
    browser = browse()
    answers = {
        "page": browser.get("/login"),
        "redirect": browser.get("/account"),
        "unknown": browser.get("/nothing"),
        "api": browser.get("/api/v1/next"),
        "other site": browser.post("/login", headers={"sec-fetch-site": "cross-site"}),
        "too large": browser.post("/login", content=b"x" * (shield.MAX_BODY_BYTES + 1)),
        "static": browser.get("/static/style.css"),
    }
    monkeypatch.setattr(account, "local_path", lambda path: 1 / 0)
    answers["fault"] = browser.get("/login")
    assert [answer.status_code for answer in answers.values()] == [200, 303, 404, 401, 403, 413, 200, 500]
    for what, answer in answers.items():
        assert answer.headers["content-security-policy"] == CSP, what
        assert answer.headers["x-content-type-options"] == "nosniff", what
        assert answer.headers["referrer-policy"] == "no-referrer", what
        assert answer.headers["x-frame-options"] == "DENY", what
        assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"]), what
        assert "strict-transport-security" not in answer.headers, what
        assert answer.headers["cache-control"] == ("no-cache" if what == "static" else "no-store"), what
        assert what == "static" or "etag" not in answer.headers, what
    assert "max-age" in browse(secure=True).get("/login").headers["strict-transport-security"]


def test_SEC_02_templates_hold_nothing_inline():
    for path in TEMPLATES.glob("*.j2"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text, re.I), path.name
        for script in re.findall(r"<script[^>]*>", text):
            assert "src=" in script, path.name


def test_SEC_03_safe_is_declared_nowhere_in_templates():
    for path in TEMPLATES.glob("*.j2"):
        assert not re.search(r"\|\s*safe|autoescape|Markup", path.read_text(encoding="utf-8")), path.name


def test_SEC_03_what_is_typed_at_the_door_comes_back_as_text(browse):
    hostile = "\"><img src=x onerror=alert(1)>{{ 7 * 7 }}"
    browser = browse()
    answer = browser.log_in(hostile, next=f"/{hostile}")
    assert answer.status_code == 401 and "<img" not in answer.text and "{{ 7 * 7 }}" in answer.text
    for path in (f"/{hostile}", f"/login?next=/{hostile}", f"/join/{hostile}"):
        assert "<img" not in browser.get(path).text


def test_SEC_03_the_name_of_a_project_is_text(tmp_path):
    made = make_project(tmp_path, name="<script>alert(1)</script>")
    answer = TestClient(create_app(made, secure_cookies=False)).get("/login")
    assert "<script>alert" not in answer.text and "&lt;script&gt;alert" in answer.text


# --- whose is whose -------------------------------------------------------------------------------------------------


def test_SEC_05_without_a_login_every_page_leads_to_the_login(browse):
    browser = browse()
    seen = 0
    for method, path, declared in routes(browser.app):
        if declared in OPEN or method == "HEAD":
            continue
        seen += 1
        answer = browser.request(method, path, data={"form_token": browser.token()} if method == "POST" else None)
        if path.startswith("/api/"):
            assert answer.status_code == 401 and answer.json()["error"], (method, path)
        else:
            assert answer.status_code == 303 and answer.headers["location"].startswith("/login"), (method, path)
    assert seen > 20


@pytest.mark.parametrize("name", ["ben", "rio"])
def test_SEC_05_pages_of_other_roles_and_ids_of_others_look_like_none_at_all(browse, name):
    browser = browse()
    browser.log_in(name)
    nothing = browser.get("/nothing")
    assert nothing.status_code == 404
    heading = re.search("<h1>.*</h1>", nothing.text).group()
    kept = {"/", "/mine", "/guideline", "/account", "/next", "/account/password", "/account/token",
            "/account/logout_everywhere"}  # fmt: skip
    seen = 0
    for method, path, declared in routes(browser.app):
        if declared in OPEN | kept or method == "HEAD" or (path.startswith("/api/") and "openapi" not in path):
            continue
        if name == "rio" and declared.startswith(("/dashboard", "/exports")):
            continue
        seen += 1
        answer = browser.request(method, path, data={"form_token": browser.token()} if method == "POST" else None)
        assert answer.status_code == 404, (method, path)
        assert path.startswith("/api/") or heading in answer.text, (method, path)
    assert seen > 10
    for path in ("/dashboard", "/exports"):
        assert browser.get(path).status_code == (200 if name == "rio" else 404)


# --- forms of other sites -------------------------------------------------------------------------------------------


def test_SEC_06_no_form_works_without_the_token_of_this_login(browse):
    ben, eve = browse(), browse()
    ben.log_in("ben")
    eve.log_in("eve")
    admin = browse()
    admin.log_in("ann")
    seen = 0
    for method, path, _ in routes(ben.app):
        if method != "POST" or path.startswith("/api/"):
            continue
        seen += 1
        for token in ("", "0" * 64, eve.token()):
            answer = admin.post(path, data={"form_token": token, "reason": "x"})
            assert answer.status_code == 403, (path, token)
        assert admin.post(path).status_code == 403, path
        assert admin.post(path, json={"form_token": admin.token()}).status_code == 403, path
    assert seen > 12 and admin.is_in()


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "null"}, True),
        ({"origin": "http://evil.test"}, False),
        ({"origin": "http://rank.test.evil.test"}, False),
        ({"origin": "http://rank.test:8701"}, False),
        ({"origin": "http://rank.test"}, True),
        ({"origin": "http://RANK.test:80"}, True),
        ({"origin": "null"}, True),
        ({}, True),
    ],
)
def test_SEC_06_a_form_of_another_site_is_refused(browse, headers, taken):
    answer = browse().send_form("/login", headers=headers, name="ben", password=PASSWORD)
    assert answer.status_code == (303 if taken else 403), answer.text


# --- login ----------------------------------------------------------------------------------------------------------


def test_SEC_10_unknown_wrong_and_closed_look_alike_and_cost_the_same(browse, project, monkeypatch):
    with project.database.writing() as session:
        people.disable(session, people.by_name(session, "eve"), NOW)
        forgotten = people.create_person(session, "zoe", PASSWORD, "annotator", NOW)
        people.forget(session, forgotten, NOW)
    checked = []
    fits = passwords.fits
    monkeypatch.setattr(passwords, "fits", lambda password, known: checked.append(known) or fits(password, known))
    texts = set()
    tries = [("nobody", PASSWORD), ("ben", "wrong one"), ("eve", PASSWORD), ("zoe", PASSWORD), ("\u202e", PASSWORD)]
    for name, password in tries:
        browser = browse()
        answer = browser.log_in(name, password)
        assert answer.status_code == 401 and not browser.is_in()
        shown = re.sub(r'name="name" value="[^"]*"|[0-9a-f]{64}', "", answer.text)
        texts.add(shown)
    assert len(texts) == 1 and "Name or password is wrong." in texts.pop()
    assert len(checked) == len(tries), "one Argon2 verification each, whatever the name"


def test_SEC_10_the_login_gets_a_new_token_and_the_old_one_is_worth_nothing(browse, project):
    browser = browse()
    browser.get("/login")
    before = browser.cookies["heedful"]
    answer = browser.log_in("ben", next="/mine")
    assert answer.headers["location"] == "/mine"
    first = browser.cookies["heedful"]
    assert first != before and browser.is_in()
    browser.log_in("ben")
    assert browser.cookies["heedful"] != first
    with project.database.reading() as session:
        assert session.scalar(select(func.count(Login.id))) == 1, "the former login of this browser ends"
        assert session.scalar(select(Login.token_hash)) == people.digest(browser.cookies["heedful"])
    for planted in (before, first, "x" * 43):
        other = browse()
        other.cookies.set("heedful", planted)
        assert not other.is_in()


def test_SEC_10_logging_out_ends_the_login_itself(browse):
    browser = browse()
    browser.log_in("ben")
    stolen = browser.cookies["heedful"]
    assert browser.send_form("/logout").headers["location"] == "/login"
    assert "heedful" not in browser.cookies
    browser.cookies.set("heedful", stolen)
    assert not browser.is_in()


def test_SEC_10_a_login_ends_when_idle_and_after_ten_times_that_in_any_case(browse, clock, project):
    browser = browse()
    browser.log_in("ben")
    for _ in range(10):
        clock.now += 12 * 3600 - 1
        assert browser.is_in()
    clock.now += 3600
    assert not browser.is_in(), "120 hours are over, however busy it was"
    browser.log_in("ben")
    clock.now += 12 * 3600 + 61
    assert not browser.is_in()
    browser.log_in("eve")
    clock.now += 90
    browser.is_in()
    with project.database.reading() as session:
        assert session.scalar(select(func.count(Login.id))) == 1, "ended logins are swept away"


def test_SEC_10_attempts_are_counted_by_name_and_a_right_one_clears_the_count(browse):
    for i in range(25):  # from many addresses
        answer = browse(address=f"10.0.1.{i}").log_in("Ben " if i % 2 else "ben", "wrong password")
        assert answer.status_code == (401 if i < 10 else 429)
    assert int(answer.headers["retry-after"]) > 0 and "Too many attempts" in answer.text
    assert browse().log_in("ben").status_code == 429, "the right one as well: else guessing could go on"
    for _ in range(15):
        assert browse(address="10.0.2.1").log_in("eve").status_code == 303


def test_SEC_10_attempts_are_counted_by_address(browse):
    for i in range(60):
        assert browse().log_in(f"nobody{i}", "wrong password").status_code == 401
    assert browse().log_in("nobody61").status_code == 429
    assert browse(address="10.0.0.2").log_in("ben").status_code == 303


def test_SEC_10_passwords_are_argon2id_at_full_strength(project, monkeypatch):
    monkeypatch.undo()
    passwords._hasher.cache_clear()
    known = passwords.hashed("ben", PASSWORD).text
    memory, time_cost = map(int, re.match(r"\$argon2id\$v=19\$m=(\d+),t=(\d+)", known).groups())
    assert memory >= 19 * 1024 and time_cost >= 2, "OWASP's least"
    assert passwords.fits(PASSWORD, known) and not passwords.fits(PASSWORD + "x", known)
    assert known != passwords.hashed("ben", PASSWORD).text, "salted"


def test_SEC_10_a_burst_of_logins_leaves_threads_and_transactions_for_others(browse, project, monkeypatch):
    hold, inside = threading.Event(), []

    class Slow:
        def verify(self, password, known):
            inside.append(threading.current_thread())
            hold.wait(20)
            return False

    passwords.nobodys()
    monkeypatch.setattr(passwords, "_hasher", lambda: Slow())
    browsers = [browse(address=f"10.1.0.{i}") for i in range(30)]
    codes = []
    threads = [
        threading.Thread(target=lambda b=b, i=i: codes.append(b.log_in(f"name {i}").status_code))
        for i, b in enumerate(browsers)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(codes) < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes == [503] * 10 and len(inside) == 2, "20 wait, two of them are served, the others are told at once"
    assert browse().get("/login").status_code == 200
    with project.database.writing() as session:
        people.create_token(session, people.by_name(session, "ben"), "annotate", NOW)
    hold.set()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [401] * 20 + [503] * 10


def test_SEC_10_a_new_password_needs_the_old_one_and_ends_every_other_login(browse):
    here, elsewhere = browse(), browse()
    here.log_in("ben")
    elsewhere.log_in("ben")
    new = {"password": "another long one", "password_again": "another long one"}
    refused = [
        {"present_password": "wrong password"} | new,
        {"present_password": PASSWORD} | new | {"password_again": "differs in the end"},
        {"present_password": PASSWORD, "password": "short", "password_again": "short"},
    ]
    for fields in refused:
        answer = here.send_form("/account/password", **fields)
        assert answer.status_code == 422 and 'role="alert"' in answer.text
    assert elsewhere.is_in()
    assert here.send_form("/account/password", present_password=PASSWORD, **new).status_code == 303
    assert here.is_in() and not elsewhere.is_in()
    assert browse().log_in("ben").status_code == 401
    assert browse().log_in("ben", "another long one").status_code == 303


def test_logging_out_everywhere_ends_all_logins(browse):
    here, elsewhere = browse(), browse()
    here.log_in("ben")
    elsewhere.log_in("ben")
    here.send_form("/account/logout_everywhere")
    assert not here.is_in() and not elsewhere.is_in()


@pytest.mark.parametrize(
    "address", ["//evil.test", "/\\evil.test", "https://evil.test", "\\\\evil.test", "/a\r\nX: y", ""]
)
def test_SEC_10_the_login_leads_nowhere_else(browse, address):
    browser = browse()
    answer = browser.log_in("ben", next=address)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    assert browser.send_form("/language", language="en", back=address).headers["location"] == "/"


def test_SEC_10_cookies_are_out_of_reach(browse):
    plain = browse()
    cookie = plain.log_in("ben").headers["set-cookie"]
    assert {"HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; ")) and "Secure" not in cookie
    assert "Domain" not in cookie and "Max-Age" not in cookie
    secure = browse(secure=True)
    cookie = secure.log_in("ben").headers["set-cookie"]
    assert cookie.startswith("__Host-heedful=") and "Secure" in cookie.split("; ")
    secure.cookies.clear()
    secure.cookies.set("heedful", plain.cookies["heedful"])
    assert not secure.is_in(), "a cookie that another host may have set is not read"


def test_a_closed_account_is_out_at_once(browse, project):
    browser = browse()
    browser.log_in("ben")
    with project.database.writing() as session:
        people.disable(session, people.by_name(session, "ben"), NOW)
    assert not browser.is_in()


def test_a_script_of_a_page_is_told_so_when_the_login_has_ended(browse):
    browser = browse()
    headers = {"sec-fetch-dest": "empty", "sec-fetch-site": "same-origin"}
    assert browser.post("/rank/x/draft", data={"form_token": browser.token()}, headers=headers).status_code == 401


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_SEC_11_a_token_is_shown_once_and_only_its_hash_is_kept(browse, project):
    browser = browse()
    browser.log_in("ben")
    answer = browser.send_form("/account/token", scope="annotate", days="7")
    [token] = re.findall(r"heed_[\w-]{43}", answer.text)
    assert token not in browser.get("/account").text and token[:12] in browser.get("/account").text
    with project.database.reading() as session:
        row = session.scalars(select(ApiToken)).one()
    assert row.token_hash == people.digest(token) and row.expires_at == NOW + 7 * 86400
    program = browse()
    assert program.get("/api/v1/next", headers={"authorization": f"Bearer {token}"}).status_code == 200
    for wrong in (f"/api/v1/next?token={token}", f"/api/v1/next?access_token={token}"):
        assert program.get(wrong).status_code == 401
    assert program.get("/api/v1/next", headers={"authorization": f"Basic {token}"}).status_code == 401
    assert browser.get("/api/v1/next").status_code == 401, "a cookie is no token: no other site can use the interface"
    assert browse().send_form(f"/account/token/{token[:12]}/revoke").status_code == 303  # to the login
    eve = browse()
    eve.log_in("eve")
    assert eve.send_form(f"/account/token/{token[:12]}/revoke").status_code == 404
    assert program.get("/api/v1/next", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert browser.send_form(f"/account/token/{token[:12]}/revoke").status_code == 303
    assert program.get("/api/v1/next", headers={"authorization": f"Bearer {token}"}).status_code == 401


def test_SEC_11_tokens_have_a_scope_an_end_and_an_owner_who_may(browse, project, clock):
    with project.database.writing() as session:
        ben, rio = people.by_name(session, "ben"), people.by_name(session, "rio")
        ranks = people.create_token(session, ben, "annotate", NOW, days=1)
        reads = people.create_token(session, rio, "export", NOW, days=1)
    with project.database.writing() as session:
        assert people.person_of_token(session, ranks, "annotate", NOW).name == "ben"
        assert people.person_of_token(session, ranks, "export", NOW) is None
        assert people.person_of_token(session, reads, "annotate", NOW) is None
        assert people.person_of_token(session, reads, "export", NOW + 86399).name == "rio"
        assert people.person_of_token(session, reads, "export", NOW + 86401) is None
        people.set_role(session, people.by_name(session, "rio"), "annotator", NOW)
        assert people.person_of_token(session, reads, "export", NOW) is None
        people.disable(session, people.by_name(session, "ben"), NOW)
        assert people.person_of_token(session, ranks, "annotate", NOW) is None
    browser = browse()
    browser.log_in("eve")
    answer = browser.send_form("/account/token", scope="export", days="7")
    assert answer.status_code == 422 and "heed_" not in answer.text
    for days in ("0", "367", "-1", "x", "9" * 30):
        assert browser.send_form("/account/token", scope="annotate", days=days).status_code == 422


def test_SEC_11_guessing_tokens_is_limited(browse):
    program = browse()
    guesses = [{"authorization": f"Bearer heed_{i:043}"} for i in range(32)]
    codes = [program.get("/api/v1/next", headers=guess).status_code for guess in guesses]
    assert codes == [401] * 30 + [429] * 2


# --- sizes, faults, logs --------------------------------------------------------------------------------------------


def test_SEC_09_a_body_without_a_stated_length_is_cut_off_too(browse):
    browser = browse()
    token, num_sent = browser.token(), 0

    def body():
        nonlocal num_sent
        yield f"form_token={token}&name=".encode()
        for _ in range(64):
            num_sent += 1
            yield b"x" * 65536

    answer = browser.post("/login", content=body(), headers={"content-type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 413
    lying = browser.post("/login", content=b"", headers={"content-length": "-5"})
    assert lying.status_code == 413


def test_SEC_09_static_files_are_those_of_the_folder_alone(browse):
    browser = browse()
    assert browser.get("/static/rank.js").status_code == 200
    for path in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "/etc/passwd", "%2fetc%2fpasswd", "", "."):
        answer = browser.get(f"/static/{path}")
        assert answer.status_code == 404 and "import" not in answer.text, path


def test_a_file_in_a_form_is_refused(browse):
    browser = browse()
    answer = browser.post("/login", data={"form_token": browser.token()}, files={"name": ("x.txt", b"hello")})
    assert answer.status_code == 400


def test_SEC_11_a_fault_tells_neither_page_nor_log_what_was_typed(browse, project, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)

    def fail(*_, **__):
        raise RuntimeError(f"parameters: {PASSWORD}")

    monkeypatch.setattr(people, "enter", fail)
    answer = browse().log_in("ben")
    assert answer.status_code == 500 and answer.headers["x-request-id"] in answer.text
    assert PASSWORD not in answer.text and "RuntimeError" not in answer.text
    assert PASSWORD not in caplog.text and "RuntimeError" in caplog.text
    assert answer.headers["x-request-id"] in caplog.text


def test_SEC_11_logs_hold_no_secret(browse, project, caplog):
    caplog.set_level(logging.DEBUG)
    with project.database.writing() as session:
        invitation = invitations.invite(session, "annotator", NOW)
    browser = browse()
    browser.get(f"/join/{invitation}")
    new = {"name": "mia", "password": "mia's own long one", "password_again": "mia's own long one"}
    assert browser.send_form(f"/join/{invitation}", **new).status_code == 303
    browser.log_in("mia", "not that one")
    [token] = re.findall(r"heed_[\w-]{43}", browser.send_form("/account/token", scope="annotate", days="7").text)
    browser.get("/api/v1/next", headers={"authorization": f"Bearer {token}"})
    log = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("heedful"))
    assert log.count("/join/{token}") == 2 and "POST /login 401" in log
    cookie = browser.cookies["heedful"]
    for secret in (invitation, "mia", "mia's own long one", "not that one", token, cookie, pages.form_token(cookie)):
        assert secret not in log


FIELDS = ("name", "password", "password_again", "next", "language", "back", "scope", "days", "role", "reason", "text",
          "pseudonym", "nonce", "note", "strength", "guideline_version", "rank.x", "flag.x", "rating.a.x")  # fmt: skip


@pytest.mark.skipif(bool(missing_postgresql()), reason=missing_postgresql())
def test_nothing_that_is_sent_is_a_fault_of_the_server(tmp_path, clock):
    """On PostgreSQL, which is stricter about characters and numbers than SQLite."""
    with postgresql_server() as folder:
        made = make_project(tmp_path, items(3), database=new_postgresql(folder))
        with made.database.writing() as session:
            people.create_person(session, "ann", PASSWORD, "admin", NOW)
        high = "10000 per minute"
        limits = Limits(login_per_account=high, login_per_address=high, bad_token_per_address=high, submit=high)
        browser = Browser(create_app(made, clock=clock, secure_cookies=False, limits=limits), follow_redirects=False)
        browser.log_in("ann")
        held = browser.send_form("/next").headers["location"].removeprefix("/rank/")
        seen = 0
        for method, _, declared in routes(browser.app):
            if declared in ("/logout", "/account/logout_everywhere") or declared.startswith("/api/"):
                continue
            for text in ("a\x00b", "9" * 400, "\ud800\u202e/../x"):
                raw = quote(text.encode("utf-8", "surrogatepass"), safe="")
                fields = "&".join(f"{field}={raw}" for field in FIELDS)
                for here in [raw, held] if "{" in declared else [raw]:
                    address = re.sub(r"{\w+}", here, declared.replace("{verb}", "exclude"))
                    if method == "GET":
                        answer = browser.get(f"{address}?before={raw}&next={raw}&correct={raw}")
                    else:
                        answer = browser.post(
                            address, content=f"form_token={browser.token()}&{fields}",
                            headers={"content-type": "application/x-www-form-urlencoded"},
                        )  # fmt: skip
                    seen += 1
                    assert answer.status_code < 500, (method, address[:80], text[:20])
        assert seen > 100 and browser.is_in()
        made.database.dispose()


# --- invitations and language ---------------------------------------------------------------------------------------


def test_an_invitation_makes_one_account_and_logs_it_in(browse, project, clock):
    with project.database.writing() as session:
        token, late = (invitations.invite(session, "reviewer", NOW, days=days) for days in (2, 1))
    browser = browse()
    new = {"name": " Lí  ", "password": "a fine long one", "password_again": "a fine long one"}
    for wrong in ({"password_again": "not the same one"}, {"name": "ben"}, {"name": "a\nb"}, {"name": ""}):
        answer = browser.send_form(f"/join/{token}", **(new | wrong))
        assert answer.status_code == 422 and not browser.is_in(), wrong
    weak = {"password": "aaaaaaaaaaaa", "password_again": "aaaaaaaaaaaa"}
    assert browser.send_form(f"/join/{token}", **(new | weak)).status_code == 422
    assert browser.send_form(f"/join/{token}", **new).headers["location"] == "/"
    assert browser.is_in() and person(project, "Lí").role == "reviewer"
    again = browse().send_form(f"/join/{token}", **(new | {"name": "other"}))
    assert again.status_code == 422 and "has been used" in again.text
    clock.now += 86401
    assert browse().get(f"/join/{late}").status_code == 404
    assert browse().send_form(f"/join/{late}", **(new | {"name": "other"})).status_code == 422
    assert person(project, "other") is None
    assert browse().get("/join/unknown").status_code == 404


def test_the_language_is_chosen_by_the_browser_then_by_the_person(browse, project):
    browser = browse()
    assert browser.get("/login", headers={"accept-language": "zh-CN,zh;q=0.9"}).headers["content-language"] == "zh-CN"
    assert browser.get("/login").headers["content-language"] == "en"
    assert browser.send_form("/language", language="zh_CN", back="/login").headers["location"] == "/login"
    page = browser.get("/login")
    assert page.headers["content-language"] == "zh-CN" and 'lang="zh-CN"' in page.text
    browser.log_in("ben")
    browser.send_form("/language", language="en", back="/account")
    assert person(project, "ben").language == "en"
    assert browser.get("/account", headers={"accept-language": "zh-CN"}).headers["content-language"] == "en"
    assert browser.send_form("/language", language="xx", back="/").status_code == 404


def test_pseudonyms_tell_nothing(project):
    with project.database.reading() as session:
        rows = session.scalars(select(Person)).all()
    assert len({row.pseudonym for row in rows}) == len(rows)
    assert all(re.fullmatch("rater-[0-9a-f]{10}", row.pseudonym) for row in rows)
