"""The verbs that run recipes: what reaches the pipeline."""

import pytest

from heedful import pipeline
from heedful.cli.main import main

RECIPE = "name: mine\noutput: {output}\nmodel: {{name: nowhere}}\ndata: {{demonstrations: d.jsonl}}\nsft: {{}}\n"


@pytest.fixture
def calls(monkeypatch):
    """Every (recipe, keywords) that the pipeline was asked to run."""
    found = []
    monkeypatch.setattr(pipeline, "run", lambda recipe, **keywords: found.append((recipe, keywords)))
    return found


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.format(output=tmp_path / "runs"))
    return path


def test_a_new_run_bears_its_own_name_so_that_it_can_be_resumed(recipe, calls, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert main(["run", str(recipe), "--new"]) == 0
    assert calls[-1][0].name == "mine-2"
    assert main(["run", str(recipe), "--name", "mine-2", "--resume"]) == 0
    assert calls[-1][0].name == "mine-2" and calls[-1][1]["existing"] == "resume"


def test_a_single_stage_goes_on_with_the_run_of_its_recipe(recipe, calls):
    assert main(["sft", str(recipe)]) == 0
    assert calls[-1][1] == {"existing": "resume", "only": "sft"}
    assert main(["ppo", str(recipe)]) == 2, "the recipe has no ppo section"


def test_resume_and_new_exclude_each_other(recipe, calls, capsys):
    assert main(["run", str(recipe), "--resume", "--new"]) == 2
    assert "exclude each other" in capsys.readouterr().err and not calls


def test_overrides_reach_the_recipe(recipe, calls):
    assert main(["run", str(recipe), "--sft.epochs", "3", "--seed=7"]) == 0
    assert calls[-1][0].sft.epochs == 3 and calls[-1][0].seed == 7
