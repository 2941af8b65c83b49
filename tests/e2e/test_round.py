"""Rounds on a toy model with simulated raters: two whole ones, what joins them, interruptions, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from heedful.annotate.simulate.crowd import simulate
from heedful.cli.main import main
from heedful.data.export import record_row
from heedful.data.files import write_jsonl
from heedful.data.load import load_rankings
from heedful.models.export import load_reward_card
from heedful.pipeline import round as rounds
from heedful.pipeline.card import card_of_file
from heedful.pipeline.scorer import open_scorer
from heedful.records import Answer, Message, Prompt, Ranking
from heedful.runs.files import read_json


def shortness(messages, answer: str) -> float:
    """What simulated raters want: short answers."""
    return -len(answer) / 10


@pytest.fixture(autouse=True)
def _without_drawing(monkeypatch):
    """Most of a toy round's time is its report, which other tests look at."""
    monkeypatch.setattr("heedful.report.build.write_report", lambda path: path)


@pytest.fixture
def folder(tmp_path, toy_recipe, toy_model) -> Path:
    """A folder of rounds of sixteen prompts each."""
    path = tmp_path / "rounds"
    path.mkdir()
    (tmp_path / "toy.yaml").write_text(toy_recipe.replace("evaluate: {max_prompts: 12", "evaluate: {max_prompts: 4"))
    (tmp_path / "guideline.md").write_text("Prefer what is short.")
    colours = ["red", "blue", "green", "gold", "grey", "pink", "teal", "navy"]
    rows = [{"prompt": f"Say {a} {b} please", "category": "chat"} for a in colours for b in colours if a != b]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    controls = [
        Ranking(f"control{n}", (Message("user", f"Control {n}"),), (Answer("a", "ok"), Answer("b", "no " * 9)),
                gold=(("a", "b"),))
        for n in range(6)
    ]  # fmt: skip
    write_jsonl(tmp_path / "gold.jsonl", [record_row(control) for control in controls])
    (path / "rounds.yaml").write_text(
        f"recipe: {tmp_path}/toy.yaml\npolicy: {toy_model}\nprompts: {tmp_path}/prompts.jsonl\nnum_prompts: 16\n"
        f"guideline: {tmp_path}/guideline.md\nnum_answers: 3\nmax_new_tokens: 10\nolder_share: 0.25\n"
        f"gold: {tmp_path}/gold.jsonl\ngold_rate: 0.2\n"
    )
    return path


def crowd(project: Path) -> None:
    simulate(project, {"honest": 3}, shortness)


def test_two_rounds_with_simulated_raters(folder, capsys):
    waiting = rounds.next_step(folder)
    assert waiting.result is None and (waiting.num_there, waiting.num_wanted) == (0, waiting.num_wanted)
    assert waiting.num_wanted >= 16, "some are ranked by three"
    first = rounds.next_step(folder, rate=crowd)
    assert first.number == 1 and first.result is not None and first.num_there == first.num_wanted
    assert first.result["accuracy_before"] is None and first.result["accuracy_after"]["num_pairs"] > 0
    assert first.result["scores_by_policy"].keys() == {"round-0"} and first.result["evaluation"]
    second = rounds.next_step(folder, rate=crowd)
    assert second.number == 2 and second.result is not None
    before, after = second.result["accuracy_before"], second.result["accuracy_after"]
    assert before["num_pairs"] == after["num_pairs"] > 0

    written = {n: load_rankings(folder / f"round-{n}/answers.jsonl", keep_unranked=True) for n in (1, 2)}
    controls = [{r.group_id for r in written[n] if r.gold} for n in written]
    assert list(map(len, controls)) == [4, 2] and controls[0].isdisjoint(controls[1]), "none in two rounds"
    answers = {n: [r for r in written[n] if r.gold is None] for n in written}
    by_policy = [a.policy for r in answers[2] for a in r.answers]
    assert set(by_policy) == {"round-0", "round-1"} and by_policy.count("round-0") == len(by_policy) // 4
    prompts = {n: {r.prompt for r in answers[n]} for n in answers}
    assert prompts[1].isdisjoint(prompts[2]) and {r.round for r in answers[2]} == {2}

    train = {n: load_rankings(folder / f"round-{n}/train.jsonl", keep_ties=True) for n in (1, 2)}
    heldout = {n: load_rankings(folder / f"round-{n}/heldout.jsonl", keep_ties=True) for n in (1, 2)}
    assert {r.round for r in train[2]} == {1, 2} and {r.round for r in heldout[2]} == {2}
    trained_on = {r.group_id for r in train[2]}
    assert trained_on.isdisjoint(r.group_id for part in heldout.values() for r in part), "held out stays held out"
    assert {r.group_id for r in train[1]} < trained_on
    for accuracy, model in ((before, 1), (after, 2)):  # by the verb that measures any reward model
        card = card_of_file(
            str(folder / f"round-{model}/run/stages/02-reward/model"), str(folder / "round-2/heldout.jsonl"),
            device="cpu", dtype="float32",
        )  # fmt: skip
        assert card.accuracy == accuracy["value"]

    anchors = load_rankings(folder / "anchors.jsonl", keep_ties=True)
    assert [r.group_id for r in anchors] == [r.group_id for r in heldout[1]]
    for n in (1, 2):  # one scale: the same answers have mean 0 and deviation 1 in every round
        model = folder / f"round-{n}/run/stages/02-reward/model"
        texts = [(Prompt(r.group_id, r.prompt), a.text) for r in anchors for a in r.answers]
        scores = open_scorer(str(model), device="cpu", dtype="float32")([p for p, _ in texts], [t for _, t in texts])
        card = load_reward_card(model)
        norm, config = (read_json(model / f"{name}.json") for name in ("reward_norm", "config"))
        mean = sum(scores) / len(scores)
        assert card.score_mean == pytest.approx(mean, abs=1e-5)
        assert norm["mean"] == config["mean"] == card.score_mean and norm["std"] == config["std"] == card.score_std
        assert sum((s - mean) ** 2 for s in scores) / len(scores) == pytest.approx(card.score_std**2, rel=1e-3)
    assert json.loads((folder / "round-2/run/status.json").read_text())["state"] == "finished"
    assert Path(second.result["policy"]).is_dir()


def test_an_interruption_before_and_after_people_ranked(folder, monkeypatch):
    class Stop(Exception):
        pass

    def stop(*_, **__):
        raise Stop

    with monkeypatch.context() as patch:  # the answers are in the project, and the file that says so is not there yet
        patch.setattr("heedful.pipeline.sample.write_rows", stop)
        with pytest.raises(Stop):
            rounds.next_step(folder)
    with monkeypatch.context() as patch:
        patch.setattr("heedful.pipeline.stages.run", stop)
        with pytest.raises(Stop):
            rounds.next_step(folder, rate=crowd)
    assert (folder / "round-1/data/rankings.jsonl").exists() and not (folder / "round-1/result.json").exists()
    status = rounds.next_step(folder, rate=stop)  # nobody is asked again
    assert status.number == 1 and status.result is not None
    answers = load_rankings(folder / "round-1/answers.jsonl", keep_unranked=True)
    assert len([r for r in answers if r.gold is None]) == 16 == status.result["num_prompts"]


def test_a_round_is_closed_before_all_is_ranked(folder, capsys):
    assert main(["round", str(folder)]) == 0
    assert "0 of" in (said := capsys.readouterr().out) and "--close" in said
    project = str(folder / "project")
    assert main(["annotate", "simulate", project, "--raters", "honest=1", "--limit", "12"]) == 0
    assert capsys.readouterr().out == "honest-1: 12 rankings\n"
    assert main(["annotate", "simulate", project, "--raters", "saint=1"]) == 2
    assert "give a whole number of one of honest, noisy" in capsys.readouterr().err
    assert main(["round", str(folder), "--json"]) == 0
    num_there = json.loads(capsys.readouterr().out)["num_there"]
    assert 8 <= num_there < 12, "control items are no rankings of the round"
    assert main(["round", str(folder), "--close"]) == 0
    said = capsys.readouterr().out
    assert f"round 1: {num_there} rankings of {num_there} prompts" in said and "next policy:" in said


@pytest.mark.parametrize("change, sentence", [
    (("num_prompts: 16", "num_prompts: 99"), "56 prompts are left that no round has asked, 99 are asked for"),
    (("num_answers: 3", "num_answers: 1"), "num_answers"),
    (("num_answers: 3", "answers: 3"), "answers: unknown key; known keys are recipe"),
    (("guideline:", "project: nowhere\nguideline:"), "nowhere: no project is there"),
    (("toy.yaml", "none.yaml"), "no such recipe file"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(folder, capsys, change, sentence):
    file = folder / "rounds.yaml"
    file.write_text(file.read_text().replace(*change))
    assert main(["round", str(folder)]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("heedful: ") and sentence in last


def test_a_folder_without_rounds_is_refused(tmp_path, capsys):
    assert main(["round", str(tmp_path)]) == 2
    assert "rounds.yaml is missing; write one with the keys recipe, policy, prompts" in capsys.readouterr().err


def test_rankings_from_before_are_trained_on_too(folder, tmp_path):
    earlier = [
        Ranking(f"old{n}", (Message("user", f"An old question {n * 7919}"),), (Answer("a", "ok"), Answer("b", "no no")),
                consensus={"a": 1, "b": 2})
        for n in range(30)
    ]  # fmt: skip
    write_jsonl(tmp_path / "old.jsonl", [record_row(r) for r in earlier])
    file = folder / "rounds.yaml"
    file.write_text(file.read_text() + f"rankings: {tmp_path}/old.jsonl\n")
    status = rounds.next_step(folder, rate=crowd)
    train = load_rankings(folder / "round-1/train.jsonl", keep_ties=True)
    num_old = sum(r.group_id.startswith("old") for r in train)
    assert status.result is not None and 15 <= num_old < 30 and len(train) == num_old + sum(r.round == 1 for r in train)
