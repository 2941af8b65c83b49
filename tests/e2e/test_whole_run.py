"""The whole pipeline on a toy model: every stage, the files it leaves, what others can load."""

import json

import pytest
import torch

from heedful import pipeline
from heedful.config.read import load_recipe
from heedful.errors import CheckpointError, GateError


@pytest.fixture(scope="module")
def run_folder(toy_recipe, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    (path / "toy.yaml").write_text(toy_recipe)
    recipe = load_recipe(path / "toy.yaml", ["--output", str(path)])
    pipeline.run(recipe)
    return path / "toy"


def test_every_stage_leaves_its_results(run_folder):
    found = pipeline.results(run_folder)
    assert list(found) == ["sft", "reward", "ppo", "evaluate"]
    assert found["ppo"]["gate"].startswith(("passed", "overridden"))
    assert 0 <= found["evaluate"]["metrics"]["gold"]["win_rate"] <= 1
    assert (run_folder / "report.html").stat().st_size > 10_000


def test_the_first_ppo_step_is_proved(run_folder):
    rows = [json.loads(line) for line in (run_folder / "stages/03-ppo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["ppo/kl_nats"] == 0 and rows[0]["ppo/kl_k3_nats"] == 0
    assert rows[1]["ppo/kl_nats"] != 0, "the policy has not moved"
    assert rows[0]["ppo/kl_coefficient"] == 0.05 and rows[1]["ppo/kl_coefficient"] < 0.05  # PPO-11: the one in use


def test_every_distribution_of_a_step_is_kept(run_folder):
    stage = run_folder / "stages/03-ppo"
    rows = [json.loads(line) for line in (stage / "histograms.jsonl").read_text().splitlines()]
    wanted = {"advantages", "ratios", "kl_per_sample_nats", "rewards", "answer_tokens", "values"}
    for row in rows:
        assert {f"ppo/{name}" for name in wanted} <= row.keys()
        tokens = row["ppo/answer_tokens"]
        assert sum(row["ppo/ratios"]["counts"]) == round(2 * tokens["mean"] * sum(tokens["counts"]))  # two epochs
    assert list((stage / "tensorboard").iterdir())


def test_the_policy_folder_loads_in_plain_transformers_and_chats(run_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = run_folder / "stages/03-ppo/model"
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say red"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
    assert model.config.attention_dropout == 0.1  # PPO-08: the saved config keeps its dropout


def test_REW_07_the_reward_folder_gives_the_scores_that_training_reported(run_folder, toy_data):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from heedful.data.chat import answer_ids, prompt_ids
    from heedful.data.load import load_rankings
    from heedful.data.pairs import consensus
    from heedful.data.splits import split
    from heedful.evaluate.accuracy import pair_accuracy

    path = run_folder / "stages/02-reward/model"
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
    assert model.config.num_labels == 1
    heldout = split(load_rankings(toy_data / "rankings.jsonl"), 0.2, seed=0)[1]
    scores, ranks = [], []
    for ranking in heldout:
        order = consensus(ranking)
        ids = [prompt_ids(tokenizer, ranking.prompt) + answer_ids(tokenizer, a.text) for a in ranking.answers]
        with torch.no_grad():
            scores.append([float(model(input_ids=torch.tensor([row])).logits) for row in ids])
        ranks.append([order[a.id] for a in ranking.answers])
    card = pipeline.results(run_folder)["reward"]["card"]
    assert pair_accuracy(scores, ranks).value == card["accuracy"]
    flat = torch.tensor([s for row in scores for s in row], dtype=torch.float64)
    assert float(flat.mean()) == pytest.approx(card["score_mean"], abs=1e-4)


def test_a_second_run_never_mixes_with_the_first(run_folder, toy_recipe, tmp_path):
    (tmp_path / "toy.yaml").write_text(toy_recipe)
    recipe = load_recipe(tmp_path / "toy.yaml", ["--output", str(run_folder.parent)])
    with pytest.raises(CheckpointError, match="--resume"):
        pipeline.run(recipe)
    other = load_recipe(tmp_path / "toy.yaml", ["--output", str(run_folder.parent), "--ppo.steps", "9"])
    with pytest.raises(CheckpointError, match="ppo.steps is 4 there and 9 here"):
        pipeline.run(other, existing="resume")
    before = (run_folder / "stages/03-ppo/metrics.jsonl").read_bytes()
    pipeline.run(recipe, existing="resume")  # everything is finished: nothing is run again
    assert (run_folder / "stages/03-ppo/metrics.jsonl").read_bytes() == before


def test_the_gate_refuses_a_weak_reward_model(toy_recipe, run_folder, tmp_path):
    (tmp_path / "toy.yaml").write_text(toy_recipe)
    policy, reward = run_folder / "stages/01-sft/model", run_folder / "stages/02-reward/model"
    card = json.loads((reward / "reward_card.json").read_text())
    recipe = load_recipe(
        tmp_path / "toy.yaml",
        ["--output", str(tmp_path), "--sft", "null", "--reward", "null", "--evaluate", "null",
         "--ppo.accept_weak_reward", "false", "--model.policy", str(policy), "--model.reward", str(reward)],
    )  # fmt: skip
    if card["accuracy"] >= 0.7:
        pytest.skip("the toy reward model is good")
    with pytest.raises(GateError, match="accept_weak_reward"):
        pipeline.run(recipe)
