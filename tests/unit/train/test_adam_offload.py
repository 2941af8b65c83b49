"""Moments that wait in main memory: the weights are the same to the bit, however buckets are cut, and through saves.

The device is the CPU here, told to have a memory of its own; one test needs a GPU.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from heedful.config.recipe import Recipe
from heedful.config.section import OptimizerConfig
from heedful.models import offload
from heedful.pipeline.context import Context
from heedful.train import adam, moments
from heedful.train.step import Optimisation, _clipped_norm
from toy_parts import roles
from toy_ppo import RATE, AtTheThird, Longer, largest_gap, train, weights

V, D = 40, 24
STEPS = [[1, 2, 2], [3, 4], [5], list(range(5, 33)), [0], [1, 35]]
"""Tokens; with the fourth more than half of the rows have been seen."""
BUCKETS = [2 * moments.ALIGNED_BYTES, 6 * moments.ALIGNED_BYTES, 2**20]
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=BUCKETS)
def apart(request, monkeypatch):
    """Main memory and the device's are two; buckets are cut within matrices, between them, or nowhere."""
    monkeypatch.setattr(offload, "is_apart", lambda device: True)
    monkeypatch.setattr(moments, "BUCKET_BYTES", request.param)
    monkeypatch.setattr(adam, "MIN_ROWS", 16)


class Model(nn.Module):
    """An embedding that is read by rows, matrices, biases, and an output that not every step reads."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.wide, self.narrow = nn.Embedding(V, D), nn.Linear(D, 37), nn.Linear(37, 3)
        self.seldom = nn.Linear(37, 5)
        self.to(dtype)

    def forward(self, tokens, rest):
        hidden = torch.tanh(self.wide(self.table(tokens)))
        return self.narrow(hidden).square().sum() + (self.seldom(hidden).square().sum() if rest else 0)


def optimisation(model, *, offloads):
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, warmup_fraction=0.5, max_gradient_norm=0.5,
                             offload=offloads)  # fmt: skip
    return Optimisation("value", dict(model.named_parameters()), config, len(STEPS))


def step(model, of, n):
    """Clipped, as :func:`heedful.train.step.optimise` does it."""
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    model(torch.tensor(STEPS[n], device=device), rest=n % 2 == 1).backward()
    _clipped_norm(of, n, [])
    of.move()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def stored(state):
    """As a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def same(one, other):
    """Nested values with tensors are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_and_state_are_those_without(apart, dtype):
    stay, wait = Model(dtype=dtype), Model(dtype=dtype)
    plain, away = optimisation(stay, offloads=False), optimisation(wait, offloads=True)
    for n in range(len(STEPS)):
        step(stay, plain, n)
        step(wait, away, n)
        assert equal(stay, wait)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(stay.parameters(), wait.parameters(), strict=True)
                   if a.grad is not None)  # fmt: skip
        assert same(stored(plain.state_dict()), stored(away.state_dict()))
    assert stay.table.weight in plain.adam.state and wait.table.weight in away.adam.state


def test_a_parameter_without_a_gradient_is_left_alone(apart):
    model = Model()
    of, before = optimisation(model, offloads=True), model.seldom.weight.detach().clone()
    step(model, of, 0)
    assert torch.equal(model.seldom.weight, before) and model.seldom.weight not in of.adam.state
    step(model, of, 1)
    assert [float(of.adam.state[x.weight]["step"]) for x in (model.seldom, model.wide)] == [1, 2]


@pytest.mark.parametrize("stop", range(1, len(STEPS)))
@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_a_run_goes_on_with_or_without(apart, first, second, stop):
    whole, before, after = Model(), Model(), Model(seed=1)
    through = optimisation(whole, offloads=False)
    earlier, later = optimisation(before, offloads=first), optimisation(after, offloads=second)
    for n in range(len(STEPS)):
        if n == stop:
            later.load_state_dict(stored(earlier.state_dict()))
        step(whole, through, n)
        step(before, earlier, n) if n < stop else step(after, later, n)
    assert equal(whole, after)


def test_a_state_may_be_loaded_over_another(apart):
    model = Model()
    of = optimisation(model, offloads=True)
    step(model, of, 1)
    kept = stored(of.state_dict())
    for n in (2, 3):
        step(model, of, n)
    of.load_state_dict(copy.deepcopy(kept))
    assert same(stored(of.state_dict()), kept)
    with pytest.raises(ValueError, match="parameter group"):
        of.load_state_dict({**kept, "adam": {**kept["adam"], "param_groups": kept["adam"]["param_groups"][:1]}})


def test_pieces_cover_every_number_once_and_fill_their_buckets(monkeypatch):
    monkeypatch.setattr(moments, "BUCKET_BYTES", 4 * moments.ALIGNED_BYTES)  # 128 float32 of either moment
    sizes = [(3,), (300,), (10, 20), (64,)]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    state = {}
    for p in parameters:
        p.grad = torch.ones_like(p)
        state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    buckets = list(moments.cut({"params": parameters}, state))
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    for piece in pieces:
        piece.weights.add_(1)
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in parameters)
    assert sum(piece.is_last for piece in pieces) == len(parameters)
    assert all(bucket.num_bytes <= moments.BUCKET_BYTES // 2 for bucket in buckets) and len(buckets) == 6
    for bucket in buckets:
        ends = [piece.offset_bytes + piece.weights.nbytes for piece in bucket.pieces]
        assert all(piece.offset_bytes >= end for piece, end in zip(bucket.pieces[1:], ends, strict=False))
        assert all(piece.offset_bytes % moments.ALIGNED_BYTES == 0 for piece in bucket.pieces)


def test_weights_that_do_not_lie_in_order_are_no_copy():
    p = nn.Parameter(torch.zeros(4, 6).t())
    p.grad = torch.ones_like(p)
    state = {p: {"step": torch.zeros(()), "exp_avg": torch.zeros(6, 4), "exp_avg_sq": torch.zeros(6, 4)}}
    with pytest.raises(RuntimeError, match="view"):
        list(moments.cut({"params": [p]}, state))


def test_few_blocks_hold_what_is_at_home(monkeypatch):
    """A tensor larger than a block has one of its own; smaller ones fill what is left."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", 4 * 100)
    like = [torch.empty(n) for n in (60, 60, 250, 30, 2)] + [torch.empty(3, 2, dtype=torch.float64)]
    found = offload.zeros_at_home(like)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in like]
    assert all(not x.any() for x in found)
    storages = [x.untyped_storage() for x in found]
    assert {s.nbytes() for s in storages} == {400, 1000, 48}
    assert storages[0].data_ptr() == storages[3].data_ptr() and len({s.data_ptr() for s in storages}) == 4
    for n, x in enumerate(found):
        x.fill_(n)
    assert all((x == n).all() for n, x in enumerate(found))


def test_room_that_the_self_test_reserves(apart):
    parameters = [torch.empty(1000), torch.empty(24)]
    assert sum(x.nbytes for x in moments.reserve(parameters, offloaded=False)) == 8 * 1024
    (buckets,) = moments.reserve(parameters, offloaded=True)
    assert buckets.nbytes == min(8 * 1024, 2 * moments.BUCKET_BYTES)
    assert moments.reserve([], offloaded=True) == []


def test_nothing_is_moved_where_memory_is_one(monkeypatch):
    model = Model()
    of = optimisation(model, offloads=True)
    assert of.adam._shuttle is None
    assert len(moments.reserve([torch.empty(10)], offloaded=True)) == 2


def test_parameters_of_two_types_share_a_bucket(apart):
    stay, wait = Model(), Model()
    for model in (stay, wait):
        model.narrow.double()
        model.narrow.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    plain, away = optimisation(stay, offloads=False), optimisation(wait, offloads=True)
    for n in range(len(STEPS)):
        step(stay, plain, n)
        step(wait, away, n)
    assert equal(stay, wait) and same(stored(plain.state_dict()), stored(away.state_dict()))


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_run_says_where_moments_are(is_apart, monkeypatch, capsys):
    monkeypatch.setattr(offload, "is_apart", lambda device: is_apart)
    recipe = Recipe.model_validate({"model": {"name": "toy", "device": "cpu"}, "data": {"demonstrations": "d.jsonl"},
                                    "sft": {"optimizer": {"offload": True}}})  # fmt: skip
    context = Context(recipe, None)
    context.tell_moments("sft.optimizer", recipe.sft.optimizer)
    where = "the moments of AdamW wait in main memory" if is_apart else "nothing is moved, since this device computes"
    assert f"sft.optimizer.offload: {where}" in capsys.readouterr().err
    context.tell_moments("sft.optimizer", OptimizerConfig())
    assert not capsys.readouterr().err


OFFLOADS = {"optimizer": {**RATE, "offload": True}, "value_optimizer": {**RATE, "offload": True}}
PPO = {"steps": 4, "minibatches": 2, "checkpoint": {"every_steps": 1}}


@pytest.mark.parametrize("sharing", [{}, {"value_from": "trunk"}])
def test_ppo_with_everything_away_ends_with_the_same_weights(tmp_path, apart, sharing):
    stay, wait = roles(tmp_path, **sharing), roles(tmp_path, offload_frozen=True, **sharing)
    train(stay, tmp_path / "stay", **PPO)
    train(wait, tmp_path / "wait", **PPO, **OFFLOADS)
    assert largest_gap(weights(stay), weights(wait)) == 0


@pytest.mark.parametrize(("first", "second"), [(OFFLOADS, OFFLOADS), (OFFLOADS, {}), ({}, OFFLOADS)])
def test_ppo_is_killed_and_goes_on(tmp_path, apart, first, second):
    whole = roles(tmp_path)
    train(whole, tmp_path / "whole", **PPO)
    stopped = roles(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, tmp_path / "run", rewards=[StopsAtThird()], **PPO, **first)
    again = roles(tmp_path)
    rows = train(again, tmp_path / "run", **PPO, **second)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert largest_gap(weights(whole), weights(again)) == 0


class StopsAtThird(AtTheThird, Longer):
    """The length of the answer."""


@needs_a_gpu
@pytest.mark.parametrize("bucket_bytes", [2**16, 2**22])
def test_on_a_gpu_weights_are_the_same_and_few_moments_are_there(bucket_bytes, monkeypatch):
    """16 matrices of 4 MiB and a large one, ten steps without a pause; a state is read right after each second step."""
    monkeypatch.setattr(moments, "BUCKET_BYTES", bucket_bytes)
    cuda = torch.device("cuda")

    def build(offloads):
        torch.manual_seed(0)
        layers = [nn.Linear(1024, 1024) for _ in range(16)]
        model = nn.Sequential(*layers, nn.Linear(1024, 8000)).to(cuda)
        config = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, schedule="constant", warmup_fraction=0.0,
                                 offload=offloads)  # fmt: skip
        return model, Optimisation("policy", dict(model.named_parameters()), config, 10)

    ended = []
    for offloads in (False, True):
        model, of = build(offloads)
        x = torch.randn(64, 1024, device=cuda, generator=torch.Generator(cuda).manual_seed(1))
        states = []
        for n in range(10):
            model.zero_grad(set_to_none=True)
            model(x * (n + 1)).square().mean().backward()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            of.move()
            if offloads:
                assert torch.cuda.max_memory_allocated() - before <= 2 * bucket_bytes + 2**20
                assert torch.cuda.memory_allocated() - before <= 2**20
            if n % 2:
                states.append(stored(of.state_dict()))
        ended.append(states)
        if offloads:
            assert all(s["exp_avg"].is_pinned() for s in of.adam.state.values())
            later, again = build(True)
            again.load_state_dict(states[-1])
            assert same(stored(again.state_dict()), states[-1])
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), later.parameters(), strict=True))
    assert all(same(a, b) for a, b in zip(*ended, strict=True))
