"""Runs in processes of their own that are killed again and again, and then compared with a straight one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attempt import attempt
from outcome import first_difference, outcome

DEADLINE_SECONDS = 120.0


class Run:
    """A run in a folder of its own, attempted again and again."""

    def __init__(
        self, processes: Any, folder: Path, recipe: str, overrides: Sequence[str] = (), *, draws_report: bool = True
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "toy"
        self.num_open_rollouts = 0
        """Kills that left answers of an unfinished step, which the next attempt then met."""
        (folder / "toy.yaml").write_text(recipe)
        self._arguments = (str(folder / "toy.yaml"), ["--output", str(folder), *overrides], draws_report)
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

    def saving(self) -> int:
        """1 while a checkpoint or a model is being written."""
        return int(bool(self._stats("stages/*/checkpoints/*.partial") or self._stats("stages/*/.*.partial")))

    def rollout_bytes(self) -> int:
        """Of the answers of unfinished steps on disk."""
        return sum(stat.st_size for stat in self._stats("stages/*/rollouts/*").values())

    def _newest(self) -> str:
        stats = self._stats("stages/**/*")
        return max(stats, key=lambda path: stats[path].st_mtime, default=self.path).name

    def _stats(self, pattern: str) -> dict[Path, os.stat_result]:
        """What is there, looked at again when something went away meanwhile."""
        while True:
            try:
                return {path: path.stat() for path in self.path.glob(pattern)}
            except FileNotFoundError:
                continue

    def killed_at_random(self, num_kills: int, rng: random.Random, whole_seconds: float) -> int:
        """Attempts with a kill each, by turns at any moment, during a save and during a rollout, then one to the end;
        the number of kills."""
        moments = ["any", "save", "rollout"]
        for n in range(num_kills):
            kind = moments[n % len(moments)]
            if kind == "any":
                moment = rng.uniform(0.1, 0.4) * whole_seconds
                code = self.attempt(lambda seconds, moment=moment: seconds > moment)
            else:
                watched = self.saving if kind == "save" else self.rollout_bytes
                code = self.attempt(Watch(watched, rng.randrange(3), rng.uniform(0, 0.004)))
            if code == 0:
                return n
            assert code == -signal.SIGKILL, f"the attempt ended by itself with code {code}"
            self.num_open_rollouts += self.rollout_bytes() > 0
            print("killed", "while saving:" if self.saving() else "between saves:", self._newest())
        code = self.attempt()
        assert code == 0, f"the last attempt ended with code {code}"
        return num_kills


class Watch:
    """True a moment after ``watched`` has risen, the first ``num_to_pass`` times apart."""

    def __init__(self, watched: Callable[[], int], num_to_pass: int, delay_seconds: float) -> None:
        self._watched, self._left, self._delay, self._before = watched, num_to_pass, delay_seconds, watched()

    def __call__(self, seconds: float) -> bool:
        now = self._watched()
        self._left -= now > self._before
        self._before = now
        if self._left >= 0:
            return False
        time.sleep(self._delay)
        return True


def straight_run(new_run: Callable[[str], Run]) -> tuple[Run, float, dict[str, Any]]:
    """An uninterrupted run, its seconds and its outcome; made twice, since the same seed must give the same run."""
    outcomes = []
    for name in ("warm-up", "straight"):  # the first attempt waits for the imports
        run = new_run(name)
        started = time.monotonic()
        code = run.attempt()
        assert code == 0, f"the run ended with code {code}"
        seconds = time.monotonic() - started
        outcomes.append(outcome(run.path))
    difference = first_difference(*outcomes)
    assert difference is None, difference
    return run, seconds, outcomes[0]


def kill_and_compare(
    new_run: Callable[[str], Run], expected: dict[str, Any], whole_seconds: float, num_kills: int, seed: int,
    *, kills_per_run: int,
) -> list[Run]:  # fmt: skip
    """Runs that are killed, ``num_kills`` times in all, each as good as the straight one."""
    rng, left, runs = random.Random(seed), num_kills, []
    while left > 0:
        runs.append(new_run(str(len(runs))))
        left -= runs[-1].killed_at_random(min(left, kills_per_run), rng, whole_seconds)
        difference = first_difference(expected, outcome(runs[-1].path))
        assert difference is None, difference
        assert len(runs) < 10 * num_kills
    print(f"{num_kills} kills in {len(runs)} runs of {whole_seconds:.1f} s each")
    return runs
