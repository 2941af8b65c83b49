"""The reward model learns the order people gave, and its card tells the truth about it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from heedful.config.reward import RewardConfig
from heedful.data import tokenise
from heedful.data.pairs import consensus
from heedful.models.export import load_reward_card, save_reward
from heedful.models.packing import attention_tokens
from heedful.models.roles import build_scalar
from heedful.records import Answer, Message, Ranking
from heedful.runs.folder import StageFolder
from heedful.train.reward import micro_batches, reward_card, train_reward
from toy_parts import CPU, model_folder, scalar

RATE = {"learning_rate": 3e-3, "schedule": "constant", "warmup_fraction": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("reward") / "model")


def ranking(n, *texts, category="", ranks=None):
    """Answers from best to worst, unless ``ranks`` says otherwise."""
    answers = tuple(Answer(f"a{k}", text) for k, text in enumerate(texts))
    order = ranks or range(1, len(texts) + 1)
    consensus_ranks = {a.id: rank for a, rank in zip(answers, order, strict=True)}
    return Ranking(f"g{n}", (Message("user", f"Question {n}"),), answers, consensus=consensus_ranks, category=category)


def samples_of(model, records):
    return tokenise.rankings(records, [consensus(r) for r in records], model.tokenizer, max_tokens=200).samples


def separable(num, start=0):
    """The chosen answer always holds the word good, the rejected one bad; lengths say nothing."""
    fill = ["it is ", "I find it ", "", "well, "]
    return [
        ranking(n, fill[n % 4] + "good", fill[(n + n // 4) % 4] + "bad", category="even" if n % 2 == 0 else "odd")
        for n in range(start, start + num)
    ]


def train(model, samples, heldout, path, **options):
    config = RewardConfig(**{"optimizer": RATE, **options})
    stage = StageFolder(path, "reward", 2)
    card = train_reward(model, samples, heldout, config, stage, seed=0)
    return card, [json.loads(line) for line in stage.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    model = scalar(folder)
    samples, heldout = samples_of(model, separable(64)), samples_of(model, separable(16, start=200))
    card, rows = train(model, samples, heldout, tmp_path_factory.mktemp("trained"), epochs=4)
    return model, card, rows, heldout


def test_REW_08_separable_pairs_are_learned_and_turned_labels_turn_the_accuracy(trained):
    model, card, rows, heldout = trained
    assert card.accuracy >= 0.95 and rows[-1]["reward/margin"] > 0 and rows[-1]["reward/accuracy"] >= 0.95
    assert card.num_pairs == card.num_prompts == 16 and card.loss < 0.2 < rows[0]["reward/loss_nats"]
    assert card.accuracy_low <= card.accuracy <= card.accuracy_high
    assert card.accuracy_by_category.keys() == {"even", "odd"}
    assert rows[-1]["reward/heldout_accuracy"] == card.accuracy
    turned = [dataclasses.replace(s, ranks=[3 - r for r in s.ranks]) for s in heldout]
    other = reward_card(model, turned, RewardConfig(), seed=0)
    assert other.accuracy == pytest.approx(1 - card.accuracy) and other.loss > 1
    assert (other.score_mean, other.score_std) == (card.score_mean, card.score_std)


def test_REW_05_the_loss_is_a_mean_over_prompts_whatever_their_order(folder, tmp_path):
    """Alone, together, in another order: the loss of three prompts is the mean of their losses."""
    records = [ranking(0, "a", "bb"), ranking(1, "one", "two", "three", "four"), ranking(2, "x", "y", "z")]
    alone = [_first_row(folder, [record], tmp_path / f"a{n}")["reward/loss_nats"] for n, record in enumerate(records)]
    assert max(alone) - min(alone) > 0.01
    for n, order in enumerate(([0, 1, 2], [2, 0, 1], [1, 2, 0])):
        row = _first_row(folder, [records[i] for i in order], tmp_path / f"b{n}")
        assert row["reward/loss_nats"] == pytest.approx(sum(alone) / 3, rel=1e-5)


def _first_row(folder, records, path):
    model = scalar(folder)
    samples = samples_of(model, records)
    return train(model, samples, samples, path, prompts_per_step=len(records))[1][0]


def test_the_cut_into_micro_batches_changes_nothing(folder, tmp_path):
    records = [ranking(n, *("word " * (1 + (n * k) % 5) + str(k) for k in range(2 + n % 3))) for n in range(8)]
    found = []
    slow = {**RATE, "epsilon": 1e-2}
    for micro_batch_tokens in (1, 300, 10**6):
        model = scalar(folder)
        samples = samples_of(model, records)
        config = RewardConfig(micro_batch_tokens=micro_batch_tokens)
        num = len(micro_batches(samples, config, model.pad_id, attention_tokens=attention_tokens(model)))
        assert num == {1: 8, 10**6: 1}.get(micro_batch_tokens, num) and (num in (1, 8) or 1 < num < 8)
        card, rows = train(model, samples, samples, tmp_path / str(num), epochs=2, optimizer=slow,
                           micro_batch_tokens=micro_batch_tokens)  # fmt: skip
        found.append((torch.cat([p.detach().flatten() for p in model.trainable_parameters().values()]), rows, card))
    for weights, rows, card in found[1:]:
        assert torch.allclose(weights, found[0][0], atol=1e-5)
        for name in ("reward/loss_nats", "reward/gradient_norm", "reward/accuracy", "reward/margin"):
            assert [r[name] for r in rows] == pytest.approx([r[name] for r in found[0][1]], rel=1e-4, abs=1e-6)
        assert card.loss == pytest.approx(found[0][2].loss, rel=1e-4) and card.accuracy == found[0][2].accuracy


def test_REW_03_scores_do_not_depend_on_the_batch(trained):
    model, *_ = trained
    asked = [(Message("user", "Q" * n),) for n in range(1, 8)]
    said = ["good" * n for n in range(1, 8)]
    alone = [model.score_texts([p], [a], micro_batch_tokens=1)[0] for p, a in zip(asked, said, strict=True)]
    for budget in (1, 60, 150, 10**6):
        assert model.score_texts(asked, said, micro_batch_tokens=budget) == pytest.approx(alone, abs=1e-4)
        assert model.score_texts(asked[::-1], said[::-1], micro_batch_tokens=budget) == pytest.approx(
            alone[::-1], abs=1e-4
        )
    assert max(alone) - min(alone) > 0.01


SCORE = """
import json, sys, torch
from heedful.models.roles import build_scalar
from heedful.records import Message
model = build_scalar(sys.argv[1], lora=None, device=torch.device("cpu"), dtype=torch.float32)
texts = json.loads(sys.argv[2])
print(json.dumps(model.score_texts([(Message("user", "Q"),)] * len(texts), texts, micro_batch_tokens=500)))
"""


def test_EXP_01_a_new_process_gives_the_same_scores(trained, tmp_path):
    model, card, *_ = trained
    texts = ["good", "bad", *("x" * n for n in range(1, 9))]
    before = model.score_texts([(Message("user", "Q"),)] * 10, texts, micro_batch_tokens=500)
    save_reward(model.model, model.tokenizer, tmp_path / "m", score_mean=card.score_mean, score_std=card.score_std,
                card=card)  # fmt: skip
    assert load_reward_card(tmp_path / "m") == card
    command = [sys.executable, "-c", SCORE, str(tmp_path / "m"), json.dumps(texts)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found == pytest.approx(before, abs=1e-5)
    again = build_scalar(tmp_path / "m", lora=None, device=CPU, dtype=torch.float32)
    fresh = scalar(model_folder(tmp_path / "fresh"))
    assert not torch.allclose(again.base.score.weight, fresh.base.score.weight, atol=1e-3)


def test_label_smoothing_keeps_scores_from_running_away(folder, tmp_path):
    stds = []
    for n, smoothing in enumerate((0.0, 0.3)):
        model = scalar(folder)
        samples = samples_of(model, separable(32))
        stds.append(train(model, samples, samples, tmp_path / str(n), epochs=4, label_smoothing=smoothing)[0].score_std)
    assert stds[1] < 0.7 * stds[0]


@pytest.mark.parametrize("where", ["weights", "scores"])
def test_a_nan_never_moves_the_reward_model(folder, tmp_path, where):
    from heedful.errors import GuardError

    model = scalar(folder)
    with torch.no_grad():
        (model.base.model.norm.weight if where == "weights" else model.base.score.weight).view(-1)[0] = float("nan")
    before = {n: p.detach().clone() for n, p in model.trainable_parameters().items()}
    with pytest.raises(GuardError, match="reward .* is not finite at step 0"):
        train(model, samples_of(model, separable(8)), [], tmp_path)
    assert all(torch.equal(p.nan_to_num(), before[n].nan_to_num()) for n, p in model.trainable_parameters().items())
