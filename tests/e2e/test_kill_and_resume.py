"""Whenever a run is killed, the resumed one ends as the uninterrupted one: to the last bit, on a CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from killing import DEADLINE_SECONDS, Run, kill_and_compare, straight_run
from outcome import first_difference

LORA = ["--sft.lora", "{rank: 4}", "--reward.lora", "{rank: 4}", "--ppo.lora", "{rank: 4}"]


@pytest.fixture(scope="module", params=[[], LORA], ids=["full", "lora"])
def straight(processes, toy_recipe, tmp_path_factory, request):
    """The uninterrupted run: its overrides, its seconds and its outcome."""
    folder = tmp_path_factory.mktemp("straight")
    _, seconds, expected = straight_run(lambda name: Run(processes, folder / name, toy_recipe, request.param))
    return request.param, seconds, expected


def kill_some(processes, straight, toy_recipe, folder, num_kills, seed):
    overrides, seconds, expected = straight
    kill_and_compare(
        lambda name: Run(processes, folder / name, toy_recipe, overrides), expected, seconds, num_kills, seed,
        kills_per_run=num_kills,
    )  # fmt: skip


def test_RES_05_RES_07_a_killed_run_ends_as_the_straight_one(processes, straight, toy_recipe, tmp_path):
    kill_some(processes, straight, toy_recipe, tmp_path, num_kills=4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_RES_07_ten_kills_at_random_moments(processes, straight, toy_recipe, tmp_path, seed):
    kill_some(processes, straight, toy_recipe, tmp_path, num_kills=10, seed=seed)


def test_the_comparison_sees_one_bit(straight):
    expected = straight[2]
    names = [name for name in expected if name.endswith(".pt")]
    assert {name.rsplit("/", 1)[1] for name in names} >= {"policy.pt", "value.pt", "kl.pt", "data.pt", "random.pt"}
    for name in names:
        changed = torch.load(_rewritten(expected[name]), weights_only=True)
        assert first_difference(expected[name], changed) is None
        if name.endswith("policy.pt"):
            weight = next(iter(changed["weights"].values()))
            weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(torch.inf))
            assert "weights" in first_difference(expected[name], changed)


def _rewritten(value):
    import io

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_ctrl_c_saves_and_says_130_and_a_second_process_is_refused(toy_recipe, straight, tmp_path):
    """The real command line, as a person uses it."""
    overrides, _, expected = straight
    if overrides:
        pytest.skip("once is enough")
    run = tmp_path / "toy"
    (tmp_path / "toy.yaml").write_text(toy_recipe)
    command = [sys.executable, "-m", "heedful.cli.main", "run", str(tmp_path / "toy.yaml"), "--output", str(tmp_path)]
    slow = ["--ppo.steps", "1000", "--ppo.checkpoint.every_steps", "1000"]
    process = subprocess.Popen([*command, *slow], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics = run / "stages/03-ppo/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)

    second = subprocess.run([*command, *slow, "--resume"], capture_output=True, text=True)
    assert second.returncode == 2 and f"is being written by process {process.pid}" in second.stderr
    assert "Traceback" not in second.stderr

    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in said.splitlines()[-1] and "Traceback" not in said
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    (saved,) = (run / "stages/03-ppo/checkpoints").iterdir()
    rows = metrics.read_text().count("\n")
    assert saved.name == f"step-{rows:08d}"  # every step that was logged is in the checkpoint


def wait_for(condition, process):
    started = time.monotonic()
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() - started < DEADLINE_SECONDS
        time.sleep(0.01)
