"""Fine-tuning: what is learned, and that the cut into batches changes nothing."""

from __future__ import annotations

import json
import math

import pytest
import torch

from heedful.config.recipe import SFTConfig
from heedful.data import tokenise
from heedful.data.chat import end_token_ids, prompt_ids
from heedful.records import Demonstration, Message, TokenSample
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.hf import HFEngine
from heedful.runs.folder import StageFolder
from heedful.train.sft import heldout_loss, micro_batches, train_sft
from toy_parts import model_folder, policy

RATE = {"learning_rate": 1e-2, "schedule": "constant", "warmup_fraction": 0.0, "epsilon": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("sft") / "model")


def demonstration(n, answer="ok " * 2):
    return Demonstration(f"d{n}", (Message("user", f"Question {'very ' * (n % 3)}{n}"), Message("assistant", answer)))


def samples_of(part, num=8):
    records = [demonstration(n, "yes " * (1 + 2 * n)) for n in range(num)]
    return tokenise.demonstrations(records, part.tokenizer, max_tokens=256).samples


def train(part, samples, path, **options):
    config = SFTConfig(**{"epochs": 1, "prompts_per_step": 8, "optimizer": RATE, **options})
    stage = StageFolder(path, "sft", 1)
    results = train_sft(part, samples, samples[:2], config, stage, seed=0)
    return results, [json.loads(line) for line in stage.metrics.read_text().splitlines()]


def weights(part):
    return torch.cat([p.detach().flatten() for p in part.trainable_parameters().values()]).clone()


def test_SFT_01_the_end_is_learned_at_the_right_place(folder, tmp_path):
    part = policy(folder)
    assert part.tokenizer.eos_token_id in end_token_ids(part.tokenizer)
    assert part.pad_id not in end_token_ids(part.tokenizer)
    record = demonstration(0, "blue sky")
    samples = tokenise.demonstrations([record], part.tokenizer, max_tokens=256).samples
    fast = {**RATE, "epsilon": 1e-8, "learning_rate": 3e-3}
    results, rows = train(part, samples, tmp_path, epochs=40, prompts_per_step=1, optimizer=fast)
    assert rows[0]["sft/loss_nats"] > 4 and results["heldout_loss_nats"] < 0.05
    assert rows[0]["sft/num_tokens"] == len("blue sky") + 1
    request = Request("d0", 0, prompt_ids(part.tokenizer, record.messages[:1]))
    (said,) = HFEngine(part, end_token_ids(part.tokenizer)).generate([request], Sampling(30, 0.0), seed=0)
    assert said.text == "blue sky" and said.finish_reason == "stop" and len(said.ids) == len("blue sky") + 1


def test_SFT_05_a_row_without_a_counted_token_changes_nothing(folder, tmp_path):
    normal = samples_of(policy(folder))[:1]
    empty = TokenSample([5, 6, 7, 8] * 30, [False] * 120, "empty")
    found = []
    for n, chosen in enumerate((normal, [*normal, empty])):
        part = policy(folder)
        _, rows = train(part, chosen, tmp_path / str(n), prompts_per_step=len(chosen))
        found.append((rows[0]["sft/loss_nats"], rows[0]["sft/num_tokens"], weights(part)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6) and found[0][1] == found[1][1]
    assert torch.allclose(found[0][2], found[1][2], atol=1e-6)

    part = policy(folder)
    before = weights(part)
    results, rows = train(part, [empty, empty], tmp_path / "only", prompts_per_step=2)
    assert rows[0]["sft/loss_nats"] == 0 and rows[0]["sft/gradient_norm"] == 0
    assert torch.equal(weights(part), before) and results["heldout_loss_nats"] is None


def test_SFT_07_PPO_21_the_cut_into_micro_batches_changes_nothing(folder, tmp_path):
    """Eight rows of unequal length as 8×1, in pieces, and as 1×8."""
    found = []
    for micro_batch_tokens, num_batches in ((1, 8), (200, None), (10**6, 1)):
        part = policy(folder)
        config = SFTConfig(micro_batch_tokens=micro_batch_tokens)
        count = len(micro_batches(samples_of(part), config, part.pad_id))
        assert count == num_batches if num_batches else 1 < count < 8
        _, rows = train(part, samples_of(part), tmp_path / str(count), epochs=2, micro_batch_tokens=micro_batch_tokens)
        found.append((rows, weights(part), heldout_loss(part, samples_of(part), config)))
    for rows, after, loss in found[1:]:
        assert torch.allclose(after, found[0][1], atol=1e-5) and loss == pytest.approx(found[0][2], rel=1e-5)
        for name in ("sft/loss_nats", "sft/gradient_norm"):
            assert [row[name] for row in rows] == pytest.approx([row[name] for row in found[0][0]], rel=1e-4)
    assert not torch.allclose(weights(policy(folder)), found[0][1], atol=1e-3)


@pytest.mark.parametrize("row_tokens", [150, 2000])
def test_packing_changes_nothing(folder, tmp_path, row_tokens):
    found = []
    for packing in (False, True):
        part = policy(folder)
        config = SFTConfig(packing=packing, micro_batch_tokens=row_tokens)
        batches = micro_batches(samples_of(part), config, part.pad_id)
        assert not packing or len(batches) < 8
        _, rows = train(part, samples_of(part), tmp_path / str(packing), packing=packing, micro_batch_tokens=row_tokens)
        found.append((rows[0], weights(part)))
    (padded, a), (packed, b) = found
    assert torch.allclose(a, b, atol=1e-5)
    for name in ("sft/loss_nats", "sft/gradient_norm", "sft/num_tokens"):
        assert padded[name] == pytest.approx(packed[name], rel=1e-4)


def test_PPO_20_the_rate_falls_over_the_optimizer_steps(folder, tmp_path):
    linear = {"learning_rate": 1e-5, "schedule": "linear", "warmup_fraction": 0.25}
    part = policy(folder)
    _, rows = train(part, samples_of(part), tmp_path, epochs=2, prompts_per_step=2, optimizer=linear)
    assert [row["sft/learning_rate"] for row in rows] == pytest.approx(
        [1e-5 * x for x in (0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)]
    )
    assert [row["sft/epoch"] for row in rows] == pytest.approx([0.25 * n for n in range(1, 9)])


def test_every_demonstration_is_met_once_an_epoch(folder, tmp_path):
    part = policy(folder)
    samples = samples_of(part, 6)
    _, rows = train(part, samples, tmp_path, epochs=2, prompts_per_step=4)
    assert len(rows) == 3
    assert sum(row["sft/num_tokens"] for row in rows) == 2 * sum(sum(s.loss_mask) for s in samples)
    assert all(math.isfinite(row["sft/loss_nats"]) for row in rows)
