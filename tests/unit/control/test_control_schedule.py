"""Learning-rate schedules, and the room's promise to need no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from heedful.control.schedule import factor
from heedful.errors import ConfigError


def test_PPO_20_linear_decay_over_optimizer_steps() -> None:
    rollouts, batch, minibatch, epochs = 10, 128, 64, 2
    total = rollouts * (batch // minibatch) * epochs
    assert total == 40
    rates = [1e-5 * factor(step, total_steps=total, warmup_steps=0, kind="linear") for step in range(41)]
    assert rates[0] == 1e-5
    assert rates[20] == pytest.approx(5e-6)
    assert rates[39] == pytest.approx(1e-5 / 40) and rates[39] > 0
    assert rates[40] == 0
    assert all(a > b for a, b in zip(rates, rates[1:]))


def test_warm_up_wastes_no_step_and_joins_the_decay() -> None:
    linear = [factor(step, total_steps=12, warmup_steps=4, kind="linear") for step in range(13)]
    assert linear[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert linear[8] == pytest.approx(0.5)
    assert linear[12] == 0
    cosine = [factor(step, total_steps=12, warmup_steps=4, kind="cosine") for step in range(13)]
    assert cosine[:5] == linear[:5]
    assert cosine[6] == pytest.approx(0.853553, abs=1e-6) and cosine[8] == pytest.approx(0.5)
    assert 0 < cosine[11] < 0.05 and cosine[12] == 0
    assert [factor(s, total_steps=12, warmup_steps=4, kind="constant") for s in (0, 3, 4, 11, 12)] == [0.25, 1, 1, 1, 1]


def test_ends() -> None:
    assert factor(100, total_steps=40, warmup_steps=0, kind="linear") == 0
    assert factor(100, total_steps=40, warmup_steps=0, kind="cosine") == 0
    assert factor(5, total_steps=5, warmup_steps=5, kind="linear") == 0
    assert factor(4, total_steps=5, warmup_steps=5, kind="linear") == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"total_steps": 0}, "total_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 41}, "warmup_steps"),
        ({"kind": "polynomial"}, "polynomial"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        factor(0, **{"total_steps": 40, "warmup_steps": 0, "kind": "linear", **arguments})


def test_control_imports_without_torch() -> None:
    modules = "heedful.control.guarded, heedful.control.kl, heedful.control.schedule"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
