"""A bad number put into every stream in turn: named where it starts, no weight moves, and the file shows it again."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from heedful.config.ppo import PPOConfig, PTXConfig, SamplingConfig
from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.errors import CheckpointError, GuardError, NonFiniteError
from heedful.records import TokenSample
from heedful.rollout.fake import FakeEngine
from heedful.rollout.score import Scoring
from heedful.runs.folder import StageFolder
from heedful.train import forensics, guard
from heedful.train.ppo import train_ppo
from heedful.train.rerun import rerun
from toy_parts import prompts, roles

LORA = LoraConfig(rank=4)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("forensics-models")


class Scores:
    """A source that gives the same scores at every step."""

    name, weight = "given", 1.0

    def __init__(self, *scores):
        self.scores = scores

    def __call__(self, prompts, completions):
        return [self.scores[i % len(self.scores)] for i in range(len(completions))]


def break_in(parts, path, *, scores=(0.5, -0.5), weight=1.0, demonstrations=(), **options):
    """Train, expect a guard to stop it with no weight moved, and return its error and its replay file."""
    config = PPOConfig(**{"steps": 2, "prompts_per_step": 6, "sampling": SamplingConfig(max_new_tokens=4),
                          "micro_batch_tokens": 100, **options})  # fmt: skip
    ends = end_token_ids(parts.policy.tokenizer)
    engine = FakeEngine(lambda r: [50 + int(r.prompt_id[1:]), 51, ends[0]], ends, parts.policy.tokenizer)
    before = weights(parts)
    source = Scores(*scores)
    source.weight = weight
    with pytest.raises(GuardError) as caught:
        train_ppo(parts, Scoring([source]), prompts(parts.policy.tokenizer), config,
                  StageFolder(path, "ppo", 3), seed=0, engine=engine, demonstrations=demonstrations)  # fmt: skip
    after = weights(parts)
    assert all(torch.equal(after[n].nan_to_num(7.0), x.nan_to_num(7.0)) for n, x in before.items()), "a weight moved"
    (file,) = path.glob("replay-step-*.pt")
    assert str(caught.value).endswith(f"; replay it: heedful replay {file}")
    return caught.value, file


def weights(parts):
    return {f"{side}/{name}": p.detach().clone() for side in ("policy", "value")
            for name, p in getattr(parts, side).trainable_parameters().items()}  # fmt: skip


def again(file, fresh):
    """The second run on models as the folders have them, with the weights of the file."""
    record = forensics.read(file)
    record.put_weights(fresh)
    return rerun(record, fresh)


def damage(module, name="weight", place=3, value=NAN):
    with torch.no_grad():
        getattr(module, name).view(-1)[place] = value


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_log_probs(models, tmp_path, lora, value):
    parts = roles(models, lora=lora)
    layer = parts.policy.base.model.layers[1].mlp.down_proj
    damage(layer if lora is None else layer.lora_B["default"], value=value)
    error, file = break_in(parts, tmp_path)
    assert isinstance(error, NonFiniteError) and error.stream == "log-probs" and error.step == 0
    assert str(error).startswith("log-probs is not finite at step 0 (samples: p")
    found = again(file, roles(models, lora=lora))
    assert found.reproduced and set(found.samples) == set(error.ids) and list(found.streams) == ["log-probs"]
    assert found.module.startswith("policy: ") and "layers.1.mlp.down_proj" in found.module
    assert found.module_cause.endswith("weight is not finite")
    assert len(found.bad_weights) == 1 and "down_proj" in found.bad_weights[0]
    assert found.gradient is None


@pytest.mark.parametrize("module, cause", [
    ("model.norm", "from finite inputs and weights: it overflows"),
    ("model.layers.1.mlp.down_proj", "from inputs that were bad already"),  # gate × up, of no module, overflows
])  # fmt: skip
def test_weights_that_are_finite_and_overflow(models, tmp_path, module, cause):
    parts = roles(models)
    with torch.no_grad():
        if module == "model.norm":
            parts.policy.base.model.norm.weight.fill_(3e38)
        else:
            parts.policy.base.model.layers[1].mlp.gate_proj.weight.mul_(1e30)
            parts.policy.base.model.layers[1].mlp.up_proj.weight.mul_(1e30)
    _, file = break_in(parts, tmp_path)
    found = again(file, roles(models))
    assert found.reproduced and (found.module, found.module_cause) == (f"policy: {module}", cause)
    assert found.bad_weights == []


def test_only_the_micro_batch_at_work_runs_again(models, tmp_path):
    """One answer is bad, by a token that it alone has; it is named, and its micro-batch is what is in the file."""
    parts = roles(models)
    damage(parts.policy.base.model.embed_tokens, place=53 * 32)
    error, file = break_in(parts, tmp_path, micro_batch_tokens=1)
    assert error.ids == ("p3/0",)
    (batch,) = forensics.read(file).micro_batches
    assert batch.ids == ("p3/0",)
    found = again(file, roles(models))
    assert found.reproduced and found.streams["log-probs"].num_values == 3
    assert "embed_tokens" in found.module and found.phase == "scoring"


def test_reference(models, tmp_path):
    parts = roles(models)
    damage(parts.reference.part.base.model.norm)
    error, file = break_in(parts, tmp_path)
    assert error.stream == "reference log-probs"
    found = rerun(forensics.read(file), parts)
    assert found.reproduced and found.module == "reference: model.norm"
    assert found.streams["log-probs"].num_bad == 0 and found.streams["reference log-probs"].mean is None
    healthy = again(file, roles(models))
    assert healthy.error is None and not healthy.reproduced and healthy.module is None


@pytest.mark.parametrize("value_from", ["reward", "trunk"])
def test_value_head(models, tmp_path, value_from):
    parts = roles(models, value_from=value_from)
    damage(parts.value.part.model if value_from == "trunk" else parts.value.part.base.score)
    error, file = break_in(parts, tmp_path, value_from=value_from)
    assert error.stream == "values"
    found = again(file, roles(models, value_from=value_from))
    assert (
        found.reproduced and found.module == {"reward": "value: score", "trunk": "value: the whole model"}[value_from]
    )


def test_scores(models, tmp_path):
    """Ten times 1e38 is a finite number of Python and none of float32."""
    error, file = break_in(roles(models), tmp_path, scores=(0.1, 1e38), weight=10.0)
    assert error.stream == "scores" and len(error.ids) == 3
    found = again(file, roles(models))
    assert found.reproduced and found.module is None and found.streams["scores"].num_bad == 3
    assert list(found.streams) == ["log-probs", "entropy", "reference log-probs", "values", "scores"]


def test_advantages(models, tmp_path):
    error, file = break_in(roles(models), tmp_path, scores=(3e38, -3e38), score_clip=None)
    assert error.stream == "advantages"
    found = again(file, roles(models))
    assert found.reproduced and found.streams["rewards"].num_bad == 0 < found.streams["advantages"].num_bad


def test_policy_loss(models, tmp_path):
    """Advantages that are finite each and whose sum is not."""
    error, file = break_in(roles(models), tmp_path, scores=(3e38,), score_clip=None, whiten_advantages=False)
    assert error.stream == "the policy loss" and len(error.ids) > 1
    record = forensics.read(file)
    assert record.phase == "policy update" and record.minibatch == (0, 0)
    assert record.micro_batches[-1].tokens.ids == error.ids
    found = again(file, roles(models))
    assert found.reproduced and found.samples == error.ids and found.module is None
    assert found.streams["ratio"].minimum == found.streams["ratio"].maximum == 1
    assert found.streams["advantages"].num_bad == 0 and found.streams["the policy loss"].num_bad == 1


def test_value_loss(models, tmp_path):
    error, file = break_in(roles(models), tmp_path, scores=(1e20,), score_clip=None, value_warmup_steps=1)
    assert error.stream == "the value loss"
    assert again(file, roles(models)).reproduced and forensics.read(file).phase == "value update"


def test_demonstrations_mixed_in(models, tmp_path):
    """A letter that only a demonstration has."""
    parts = roles(models)
    damage(parts.policy.base.model.embed_tokens, place=60 * 32)
    samples = [TokenSample([5, 60, 6], [False, True, True], "d1")]
    error, file = break_in(parts, tmp_path, demonstrations=samples, ptx=PTXConfig(prompts_per_step=1))
    assert error.stream == "the policy loss"
    found = again(file, roles(models))
    assert found.reproduced and "embed_tokens" in found.module and found.streams["the policy loss"].num_bad == 1


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_gradient_of_a_module(models, tmp_path, lora):
    """NaN in the backward pass of the second layer's attention: that layer is named, not the first one."""
    parts = roles(models, lora=lora)
    attention = parts.policy.base.model.layers[1].self_attn.o_proj
    attention.register_full_backward_hook(lambda module, into, out: (into[0] * NAN,))
    error, file = break_in(parts, tmp_path)
    assert error.stream == "the policy gradient" and len(error.ids) == 6
    assert "layers.1." in error.module and "mlp" not in error.module and f"from {error.module} backwards" in str(error)
    record = forensics.read(file)
    assert sum(len(b.tokens.ids) for b in record.micro_batches) == 6, "the gradient is that of the whole minibatch"
    found = rerun(record, parts)
    assert found.reproduced and "layers.1.self_attn" in found.gradient and found.module is None
    assert found.streams["the policy gradient"].num_bad > 0 == found.streams["the policy loss"].num_bad
    assert not again(file, roles(models, lora=lora)).reproduced


def test_gradient_whose_norm_overflows(models, tmp_path):
    error, file = break_in(roles(models), tmp_path, scores=(1e30,), score_clip=None, whiten_advantages=False)
    assert error.stream == "the policy gradient" and "its norm overflows, the largest is that of" in str(error)
    found = again(file, roles(models))
    assert found.reproduced and found.gradient is None and found.streams["the policy gradient"].num_bad == 0


def test_a_failed_proof_without_a_bad_number(models, tmp_path):
    """Dropout in one forward and not in the other: the ratio is not 1. The second run has the fault or has it not."""
    parts = roles(models)
    hidden = parts.policy.hidden

    def shaken(batch):
        return hidden(batch) * (1.1 if torch.is_grad_enabled() else 1.0)

    parts.policy.hidden = shaken
    error, file = break_in(parts, tmp_path)
    assert not isinstance(error, NonFiniteError) and "importance ratio differs from 1" in str(error)
    found = rerun(forensics.read(file), parts)
    assert found.reproduced and found.streams["ratio"].minimum < 0.9 and "ratio" in found.error
    assert not again(file, roles(models)).reproduced


# what the recorder does with the file


def recorder(models, path):
    return forensics.Recorder(StageFolder(path, "ppo", 3), roles(models), PPOConfig())


def fail(recorder, step=0, error=None):
    recorder.begin(step)
    with pytest.raises(GuardError) as caught, recorder:
        recorder.note(phase="scoring", rollouts=[], kl_coefficient=0.1)
        raise error or NonFiniteError("x is not finite", stream="x", step=step)
    return str(caught.value)


def test_one_file_a_stage_and_the_newest(models, tmp_path):
    one = recorder(models, tmp_path)
    for step in (3, 12, 5):
        fail(one, step)
    (file,) = tmp_path.iterdir()
    assert file.name == "replay-step-000005.pt" and forensics.read(file).step == 5
    assert forensics.read(file).error == {"message": "x is not finite", "stream": "x", "ids": [], "module": None}


def test_a_full_disk_does_not_hide_the_error(models, tmp_path, monkeypatch):
    one = recorder(models, tmp_path)
    fail(one, 3)

    def full(content, handle):
        handle.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert fail(one, 4) == "x is not finite; no replay file could be written ([Errno 28] No space left on device)"
    assert [p.name for p in tmp_path.iterdir()] == ["replay-step-000003.pt"]


def test_other_errors_pass_and_leave_nothing(models, tmp_path):
    one = recorder(models, tmp_path)
    with pytest.raises(ValueError, match="^mine$"), one:
        raise ValueError("mine")
    with one:
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_minibatch_forgets_the_one_before(models, tmp_path):
    one, (batch,) = recorder(models, tmp_path), token_batches("a")
    one.note(phase="policy update", minibatch=(0, 0), micro_batch=batch)
    one.note(phase="policy update", micro_batch=batch)
    one.note(phase="value update", micro_batch=batch)
    one.note(minibatch=(1, 2))
    one.note(phase="policy update", micro_batch=dataclasses.replace(batch, ids=("b",)))
    with pytest.raises(GuardError), one:
        raise GuardError("x")
    found = forensics.read(tmp_path / "replay-step-000000.pt")
    assert [b.ids for b in found.micro_batches] == [("b",)] and found.minibatch == (1, 2)
    assert found.phase == "policy update" and torch.equal(found.micro_batches[0].inputs_BT, batch.inputs_BT)


def token_batches(*ids):
    from heedful.data.collate import token_batch

    return [token_batch([TokenSample([1, 2, 3], [False, True, True], id)], 0) for id in ids]


def test_a_file_that_is_none_is_refused_in_one_sentence(models, tmp_path):
    fail(recorder(models, tmp_path), 1)
    (good,) = tmp_path.iterdir()
    content = torch.load(good, weights_only=True)
    with pytest.raises(CheckpointError, match="nowhere.pt: no such file"):
        forensics.read(tmp_path / "nowhere.pt")
    bad = tmp_path / "bad.pt"
    for damaged in (b"", b"hello", good.read_bytes()[:-200], b"\0" * 5000):
        bad.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="bad.pt: not a replay file, or damaged"):
            forensics.read(bad)
    for other in ([1, 2], {"weights": {}}, {"version": 1}, {**content, "config": {"steps": "many"}}):
        torch.save(other, bad)
        with pytest.raises(CheckpointError, match="bad.pt: not a replay file, or damaged"):
            forensics.read(bad)
    torch.save({**content, "version": 99}, bad)
    with pytest.raises(CheckpointError, match=r"another version of heedful \(format 99, this one 1\)"):
        forensics.read(bad)
    shutil.copy(good, bad)
    with pytest.raises(CheckpointError, match="the recorded policy weights do not fit the run's model"):
        forensics.read(bad).put_weights(roles(models, lora=LORA))


def test_guard_names_the_last_bad_weight_and_every_sample_of_a_scalar():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    layers(torch.ones(1, 2)).sum().backward()
    named = dict(layers.named_parameters())
    guard.gradients(named, 1.0, model="policy", step=3)
    named["0.weight"].grad[0, 0] = named["1.weight"].grad[1, 1] = INF
    with pytest.raises(NonFiniteError, match=r"step 3, from 1.weight backwards \(2 of 6 weights\)") as caught:
        guard.gradients(named, torch.tensor(NAN), model="policy", step=3, ids=("a",))
    assert (caught.value.module, caught.value.ids, caught.value.stream) == ("1.weight", ("a",), "the policy gradient")
    with pytest.raises(NonFiniteError, match=r"samples: a, b\)"):
        guard.finite("the loss", torch.tensor(INF), step=0, ids=("a", "b"))
