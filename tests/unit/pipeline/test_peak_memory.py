"""The measured peak of a stage beside the planned one."""

from __future__ import annotations

import pytest
import torch

from heedful.config.read import load_recipe
from heedful.pipeline import memory
from heedful.pipeline.memory import PeakMeter, compared
from heedful.pipeline.stages import results, run
from heedful.plan import shape
from heedful.plan.parts import Phase, StagePlan
from heedful.runs.files import read_json


def test_the_meter_sees_what_was_held_since_it_began_and_not_before():
    big = torch.ones(64 * 2**20)  # 256 MiB
    del big
    meter = PeakMeter(torch.device("cpu"))
    if not meter.is_own:
        pytest.skip("this system does not set its high-water mark back")
    block = torch.ones(16 * 2**20)
    del block
    rise = meter.peak_bytes() - meter.start_bytes
    assert 60 * 2**20 < rise < 128 * 2**20


def test_where_the_mark_cannot_be_set_back_an_earlier_peak_is_not_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_RESET", tmp_path / "no" / "such")
    marks = iter([100, 100, 100, 300])
    monkeypatch.setattr(memory, "peak_memory_bytes", lambda: next(marks))
    plan = StagePlan("sft", (Phase("train", {"policy: parameters": 330}),))
    assert "error" not in compared(PeakMeter(torch.device("cpu")), plan)
    found = compared(PeakMeter(torch.device("cpu")), plan)
    assert found["error"] == pytest.approx(0.1) and found["phase"] == "train"


def test_without_a_plan_the_peak_is_there_all_the_same():
    found = compared(PeakMeter(torch.device("cpu")), None)
    assert found["measured_bytes"] > 0 and "error" not in found


def test_a_run_saves_its_plan_and_every_stage_how_wrong_it_was(toy_recipe, tmp_path):
    recipe_file = tmp_path / "toy.yaml"
    recipe_file.write_text(toy_recipe)
    recipe = load_recipe(
        recipe_file, ["--output", str(tmp_path), "--reward", "null", "--ppo", "null", "--evaluate", "null"]
    )
    page = run(recipe)
    assert [stage["stage"] for stage in read_json(tmp_path / "toy" / "plan.json")["stages"]] == ["sft"]
    found = results(tmp_path / "toy")["sft"]
    assert found["memory"]["planned_bytes"] > 2**28
    assert found["peak_memory_bytes"] == found["memory"]["measured_bytes"] >= found["memory"]["start_bytes"]
    assert '<th class="n">planned</th>' in page.read_text() and "no plan" not in page.read_text()


def test_a_model_of_unknown_shape_runs_without_a_plan(toy_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shape, "FAMILIES", ("gpt2",))
    recipe_file = tmp_path / "toy.yaml"
    recipe_file.write_text(toy_recipe)
    recipe = load_recipe(
        recipe_file, ["--output", str(tmp_path), "--reward", "null", "--ppo", "null", "--evaluate", "null"]
    )
    page = run(recipe)
    assert "plan: none (heedful plan does not know models of type 'llama'" in capsys.readouterr().err
    assert "no plan" in page.read_text() and "error" not in results(tmp_path / "toy")["sft"]["memory"]
