"""The verbs that run recipes: what reaches the pipeline."""

import pytest

from heedful import pipeline
from heedful.cli.main import main
from heedful.config.read import load_recipe
from heedful.errors import CheckpointError, ConfigError
from heedful.runs.folder import RunFolder

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
    assert main(["run", str(recipe), "--new"]) == 0
    asked, keywords = calls[-1]
    assert keywords["existing"] == "new"
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pipeline.stages.open_run(asked, "new") as run:
        assert run.name == "mine-2" and run.recipe["name"] == "mine-2"
    assert main(["run", str(recipe), "--name", "mine-2", "--resume"]) == 0
    with pipeline.stages.open_run(calls[-1][0], "resume") as run:
        assert run.name == "mine-2"


def test_a_single_stage_goes_on_with_the_run_of_its_recipe(recipe, calls):
    assert main(["sft", str(recipe)]) == 0
    assert calls[-1][1] == {"existing": "resume", "only": "sft"}
    assert main(["ppo", str(recipe)]) == 2, "the recipe has no ppo section"


def test_resume_and_new_exclude_each_other(recipe, calls, capsys):
    assert main(["run", str(recipe), "--resume", "--new"]) == 2
    assert "exclude each other" in capsys.readouterr().err and not calls


def test_a_run_of_another_recipe_is_refused_and_left_as_it_was(recipe, calls, tmp_path):
    main(["run", str(recipe)])
    with pipeline.stages.open_run(calls[-1][0], "refuse") as run:
        run.stage("sft", 1)
        run.set_status("finished")
    main(["run", str(recipe), "--sft.epochs", "9", "--resume"])
    with pytest.raises(CheckpointError, match="sft.epochs is 2.0 there and 9.0 here"):
        pipeline.stages.open_run(calls[-1][0], "resume")
    assert RunFolder.open(tmp_path / "runs" / "mine").status["state"] == "finished"


def test_a_run_of_an_earlier_version_goes_on_where_a_later_key_has_its_default(recipe, calls):
    main(["run", str(recipe)])
    with pipeline.stages.open_run(calls[-1][0], "refuse") as run:
        run.stage("sft", 1)
        earlier = run.recipe
        del earlier["sft"]["packing"]
        run.set_recipe(earlier)
    with pipeline.stages.open_run(calls[-1][0], "resume") as run:
        assert run.recipe["sft"]["packing"] is False
    with RunFolder.open(run.path, write=True) as there:
        there.set_recipe(earlier)
    main(["run", str(recipe), "--sft.packing", "true", "--resume"])
    with pytest.raises(CheckpointError, match="sft.packing is False there and True here"):
        pipeline.stages.open_run(calls[-1][0], "resume")


def test_options_may_stand_before_the_recipe(recipe, calls):
    assert main(["run", "--sft.epochs", "3", str(recipe), "--resume"]) == 0
    assert calls[-1][0].sft.epochs == 3 and calls[-1][1]["existing"] == "resume"


def test_overrides_reach_the_recipe(recipe, calls):
    assert main(["run", str(recipe), "--sft.epochs", "3", "--seed=7"]) == 0
    assert calls[-1][0].sft.epochs == 3 and calls[-1][0].seed == 7


def test_a_stage_that_has_not_begun_may_change_when_a_run_goes_on(recipe, calls, tmp_path):
    main(["run", str(recipe)])
    with pipeline.stages.open_run(calls[-1][0], "refuse") as run:
        run.set_status("interrupted")
    main(["run", str(recipe), "--sft.epochs", "9", "--resume"])
    with pipeline.stages.open_run(calls[-1][0], "resume") as run:
        assert run.recipe["sft"]["epochs"] == 9.0
        run.stage("sft", 1)  # the stage begins
    main(["run", str(recipe), "--sft.epochs", "4", "--resume"])
    with pytest.raises(CheckpointError, match="sft.epochs is 9.0 there and 4.0 here"):
        pipeline.stages.open_run(calls[-1][0], "resume")


def test_a_missing_file_shows_before_anything_is_trained(recipe, capsys, tmp_path):
    assert main(["run", str(recipe)]) == 2
    assert "data.demonstrations: d.jsonl: no such file" in capsys.readouterr().err


def test_a_missing_file_leaves_no_run_behind(recipe, capsys, tmp_path):
    assert main(["run", str(recipe)]) == 2
    assert not (tmp_path / "runs").exists()


def test_a_run_in_which_nothing_has_begun_takes_any_recipe(recipe, calls, tmp_path):
    main(["run", str(recipe)])
    with pipeline.stages.open_run(calls[-1][0], "refuse") as run:
        run.set_status("failed")
    main(["run", str(recipe), "--model.name", "elsewhere", "--resume"])
    with pipeline.stages.open_run(calls[-1][0], "resume") as run:
        assert run.recipe["model"]["name"] == "elsewhere"


@pytest.mark.parametrize(("keyword", "word"), [("only", "foo"), ("only", "ppo"), ("existing", "foo")])
def test_a_wrong_keyword_is_one_sentence(recipe, keyword, word):
    with pytest.raises(ConfigError, match=f"{keyword} is '{word}'"):
        pipeline.run(load_recipe(recipe), **{keyword: word})


def test_a_seed_that_no_generator_takes_is_refused(recipe, capsys):
    assert main(["run", str(recipe), "--seed", "9" * 20]) == 2
    assert "option --seed" in capsys.readouterr().err


def test_an_interrupt_during_start_up_says_so(recipe, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    assert main(["run", str(recipe)]) == 130
    assert "heedful: interrupted; the same command with --resume" in capsys.readouterr().err
