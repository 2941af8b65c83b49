"""``heedful check``: a recipe proves itself before any stage has run, and nothing is written."""

from __future__ import annotations

import json

import pytest

from heedful.cli.main import main
from heedful.train import proofs


@pytest.fixture
def check(toy_recipe, tmp_path):
    """heedful check on the toy recipe; the exit code."""
    (tmp_path / "toy.yaml").write_text(toy_recipe)

    def call(*options, verb="check"):
        return main([verb, str(tmp_path / "toy.yaml"), "--output", str(tmp_path / "runs"), *options])

    call.path = tmp_path
    return call


def test_a_sound_recipe_passes_and_nothing_is_written(check, capsys):
    assert check() == 0
    out = capsys.readouterr().out.splitlines()
    assert [line[7:31].strip() for line in out[: len(proofs.ALL)]] == list(proofs.ALL)
    assert all(line.startswith("ok ") for line in out[: len(proofs.ALL)])
    assert "The SFT policy is not trained yet" in out[-3] and "with a random head stood in for it" in out[-2]
    assert out[-1].startswith(f"toy: all {len(proofs.ALL)} proofs hold (")
    assert [p.name for p in check.path.iterdir()] == ["toy.yaml"]


def test_a_proof_that_fails_is_shown_with_what_to_do(check, capsys):
    assert check("--ppo.sampling.max_new_tokens", "250") == 2
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("FAILED")]
    assert "longest batch fits" in lines[at] and "longer than the 256 positions of this model" in lines[at]
    assert lines[at + 1].strip().startswith("it must be: ") and lines[at + 2].strip().startswith("what to do: ")
    assert lines[-1].startswith(f"toy: 1 of {len(proofs.ALL)} proofs failed (") and "Traceback" not in captured.err


def test_json(check, capsys):
    assert check("--json", "--ppo.lora.rank", "4", "--ppo.value_from", "trunk") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["passed"] is True and set(content["stand_ins"]) == {"SFT policy", "reward model"}
    assert [p["name"] for p in content["proofs"]] == list(proofs.ALL) and all(p["passed"] for p in content["proofs"])
    assert check("--json", "--ppo.sampling.max_new_tokens", "250") == 2
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_every_option_of_the_recipe_is_tried(check, capsys):
    options = ("--ppo.activation_checkpointing", "true", "--ppo.kl.in_reward", "exact", "--ppo.kl.in_loss", "exact",
               "--ppo.value_from", "policy", "--ppo.entropy_coefficient", "0.01")  # fmt: skip
    assert check(*options) == 0
    card = ("--ppo.rewards.own.model", "run:reward", "--ppo.rewards.own.scaling", "card")
    assert check(*card) == 0, "a reward model that is not trained yet has no card to scale by"
    assert "own " in capsys.readouterr().out


def test_a_finished_stage_lends_its_model(check, capsys, monkeypatch):
    monkeypatch.setattr(proofs, "MIN_END_PROBABILITY", 1.1)
    options = ("--ppo.sampling.max_new_tokens", "1")
    assert check(*options) == 0
    said = capsys.readouterr().out
    assert "SFT is still to teach it" in said and "The SFT policy is not trained yet" in said
    assert check("--sft.epochs", "0.2", verb="sft") == 0
    capsys.readouterr()
    assert check("--sft.epochs", "0.2", *options) == 2, "an SFT policy that never ends its answers"
    said = capsys.readouterr().out
    assert "FAILED answers end" in said and "The SFT policy" not in said and "The reward model is not" in said


@pytest.mark.parametrize("options, sentence", [
    (("--ppo", "null", "--evaluate", "null"), "no ppo section, so there is nothing to prove"),
    (("--data.prompts", "/nowhere.jsonl"), "/nowhere.jsonl"),
    (("--ppo.rewards.short.function", "nowhere:score"), "nowhere"),
    (("--ppo.micro_batch_token", "3"), "ppo.micro_batch_tokens"),
])  # fmt: skip
def test_what_cannot_be_checked_is_said_in_a_sentence(check, capsys, options, sentence):
    assert check(*options) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_a_recipe_is_needed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["check"])
    assert stop.value.code == 2 and "RECIPE" in capsys.readouterr().err
