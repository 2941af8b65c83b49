"""benchmarks/ppo_on_gpu.py at its toy shape on the CPU, and what makes clocks right on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from heedful.config.ppo import PPOConfig
from heedful.data.chat import answer_text, prompt_ids, scored_ids
from heedful.models.roles import build_roles
from heedful.plan.shape import NAMED, shape_of
from heedful.train.statistics import Clock

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import ceilings  # noqa: E402
import ppo_on_gpu  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def quick_ceilings(monkeypatch):
    monkeypatch.setattr(ppo_on_gpu, "matrix_operations_per_second", lambda dtype, device: 1e12)
    monkeypatch.setattr(ppo_on_gpu, "bytes_per_second", lambda device: 1e10)


def asked(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["ppo_on_gpu.py", "--shape", "tiny", "--device", "cpu", *map(str, words)])
    ppo_on_gpu.main()


@pytest.mark.parametrize("roles", ["separate", "shared", "trunk"])
def test_a_run_and_its_figures(roles, quick_ceilings, tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    asked(monkeypatch, "--roles", roles, "--batch", 3, "--prompt_tokens", 40, "--new_tokens", 6, "--updates", 2,
          "--warm_up", 1, "--micro_batch_tokens", 100, "--out", out)  # fmt: skip
    found, text = json.loads(out.read_text()), capsys.readouterr().out
    assert {len(found["phases"][phase]) for phase in ("rollout", "scoring", "training")} == {3}
    for seconds, *phases in zip(found["seconds"], *found["phases"].values(), strict=True):
        assert 0 < sum(phases) <= seconds
    seconds = sorted(found["seconds"][1:])
    assert f"pairs per second                        {3 / (sum(seconds) / 2):.3f}" in text
    assert found["memory"]["measured_bytes"] > 0 and found["memory"]["planned_bytes"] > 0
    assert found["reserved_bytes"] is None and "reserved" not in text
    assert all(0 < x < 1 for x in found["bound_seconds"].values())
    planned = found["planned_seconds"]
    assert set(planned) == {"rollout", "scoring", "training"} and all(planned.values())


def test_the_shape_is_the_published_one():
    for name, dimensions in zip(("opt-1.3b", "opt-350m"), ppo_on_gpu.SHAPES["opt-1.3b"], strict=True):
        config = transformers.OPTConfig(**dimensions).to_dict()
        assert shape_of(config, name=name) == NAMED[name]


def test_an_answer_is_read_as_the_tokens_that_were_sampled():
    tokenizer = ppo_on_gpu.tokenizer_of(160)
    assert len(tokenizer) == 160
    for prompt, ids in ppo_on_gpu.make_prompts(tokenizer, 3, 45, seed=1):
        assert len(ids) == 45
        answer = list(range(3, 160))
        read = scored_ids(tokenizer, prompt.messages, answer_text(tokenizer, answer))
        assert read == [*prompt_ids(tokenizer, prompt.messages), *answer, tokenizer.eos_token_id]
    with pytest.raises(SystemExit, match="leaves no room"):
        ppo_on_gpu.make_prompts(tokenizer, 1, 5, seed=1)


def test_the_operations_that_an_update_needs(tmp_path):
    policy, reward = ppo_on_gpu.make_models(tmp_path, "tiny", CPU)
    roles = build_roles(policy, reward, policy_lora=None, value_lora=None, device=CPU, dtype=torch.float32)
    large, head = 2 * (4 * 32 * 32 + 2 * 32 * 64), 160 * 32
    small = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 16 * 8  # with the projections of a narrow embedding
    words = type("Asked", (), {"batch": 2, "prompt_tokens": 10, "new_tokens": 5})
    read, counted = 2 * 14, 2 * 5
    forward, value = 2 * (large * read + head * counted), 2 * small * read
    score = 2 * forward + value + 2 * small * 2 * 16
    config = {"prompts_per_step": 2, "steps": 1, "sampling": {"max_new_tokens": 5}}
    once = ppo_on_gpu.needed_operations(words, PPOConfig(**config), roles)
    assert once == {"scoring": score, "training": 2 * forward + 3 * value}  # the policy's forward is kept
    cut = ppo_on_gpu.needed_operations(words, PPOConfig(**config, micro_batch_tokens=14), roles)
    assert cut == {"scoring": score, "training": 3 * forward + 3 * value}


def test_a_forward_that_the_scoring_made_is_not_counted_again():
    weights = ceilings.Weights(trunk=600, head=400, bytes_each=2)
    kept = ceilings.training_operations(weights, read=10, counted=5, trunks=2, full=True, kept={"policy"})
    assert kept == 2 * (5 * 600 * 10 + 2 * 400 * 5)  # two backward passes of the policy, all three of the value
    options = {"prompts_per_step": 4, "micro_batch_tokens": 40}
    assert ceilings.kept_forwards(PPOConfig(**options), 10) == {"policy"}
    both = ceilings.kept_forwards(PPOConfig(**options, activation_checkpointing=True), 10)
    assert both == ceilings.kept_forwards(PPOConfig(**options, value_from="trunk"), 10) == {"policy", "value"}
    none = [({}, 11), ({"epochs": 2}, 10), ({"minibatches": 2}, 10)]
    assert not any(ceilings.kept_forwards(PPOConfig(**options, **more), length) for more, length in none)
    on_trunk = ceilings.training_operations(weights, read=10, counted=5, trunks=1, full=True, kept=both)
    assert on_trunk == 2 * (2 * 600 * 10 + 2 * 400 * 5)
    two = ceilings.training_operations(weights, read=10, counted=5, trunks=2, full=True, kept=both)
    assert two == 2 * (4 * 600 * 10 + 2 * 400 * 5)


def test_the_bound_of_a_decoding_reads_keys_and_values():
    weights = ceilings.Weights(trunk=600, head=400, bytes_each=2)
    speeds = {"bytes_per_second": 1000.0, "flops": 1e12}
    found = ceilings.bound_seconds([3, 3], [2, 1], weights, speeds, cache_bytes=100)
    assert found["bandwidth"] == pytest.approx(2.0 + 0.6 + 2.0 + 0.4)  # two rows of 3, then one of 4
    assert found["step by step"] == pytest.approx(found["bandwidth"])


def test_without_the_gpu_that_is_asked_for_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["ppo_on_gpu.py"])
    with pytest.raises(SystemExit, match="device 'cuda' is not there"):
        ppo_on_gpu.main()


@pytest.mark.parametrize("clock", ["of heedful", "of the benchmarks"])
def test_clocks_wait_for_a_gpu(clock, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("waited"))
    if clock == "of heedful":
        Clock().mark("seconds_train")
        assert waits == ["waited"]
    else:
        ceilings.timed(lambda: waits.append("ran"))
        assert waits == ["waited", "ran", "waited"]
