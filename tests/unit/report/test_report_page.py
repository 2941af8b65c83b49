import html
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from heedful.errors import CheckpointError
from heedful.records import EvaluationRow, Message
from heedful.report.build import write_report
from heedful.runs.folder import RunFolder
from heedful.runs.writer import StageWriter

VOID = {"meta", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """Text, tags and ids of a page; fails on a tag closed out of turn."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self._text: list[str] = []
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self._open == []
        self.text = re.sub(r"\s+", " ", " ".join(self._text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href") and value:
                self.links.append(value)
            assert not name.startswith("on"), f"event handler {name}"
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self._text.append(data)


def test_a_finished_run_shows_every_part(finished_page) -> None:
    page = Page(finished_page)
    for expected in (
        "PPO beats SFT on held-out prompts: win rate 78 % [70, 85]",
        "moved 6.62 nats per answer", "98 % against 86 %",
        "77.6 % [73.6, 81.6] of held-out pairs", "passed the gate of 70 %",
        "“The longer answer wins” alone gets 58.3 %",
        "demonstrations 288", "ties 91",
        "78.3 % [70.3, 85.3]", "question answering", "87 % [67, 100] of 15",
        "Why does bread rise when it is baked?", "The basil and I owe you a dinner!", "cut at the length limit",
        "Where the score fell most", "53 more prompts",
        "KL coefficient", "Tokens whose ratio was clipped", "Answers that end by themselves",
        "Distributions at the first, middle and last step", "step 1:", "step 13:", "step 25:",
        "2 min 8 s", "3.2 GiB", "rollout 2 min 57 s", "numpy", "accept_weak_reward: false",
    ):  # fmt: skip
        assert expected in page.text.replace("\u00a0", " "), expected


def test_the_page_is_self_contained_and_well_formed(finished_page) -> None:
    page = Page(finished_page)
    assert "script" not in page.tags and "iframe" not in page.tags and "link" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page.source)) <= set(page.ids)
    figures = re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL)
    assert len(figures) > 40
    for figure in figures:
        xml.etree.ElementTree.fromstring(figure.replace("<svg ", '<svg xmlns:xlink="x" ', 1))
        assert "#01020" not in figure  # every stand-in colour became a variable


def test_the_same_run_gives_the_same_bytes(finished_run, finished_page, tmp_path) -> None:
    code = "import sys; from heedful.report.build import write_report; write_report(sys.argv[1], out=sys.argv[2])"
    command = [sys.executable, "-c", code, str(finished_run), str(tmp_path / "b")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert (tmp_path / "b.html").read_bytes() == finished_page.read_bytes()
    assert (tmp_path / "b.json").read_bytes() == finished_page.with_suffix(".json").read_bytes()


def test_the_json_holds_the_same_numbers(finished_page) -> None:
    report = json.loads(finished_page.with_suffix(".json").read_text())
    assert report["verdict"]["tone"] == "good"
    assert report["evaluation"]["gold"]["win_rate"] == 0.783
    assert report["reward_card"]["card"]["accuracy"] == 0.776 and report["reward_card"]["passed"] is True
    ppo = report["stages"][2]
    assert ppo["curves"]["ppo/kl_nats"]["steps"] == list(range(1, 26))
    assert [d["step"] for d in ppo["distributions"]["ppo/ratios"]] == [1, 13, 25]
    assert ppo["seconds_spent"]["rollout"] == pytest.approx(25 * 7.1)


ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</div>\u202e\ud800\u0007$\\frac{"


def test_everything_that_models_and_files_say_is_escaped(make_run, fill) -> None:
    with make_run() as run:
        run.set_status("running", ATTACK, ATTACK)
        stage = run.stage("ppo", 1)
        with StageWriter(stage) as writer:
            writer.scalars(1, {"ppo/kl_nats": 1.0})
            writer.samples(1, [{ATTACK: ATTACK, "score": 1.0}])
        with stage.metrics.open("a") as file:  # a metric of a newer or a hostile writer
            file.write(json.dumps({"step": 2, f"x/{ATTACK}": 1.0, f"ppo/score/{ATTACK[:8]}": 2.0}) + "\n")
        stage.finish({ATTACK: ATTACK, "data": {ATTACK: ATTACK}})
        card = {"accuracy": 0.7, "model": ATTACK, "accuracy_by_category": {ATTACK: 0.5}, "data": {ATTACK: ATTACK}}
        run.stage("reward", 2).finish({"card": card})
        row = EvaluationRow(
            ATTACK, (Message(ATTACK, ATTACK),), ATTACK, ATTACK, ATTACK, {ATTACK: 1}, {"gold": 2}, ATTACK
        )
        fill.evaluate(run.stage("evaluate", 3), [row])
    page = Page(write_report(run.path))
    assert "script" not in page.tags and "img" not in page.tags
    assert "49" not in page.text.split("{{ 7 * 7 }}")[0][-20:] and "{{ 7 * 7 }}" in page.text
    assert html.escape("<script>alert(1)</script>") in page.source
    assert "default-src 'none'" in page.source  # and should escaping ever fail, nothing runs


def test_an_empty_run_says_so_in_words(make_run) -> None:
    with make_run() as run:
        text = Page(write_report(run.path)).text
        assert "The run is still running" in text
    text = Page(write_report(run.path)).text
    for expected in (
        "The run is interrupted", "No evaluation yet", "No answers to compare yet", "No reward card yet",
        "No stage has reported its data yet", "No stage has begun", "Nothing has been measured yet",
    ):  # fmt: skip
        assert expected in text, expected


def test_an_unfinished_stage_is_shown_as_far_as_it_is(make_run, fill) -> None:
    rng = np.random.default_rng(0)
    with make_run() as run:
        fill.sft(run.stage("sft", 1), rng, num_steps=3)
        fill.reward(run.stage("reward", 2), rng, accuracy=0.64)
        run.set_status("running", "ppo")
        stage = run.stage("ppo", 3)
        fill.ppo(stage, rng, num_steps=2, finish=False)
        with stage.metrics.open("a") as file:
            file.write('{"step": 3, "ppo/kl_')
    text = Page(write_report(run.path)).text.replace("\u00a0", " ")
    assert "The run is interrupted in stage ppo" in text
    assert "unfinished, at step 2" in text
    assert "below the gate of 70 %" in text
    assert "Samples at step 2" in text


@pytest.mark.parametrize("stages", [["reward"], ["evaluate"], ["ppo"], ["sft", "ppo", "evaluate"]])
def test_any_stages_may_be_missing(make_run, fill, stages: list[str]) -> None:
    rng = np.random.default_rng(0)
    with make_run() as run:
        for index, name in enumerate(stages, start=1):
            stage = run.stage(name, index)
            if name == "evaluate":
                fill.evaluate(stage, fill.rows(rng, 4))
            else:
                getattr(fill, name)(stage, rng)
        run.set_status("finished")
    text = Page(write_report(run.path)).text
    if stages == ["evaluate"]:
        assert "the trained policy beats the starting model" in text
    if "evaluate" not in stages:
        assert "no evaluation was part of it" in text


@pytest.mark.parametrize(("low", "high", "tone", "words"), [
    (0.6, 0.9, "good", "PPO beats"), (0.4, 0.6, "open", "No clear difference"), (0.1, 0.4, "bad", "is worse than"),
])  # fmt: skip
def test_the_verdict_follows_the_interval(make_run, low: float, high: float, tone: str, words: str) -> None:
    with make_run() as run:
        run.stage("ppo", 1).finish({})
        gold = {"win_rate": (low + high) / 2, "win_rate_low": low, "win_rate_high": high}
        run.stage("evaluate", 2).finish({"metrics": {"gold": gold, "end_token_rate": {"before": 0.9, "after": 0.8}}})
        run.set_status("finished")
    report = json.loads(write_report(run.path).with_suffix(".json").read_text())
    assert report["verdict"]["tone"] == tone and words in report["verdict"]["headline"]
    assert "less often than" in report["verdict"]["notes"][0]


def test_a_win_by_the_trained_reward_model_is_no_proof(make_run) -> None:
    with make_run() as run:
        judged = {"win_rate": 0.9, "win_rate_low": 0.8, "win_rate_high": 0.95}
        run.stage("evaluate", 1).finish({"metrics": {"reward_model": judged}})
        run.set_status("finished")
    verdict = json.loads(write_report(run.path).with_suffix(".json").read_text())["verdict"]
    assert verdict["tone"] == "open" and "no independent evidence" in verdict["notes"][0]


def test_numbers_that_are_not_finite_are_reported(make_run) -> None:
    with make_run() as run, StageWriter(run.stage("ppo", 1)) as writer:
        writer.scalars(1, {"ppo/kl_nats": 0.0, "ppo/value_loss": float("nan")})
        writer.scalars(2, {"ppo/kl_nats": float("nan"), "ppo/value_loss": float("nan")})
        writer.histograms(1, {"ppo/ratios": [1.0] * 8})
    text = Page(write_report(run.path)).text
    assert "Numbers that were not finite: step 1: ppo/value_loss is nan; step 2: ppo/kl_nats is nan" in text


def test_length_that_explains_as_much_as_the_model_is_said_aloud(make_run) -> None:
    card = {"accuracy": 0.72, "accuracy_low": 0.66, "accuracy_high": 0.78, "length_accuracy": 0.7}
    with make_run() as run:
        run.stage("reward", 1).finish({"card": card})
    assert "length explains about as much" in Page(write_report(run.path)).text


def test_unreadable_rows_are_counted(make_run, fill) -> None:
    with make_run() as run:
        stage = run.stage("evaluate", 1)
        fill.evaluate(stage, fill.rows(np.random.default_rng(0), 4))
        with (stage.path / "evaluation.jsonl").open("a") as file:
            file.write('{"prompt_id": "p9"}\n')
    assert "1 rows of evaluation.jsonl could not be read" in Page(write_report(run.path)).text


def test_not_a_run(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        write_report(tmp_path)


def test_long_curves_stay_small(make_run) -> None:
    with make_run() as run, run.stage("sft", 1).metrics.open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "sft/loss_nats": 1 / (1 + step)}) + "\n")
    assert write_report(run.path).stat().st_size < 100_000


def test_the_verb(finished_run, tmp_path, capsys) -> None:
    import argparse

    from heedful.cli import report as verb

    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["report", str(finished_run), "--out", str(tmp_path / "page.html")])
    assert arguments.handler(arguments) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file() and (tmp_path / "page.json").is_file()
    assert RunFolder.open(finished_run).status["state"] == "finished"
