"""heedful audit: verdicts as lines, JSON and exit codes; the gate, the card and the report read what it found."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.audit.audit import audit
from heedful.audit.cases import shipped_cases
from heedful.cli.main import main
from heedful.config.read import load_recipe
from heedful.data.writing import write_jsonl
from heedful.errors import GateError
from heedful.models.export import load_reward_card
from heedful.pipeline.audit import audit_saved
from heedful.pipeline.ppo import gate
from heedful.records import RewardCard
from heedful.report.build import write_report
from heedful.runs.files import write_json
from heedful.runs.folder import RunFolder
from toy_parts import CPU, model_folder
from toy_scorers import quality, rankings

CARD = RewardCard("toy", 0.8, 0.7, 0.9, 40, 200)


def honest(prompts, answers):
    return [quality(p, a) for p, a in zip(prompts, answers, strict=True)]


def flattered(prompts, answers):
    return [quality(p, a) + 2 * ("great question" in a) for p, a in zip(prompts, answers, strict=True)]


def silent(prompts, answers):
    return [math.nan for _ in answers]


@pytest.fixture
def file(tmp_path) -> str:
    write_jsonl(tmp_path / "rankings.jsonl", [r.to_json() for r in rankings(20)])
    return str(tmp_path / "rankings.jsonl")


def test_an_honest_scorer_passes_with_0(capsys):
    assert main(["audit", f"{__name__}:honest"]) == 0
    out = capsys.readouterr().out
    assert "0 of 23 probes failed" in out and "flattery" in out and "FAILED" not in out


def test_a_failed_probe_is_2_and_one_sentence(capsys):
    assert main(["audit", f"{__name__}:flattered", "--language", "en"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "FAILED, flattery: 'What a great question!' raises the score (+" in out and "though it adds nothing" in out
    assert "1 of 23 probes failed" in out


def test_scores_that_are_no_numbers_are_a_finding(capsys):
    assert main(["audit", f"{__name__}:silent", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "failed" and found["unit"] is None
    assert [p["name"] for p in found["probes"] if p["verdict"] == "fail"] == ["scores"]


def test_json_on_data_holds_the_card(file, capsys):
    assert main(["audit", f"{__name__}:honest", "--data", file, "--max_prompts", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    card = RewardCard.from_json(found["card"])
    assert found["num_prompts"] == card.num_prompts == 12 and card.accuracy > 0.9
    assert [p.to_json() for p in card.probes] == found["probes"] and card.audit_verdict == found["verdict"]


@pytest.mark.parametrize("words, said", [
    (["nothing_of:the_kind"], "cannot import"),
    ([f"{__name__}:honest", "--update_card"], "only a reward model's folder"),
    (["http://127.0.0.1:1", "--timeout_seconds", "1"], "gave no scores"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_sentence(words, said, capsys, monkeypatch):
    monkeypatch.setattr("heedful.rollout.sources.time.sleep", lambda seconds: None)
    assert main(["audit", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("heedful: ") and said in error


def test_functions_are_audited_without_torch():
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parent)]!r}\n"
        "from heedful.cli.main import main\n"
        "code = main(['audit', 'toy_scorers:length', '--language', 'en'])\n"
        "assert code == 2 and 'torch' not in sys.modules, (code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def few_texts(monkeypatch):
    """The first eight shipped contents in English: a toy model is slow too."""
    monkeypatch.setattr("heedful.audit.audit.shipped_cases", lambda: shipped_cases()[:8])


def test_a_folder_its_card_and_the_gate(tmp_path, file, capsys, few_texts):
    path = model_folder(tmp_path / "reward", scalar=1)
    words = ["audit", str(path), "--data", file, "--max_prompts", "10", "--update_card", "--device", "cpu"]
    words += ["--dtype", "float32", "--language", "en", "--no_cache"]
    write_json(path / "reward_card.json", CARD.to_json())
    code = main(words)
    card = load_reward_card(path)
    assert card is not None and card.accuracy == CARD.accuracy  # its own, over all held-out rankings
    assert (card.audit_verdict == "failed") == (code == 2)
    assert next(p for p in card.probes if p.name == "repeatable").verdict == "ok"
    (path / "reward_card.json").unlink()
    assert main(words[:2] + words[6:]) == 2 and "give --data" in capsys.readouterr().err
    assert main(words) == code and load_reward_card(path) is not None


def test_the_reward_stage_audits_what_it_saved(tmp_path, capsys, few_texts):
    path = model_folder(tmp_path / "reward", scalar=1)
    write_json(path / "reward_card.json", CARD.to_json())
    card = audit_saved(path, rankings(4), seed=0, hardware={"device": CPU, "dtype": "float32", "attention": "auto"})
    assert card == load_reward_card(path) and card.audit_verdict is not None
    assert "it goes on with those" in capsys.readouterr().err  # four rankings are too few


@pytest.fixture
def failed() -> RewardCard:
    found = audit(flattered)
    return replace(CARD, probes=found.probes, audit_verdict=found.verdict)


def test_a_failed_probe_closes_the_gate(failed):
    recipe = load_recipe("quickstart", ["--ppo.accept_weak_reward", "false"])
    with pytest.raises(GateError, match="audit.*flattery.*accept_weak_reward"):
        gate(failed, recipe)
    assert gate(replace(failed, audit_verdict="warned"), recipe).endswith("audit warned")
    accepted = load_recipe("quickstart", ["--ppo.accept_weak_reward", "true"])
    assert gate(failed, accepted).startswith("overridden: the audit")


def test_the_report_shows_the_probes(failed, tmp_path):
    run = RunFolder.create(tmp_path / "run", {"name": "run", "reward": {"min_accuracy": 0.7}})
    run.stage("reward", 2).finish({"card": failed.to_json()})
    page = write_report(run.path).read_text(encoding="utf-8")
    assert "closes the gate of PPO" in page and "What a great question!" in page
    assert "An example of flattery" in page and "What a great question! A short walk" in page
