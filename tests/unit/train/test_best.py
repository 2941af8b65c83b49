from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from heedful.errors import GuardError
from heedful.train import checkpoint
from heedful.train.best import Best
from heedful.train.ema import EMA


def parameter(value: float) -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.full((2, 2), float(value)))}


def put(weights: dict[str, nn.Parameter], value: float) -> None:
    with torch.no_grad():
        weights["w"].fill_(value)


def test_the_highest_score_is_kept_and_the_first_of_equals() -> None:
    weights = parameter(0)
    best = Best(weights)
    assert best.step is None and best.score is None
    taken = []
    for step, score in enumerate([-3.0, 0.5, 0.2, 0.5, -1.0]):
        put(weights, step)
        taken.append(best.offer(step, score, weights))
    assert taken == [True, True, False, False, False]
    assert (best.step, best.score) == (1, 0.5)
    assert (best.weights["w"] == 1).all() and best.weights["w"].device.type == "cpu"


def test_the_copy_is_its_own() -> None:
    weights = parameter(1)
    best = Best(weights)
    best.offer(0, 0.0, weights)
    put(weights, 9)
    assert (best.weights["w"] == 1).all()
    ema = EMA(weights, 0.5)
    best.offer(1, 1.0, ema.average)
    put(weights, 0)
    ema.update()
    assert (best.weights["w"] == 9).all() and (ema.average["w"] == 4.5).all()


@pytest.mark.parametrize("fails", [False, True])
def test_applied_puts_the_best_in_and_the_last_back(fails: bool) -> None:
    weights = parameter(1)
    best = Best(weights)
    best.offer(0, 1.0, weights)
    put(weights, 0.1)
    try:
        with best.applied():
            assert (weights["w"] == 1).all()
            if fails:
                raise RuntimeError("in saving")
    except RuntimeError:
        assert fails
    assert torch.equal(weights["w"], torch.full((2, 2), 0.1)) and (best.weights["w"] == 1).all()


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_stops_the_run(score: float) -> None:
    weights = parameter(1)
    best = Best(weights)
    with pytest.raises(GuardError, match="step 7"):
        best.offer(7, score, weights)
    assert best.step is None


def test_nothing_offered_or_other_names_are_errors() -> None:
    best = Best(parameter(1))
    with pytest.raises(ValueError, match="w is not both"), best.applied():
        pass
    best.offer(0, 0.0, {"v": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="is not both"), best.applied():
        pass


@pytest.mark.parametrize("offered", [True, False])
def test_RES_05_the_best_survives_a_checkpoint_with_its_weights(offered: bool, tmp_path: Path) -> None:
    weights = parameter(3)
    best = Best(weights)
    if offered:
        best.offer(4, 1.5, weights)
    checkpoint.save(tmp_path, 5, {"best": best.state_dict()})
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    resumed = Best(parameter(0))
    resumed.load_state_dict(found[1]["best"])
    assert (resumed.step, resumed.score) == ((4, 1.5) if offered else (None, None))
    assert not resumed.offer(6, 1.5, parameter(7)) if offered else resumed.offer(6, -5.0, parameter(7))
    with resumed.applied():
        assert (resumed.parameters["w"] == (3 if offered else 7)).all()
