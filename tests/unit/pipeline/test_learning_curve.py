"""The reward stage on a file: models on nested shares of the prompts, resumable; gold controls are never trained on."""

from __future__ import annotations

import json

import pytest

from heedful import pipeline
from heedful.config.read import load_recipe
from heedful.runs.folder import RunFolder
from heedful.train import loop, reward
from toy_parts import model_folder


def row(name, better, **labels):
    """One line of a master file."""
    answers = [{"id": "a", "text": better}, {"id": "b", "text": "bad"}]
    return {"group_id": name, "prompt": [{"role": "user", "content": f"Rank {name}"}], "answers": answers, **labels}


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curve")
    model_folder(folder / "model")
    rows = [row(f"r{n}", f"good {n}", consensus={"a": 1, "b": 2}) for n in range(16)]
    rows.append(row("control", "good", gold=[["a", "b"]]))
    (folder / "rankings.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "heldout.jsonl").write_text(
        "".join(json.dumps({**r, "group_id": f"h{r['group_id']}"}) + "\n" for r in rows)
    )
    (folder / "recipe.yaml").write_text(f"""
model: {{name: "{folder}/model", device: cpu, dtype: float32}}
data: {{rankings: "{folder}/rankings.jsonl", heldout_rankings: "{folder}/heldout.jsonl"}}
sft: null
reward:
  prompts_per_step: 2
  learning_curve: [0.25, 0.5]
  lora: {{rank: 4}}
  optimizer: {{learning_rate: 0.01, schedule: constant, warmup_fraction: 0}}
""")
    return lambda name: load_recipe(folder / "recipe.yaml", ["--name", name, "--output", str(folder / "runs")])


def results(recipe):
    (stage,) = RunFolder.open(f"{recipe.output}/{recipe.name}").stages()
    return stage.results


def test_the_curve_is_the_same_training_on_nested_shares(recipe_of, monkeypatch):
    seen = []
    train = reward.train_reward

    def noting(model, samples, heldout, *rest, **options):
        seen.append(({s.group_id for s in samples}, {s.group_id for s in heldout}))
        return train(model, samples, heldout, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(reward, "train_reward", noting)
        pipeline.run(recipe_of("straight"))
    whole, quarter, half = (s for s, _ in seen)
    assert quarter < half < whole and [len(x) for x in (quarter, half, whole)] == [4, 8, 16]
    assert len({frozenset(h) for _, h in seen}) == 1 and not any("control" in "".join(x) for pair in seen for x in pair)
    straight = results(recipe_of("straight"))
    curve = straight["learning_curve"]
    assert [(p["share"], p["num_rankings"]) for p in curve] == [(0.25, 4), (0.5, 8), (1.0, 16)]
    assert straight["num_controls"] == straight["card"]["gold_controls"]["num_items"] == 2
    assert curve[-1]["accuracy"] == straight["card"]["accuracy"] and curve[0]["loss"] > curve[-1]["loss"]

    done = []  # stopped in the second share, then gone on: the same curve
    run, shares = loop.Loop.run, iter(range(3))

    def stopping(self, step):
        if next(shares) == 2:
            raise loop.Interrupted("here")
        run(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "run", stopping)
        with pytest.raises(loop.Interrupted):
            pipeline.run(recipe_of("stopped"))
    with monkeypatch.context() as patch:
        patch.setattr(reward, "train_reward", lambda *a, **o: done.append(len(a[1])) or train(*a, **o))
        pipeline.run(recipe_of("stopped"), existing="resume")
    assert done == [16, 8]  # the quarter was finished
    assert results(recipe_of("stopped"))["learning_curve"] == curve
