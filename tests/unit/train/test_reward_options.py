"""Every option of the reward model: what it does, that micro-batches change nothing, that a resume is exact."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from test_reward_loop import CPU, RATE, ranking, samples_of, separable, train
from test_stop_at_the_end import stop_at

from heedful.config.reward import RewardConfig
from heedful.config.section import LoraConfig
from heedful.data import tokenise
from heedful.data.collate import ranking_batch
from heedful.errors import DataError
from heedful.models.roles import build_scalar
from heedful.objectives import preference
from heedful.records import Answer, Judgement, Message, Ranking
from heedful.runs.folder import StageFolder
from heedful.train import loop
from heedful.train.length_correction import correct_length
from heedful.train.reward import micro_batches, train_reward
from heedful.train.reward_loss import LengthHead, RewardLoss
from heedful.train.watch import OverfittingWatch
from toy_parts import disturb, model_folder, scalar

SLOW = {**RATE, "epsilon": 1e-2}
OPTIONS = {
    "labels": {"labels": "votes", "ties": "half", "margin": 0.3},
    "pairs": {"weigh": "pairs", "labels": "votes", "ties": "half"},
    "every_token": {"form": "every_token", "ties": "half", "margin": 0.3},
    "penalties": {"zero_centre": 0.1, "length_penalty": 1.0, "max_spread": 0.2, "baits_per_ranking": 1},
    "offset": {"length_offset": 0.7, "weigh": "pairs", "baits_per_ranking": 1, "form": "every_token"},
    "corrected": {"correct_length": True, "length_target": 0.0, "keep": "best", "evaluate_every_steps": 1},
    "length_head": {"length_head": True, "form": "every_token", "baits_per_ranking": 1},
    "best_head": {"train": "head", "keep": "best", "length_head": True, "evaluate_every_steps": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("options") / "model")


def voted(n):
    """Two to four answers of different lengths with two raters, who sometimes disagree; some rankings are all tied."""
    texts = [f"{'word ' * (1 + (n * k) % 4)}{k}" for k in range(2 + n % 3)]
    record = ranking(n, *texts, ranks=[1] * len(texts) if n == 4 else None)
    first = {a.id: record.consensus[a.id] for a in record.answers}
    second = first if n % 2 else {**first, "a0": first["a1"], "a1": first["a0"]}
    return dataclasses.replace(record, rankings=(Judgement("x", first), Judgement("y", second)))


def voted_samples(model, num=8, **options):
    records = [voted(n) for n in range(num)]
    given = {"labels": "votes", "keep_all_tied": True, **options}
    return tokenise.rankings(records, [r.consensus for r in records], model.tokenizer, max_tokens=200, **given).samples


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.base.parameters()])


@pytest.mark.parametrize("name", OPTIONS)
def test_PPO_10_neither_the_cut_into_micro_batches_nor_packing_changes_anything(folder, tmp_path, name):
    found = []
    for micro_batch_tokens, share_prompts in ((150, False), (1, True), (150, True), (10**6, True)):
        model = scalar(folder)
        path = tmp_path / f"{micro_batch_tokens}-{share_prompts}"
        card, rows = train(model, voted_samples(model), voted_samples(model), path, epochs=2, optimizer=SLOW,
                           micro_batch_tokens=micro_batch_tokens, share_prompts=share_prompts,
                           **OPTIONS[name])  # fmt: skip
        found.append((flat(model), rows, card))
    for weights, rows, card in found[1:]:
        assert torch.allclose(weights, found[0][0], atol=2e-5)
        for metric in ("loss_nats", "gradient_norm", "accuracy", "length_correlation"):
            series, first = ([r[f"reward/{metric}"] for r in x] for x in (rows, found[0][1]))
            assert series == pytest.approx(first, rel=1e-3, abs=1e-5)
        assert card.loss == pytest.approx(found[0][2].loss, rel=1e-4)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_shared_prompts_and_exact_resume(folder, tmp_path, monkeypatch, name, share_prompts):
    """Stopped after two of four steps and gone on: the same bits as without a stop."""
    config = RewardConfig(epochs=2, prompts_per_step=4, optimizer=RATE, share_prompts=share_prompts, **OPTIONS[name])

    def run(path, stop=None):
        model = scalar(folder)
        with monkeypatch.context() as patch:
            if stop:
                patch.setattr(loop, "_stop_signals", stop_at(stop))
            stage = StageFolder(path, "reward", 2)
            return train_reward(model, voted_samples(model), voted_samples(model), config, stage, seed=0), flat(model)

    card, weights = run(tmp_path / "straight")
    with pytest.raises(loop.Interrupted):
        run(tmp_path / "stopped", stop=2)
    again, resumed = run(tmp_path / "stopped")
    assert torch.equal(weights, resumed) and again == card
    straight, stopped = (
        [json.loads(line)["reward/loss_nats"] for line in (tmp_path / p / "metrics.jsonl").read_text().splitlines()]
        for p in ("straight", "stopped")
    )
    assert straight == stopped and len(straight) == 4


def loss_of(model, samples, **options):
    """The value and parts of the loss of one step, and of each score's gradient."""
    loss = RewardLoss(model, RewardConfig(**options), seed=0)
    parts = loss.parts([ranking_batch(samples, model.pad_id)])
    return loss(parts[0]), loss, parts[0].batch


def test_the_labels_of_the_data_reach_the_loss(folder):
    """Votes, ties and margins: the step's loss is the objective on the labels, written down by hand."""
    model = scalar(folder)
    record = dataclasses.replace(
        ranking(0, "one", "two two", "three", ranks=[1, 2, 2]),
        rankings=(Judgement("x", {"a0": 1, "a1": 2, "a2": 2}), Judgement("y", {"a0": 2, "a1": 1, "a2": 3}),
                  Judgement("z", {"a0": 1, "a1": 2})),
    )  # fmt: skip
    (sample,) = tokenise.rankings([record], [record.consensus], model.tokenizer, max_tokens=99, labels="votes").samples
    out, _, batch = loss_of(model, [sample], ties="half", margin=0.5)
    a, b, c = model.ranking_scores(batch)[0].tolist()
    logistic = lambda x: math.log1p(math.exp(-x))  # noqa: E731
    first = 2 / 3 * logistic(a - b - 0.5) + 1 / 3 * logistic(b - a + 0.5)
    second, tie = logistic(a - c - 0.5), (logistic(b - c) + logistic(c - b)) / 2
    assert float(out.metrics["loss_nats"]) == pytest.approx((first + second + tie) / 3, rel=1e-5)
    hard, _, _ = loss_of(model, [dataclasses.replace(sample, targets=None)])
    assert float(hard.loss.detach()) == pytest.approx((logistic(a - b) + logistic(a - c)) / 2, rel=1e-5)


@torch.no_grad()
def test_REW_04_every_token_reads_each_answer_and_no_pad(folder):
    """The values that the loss sees are those after each token of each answer, whatever shares its row."""
    model = scalar(folder)
    samples = voted_samples(model, 3, labels="ranks")
    expected = 0.0
    for s in samples:
        T = max(map(len, s.sequences))
        values, ids = torch.zeros(1, len(s.ranks), T), torch.zeros(1, len(s.ranks), T, dtype=torch.int64)
        lengths = [len(x) - s.num_prompt_tokens for x in s.sequences]
        for k, x in enumerate(s.sequences):
            states = model._trunk(
                torch.tensor([x]), torch.ones(1, len(x), dtype=torch.int64), torch.arange(len(x))[None]
            )
            values[0, k, : lengths[k]] = model.scalars(states)[0, s.num_prompt_tokens :]
            ids[0, k, : lengths[k]] = torch.tensor(x[s.num_prompt_tokens :])
        expected += float(preference.every_token(
            values, ids, torch.tensor([lengths]), torch.tensor([s.ranks]), torch.ones(1, len(lengths), dtype=torch.bool)
        ).loss) / 3  # fmt: skip
    for share in (False, True):
        loss = RewardLoss(model, RewardConfig(form="every_token"), seed=0)
        (part,) = loss.parts([ranking_batch(samples, model.pad_id, attention_tokens=1e3 if share else None)])
        assert float(loss(part).loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("target", [0.2, None])
def test_the_length_penalty_follows_the_exact_gradient(folder, target):
    """Slopes found without gradient, then followed: the same as differentiating the penalty of the whole step."""
    model = scalar(folder)
    samples = voted_samples(model, 6, labels="ranks")
    config = RewardConfig(length_penalty=0.7, length_target=target, micro_batch_tokens=150)
    loss = RewardLoss(model, config, seed=0)
    parts = loss.parts(micro_batches(samples, config, model.pad_id, attention_tokens=None))
    assert len(parts) > 1
    for part in parts:
        loss(part).loss.backward()
    cut = [p.grad.clone() for p in model.trainable_parameters().values()]
    model.model.zero_grad()
    batch = ranking_batch(samples, model.pad_id)
    scores = model.ranking_scores(batch)
    correlation = preference.length_correlation(scores, batch.lengths_PK, batch.mask_PK)
    found = float(correlation.detach())
    assert loss.step_metrics()["length_correlation"] == pytest.approx(found, abs=1e-5) and abs(found) > 0.05
    out = preference.ranking(scores, batch.ranks_PK, batch.mask_PK, denominator=6 - 1)  # one ranking is all tied
    if target is None:
        ranks, lengths = [], []
        for s in samples:
            rows = [[-rank for rank in s.ranks], [math.log(len(ids) - s.num_prompt_tokens) for ids in s.sequences]]
            ranks += list(np.array(rows[0]) - np.mean(rows[0]))
            lengths += list(np.array(rows[1]) - np.mean(rows[1]))
        target = np.dot(ranks, lengths) / np.sqrt(np.dot(ranks, ranks) * np.dot(lengths, lengths))
        assert abs(target) > 0.05
    (out.loss + 0.7 * (correlation - target) ** 2).backward()
    whole = [p.grad for p in model.trainable_parameters().values()]
    largest = max(float(b.abs().max()) for b in whole)
    for a, b in zip(cut, whole, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("options", [{}, {"labels": "votes"}, {"weigh": "pairs", "label_smoothing": 0.1}])
def test_the_length_offset_helps_the_loss_and_is_no_part_of_the_scores(folder, options):
    """The loss is that of score + share · β · log length, β being best for length alone; what is told is the score."""
    model = scalar(folder)
    config = RewardConfig(length_offset=0.5, micro_batch_tokens=150, **options)
    samples = voted_samples(model, 12, labels=config.labels)
    batches = micro_batches(samples, config, model.pad_id, attention_tokens=None)
    assert len(batches) > 1
    loss = RewardLoss(model, config, seed=0)
    loss.fit_length(batches)
    with torch.no_grad():
        found = sum(float(loss(part).loss) for part in loss.parts(batches))
    batch = ranking_batch(samples, model.pad_id)
    log_lengths = batch.lengths_PK.clamp(min=1).log()
    num_pairs = preference.num_pairs(batch.ranks_PK, batch.mask_PK, targets_PKK=batch.targets_PKK, ties=config.ties)
    weights = (num_pairs if config.weigh == "pairs" else num_pairs.sign()).float()

    def cost(scores):
        return float(preference.ranking(
            scores, batch.ranks_PK, batch.mask_PK, targets_PKK=batch.targets_PKK, weights_P=weights,
            label_smoothing=config.label_smoothing, denominator=float(weights.sum()),
        ).loss)  # fmt: skip

    beta = loss.length_slopes_H[0] / 0.5
    assert abs(beta) > 0.05
    assert cost(beta * log_lengths) < min(cost((beta - 0.1) * log_lengths), cost((beta + 0.1) * log_lengths))
    with torch.no_grad():
        scores = model.ranking_scores(batch)
    assert found == pytest.approx(cost(scores + 0.5 * beta * log_lengths), rel=1e-5)
    plain = preference.length_correlation(scores, batch.lengths_PK, batch.mask_PK)
    assert loss.step_metrics()["length_correlation"] == pytest.approx(float(plain), abs=1e-5)


def test_length_that_orders_every_pair_leaves_nothing_to_learn(folder):
    model = scalar(folder)
    samples = samples_of(model, [ranking(n, "it is, as far as I can tell, good", "bad") for n in range(6)])
    loss = RewardLoss(model, RewardConfig(length_offset=1.0), seed=0)
    with pytest.raises(DataError, match="length alone orders every training pair"):
        loss.fit_length([ranking_batch(samples, model.pad_id)])


def long_wins(num, start=0):
    """Good beats bad always; in four of five rankings the longer answer is the good one too."""
    long = "it is, as far as I can tell, "
    return [
        ranking(n, ("" if n % 5 == 0 else long) + "good", (long if n % 5 == 0 else "") + "bad")
        for n in range(start, start + num)
    ]


@pytest.mark.parametrize("options", [
    {"length_penalty": 3.0, "length_target": 0.0}, {"length_head": True},
    {"correct_length": True, "length_target": 0.0, "baits_per_ranking": 1},
])  # fmt: skip
def test_scores_are_kept_from_length(folder, tmp_path, options):
    """After the same training the scores follow length less, and the shorter good answer wins as often or more."""
    cards, correlations = [], []
    for n, given in enumerate(({}, options)):
        model = scalar(folder)
        samples, heldout = samples_of(model, long_wins(40)), samples_of(model, long_wins(40, start=500))
        cards.append(train(model, samples, heldout, tmp_path / str(n), epochs=2, **given)[0])
        batch = ranking_batch(heldout, model.pad_id)
        with torch.no_grad():
            scores = model.ranking_scores(batch)
        correlations.append(float(preference.length_correlation(scores, batch.lengths_PK, batch.mask_PK)))
    assert correlations[0] > 0.3 and abs(correlations[1]) < 0.6 * correlations[0]
    assert cards[1].shorter_wins.value >= cards[0].shorter_wins.value


def test_what_length_alone_explains_is_not_learned_with_the_offset(folder, tmp_path):
    """Nothing but length tells the answers apart, and the longer one wins four times in five."""
    texts = ("it is so as far as I can tell", "it is so")
    records = [ranking(n, *texts[:: -1 if n % 5 == 0 else 1]) for n in range(80)]
    leads = []
    for n, share in enumerate((0.0, 1.0)):
        model = scalar(folder)
        samples, heldout = samples_of(model, records[:40]), samples_of(model, records[40:])
        train(model, samples, heldout, tmp_path / str(n), epochs=2, length_offset=share)
        batch = ranking_batch(heldout, model.pad_id)
        with torch.no_grad():
            scores = model.ranking_scores(batch)
        longer = batch.lengths_PK.argmax(dim=1, keepdim=True)
        leads.append(float((2 * scores.gather(1, longer)[:, 0] - scores.sum(dim=1)).mean()))
    assert leads[0] > 0.5 and abs(leads[1]) < 0.3 * leads[0], leads


@pytest.mark.parametrize("target", [None, 0.1])
def test_the_head_is_turned_until_scores_follow_length_as_wanted(folder, target):
    """What is told is what the scores then do; the trunk is left alone, and so is a head that needs nothing."""
    model = scalar(folder)
    samples = samples_of(model, long_wins(40))
    batches = micro_batches(samples, RewardConfig(micro_batch_tokens=150), model.pad_id, attention_tokens=None)
    whole = ranking_batch(samples, model.pad_id)

    def scores():
        with torch.no_grad():
            return model.ranking_scores(whole)

    def correlation():
        return float(preference.length_correlation(scores(), whole.lengths_PK, whole.mask_PK))

    def balanced_loss(scores_PK):
        lead_P = (scores_PK[:, 0] - scores_PK[:, 1]).double()  # the better stands first
        loss_P = torch.nn.functional.softplus(-lead_P)
        is_shorter_P = whole.lengths_PK[:, 0] < whole.lengths_PK[:, 1]
        assert is_shorter_P.sum() == 8
        return float(loss_P[is_shorter_P].mean() + loss_P[~is_shorter_P].mean())

    with torch.no_grad():  # a head that loves length
        states = model.ranking_states(whole)[whole.rows_PK, whole.columns_PK]
        model.set_head(3 * (states[:, 0] - states[:, 1])[1:5].mean(dim=0))  # the longer minus the shorter
    trunk = [p.clone() for p in model.base.base_model.parameters()]
    before, level, row = correlation(), float(scores().mean()), model._head.weight.clone()
    done = correct_length(model, batches, target=target)
    after = correlation()
    assert before > 0.9 and done.readable > 0.9 and done.factor > 0
    assert (done.before, done.after) == pytest.approx((before, after), abs=1e-4)
    assert abs(float(scores().mean()) - level) < 0.1 * done.factor
    assert all(map(torch.equal, trunk, model.base.base_model.parameters()))
    if target is not None:
        assert after == pytest.approx(target, abs=1e-3)
        assert correct_length(model, batches, target=target + 0.1).factor == 0 and correlation() == after
        return
    found, turn = balanced_loss(scores()), (model._head.weight - row).detach()[0]
    for share in (-0.1, 0.1):
        model.turn_head(share * turn)
        assert balanced_loss(scores()) > found
        model.turn_head(-share * turn)


def test_without_a_shorter_winner_the_head_stays(folder):
    model = scalar(folder)
    samples = samples_of(model, [ranking(n, "it is, as far as I can tell, good", "bad") for n in range(6)])
    assert correct_length(model, [ranking_batch(samples, model.pad_id)], target=None).factor == 0


def test_the_card_and_the_saved_scores_are_those_of_the_turned_head(folder, tmp_path):
    model = scalar(folder)
    samples, heldout = samples_of(model, long_wins(40)), samples_of(model, long_wins(40, start=500))
    card, _ = train(model, samples, heldout, tmp_path, epochs=2, correct_length=True, length_target=0.0)
    done = card.data["length_correction"]
    assert done["factor"] > 0 and done["after"] == pytest.approx(0, abs=1e-3) and done["before"] > 0.3
    with torch.no_grad():
        scores = model.ranking_scores(ranking_batch(heldout, model.pad_id))
    assert card.score_mean == pytest.approx(float(scores.mean()), abs=1e-5)


def test_scores_love_length_as_much_as_the_ranks_do(folder, tmp_path):
    """Without a target the penalty takes away what the scores lean on length beyond the ranks, and no more."""
    gaps = []
    for n, weight in enumerate((0.0, 10.0)):
        model = scalar(folder)
        samples = samples_of(model, long_wins(40))
        train(model, samples, samples, tmp_path / str(n), epochs=3, length_penalty=weight)
        batch = ranking_batch(samples, model.pad_id)
        with torch.no_grad():
            scores = model.ranking_scores(batch)
        people, found = (
            float(preference.length_correlation(x, batch.lengths_PK, batch.mask_PK))
            for x in (-batch.ranks_PK.float(), scores)
        )
        assert 0.3 < people < 0.9
        gaps.append(found - people)
    assert abs(gaps[1]) < 0.1 and abs(gaps[1]) < abs(gaps[0]), gaps


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_the_length_head_is_orthogonal_learns_length_and_is_not_saved(folder, tmp_path, lora):
    torch.manual_seed(0)
    model = build_scalar(folder, lora=lora, device=CPU, dtype=torch.float32, new_head=True)
    disturb(model)
    head = LengthHead(model, seed=0)
    unit = torch.eye(32)
    with torch.no_grad():
        length, quality = head.scalars(unit), model.scalars(unit)
    assert float(length @ quality) == pytest.approx(0, abs=1e-5) and float(length.norm()) > 0.1
    assert torch.equal(LengthHead(model, seed=0).weight_D, head.weight_D)
    names = set(model.trainable_parameters())
    loss = RewardLoss(model, RewardConfig(length_head=True), seed=0)
    assert loss.parameters().keys() == names | {"length_head.weight"} and set(model.trainable_parameters()) == names
    samples = samples_of(model, long_wins(32))
    batch = ranking_batch(samples, model.pad_id)

    @torch.no_grad()
    def correlation():
        states = model.ranking_states(batch)[batch.rows_PK, batch.columns_PK]
        return float(preference.length_correlation(loss.length_head.scalars(states), batch.lengths_PK, batch.mask_PK))

    if correlation() > 0:
        loss.length_head.weight_D.data.neg_()  # it starts the wrong way round
    assert correlation() < 0
    adam = torch.optim.Adam([loss.length_head.weight_D], lr=0.05)
    for _ in range(30):
        adam.zero_grad()
        loss(loss.parts([batch])[0]).loss.backward()
        adam.step()
    assert correlation() > 0.8


def test_the_spread_and_the_level_are_bounded(folder, tmp_path):
    spreads, levels = [], []
    for n, options in enumerate(({}, {"max_spread": 0.3}, {"zero_centre": 3.0})):
        model = scalar(folder)
        with torch.no_grad():
            model.base.score.weight.mul_(5)
        samples = samples_of(model, separable(32))
        train(model, samples, samples, tmp_path / str(n), epochs=4, **options)
        batch = ranking_batch(samples, model.pad_id)
        with torch.no_grad():
            scores = model.ranking_scores(batch)
        spreads.append(float(preference.spread_limit(
            scores, batch.mask_PK, limit=1.0, denominator=32).metrics["spread"]))  # fmt: skip
        levels.append(float(preference.zero_centre(
            scores, batch.mask_PK, coefficient=1.0, denominator=32).metrics["level"]))  # fmt: skip
    assert spreads[1] < 1.0 < spreads[0] and levels[2] < 0.2 * levels[0]


def test_baits_are_learned_marked_and_no_part_of_the_accuracy(folder, tmp_path):
    model = scalar(folder)
    samples = samples_of(model, separable(24))
    _, rows = train(model, samples, samples, tmp_path, epochs=3, baits_per_ranking=2)
    assert rows[-1]["reward/bait_accuracy"] >= 0.45 and all("reward/bait_accuracy" in r for r in rows)
    turned = [dataclasses.replace(s, kinds=("sampled", "bait")) for s in samples]
    told = loss_of(model, turned)[1].step_metrics()
    assert "accuracy" not in told and told["bait_accuracy"] >= 0.9
    told = loss_of(model, samples)[1].step_metrics()
    assert "bait_accuracy" not in told and "accuracy" in told


def test_keep_best_keeps_the_lowest_heldout_loss(folder, tmp_path):
    """Held-out labels are turned round, so that training makes them worse and the first look is the best."""
    losses = []
    for keep in ("last", "best"):
        model = scalar(folder)
        samples = samples_of(model, separable(16))
        heldout = [dataclasses.replace(s, ranks=s.ranks[::-1]) for s in samples]
        card, rows = train(model, samples, heldout, tmp_path / keep, epochs=4, keep=keep, evaluate_every_steps=1)
        seen = [r["reward/heldout_loss_nats"] for r in rows]
        losses.append(card.loss)
        assert card.loss == pytest.approx({"last": seen[-1], "best": min(seen)}[keep], rel=1e-4)
        assert card.data["kept_step"] == {"last": len(rows), "best": 1 + seen.index(min(seen))}[keep]
        assert "held-out loss rose" in card.data["overfitting"]
        assert card.train_accuracy == rows[-1]["reward/accuracy"]
    assert losses[1] < losses[0] - 0.1


def test_train_head_leaves_the_trunk(folder, tmp_path):
    model = scalar(folder)
    before = {n: p.detach().clone() for n, p in model.base.named_parameters()}
    samples = samples_of(model, separable(16))
    card, rows = train(
        model, samples, samples, tmp_path, epochs=4, train="head", optimizer={**RATE, "learning_rate": 0.1}
    )
    changed = [n for n, p in model.base.named_parameters() if not torch.equal(p, before[n])]
    assert changed == ["score.weight"] and rows[-1]["reward/loss_nats"] < rows[0]["reward/loss_nats"]


def test_gold_controls_are_a_check_and_nothing_else(folder, tmp_path):
    model = scalar(folder)
    samples = samples_of(model, separable(24))
    control = Ranking("c", (Message("user", "Q"),), (Answer("a", "good"), Answer("b", "bad")), gold=(("a", "b"),))
    controls = tokenise.rankings([control] * 3, [{"a": 1, "b": 2}] * 3, model.tokenizer, max_tokens=99).samples
    assert controls[0].gold == ((0, 1),)
    found = []
    for n, given in enumerate(([], controls)):
        model = scalar(folder)
        config = RewardConfig(optimizer=RATE, epochs=4)
        stage = StageFolder(tmp_path / str(n), "reward", 2)
        found.append((train_reward(model, samples, samples, config, stage, seed=0, controls=given), flat(model)))
    assert torch.equal(found[0][1], found[1][1])
    assert found[1][0].gold_controls.rate == 1 and found[1][0].gold_controls.num_items == 3
    assert dataclasses.replace(found[1][0], gold_controls=None) == found[0][0]


def test_the_overfitting_watch_speaks_when_both_rise():
    def watch(*looks):
        found = OverfittingWatch()
        for n, (accuracy, loss) in enumerate(looks):
            found.trained(accuracy - 0.1)
            found.trained(accuracy + 0.1)
            again = OverfittingWatch()
            again.load_state_dict(json.loads(json.dumps(found.state_dict())))
            found = again
            found.looked(10 * n + 10, loss)
        return found

    said = watch((0.6, 0.65), (0.7, 0.55), (0.9, 0.61)).verdict()
    assert "after step 20 the held-out loss rose from 0.550 to 0.610" in said and "70.0% to 90.0%" in said
    assert watch((0.6, 0.65), (0.7, 0.55), (0.9, 0.565)).verdict() is None  # noise
    assert watch((0.6, 0.65), (0.7, 0.55), (0.65, 0.7)).verdict() is None  # it unlearns, which is something else
    assert watch().verdict() is None and watch().train_accuracy is None
    assert watch((0.6, 0.65), (0.8, 0.5)).train_accuracy == pytest.approx(0.8)


@pytest.mark.parametrize("weigh", ["prompts", "pairs"])
def test_what_weighs_the_same_prompts_or_pairs(folder, weigh):
    model = scalar(folder)
    disturb(model)
    records = [ranking(n, *("word " * (k + 1) for k in range(size))) for n, size in enumerate((2, 4))]
    samples = samples_of(model, records)
    loss = RewardLoss(model, RewardConfig(weigh=weigh), seed=0)
    parts = loss.parts(micro_batches(samples, RewardConfig(micro_batch_tokens=1), model.pad_id, attention_tokens=None))
    assert len(parts) == 2
    found = sum(float(loss(part).loss.detach()) for part in parts)
    costs = []
    for sample in samples:
        batch = ranking_batch([sample], model.pad_id)
        score_K = model.scalars(model.ranking_states(batch)[batch.rows_PK, batch.columns_PK])[0].tolist()
        costs.append([math.log1p(math.exp(score_K[j] - score_K[i]))
                      for i in range(len(score_K)) for j in range(i + 1, len(score_K))])  # fmt: skip
    expected = {"prompts": (np.mean(costs[0]) + np.mean(costs[1])) / 2, "pairs": np.mean(costs[0] + costs[1])}
    assert found == pytest.approx(expected[weigh], rel=1e-5)
    assert expected["prompts"] != pytest.approx(expected["pairs"], rel=1e-3)
