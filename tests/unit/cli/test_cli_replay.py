"""heedful replay, from a run whose reward function gives a number that float32 cannot hold."""

import json

import pytest

from heedful.cli.main import main
from toy_parts import model_folder

RECIPE = """
name: broken
output: {runs}
model: {{name: "{model}", dtype: float32, device: cpu}}
data: {{prompts: "{prompts}"}}
ppo:
  steps: 2
  prompts_per_step: 4
  sampling: {{max_new_tokens: 4}}
  rewards: {{size: {{function: "reward_of_the_user:size", weight: 10}}}}
  value_from: {value_from}
  lora: {lora}
  self_test: false
"""
FUNCTION = """
def size(prompts, answers):
    return [1e38 if i == 1 else 0.0 for i in range(len(answers))]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay")
    model_folder(path / "model")
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(8)))
    (path / "reward_of_the_user.py").write_text(FUNCTION)
    return path


def broken_run(world, tmp_path, monkeypatch, capsys, **options):
    monkeypatch.syspath_prepend(world)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(runs=tmp_path / "runs", model=world / "model", prompts=world / "prompts.jsonl",
                                    **{"value_from": "policy", "lora": "null", **options}))  # fmt: skip
    assert main(["run", str(recipe)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    before, _, command = said.partition("; replay it: heedful ")
    assert before.startswith("heedful: scores is not finite at step 0 (samples: ")
    verb, file = command.split()
    assert verb == "replay"
    return file, before.removeprefix("heedful: ")


@pytest.mark.parametrize("options", [{"lora": "{rank: 2}"}, {"value_from": "trunk"}], ids=["lora", "trunk"])
def test_a_broken_run_is_replayed(world, tmp_path, monkeypatch, capsys, options):
    file, error = broken_run(world, tmp_path, monkeypatch, capsys, **options)
    files = sorted(p for p in (tmp_path / "runs").rglob("*"))
    assert main(["replay", file]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Step 0, scoring. It stopped with:\n  scores is not finite at step 0")
    assert "\nscores                             0           0           0              1 of 4\n" in text
    assert text.rstrip().splitlines()[-1] == "Reproduced: it stops in the same way."
    assert main(["replay", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recorded"] == found["error"] == error and found["reproduced"] and len(found["samples"]) == 1
    assert [s["name"] for s in found["streams"]][-1] == "scores" and found["streams"][0]["num_bad"] == 0
    assert sorted(p for p in (tmp_path / "runs").rglob("*")) == files, "a replay writes nothing"


def test_a_run_that_moved_and_models_that_went(world, tmp_path, monkeypatch, capsys):
    import shutil

    file, _ = broken_run(world, tmp_path, monkeypatch, capsys)
    moved = tmp_path / "elsewhere.pt"
    shutil.copy(file, moved)
    assert main(["replay", str(moved)]) == 0, "a copy finds the run that it came from"
    (tmp_path / "runs").rename(tmp_path / "archive")
    capsys.readouterr()
    assert main(["replay", str(moved)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["replay", file.replace("/runs/", "/archive/")]) == 0


def test_what_is_no_replay_file(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none.pt")]) == 2
    assert "none.pt: no such file" in capsys.readouterr().err
    (tmp_path / "x.pt").write_text("hello")
    assert main(["replay", str(tmp_path / "x.pt")]) == 2
    assert "x.pt: not a replay file" in capsys.readouterr().err


def test_what_does_not_come_again_is_said():
    from heedful.cli.replay import as_json, as_text
    from heedful.train.rerun import Findings

    healthy = Findings("values is not finite at step 3", 3, "scoring")
    assert "Could not be reproduced: this time every proof held." in as_text(healthy)
    healthy.error = "the ratio"
    assert "this time another proof failed: the ratio" in as_text(healthy)
    assert json.loads(json.dumps(as_json(healthy)))["reproduced"] is False
