from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from heedful.train import checkpoint
from heedful.train.ema import EMA


def parameters(*dtypes: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"w{i}": nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype))
        for i, dtype in enumerate(dtypes or (torch.float32, torch.float32))
    }


def move(weights: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in weights.values():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype))


def test_the_average_is_the_weighted_sum_of_every_state_and_the_start() -> None:
    weights = parameters()
    states = [{n: p.detach().double() for n, p in weights.items()}]
    ema = EMA(weights, 0.75)
    assert all(torch.equal(ema.average[n], p) for n, p in weights.items())
    for seed in range(5):
        move(weights, seed)
        states.append({n: p.detach().double() for n, p in weights.items()})
        ema.update()
    shares = [0.75**5, *(0.25 * 0.75 ** (4 - i) for i in range(5))]
    assert sum(shares) == pytest.approx(1)
    for name in weights:
        expected = sum(s * state[name] for s, state in zip(shares, states, strict=True))
        assert torch.allclose(ema.average[name].double(), torch.as_tensor(expected), atol=1e-6)


def test_weights_that_stay_are_their_own_average_to_the_bit() -> None:
    weights = parameters()
    ema = EMA(weights, 0.992)
    for _ in range(100):
        ema.update()
    assert all(torch.equal(ema.average[n], p) for n, p in weights.items())


@pytest.mark.parametrize("fails", [False, True])
def test_applied_swaps_in_and_back_to_the_bit(fails: bool) -> None:
    weights = parameters(torch.float32, torch.bfloat16, torch.float64)
    ema = EMA(weights, 0.5)
    move(weights, 1)
    ema.update()
    before = {n: p.detach().clone() for n, p in weights.items()}
    average = {n: x.clone() for n, x in ema.average.items()}
    objects = dict(weights)
    try:
        with ema.applied():
            for name, p in weights.items():
                assert torch.equal(p, average[name].to(p.dtype)) and not torch.equal(p, before[name])
            if fails:
                raise RuntimeError("in the evaluation")
    except RuntimeError:
        assert fails
    for name, p in weights.items():
        assert p is objects[name] and torch.equal(p, before[name]) and torch.equal(ema.average[name], average[name])


def test_small_updates_are_not_swallowed_by_a_low_precision() -> None:
    weights = {"w": nn.Parameter(torch.ones(1, dtype=torch.bfloat16))}
    ema = EMA(weights, 0.999)
    with torch.no_grad():
        weights["w"].mul_(2)
    ema.update()
    assert ema.average["w"].dtype == torch.float32 and float(ema.average["w"]) == pytest.approx(1.001, abs=1e-6)


def test_RES_05_a_resumed_average_goes_on_to_the_bit(tmp_path: Path) -> None:
    weights = parameters()
    straight = EMA(weights, 0.9)
    move(weights, 1)
    straight.update()
    checkpoint.save(tmp_path, 1, {"ema": straight.state_dict()})
    restored = parameters()
    with torch.no_grad():
        for name, p in restored.items():
            p.copy_(weights[name])
    resumed = EMA(restored, 0.9)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    resumed.load_state_dict(found[1]["ema"])
    for ema, own in ((straight, weights), (resumed, restored)):
        move(own, 2)
        ema.update()
    assert all(torch.equal(resumed.average[n], x) for n, x in straight.average.items())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        EMA(parameters(), decay)
