"""`heedful sample` on toy models: what is asked for comes out, an interruption costs nothing, mistakes are said."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from heedful.cli.main import main
from heedful.data.duplicates import alike
from heedful.data.load import load_rankings
from heedful.pipeline import sample as pipeline_sample

PROMPTS = [f"Say {a} and {b} {c}" for a in ("red", "blue", "green") for b in ("gold", "grey") for c in ("up", "on")]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": text, "category": ("chat", "safety")[i % 2]} for i, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def policies(toy_model, tmp_path_factory) -> list[str]:
    """Two models under two names."""
    other = tmp_path_factory.mktemp("other") / "old"
    shutil.copytree(toy_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return [f"new={toy_model}", f"old={other}"]


@pytest.fixture
def command(prompts, policies, tmp_path):
    def call(*options: str, out: str | None = "s.jsonl") -> int:
        where = ["--out", str(tmp_path / out)] if out else []
        return main([
            "sample", str(prompts), "--policy", *policies, *where, "--max_new_tokens", "12", "--device", "cpu",
            "--dtype", "float32", "--threshold", "0.9", *options,
        ])  # fmt: skip

    call.path = tmp_path
    return call


def read(path: Path):
    return load_rankings(path, keep_unranked=True)


def test_answers_of_several_policies_and_temperatures(command, capsys):
    assert command("--temperatures", "0.7", "1.3", "--answers", "4", "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    rankings = read(command.path / "s.jsonl")
    assert counts["num_rankings"] == len(rankings) and counts["num_answers"] == 4 * len(rankings)
    assert counts["by_policy"].keys() == {"new@0.7", "new@1.3", "old@0.7", "old@1.3"}
    for ranking in rankings:
        assert len({a.policy for a in ranking.answers}) == 4
        assert [a.id for a in ranking.answers] == ["a1", "a2", "a3", "a4"]
        texts = [a.text for a in ranking.answers]
        assert not any(alike(a, b, 0.9) for i, a in enumerate(texts) for b in texts[:i])
    assert not (command.path / "s.jsonl.partial").exists()
    assert command("--temperatures", "0.7", "1.3", "--answers", "4", out="again.jsonl") == 0
    assert read(command.path / "again.jsonl") == rankings


def test_quotas_rounds_baits_and_gold(command, capsys):
    answers = [{"id": "x", "text": "short and right"}, {"id": "y", "text": "long and wrong"}]
    rows = [{"group_id": f"c{i}", "prompt": [{"role": "user", "content": f"control {i}"}], "answers": answers,
             "gold": [["x", "y"]]} for i in range(5)]  # fmt: skip
    gold = command.path / "gold.jsonl"
    gold.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert command("--num_prompts", "8", "--quotas", "chat=3,safety=1", "--round", "2", "--bait_rate", "0.25",
                   "--gold", str(gold), "--gold_rate", "0.2", "--answers", "3") == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "by category: chat 6, safety 2" in said and "controls: 2 control items, 2 baits" in said
    rankings = read(command.path / "s.jsonl")
    own = [r for r in rankings if r.gold is None]
    assert len(rankings) == 10 and Counter(r.category for r in own) == {"chat": 6, "safety": 2}
    assert all(r.round == 2 and r.group_id.endswith("-r2") for r in own)
    assert sum(a.kind == "bait" for r in own for a in r.answers) == 2


def test_answers_go_straight_into_a_project_once(command):
    project_module = pytest.importorskip("heedful.annotate.project")
    from heedful.annotate.settings import Settings

    folder = command.path / "project"
    project = project_module.create_project(folder, Settings(), "Prefer what is true.", now=0.0)
    assert command("--project", str(folder), "--answers", "2") == 0
    assert project_module.add_rankings(project, read(command.path / "s.jsonl"), now=1.0).num_known == len(PROMPTS)
    assert command("--project", str(folder), "--answers", "2", out=None) == 0
    assert not (folder / "sample.partial").exists()
    assert command("--project", str(folder), "--answers", "3") == 2  # other content under known ids


def test_the_oldest_answers_are_a_share(command):
    assert command("--weights", "0.75", "0.25", "--answers", "2") == 0
    counts = Counter(a.policy for r in read(command.path / "s.jsonl") for a in r.answers)
    assert counts == {"new": 18, "old": 6}


def test_an_interruption_costs_nothing(command, monkeypatch):
    assert command(out="straight.jsonl") == 0
    append, appended = pipeline_sample.append_entry, []

    def stop_after(limit):
        def append_or_stop(path, entry):
            append(path, entry)
            appended.append(len(entry["answers"]))
            if len(appended) % limit == 0:
                raise KeyboardInterrupt

        return append_or_stop

    monkeypatch.setattr(pipeline_sample, "append_entry", stop_after(3))
    codes = [130]
    while codes[-1] == 130 and len(codes) < 9:
        codes.append(command("--batch_size", "5"))
    assert len(codes) > 3 and codes[-1] == 0
    straight, resumed = (read(command.path / name) for name in ("straight.jsonl", "s.jsonl"))
    assert straight == resumed
    assert 4 * len(PROMPTS) <= sum(appended) < 4 * len(PROMPTS) + 12, "what was sampled was sampled again"


def test_answers_of_other_settings_do_not_mix(command, monkeypatch):
    append = pipeline_sample.append_entry

    def append_and_stop(path, entry):
        append(path, entry)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline_sample, "append_entry", append_and_stop)
        assert command("--seed", "1") == 130
    assert command("--seed", "2") == 0 and command("--seed", "2", out="fresh.jsonl") == 0
    assert read(command.path / "s.jsonl") == read(command.path / "fresh.jsonl")


@pytest.mark.parametrize("options, sentence", [
    (("--num_prompts", "99"), "99 prompts are asked for and 12 are there"),
    (("--weights", "1"), "2 policies and 1 weights"),
    (("--weights", "1", "-1"), "give a number above 0"),
    (("--quotas", "chat=1"), "quotas need a number of prompts"),
    (("--temperatures", "-1"), "temperatures are (-1.0,)"),
    (("--max_prompt_tokens", "3"), "prompt_too_long 12"),
    (("--max_new_tokens", "400"), "256 positions"),
    (("--gold", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
    (("--project", "nowhere"), "nowhere"),
])  # fmt: skip
def test_what_cannot_be_sampled_is_said_in_one_sentence(command, capsys, options, sentence):
    assert command(*options) == 2
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert last.startswith("heedful: ") and sentence in last and "Traceback" not in said
    assert not (command.path / "s.jsonl").exists()


def test_policies_of_one_name_and_no_place_to_go_are_refused(toy_model, prompts, capsys):
    policy = str(toy_model)
    assert main(["sample", str(prompts), "--policy", policy, policy, "--out", "x.jsonl"]) == 2
    assert "two policies are called 'model'" in capsys.readouterr().err
    assert main(["sample", str(prompts), "--policy", policy]) == 2
    assert "give out or project" in capsys.readouterr().err
    assert main(["sample", str(prompts), "--policy", policy, "--temperatures", "0", "--out", "x.jsonl"]) == 2
    assert "temperature 0 gives one answer" in capsys.readouterr().err


def test_a_stage_of_a_run_is_called_by_run_and_stage():
    assert pipeline_sample.name_of("runs/first/stages/03-ppo/model") == "first-ppo"
    assert pipeline_sample.name_of("org/some-model") == "some-model"
