"""Whenever a run is killed, the resumed one ends as the uninterrupted one: to the last bit, on a CPU."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt import attempt
from outcome import first_difference, outcome

LORA = ["--sft.lora", "{rank: 4}", "--reward.lora", "{rank: 4}", "--ppo.lora", "{rank: 4}"]
DEADLINE_SECONDS = 120.0


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes forked from one that has imported everything, so that an attempt costs its work and no start-up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["attempt", "heedful.pipeline", "heedful.train.ppo", "transformers", "peft"])
    return context


class Run:
    """A run in a folder of its own, attempted again and again."""

    def __init__(self, processes: Any, folder: Path, recipe: str, overrides: list[str]) -> None:
        self.path = folder / "toy"
        (folder / "toy.yaml").write_text(recipe)
        self._arguments = (str(folder / "toy.yaml"), ["--output", str(folder), *overrides])
        self._processes = processes

    def attempt(self, kill_when: Callable[[float], bool] = lambda _: False) -> int:
        """Go on with the run; SIGKILL as soon as ``kill_when(seconds)``. The exit code, −9 after a kill."""
        process = self._processes.Process(target=attempt, args=self._arguments)
        started = time.monotonic()
        process.start()
        while process.is_alive():
            seconds = time.monotonic() - started
            if kill_when(seconds) or seconds > DEADLINE_SECONDS:
                process.kill()
                break
            time.sleep(0.0005)
        process.join()
        return int(process.exitcode)

    def is_saving(self) -> bool:
        """A checkpoint or a model is being written."""
        places = ("stages/*/checkpoints/*.partial", "stages/*/.*.partial")
        return any(True for place in places for _ in self.path.glob(place))

    def _newest(self) -> str:
        return max((p for p in self.path.glob("stages/**/*")), key=lambda p: p.stat().st_mtime, default=self.path).name

    def killed_at_random(self, num_kills: int, rng: random.Random, whole_seconds: float) -> int:
        """Attempts with a kill each, every other one during a save, then one to the end; the number of kills."""
        for n in range(num_kills):
            if n % 2:
                saves_to_pass = rng.randrange(3)
                watch = SaveWatch(self, saves_to_pass, rng.uniform(0, 0.004))
                code = self.attempt(watch)
            else:
                moment = rng.uniform(0.1, 0.4) * whole_seconds
                code = self.attempt(lambda seconds, moment=moment: seconds > moment)
            if code == 0:
                return n
            assert code == -signal.SIGKILL
            print("killed", "while saving:" if self.is_saving() else "between saves:", self._newest())
        assert self.attempt() == 0
        return num_kills


class SaveWatch:
    """True a moment after the n-th save has begun."""

    def __init__(self, run: Run, saves_to_pass: int, delay_seconds: float) -> None:
        self._run, self._left, self._delay, self._was_saving = run, saves_to_pass, delay_seconds, False

    def __call__(self, seconds: float) -> bool:
        saving = self._run.is_saving()
        if saving and not self._was_saving:
            self._left -= 1
        self._was_saving = saving
        if self._left >= 0:
            return False
        time.sleep(self._delay)
        return True


@pytest.fixture(scope="module", params=[[], LORA], ids=["full", "lora"])
def straight(processes, toy_recipe, tmp_path_factory, request):
    """The uninterrupted run: its overrides, its seconds and its outcome."""
    outcomes = []
    for name in ("warm-up", "straight"):  # the first attempt waits for the imports
        run = Run(processes, tmp_path_factory.mktemp(name), toy_recipe, request.param)
        started = time.monotonic()
        assert run.attempt() == 0
        seconds = time.monotonic() - started
        outcomes.append(outcome(run.path))
    assert first_difference(*outcomes) is None  # the same seed gives the same run
    return request.param, seconds, outcomes[0]


def kill_and_compare(processes, straight, toy_recipe, folder, num_kills, seed):
    """Runs that are killed, ``num_kills`` times in all, each as good as the straight one."""
    overrides, seconds, expected = straight
    rng, left, attempts = random.Random(seed), num_kills, 0
    while left > 0:
        attempts += 1
        (folder / str(attempts)).mkdir(parents=True)
        run = Run(processes, folder / str(attempts), toy_recipe, overrides)
        left -= run.killed_at_random(left, rng, seconds)
        assert first_difference(expected, outcome(run.path)) is None
        assert attempts < 10 * num_kills
    print(f"{num_kills} kills in {attempts} runs of {seconds:.1f} s each")


def test_RES_05_RES_07_a_killed_run_ends_as_the_straight_one(processes, straight, toy_recipe, tmp_path):
    kill_and_compare(processes, straight, toy_recipe, tmp_path, num_kills=4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_RES_07_ten_kills_at_random_moments(processes, straight, toy_recipe, tmp_path, seed):
    kill_and_compare(processes, straight, toy_recipe, tmp_path, num_kills=10, seed=seed)


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
