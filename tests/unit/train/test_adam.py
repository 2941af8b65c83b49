"""AdamW with moments of seen rows: the weights are torch's, whatever rows come, through a save and a restart."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from heedful.config.section import OptimizerConfig
from heedful.train import adam
from heedful.train.step import Optimisation

V, D = 40, 24


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "MIN_ROWS", 16)


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(V, D), nn.Linear(D, 3))


def _backward(model: nn.Module, tokens: list[int]) -> None:
    model.zero_grad(set_to_none=True)
    (model(torch.tensor(tokens)) ** 2).sum().backward()


def _optimisation(model: nn.Module, decay: float = 0.0) -> Optimisation:
    config = OptimizerConfig(learning_rate=0.01, weight_decay=decay, schedule="constant", warmup_fraction=0.0)
    return Optimisation("value", dict(model.named_parameters()), config, 10)


def _torch(model: nn.Module, decay: float = 0.0) -> torch.optim.AdamW:
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": decay},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    c = OptimizerConfig()
    return torch.optim.AdamW(groups, lr=0.01, betas=(c.beta1, c.beta2), eps=c.epsilon, fused=True)


FEW = [[1, 2, 2], [3], [1, 7, 9], [0, 39], [2]]
MANY = [[1, 2, 2], [3, 4], list(range(5, 30)), [0], [1, 35]]
"""More than half of the rows from the third step on."""


@pytest.mark.parametrize("steps", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_moves_as_torch_does(steps: list[list[int]], decay: float) -> None:
    ours, theirs = _model(), _model()
    optimisation, other = _optimisation(ours, decay), _torch(theirs, decay)
    for tokens in steps:
        _backward(ours, tokens)
        _backward(theirs, tokens)
        optimisation.move()
        other.step()
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-7)
            assert mine.grad is not None and torch.equal(mine.grad, its.grad)


def test_keeps_moments_of_seen_rows_only() -> None:
    model = _model()
    optimisation = _optimisation(model)
    for tokens in FEW[:3]:
        _backward(model, tokens)
        optimisation.move()
    state = optimisation.state_dict()
    assert sorted(state["adam_rows"]["0.weight"]["ids_N"].tolist()) == [1, 2, 3, 7, 9]
    assert state["adam_rows"]["0.weight"]["exp_avg_ND"].shape == (5, D)
    assert len(state["adam"]["state"]) == 2  # of the linear layer


def test_a_matrix_most_of_whose_rows_have_gradients_has_all_moments_at_once() -> None:
    model = _model()
    optimisation = _optimisation(model)
    _backward(model, list(range(V)))
    optimisation.move()
    state = optimisation.state_dict()
    assert state["adam_rows"] == {} and len(state["adam"]["state"]) == 3


@pytest.mark.parametrize("steps", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_restart_goes_on_to_the_bit(steps: list[list[int]], stop: int) -> None:
    whole, first, second = _model(), _model(), _model(seed=1)
    through, before, after = (_optimisation(m, 0.1) for m in (whole, first, second))
    for n, tokens in enumerate(steps):
        if n == stop:
            after.load_state_dict(copy.deepcopy(before.state_dict()))
        _backward(whole, tokens)
        through.move()
        mine, optimisation = (first, before) if n < stop else (second, after)
        _backward(mine, tokens)
        optimisation.move()
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_reads_a_checkpoint_that_kept_the_moments_of_all_rows() -> None:
    ours, theirs = _model(), _model()
    other = _torch(theirs)
    _backward(theirs, FEW[0])
    other.step()
    optimisation = _optimisation(ours)
    weights = dict(theirs.named_parameters())
    optimisation.load_state_dict({"weights": weights, "adam": copy.deepcopy(other.state_dict()), "num_steps": 1})
    for tokens in FEW[1:]:
        _backward(ours, tokens)
        _backward(theirs, tokens)
        optimisation.move()
        other.step()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)
