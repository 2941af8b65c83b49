"""One optimizer step: the cut into micro-batches changes nothing, and a bad value never moves a weight."""

import pytest
import torch

from heedful.batches import LossOut
from heedful.config.section import OptimizerConfig
from heedful.errors import GuardError
from heedful.objectives import kl
from heedful.train import guard
from heedful.train.step import Optimisation, add_metrics, optimise

ROWS_X, ROWS_Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)


def run(cuts, **config):
    torch.manual_seed(1)
    linear = torch.nn.Linear(4, 1)
    optimisation = Optimisation(
        "policy", dict(linear.named_parameters()), OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0, **config), 5
    )

    def loss_of(rows):
        error = linear(ROWS_X[rows]).squeeze(1) - ROWS_Y[rows]
        loss = error.pow(2).sum() / 8
        return LossOut(loss, {"mean": loss.detach(), "worst_max": error.detach().abs().max()})

    out = optimise([optimisation], cuts, loss_of, step=0)
    return out, linear.weight.detach().clone()


@pytest.mark.parametrize("cuts", [[[i] for i in range(8)], [[0, 1], [2, 3, 4], [5, 6, 7]]])
def test_SFT_07_PPO_10_PPO_21_the_cut_changes_nothing(cuts):
    whole, weight = run([list(range(8))], max_gradient_norm=0.5)
    parts, other = run(cuts, max_gradient_norm=0.5)
    assert torch.allclose(weight, other, atol=1e-6) and (weight - other).abs().mean() < 1e-7
    assert parts.gradient_norms == pytest.approx(whole.gradient_norms, rel=1e-5)
    assert whole.gradient_norms["policy"] > 0.5
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.metrics["mean"] == pytest.approx(whole.metrics["mean"], rel=1e-5)
    assert parts.metrics["worst_max"] == pytest.approx(whole.metrics["worst_max"], rel=1e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_RES_09_a_metric_is_the_mean_of_all_whatever_the_shards(num_shards):
    """Shards of four, two or three answers, the last one filled up with padding; also one without any answer."""
    width = -(-7 // num_shards)
    kl_N = torch.tensor([1.0, 4, 9, 16, 25, 36, 49] + [99.0] * (num_shards * width - 7))
    shards = [(kl_N[i : i + width, None], (torch.arange(i, i + width) < 7)[:, None])
              for i in range(0, len(kl_N), width)]  # fmt: skip
    shards.append((torch.full((width, 1), 99.0), torch.zeros(width, 1, dtype=torch.bool)))
    total = {}
    for kl_B1, mask_B1 in shards:
        out = kl.exact_loss_term(kl_B1, mask_B1, weights_B=torch.ones(width), denominator=7)
        add_metrics(total, out.metrics)
    assert float(total["kl_loss_nats"]) == pytest.approx(20.0)


def test_PPO_20_the_rate_falls_to_zero_exactly_at_the_end():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    config = OptimizerConfig(learning_rate=1e-5, schedule="linear", warmup_fraction=0.0)
    optimisation = Optimisation("policy", {"w": parameter}, config, total_steps=10 * 2 * 2)
    rates = []
    for _ in range(40):
        rates.append(optimisation.learning_rate)
        optimisation.num_steps += 1
    assert rates[20] == pytest.approx(5e-6) and rates[39] > 0 and optimisation.learning_rate == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_loss_never_moves_a_weight(bad):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimisation = Optimisation("value", {"w": parameter}, OptimizerConfig(), 1)

    def loss_of(batch):
        return LossOut(parameter.sum() * bad, {})

    with pytest.raises(GuardError, match=r"the value loss is not finite at step 7 \(samples: the whole batch\)"):
        optimise([optimisation], [0], loss_of, step=7)
    assert torch.equal(parameter.detach(), torch.ones(2, 2)) and optimisation.num_steps == 0


def test_a_bad_gradient_never_moves_a_weight():
    parameter = torch.nn.Parameter(torch.zeros(1, 1))
    optimisation = Optimisation("policy", {"w": parameter}, OptimizerConfig(), 1)
    with pytest.raises(GuardError, match="gradient of the policy model is not finite at step 3"):
        optimise([optimisation], [0], lambda _: LossOut(parameter.sqrt().sum(), {}), step=3)
    assert float(parameter.detach()) == 0.0


def test_guard_names_stream_step_and_samples():
    stream = torch.zeros(3, 4)
    stream[1, 2] = float("nan")
    with pytest.raises(GuardError, match=r"advantages is not finite at step 5 \(samples: b\)"):
        guard.finite("advantages", stream, step=5, ids=("a", "b", "c"))
    guard.finite("advantages", stream, step=5, mask=torch.tensor([[True] * 4, [False] * 4, [True] * 4]))


def test_guard_refuses_a_ratio_that_is_not_one():
    guard.first_minibatch(0.0, 0.0, dtype=torch.float32, step=0)
    with pytest.raises(GuardError, match="ratio differs from 1 by 0.05"):
        guard.first_minibatch(0.05, 0.0, dtype=torch.float32, step=0)
    with pytest.raises(GuardError, match="clip fraction 0.1"):
        guard.first_minibatch(0.0, 0.1, dtype=torch.bfloat16, step=0)


def test_guard_refuses_a_reference_that_is_not_the_start():
    mask = torch.tensor([[True, False]])
    guard.reference_is_start(torch.tensor([[0.0, 9.0]]), mask, dtype=torch.float32, ids=("a",))
    with pytest.raises(GuardError, match="KL to the reference is 0.01 nats on a token of sample a at step 0"):
        guard.reference_is_start(torch.tensor([[-0.01, 0.0]]), mask, dtype=torch.float32, ids=("a",))


def test_optimizer_state_round_trip_is_exact():
    def make():
        linear = torch.nn.Linear(3, 1)
        config = OptimizerConfig(learning_rate=0.1)
        return linear, Optimisation("policy", dict(linear.named_parameters()), config, 4)

    def steps(linear, optimisation, numbers):
        for step in numbers:
            rows = ROWS_X[step : step + 2, :3]
            optimise([optimisation], [rows], lambda x: LossOut(linear(x).pow(2).sum(), {}), step=step)

    torch.manual_seed(0)
    straight = make()
    again, resumed = make(), make()
    again[0].load_state_dict(straight[0].state_dict())
    steps(*straight, range(4))
    steps(*again, range(2))
    resumed[1].load_state_dict(again[1].state_dict())
    steps(*resumed, range(2, 4))
    assert torch.equal(straight[0].weight, resumed[0].weight)
    assert not torch.equal(straight[0].weight, again[0].weight)
