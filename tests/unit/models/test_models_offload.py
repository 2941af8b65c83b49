"""Frozen models that wait elsewhere say what those that stay say, and are away when they have nothing to do.

On a CPU they wait in a file; ``apart`` tells it to have a memory of its own, as a GPU has. One test needs a GPU.
"""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
import torch

from heedful.config.ppo import PPOConfig
from heedful.config.section import LoraConfig
from heedful.errors import ModelError
from heedful.models import offload
from heedful.models.offload import Offload, Offloaded
from heedful.models.quantise import Rounding
from heedful.models.roles import build_reward, build_roles
from heedful.rollout.experience import forward_streams
from heedful.rollout.hf import HFEngine
from heedful.rollout.score import LearnedReward
from heedful.train.bench import Bench
from heedful.train.selftest import run_self_test
from toy_parts import disturb, model_folder, prompts, roles
from toy_ppo import largest_gap, train, weights

CPU = torch.device("cpu")
PPO = PPOConfig()


@pytest.fixture(params=["file", "main memory"])
def apart(request, monkeypatch, tmp_path):
    """Where the models wait."""
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    if request.param == "main memory":
        monkeypatch.setattr(offload, "is_apart", lambda device: True)
    return request.param


def is_away(part):
    return not any(x.numel() for x in [*part.model.parameters(), *part.model.buffers()])


def frozen(parts):
    return [parts.reference.part, parts.reward.part]


def streams(parts, *, device=CPU):
    """Of a batch of three answers: what the four parts say."""
    ids = [[5, 9, 12, 40, 7], [8, 30, 31], [60, 61, 62, 63]]
    asked = prompts(parts.policy.tokenizer)[:3]
    bench = Bench(parts, None, asked, PPO, NoEngine(), 0)
    ((_, batch),) = bench.micro_batches([x for _, x in asked], ids)
    found, _ = forward_streams(parts, batch, temperature=1.0, exact_kl=True, reference_hidden=True)
    scores = parts.reward.scores(batch.inputs_BT, batch.attention_mask_BT)
    return {**found, "scores": scores}


class NoEngine:
    def rest(self):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_they_come_to_be_read_and_say_the_same_to_the_bit(tmp_path, apart, kind, dtype):
    stay = roles(tmp_path, kind=kind, dtype=dtype)
    wait = roles(tmp_path, kind=kind, dtype=dtype, offload_frozen=True)
    expected = streams(stay)
    for _ in range(2):
        assert all(is_away(part) for part in frozen(wait))
        assert not is_away(wait.policy) and not is_away(wait.value.part)
        found = streams(wait)
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        assert not any(is_away(part) for part in frozen(wait))
        wait.offload.send_away()
    wait.offload.send_away()  # a second time changes nothing
    own = sum(x.nbytes for part in frozen(stay) for x in [*part.model.parameters(), *part.model.buffers()])
    assert wait.offload.num_bytes == own


def test_in_int8_beside_a_trunk_and_apart_under_adapters(tmp_path, apart):
    asked = prompts(roles(tmp_path).policy.tokenizer)
    for options in ({"rounding": Rounding(asked, frozen="int8")}, {"value_from": "trunk"},
                    {"sharing": "separate", "lora": LoraConfig(rank=4)}):  # fmt: skip
        expected = streams(roles(tmp_path, **options))
        wait = roles(tmp_path, offload_frozen=True, **options)
        assert all(is_away(part) for part in frozen(wait))
        found = streams(wait)
        assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_parts_that_share_weights_with_what_is_trained_stay(tmp_path, apart):
    wait = roles(tmp_path, lora=LoraConfig(rank=4), offload_frozen=True)
    assert wait.offload.num_bytes == 0 and not is_away(wait.policy) and not is_away(wait.reward.part)
    (tmp_path / "shared").mkdir()
    base = model_folder(tmp_path / "shared" / "base")
    shared = build_roles(base, base, policy_lora=LoraConfig(rank=4), value_lora=None, device=CPU, dtype=torch.float32,
                         sharing="shared", new_reward_head=True, offload_frozen=True)  # fmt: skip
    assert shared.offload.num_bytes == 0 and not is_away(shared.policy)


def test_without_the_option_nothing_moves(tmp_path):
    stay = roles(tmp_path)
    assert stay.offload.num_bytes == 0 and stay.reference.offloaded is None
    assert not any(is_away(part) for part in frozen(stay))


def test_the_file_has_no_name_and_what_is_read_of_it_is_mapped_not_copied(tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    wait = roles(tmp_path, offload_frozen=True)
    assert not list((tmp_path / "cache").iterdir())
    mapped = lambda: Path("/proc/self/smaps").read_text().count(str(tmp_path / "cache"))  # noqa: E731
    assert mapped() == 0
    streams(wait)
    own = [p for part in frozen(wait) for p in [*part.model.parameters(), *part.model.buffers()] if p.numel()]
    assert mapped() == len(own)
    wait.offload.send_away()
    assert mapped() == 0
    assert str(wait.offload).startswith("2 models of 0.00 GiB wait in a file")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="offload_frozen: .*cache: .*; set HEEDFUL_CACHE to a folder"):
        roles(tmp_path, offload_frozen=True)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(offload, "_new_file", Full)
    with pytest.raises(ModelError, match="offload_frozen: .*: No space left on device; free some disk"):
        roles(tmp_path, offload_frozen=True)


def test_weights_come_in_the_order_of_a_forward_and_a_layer_waits_for_its_own(tmp_path, apart, monkeypatch):
    part = roles(tmp_path).reward.part
    names = {id(p): name for name, p in part.model.named_parameters()}
    done = []
    part.hidden_after(torch.tensor([[5, 6, 7]]))  # tries, once, whether this model takes attention in pieces
    away = Offloaded(part)

    def told(what, group):
        found = {names.get(id(tensor), "").split("layers.")[-1][:1] for tensor, _ in group.tensors} - {""}
        done.append((what, found.pop() if len(found) == 1 else "outside"))

    copy = offload._Group.copy
    monkeypatch.setattr(offload._Group, "copy", lambda self: (told("copied", self), copy(self)))
    monkeypatch.setattr(offload._Group, "wait", lambda self: told("waited", self))
    part.hidden_after(torch.tensor([[5, 6, 7]]))
    assert done == [("copied", "outside"), ("copied", "0"), ("copied", "1"),
                    ("waited", "outside"), ("waited", "0"), ("waited", "1")]  # fmt: skip
    assert away.is_here


class Watched(HFEngine):
    """Notes whether the frozen models were away while it decoded."""

    def __init__(self, parts):
        super().__init__(parts.policy, [10**6])
        self.parts, self.seen = parts, []

    def generate(self, *asked, **options):
        self.seen.append([is_away(part) for part in frozen(self.parts)])
        return super().generate(*asked, **options)


@pytest.mark.parametrize("options", [
    {}, {"epochs": 2, "minibatches": 2}, {"kl": {"in_loss": "exact", "in_reward": "none"}, "epochs": 2},
    {"bootstrap_truncated": True}, {"best": {"every_steps": 1, "num_prompts": 2}, "prompts_per_step": 4},
], ids=["plain", "minibatches", "exact KL in the loss", "bootstrap", "best"])  # fmt: skip
def test_training_is_the_same_and_decodes_and_updates_without_them(tmp_path, apart, monkeypatch, options):
    """Three steps; the weights afterwards are equal to the bit."""
    from heedful.train import update

    away, ended = [], []
    real = update.Update._step_value

    def step_value(self, minibatch):
        away.append([is_away(part) for part in frozen(self.roles)])
        return real(self, minibatch)

    monkeypatch.setattr(update.Update, "_step_value", step_value)
    for name, offloads in (("stay", False), ("wait", True)):
        parts = roles(tmp_path, offload_frozen=offloads)
        before, engine = weights(parts), Watched(parts)
        reward = LearnedReward(parts.reward, micro_batch_tokens=256)
        away.clear()
        train(parts, tmp_path / name, engine=engine, rewards=[reward], steps=3, **options)
        ended.append(weights(parts))
        assert largest_gap(before, ended[-1]) > 0
        at_validation = 2 if "best" in options else 1  # there the reward model may have been read already
        assert all(seen == [offloads, offloads] for seen in engine.seen[::at_validation])
        exact = "kl" in options  # the reference's output layer is read in the loss
        assert away and all(seen == [offloads and not exact, offloads] for seen in away)
    assert largest_gap(*ended) == 0


def test_further_reward_models_wait_too(tmp_path, apart):
    path = model_folder(tmp_path / "other", seed=3, scalar=True)
    stay, wait = (build_reward(path, device=CPU, dtype=torch.float32) for _ in range(2))
    store = Offload(wanted=True)
    store.take(wait.part)
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert is_away(wait.part) and store.num_bytes > 0
    assert torch.equal(wait.scores(ids, mask), stay.scores(ids, mask))
    store.restore()
    for name, p in wait.part.model.named_parameters():
        assert torch.equal(p, dict(stay.part.model.named_parameters())[name])


def test_the_self_test_passes_with_models_away(tmp_path, apart):
    from heedful.rollout.score import Scoring

    wait = roles(tmp_path, offload_frozen=True)
    scoring = Scoring([LearnedReward(wait.reward, micro_batch_tokens=256)])
    engine = HFEngine(wait.policy, [2])
    stay = roles(tmp_path)
    expected = run_self_test(stay, Scoring([LearnedReward(stay.reward, micro_batch_tokens=256)]),
                             prompts(stay.policy.tokenizer), PPO, HFEngine(stay.policy, [2]), seed=0)  # fmt: skip
    found = run_self_test(wait, scoring, prompts(wait.policy.tokenizer), PPO, engine, seed=0)
    assert [(p.name, p.passed) for p in found] == [(p.name, p.passed) for p in expected]
    assert [p.measured for p in found if "peak" not in p.measured] == [
        p.measured for p in expected if "peak" not in p.measured
    ]


def test_what_is_frozen_is_what_it_was_when_it_went(tmp_path, apart):
    """Weights that were moved before stay moved."""
    part = roles(tmp_path).reward.part
    part.model.requires_grad_(True)
    disturb(part)
    part.model.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in part.model.named_parameters()}
    store = Offload(wanted=True)
    store.take(part)
    store.restore()
    assert all(torch.equal(p, before[name]) for name, p in part.model.named_parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_is_given_back_and_numbers_are_the_same(tmp_path):
    cuda = torch.device("cuda")
    model_folder(tmp_path / "policy")
    model_folder(tmp_path / "reward", seed=1, scalar=True)
    options = {"policy_lora": None, "value_lora": None, "device": cuda, "dtype": torch.bfloat16}
    stay = build_roles(tmp_path / "policy", tmp_path / "reward", **options)
    expected = streams(stay, device=cuda)
    wait = build_roles(tmp_path / "policy", tmp_path / "reward", offload_frozen=True, **options)
    for _ in range(3):
        allocated = torch.cuda.memory_allocated()
        wait.offload.fetch()
        found = streams(wait, device=cuda)
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        del found
        wait.offload.send_away()
        assert torch.cuda.memory_allocated() <= allocated
