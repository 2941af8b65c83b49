"""The verbs of the command line, one after the other, are the whole run; what cannot run is said in a sentence."""

from __future__ import annotations

import json

import pytest
from outcome import first_difference, outcome

from heedful.cli.main import main


@pytest.fixture
def command(toy_recipe, tmp_path):
    """heedful VERB on the toy recipe; the exit code."""
    (tmp_path / "toy.yaml").write_text(toy_recipe)

    def call(verb, *options, output="runs"):
        return main([verb, str(tmp_path / "toy.yaml"), "--output", str(tmp_path / output), *options])

    call.path = tmp_path
    return call


def test_stage_by_stage_is_the_whole_run(command, capsys):
    assert command("run") == 0
    whole = command.path / "runs/toy"
    assert capsys.readouterr().out.strip() == str(whole / "report.html")
    for verb in ("sft", "reward", "ppo", "evaluate"):
        assert command(verb, output="steps") == 0
        status = json.loads((command.path / "steps/toy/status.json").read_text())
        assert status["state"] == ("finished" if verb == "evaluate" else "interrupted")
        assert (command.path / "steps/toy/report.html").stat().st_size > 5000  # after every stage
    assert first_difference(outcome(whole), outcome(command.path / "steps/toy")) is None
    stage = command.path / "steps/toy/stages/01-sft"
    before = (stage / "metrics.jsonl").stat().st_mtime_ns
    assert command("sft", output="steps") == 0  # finished: not run again
    assert (stage / "metrics.jsonl").stat().st_mtime_ns == before and not (stage / "checkpoints").exists()


def test_a_stage_before_its_turn_is_refused_and_nothing_is_lost(command, capsys):
    assert command("ppo") == 2
    said = capsys.readouterr().err
    assert "the reward stage is not finished; run `heedful reward` first" in said and "Traceback" not in said
    assert command("sft") == 0 and command("reward") == 0  # the same folder goes on


def test_a_run_that_is_there_is_refused_resumed_or_left_beside(command, capsys):
    one_step = ("--reward", "null", "--ppo", "null", "--evaluate", "null", "--sft.epochs", "0.2")
    assert command("run", *one_step) == 0
    assert command("run", *one_step) == 2
    assert "add --resume to continue it or --new" in capsys.readouterr().err
    assert command("run", *one_step, "--resume") == 0 and command("run", *one_step, "--new") == 0
    assert (command.path / "runs/toy-2/report.html").exists()
    assert command("run", *one_step[:-1], "0.4", "--resume") == 2
    assert "sft.epochs is 0.2 there and 0.4 here" in capsys.readouterr().err


def test_the_gate_stops_with_2_and_can_be_overridden_when_going_on(command, capsys):
    strict = ("--ppo.accept_weak_reward", "false", "--reward.min_accuracy", "1.0")
    assert command("run", *strict) == 2
    said = capsys.readouterr().err
    assert "(at least 100% is asked)" in said and "--accept_weak_reward" in said and "Traceback" not in said
    run = command.path / "runs/toy"
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert not (run / "stages/03-ppo/metrics.jsonl").exists()
    options = ("--reward.min_accuracy", "1.0", "--resume", "--accept_weak_reward")
    assert command("run", *options) == 0
    results = json.loads((run / "stages/03-ppo/finished.json").read_text())["results"]
    assert results["gate"].startswith("overridden:")


@pytest.mark.parametrize("options, sentence", [
    (("--sft.epochs", "-1"), "sft.epochs"),
    (("--sft.epoch", "1"), "sft.epochs"),
    (("--model.device", "cuda:99"), "cuda:99"),
    (("--model.name", "/nowhere/at/all"), "/nowhere/at/all"),
    (("--data.demonstrations", "/nowhere.jsonl"), "/nowhere.jsonl"),
    (("--sft.max_tokens", "5"), "read 18, kept 0, dropped 18 (too_long 18)"),
    (("--data.max_prompt_tokens", "5", "--sft", "null"), "prompt_too_long"),
    (("--evaluate.gold", "nowhere:function"), "nowhere"),
    (("--ppo.minibatches", "4"), "must divide"),
    (("--ppo.kl.horizon", "1"), "horizon"),
    (("--ppo.kl.coefficient", "0"), "coefficient"),
    (("--ppo.sampling.max_new_tokens", "300"), "256 positions"),
    (("--sft.lora", "{targets: nothing}"), "nothing"),
])  # fmt: skip
def test_what_cannot_run_is_said_in_one_sentence_with_exit_code_2(command, capsys, options, sentence):
    assert command("run", *options) == 2
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert last.startswith("heedful: ") and sentence in last and "Traceback" not in said
    in_the_recipe = {"sft.epochs", "nowhere", "must divide", "horizon", "coefficient"}
    assert sentence not in in_the_recipe or not (command.path / "runs").exists()  # known before anything is trained
