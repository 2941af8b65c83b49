"""The parts of a recipe's reward: found wrong before anything long starts, built right, scaled as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heedful import pipeline
from heedful.config.read import load_recipe
from heedful.errors import ConfigError, GateError, HeedfulError, ModelError
from heedful.models import export, load, roles
from heedful.models.export import load_reward_card, save_reward
from heedful.models.heads import new_heads
from heedful.pipeline.context import Context
from heedful.pipeline.ppo import gate, ppo_roles
from heedful.pipeline.rewards import build_scoring, check_rewards
from heedful.records import Completion, Message, Prompt, RewardCard
from heedful.rollout.scaling import mean_and_std
from heedful.runs.folder import RunFolder
from toy_parts import CPU, model_folder

PROMPTS = [Prompt(f"p{n}", (Message("user", f"Say {n}"),)) for n in range(4)]
ANSWERS = [Completion(p.id, 0, [5], [6], [0.0], "stop", 0, "word " * n) for n, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_model) -> dict[str, Path]:
    """carded and weak: reward models with a card; bare: one without; heads: one with three outputs."""
    folder = tmp_path_factory.mktemp("models")
    found = {"policy": toy_model, "heads": model_folder(folder / "heads", scalar=3),
             "bare": model_folder(folder / "bare", scalar=1, seed=5)}  # fmt: skip
    for name, accuracy, std in (("carded", 0.8, 2.0), ("weak", 0.6, 1.0), ("flat", 0.8, 0.0)):
        part = roles.build_scalar(toy_model, lora=None, device=CPU, dtype=torch.float32, new_head=True, seed=7)
        card = RewardCard(name, accuracy, 0.5, 0.9, 10, 20, score_mean=0.5, score_std=std)
        save_reward(part.model, part.tokenizer, folder / name, score_mean=0.5, score_std=std, card=card)
        found[name] = folder / name
    for kind, names in (("attributes", ("kind", "safe")), ("ensemble", ("1", "2", "3"))):
        part = roles.build_scalar(toy_model, lora=None, device=CPU, dtype=torch.float32, new_head=True)
        weights = dict.fromkeys(names, 1.0 if kind == "attributes" else 1 / 3)
        heads = new_heads(kind, weights, 32, seed=1, device=CPU)
        heads.means, heads.deviations = (0.1, 0.2, 0.3)[: len(names)], (0.5, 4.0, 1.0)[: len(names)]
        part.set_head(heads.row())
        card = RewardCard(kind, 0.8, 0.5, 0.9, 10, 20, score_mean=0.5, score_std=2.0)
        save_reward(
            part.model, part.tokenizer, folder / kind, score_mean=0.5, score_std=2.0, card=card, heads=heads
        )
        found[kind] = folder / kind
    return found


@pytest.fixture
def recipe(tmp_path, models, toy_data, monkeypatch):
    """recipe(rewards, …overrides) → a recipe with only a ppo stage; ``{name}`` stands for the folder of a model."""
    (tmp_path / "my_parts.py").write_text("def words(prompts, answers): return [len(a.split()) for a in answers]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "recipe.yaml"

    def make(rewards, *overrides):
        text = json.dumps(rewards)
        for name, path in models.items():
            text = text.replace("{" + name + "}", str(path))
        file.write_text(
            f"output: {tmp_path}/runs\ndata: {{prompts: {toy_data}/prompts.jsonl}}\n"
            f"model: {{name: {models['policy']}, reward: {models['carded']}, device: cpu, dtype: float32}}\n"
            "ppo: {steps: 2, prompts_per_step: 4, sampling: {max_new_tokens: 4}, value_from: policy, "
            f"rewards: {text}}}\n"
        )
        return load_recipe(file, overrides)

    return make


def scoring(recipe, own=None):
    with RunFolder.create(RunFolder.next_free(f"{recipe.output}/x"), {}) as folder:
        return build_scoring(Context(recipe, folder), recipe.ppo, own)


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ({"function": "my_parts:word"}, ConfigError, "reward 'mine': function 'my_parts:word': my_parts has no func"),
        ({"function": "absent_module:f"}, ConfigError, "cannot import absent_module"),
        ({"function": "words"}, ConfigError, "write it as module:function"),
        ({"url": "http://"}, ConfigError, "reward server 'http://': write it as"),
        ({"model": "./nowhere"}, ModelError, "^ppo.rewards.mine.model: model './nowhere' is unknown"),
        ({"model": "{policy}"}, ModelError, "^ppo.rewards.mine.model: .*LlamaForCausalLM has no score head"),
        ({"model": "{heads}", "head": 3}, ModelError, "ppo.rewards.mine: head 3 of .*has 3 outputs counted from 0"),
        ({"model": "{carded}", "head": 1}, ModelError, "has 1 outputs"),
        ({"model": "{weak}"}, GateError, r"ppo.rewards.mine \(.*weak\): the reward model orders only 60.0%"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_before_the_run_begins(recipe, part, error, message):
    made = recipe({"mine": part})
    with pytest.raises(error, match=message) as caught:
        pipeline.run(made)
    assert "\n" not in str(caught.value) and not (Path(made.output)).exists()


@pytest.mark.parametrize(("model", "message"), [
    ("./nowhere", "^model.reward: model './nowhere' is unknown"), ("{policy}", "^model.reward: .* has no score head"),
])  # fmt: skip
def test_the_runs_own_reward_model_is_looked_at_before_the_run_begins(recipe, models, model, message):
    made = recipe({"mine": {"model": "run:reward"}}, "--model.reward", model.format(**models))
    with pytest.raises(ModelError, match=message):
        pipeline.run(made)
    assert not Path(made.output).exists()


@pytest.mark.parametrize(("key", "ask"), [("name", "base"), ("policy", "sft_policy"), ("reward", "reward_model")])
def test_an_unknown_model_names_its_key(recipe, key, ask):
    made = recipe({"mine": {"model": "{bare}"}}, f"--model.{key}", "./nowhere")
    with pytest.raises(ModelError, match=f"^model.{key}: model './nowhere' is unknown"):
        getattr(Context(made, None), ask)


def test_the_runs_own_card_is_read_once(recipe, models, monkeypatch):
    read = []

    def reading(path):
        read.append(path)
        return load_reward_card(path)

    monkeypatch.setattr(export, "load_reward_card", reading)
    made = recipe({"mine": {"model": "run:reward"}}, "--ppo.value_from", "reward")
    context = Context(made, None)
    gate(context.reward_card, made)
    build_scoring(context, made.ppo, ppo_roles(context).reward)
    assert read == [models["carded"]]


def test_a_weak_model_may_be_accepted_and_one_without_card_is_not_judged(recipe):
    check_rewards(recipe({"mine": {"model": "{weak}"}}, "--ppo.accept_weak_reward", "true"))
    check_rewards(recipe({"mine": {"model": "{bare}"}}))


def test_a_head_of_an_attribute_is_read_and_scaled_by_its_own_numbers(recipe, models):
    parts = {"own": {"model": "{attributes}"}, "kind": {"model": "{attributes}", "head": 1},
             "safe": {"model": "{attributes}", "head": 2}}  # fmt: skip
    found = recipe(parts)
    check_rewards(found)
    made = scoring(found)
    for r in made(PROMPTS, ANSWERS):
        raw, scaled = r.raw_parts, r.reward_parts
        assert raw["own"] == pytest.approx(raw["kind"] / 0.5 + raw["safe"] / 4.0, abs=1e-5)
        assert scaled["safe"] == pytest.approx((raw["safe"] - 0.2) / 4.0, abs=1e-5)
        assert scaled["own"] == pytest.approx((raw["own"] - 0.5) / 2.0, abs=1e-5)
    with pytest.raises(ModelError, match="head 3 of .*has 3 outputs"):
        check_rewards(recipe({"mine": {"model": "{attributes}", "head": 3}}))


def test_the_disagreement_of_an_ensemble_comes_off_its_score(recipe, models):
    parts = {"own": {"model": "{ensemble}", "weight": 2.0}, "plain": {"model": "{carded}"},
             "second": {"model": "{ensemble}", "head": 2, "scaling": "none"}}  # fmt: skip
    found = recipe(parts, "--ppo.disagreement_penalty", "0.5")
    check_rewards(found)
    free, held = scoring(recipe(parts))(PROMPTS, ANSWERS), scoring(found)(PROMPTS, ANSWERS)
    part = roles.build_reward(models["ensemble"], device=CPU, dtype=torch.float32)
    rows = part.output_texts([p.messages for p in PROMPTS], [a.text for a in ANSWERS], micro_batch_tokens=999)
    for row, before, after in zip(rows, free, held, strict=True):
        standard = [(x - m) / d for x, m, d in zip(row[1:], (0.1, 0.2, 0.3), (0.5, 4.0, 1.0), strict=True)]
        split = float(torch.tensor(standard).std()) * (0.5 + 4.0 + 1.0) / 3
        assert split > 0.01 and row[0] == pytest.approx(sum(row[1:]) / 3, abs=1e-5)
        assert after.raw_parts["own_disagreement"] == pytest.approx(split, rel=1e-4)
        assert before.score - after.score == pytest.approx(0.5 * 2.0 * split / 2.0, rel=1e-4)  # card: deviation 2
        assert before.raw_parts.keys() == {"own", "plain", "second"} == after.raw_parts.keys() - {"own_disagreement"}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"own": {"model": "{carded}"}}, "no reward model here is an ensemble"),
        ({"own": {"model": "{attributes}"}}, "no reward model here is an ensemble"),
        ({"own": {"model": "{ensemble}", "head": 1}}, "no reward model here is an ensemble"),
        ({"own": {"model": "run:reward"}}, "no reward model here is an ensemble"),
        ({"own": {"model": "{ensemble}", "scaling": "running"}}, "'running' scaling of the reward own changes"),
        ({"own": {"model": "{ensemble}"}, "own_disagreement": {"function": "my_parts:words"}}, "needs that name"),
    ],
)
def test_a_penalty_without_anything_to_disagree_is_refused(recipe, parts, message):
    with pytest.raises(ConfigError, match=message):
        check_rewards(recipe(parts, "--ppo.disagreement_penalty", "0.5"))


def test_models_are_loaded_once_and_read_once(recipe, monkeypatch):
    loaded, forwards = [], []
    build, outputs = roles.build_reward, roles.ScalarModel.outputs
    monkeypatch.setattr(roles, "build_reward", lambda path, **o: (loaded.append(path), build(path, **o))[1])
    monkeypatch.setattr(roles.ScalarModel, "outputs", lambda s, i, m: (forwards.append(len(i)), outputs(s, i, m))[1])
    parts = {f"head{n}": {"model": "{heads}", "head": n, "weight": 10.0**n} for n in range(3)}
    made = scoring(recipe(parts))
    rollouts = made(PROMPTS, ANSWERS)
    assert len(loaded) == 1 and sum(forwards) == 4
    for r in rollouts:
        assert r.reward_parts == r.raw_parts and len(set(r.raw_parts.values())) == 3  # no card: not scaled
        assert r.score == pytest.approx(sum(10.0**n * r.raw_parts[f"head{n}"] for n in range(3)))
    made(PROMPTS, ANSWERS[::-1])
    assert sum(forwards) == 8


@pytest.mark.parametrize(
    ("part", "score_scaling", "kind"),
    [
        ({"model": "{carded}"}, "card", "card"), ({"model": "{carded}"}, "running", "running"),
        ({"model": "{carded}"}, "none", "none"), ({"model": "{carded}", "scaling": "batch"}, "card", "batch"),
        ({"model": "{bare}"}, "card", "none"), ({"model": "{bare}"}, "batch", "batch"),
        ({"function": "my_parts:words"}, "card", "none"), ({"function": "my_parts:words"}, "running", "none"),
        ({"function": "my_parts:words", "scaling": "batch"}, "none", "batch"),
    ],
)  # fmt: skip
def test_each_part_is_scaled_as_written(recipe, part, score_scaling, kind):
    rollouts = scoring(recipe({"mine": part}, "--ppo.score_scaling", score_scaling))(PROMPTS, ANSWERS)
    raw = [r.raw_parts["mine"] for r in rollouts]
    mean, std = {"card": (0.5, 2.0), "none": (0.0, 1.0)}.get(kind) or mean_and_std(raw)
    assert [r.reward_parts["mine"] for r in rollouts] == pytest.approx([(x - mean) / std for x in raw])


def test_a_card_that_cannot_scale_is_refused(recipe):
    with pytest.raises(ModelError, match="ppo.rewards.mine: .*bare has no reward card to scale by"):
        scoring(recipe({"mine": {"model": "{bare}", "scaling": "card"}}))
    with pytest.raises(ModelError, match="all its scores are the same"):
        scoring(recipe({"mine": {"model": "{flat}"}}))


def test_the_runs_own_model_is_the_one_that_is_handed_over(recipe, models):
    own = roles.build_reward(models["carded"], device=CPU, dtype=torch.float32)
    made = recipe(None)
    (only,) = [set(r.raw_parts) for r in scoring(made, own)(PROMPTS[:1], ANSWERS[:1])]
    assert only == {"reward_model"}
    twice = {"own": {"model": "run:reward"}, "against": {"model": "run:reward", "weight": -1.0}}
    made = recipe(twice)
    assert [r.score for r in scoring(made, own)(PROMPTS, ANSWERS)] == [0.0] * 4


def test_a_run_logs_every_part_apart(recipe):
    parts = {"words": {"function": "my_parts:words", "weight": 0.5, "scaling": "running"},
             "tone": {"model": "{heads}", "head": 1, "weight": 2.0}}  # fmt: skip
    made = recipe(parts)
    report = pipeline.run(made)
    stage = report.parent / "stages" / "03-ppo"
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        total = 0.5 * row["ppo/score/words"] + 2 * row["ppo/score/tone"]
        assert row["ppo/score_mean"] == pytest.approx(total, abs=1e-5)
        assert row["ppo/score/tone"] == row["ppo/raw_score/tone"] and "ppo/raw_score/words" in row
    histograms = (stage / "histograms.jsonl").read_text()
    assert "ppo/score/words" in histograms and "ppo/score/tone" in histograms
    page = report.read_text()
    for title in ("Mean of one part of the score", "Mean of one part before it is scaled", "One part of the score"):
        assert f"{title}: words" in page and f"{title}: tone" in page


def test_a_server_that_dies_stops_the_run_and_is_resumed(recipe, monkeypatch):
    made = recipe({"judge": {"url": "http://127.0.0.1:9", "retries": 0}})  # nobody listens on the discard port
    with pytest.raises(HeedfulError, match="reward 'judge': http://127.0.0.1:9/get_reward gave no scores in 1 tries"):
        pipeline.run(made)
    assert load.resolve(made.model.name)  # the model is where it was
    monkeypatch.setattr("heedful.rollout.sources.HTTPReward._post", lambda s, body, line: json.dumps(
        {"rewards": [float(len(q)) for q in json.loads(body)["query"]]}).encode())  # fmt: skip
    assert pipeline.run(made, existing="resume").exists()
