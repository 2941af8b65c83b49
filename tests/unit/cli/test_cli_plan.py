"""``heedful plan``: a table or JSON, in a process without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from heedful.cli.main import main


@pytest.fixture()
def recipe(toy_recipe, tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(toy_recipe)
    return str(path)


def test_every_stage_is_planned_with_the_lengths_of_the_data(recipe, capsys):
    assert main(["plan", recipe, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in found["stages"]] == ["sft", "reward", "ppo", "evaluate"]
    assert found["lengths"] == "the data" and found["precision"] == "float32, eager attention"
    for stage in found["stages"]:
        assert stage["peak_bytes"] == max(phase["total_bytes"] for phase in stage["phases"])
        assert stage["verdict"] == "fits"


def test_the_table_names_the_peak_and_every_part_has_a_column(recipe, capsys):
    assert main(["plan", recipe]) == 0
    table = capsys.readouterr().out
    assert "ppo: train policy" in table and "ppo: peak 0." in table and "←" in table
    assert main(["plan", recipe, "--json"]) == 0
    from heedful.cli.plan import GROUPS

    known = {name for group in GROUPS.values() for name in group}
    for stage in json.loads(capsys.readouterr().out)["stages"]:
        for phase in stage["phases"]:
            assert {name.rpartition(": ")[2] for name in phase["parts"]} <= known


def test_keys_gpus_and_shapes_are_options(recipe, capsys):
    words = [
        "plan",
        recipe,
        "--gpu",
        "l4",
        "--gpus=2",
        "--shape",
        "7b",
        "--sft.max_tokens",
        "64",
        "--model.dtype",
        "auto",
    ]
    assert main(words) == 2
    table = capsys.readouterr().out
    assert "2 × l4" in table and "llama-2-7b: 6738 M" in table and "does not fit" in table
    assert "sharded over 2 devices" in table
    assert main(["plan", recipe, "--gpu", "abacus"]) == 2
    assert "'abacus' is not in the list" in capsys.readouterr().err
    assert main(["plan", recipe, "--shape", "8t"]) == 2
    assert "shape '8t' is not in the list; it has smollm2-135m" in capsys.readouterr().err
    assert main(["plan", recipe, "--gpus", "8"]) == 2
    assert "with --gpu" in capsys.readouterr().err


def test_no_torch_is_loaded(recipe):
    code = (
        f"import sys; from heedful.cli.main import main; main(['plan', {recipe!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_measured_speeds_are_kept_and_used(recipe, capsys, monkeypatch, tmp_path):
    from heedful.pipeline import measure
    from heedful.plan.machine import this_machine

    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "SIZE", 64)
    monkeypatch.setattr(measure, "NUM_BYTES", 2**20)
    before = this_machine("cpu")
    speeds = measure.measure_machine()
    after = this_machine("cpu")
    assert (before.source, after.source) == ("assumed", "measured")
    assert after.flops == speeds["flops"] > 0 and after.bytes_per_second == speeds["bytes_per_second"] > 0


def test_a_model_that_is_not_here_is_planned_by_its_published_shape_or_refused(recipe, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["plan", recipe, "--model.name", "Qwen/Qwen2.5-0.5B-Instruct", "--gpu", "h200"]) == 0
    table = capsys.readouterr().out
    assert "qwen2.5-0.5b: 494 M" in table and "the recipe's limits" in table
    assert main(["plan", recipe, "--model.name", "nobody/nothing"]) == 2
    assert "model 'nobody/nothing' is not on this machine" in capsys.readouterr().err
