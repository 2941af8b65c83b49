"""What a run leaves of its reward model, and the verbs that work on that folder: one set of scores everywhere."""

from __future__ import annotations

import json
import sqlite3

import pytest

from heedful import pipeline
from heedful.cli.main import main
from heedful.config.read import load_recipe
from heedful.data.load import load_rankings
from heedful.models.export import load_reward_card, verify_reward

OPTIONS = ["--evaluate", "null", "--sft", "null", "--ppo.steps", "2", "--reward.max_tokens", "200"]


@pytest.fixture(scope="module")
def run(toy_recipe, toy_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("reward-folder")
    (path / "toy.yaml").write_text(toy_recipe)
    prompts = [json.loads(line) for line in (toy_data / "prompts.jsonl").read_text().splitlines()]
    with (path / "prompts.jsonl").open("w") as file:
        for i, row in enumerate(prompts):
            file.write(json.dumps({**row, "category": ["chat", "writing"][i % 2]}) + "\n")
    here = ["--output", str(path), "--data.prompts", str(path / "prompts.jsonl")]
    recipe = load_recipe(path / "toy.yaml", [*OPTIONS, *here])
    pipeline.run(recipe)
    return path / "toy"


def test_the_folder_says_what_it_is_and_proves_itself(run, toy_data, toy_model):
    folder = run / "stages/02-reward/model"
    assert verify_reward(folder).num_pairs > 10
    card, text = load_reward_card(folder), (folder / "README.md").read_text()
    assert card.data["num_rankings"] + card.data["num_heldout_rankings"] == 30
    assert card.data["rankings"] == "rankings.jsonl" and str(toy_model.parent) not in text
    assert f"Trained on {card.data['num_rankings']} rankings" in text
    norm = json.loads((folder / "reward_norm.json").read_text())
    assert norm["mean"] == card.score_mean and norm["quantiles"] == card.score_quantiles
    assert norm["quantiles"]["0.05"] <= norm["quantiles"]["0.5"] <= norm["quantiles"]["0.95"]


def test_scores_by_category_before_ppo_are_kept(run):
    stage = run / "stages/03-ppo"
    found = json.loads((stage / "scores_before.json").read_text())["reward_model"]
    assert found["all answers"]["num"] == 6 == sum(found[name]["num"] for name in found if name != "all answers")
    assert set(found) <= {"all answers", "chat", "writing"} and len(found) > 1
    first = json.loads((stage / "metrics.jsonl").read_text().splitlines()[0])
    card = load_reward_card(run / "stages/02-reward/model")
    scaled = (found["all answers"]["mean"] - card.score_mean) / card.score_std
    assert first["ppo/score_mean"] == pytest.approx(scaled, abs=1e-4)
    results = json.loads((stage / "finished.json").read_text())["results"]
    assert results["scores_before"]["reward_model"] == found


def test_the_scores_of_ppo_are_kept_in_its_stage(run):
    connection = sqlite3.connect(run / "stages/03-ppo/scores.sqlite")
    (num,) = connection.execute("SELECT count(*) FROM scores").fetchone()
    connection.close()
    samples = (run / "stages/03-ppo/samples.jsonl").read_text().splitlines()
    assert num >= len({(row["prompt"], row["answer"]) for row in map(json.loads, samples)}) > 1


def test_REW_07_the_card_of_the_run_is_that_of_the_scoring_command(run, toy_data, tmp_path, capsys):
    """Accuracy counted from ``heedful score`` on the held-out rankings equals the one that the stage reports."""
    from heedful.data.splits import split

    folder = run / "stages/02-reward/model"
    source, out = toy_data / "rankings.jsonl", tmp_path / "scores.jsonl"
    assert main(["score", str(folder), str(source), "--out", str(out), "--device", "cpu", "--dtype", "float32",
                 "--no_cache"]) == 0  # fmt: skip
    assert "90 answers scored" in capsys.readouterr().out
    _, heldout = split(load_rankings(source), 0.2, seed=0)
    names = {ranking.group_id for ranking in heldout}
    shares = {}
    rows = [row for line in out.read_text().splitlines() if (row := json.loads(line))["id"] in names]
    for name in names:
        answers = [row for row in rows if row["id"] == name]
        pairs = [(a, b) for a in answers for b in answers if a["rank"] < b["rank"]]
        shares[name] = sum((a["score"] > b["score"]) + (a["score"] == b["score"]) / 2 for a, b in pairs) / len(pairs)
    card = load_reward_card(folder)
    assert len(shares) == card.num_prompts
    assert sum(shares.values()) / len(shares) == pytest.approx(card.accuracy, abs=1e-9)
    assert sum(row["score"] for row in rows) / len(rows) == pytest.approx(card.score_mean, abs=1e-4)
