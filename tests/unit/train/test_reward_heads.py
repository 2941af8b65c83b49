"""Several heads on one trunk: what each learns, the one score that is made of them, and the folder that leaves."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from test_reward_loop import CPU, RATE, ranking, train
from test_stop_at_the_end import stop_at
from transformers import AutoModelForSequenceClassification

from heedful.config.reward import RewardConfig
from heedful.config.section import LoraConfig
from heedful.data import tokenise
from heedful.data.collate import ranking_batch
from heedful.data.files import write_jsonl
from heedful.data.formats.lists import write_master
from heedful.data.heads import with_attributes, with_resamples
from heedful.errors import ModelError
from heedful.evaluate.card_text import parts
from heedful.models.export import save_reward, verify_reward
from heedful.models.heads import HEADS_FILE, head_names
from heedful.models.roles import build_reward, build_scalar
from heedful.objectives import preference
from heedful.pipeline.card import card_of_file
from heedful.records import Message
from heedful.runs.folder import StageFolder
from heedful.train import loop
from heedful.train.reward import reward_card, train_reward
from heedful.train.reward_loss import RewardLoss
from toy_parts import model_folder, scalar

ATTRIBUTES = {"kind": 1.0, "long": -0.25}
SLOW = {**RATE, "epsilon": 1e-2}
OPTIONS = {
    "plain": {},
    "every_token": {"form": "every_token", "ties": "half", "label_smoothing": 0.1},
    "penalties": {"zero_centre": 0.1, "length_penalty": 1.0, "max_spread": 0.2, "baits_per_ranking": 1,
                  "attributes": {"overall": 1.0, **ATTRIBUTES}},
    "ensemble": {"attributes": {}, "ensemble": 3, "ties": "half", "label_smoothing": 0.1, "margin": 0.2},
    "ensemble_of_values": {"attributes": {}, "ensemble": 2, "form": "every_token", "baits_per_ranking": 1,
                           "zero_centre": 0.1, "length_penalty": 1.0, "keep": "best", "evaluate_every_steps": 1},
    "best_head": {"train": "head", "keep": "best", "evaluate_every_steps": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("heads") / "model")


def rated(n):
    """Answers that are kind or not and long or not, all four mixes; the ranking likes kind ones, then short ones."""
    texts = [f"{'kind' if kind else 'rude'}{' word' * (5 if long else 1)} {n}" for kind in (1, 0) for long in (0, 1)]
    record = ranking(n, *texts)
    ids = [a.id for a in record.answers]
    kind, long = dict(zip(ids, (1.0, 1.0, 0.0, 0.0))), dict(zip(ids, (2.0, 9.0, 2.0, 9.0)))
    if n % 3 == 2:  # one answer without a rating, one ranking without an attribute
        del kind[ids[1]], long[ids[0]]
    return dataclasses.replace(record, ratings={"kind": kind} if n % 4 == 3 else {"kind": kind, "long": long})


def samples_of(model, num=8, start=0):
    records = [rated(n) for n in range(start, start + num)]
    found = tokenise.rankings(
        records, [r.consensus for r in records], model.tokenizer, max_tokens=200, keep_all_tied=True
    )
    return found.samples


def flat(model):
    heads = [model.heads.weight_HD.flatten()] if model.heads else []
    return torch.cat([*(p.detach().flatten() for p in model.base.parameters()), *heads])


@pytest.fixture(scope="module", params=[None, LoraConfig(rank=4)], ids=["full", "lora"])
def trained(request, folder, tmp_path_factory):
    """A model with two heads, its card, its folder and what it was measured on."""
    path = tmp_path_factory.mktemp("trained")
    torch.manual_seed(4)
    model = build_scalar(folder, lora=request.param, device=CPU, dtype=torch.float32, new_head=True)
    heldout = samples_of(model, 8, start=100)
    card, rows = train(model, samples_of(model, 24), heldout, path / "stage", epochs=6, attributes=ATTRIBUTES)
    save_reward(model.model, model.tokenizer, path / "out", score_mean=card.score_mean, score_std=card.score_std,
                card=card, heads=model.heads)  # fmt: skip
    return model, card, rows, path / "out", heldout


@torch.no_grad()
def test_each_head_learns_its_attribute_and_the_score_weighs_them(trained):
    model, card, rows, _, heldout = trained
    assert {name: x.value > 0.95 for name, x in card.attributes.items()} == {"kind": True, "long": True}
    assert card.attributes["long"].num_prompts < card.attributes["kind"].num_prompts == 8
    last = rows[-1]
    assert last["reward/accuracy/kind"] > 0.9 and last["reward/accuracy/long"] > 0.9
    assert last["reward/heldout_accuracy/kind"] == card.attributes["kind"].value
    assert card.accuracy > 0.75 and last["reward/accuracy"] > 0.75  # kind first, then short, as weighed
    batch = ranking_batch(heldout, model.pad_id)
    scores = model.ranking_scores(batch)
    states = model.ranking_states(batch)[batch.rows_PK, batch.columns_PK]
    kind, long = model.heads.scalars(states).unbind(-1)
    expected = kind / float(preference.deviation(kind, batch.mask_PK))
    expected = expected - 0.25 * long / float(preference.deviation(long, batch.mask_PK))
    assert torch.allclose(scores, expected, atol=1e-4)
    real = scores[batch.mask_PK]
    assert card.score_mean == pytest.approx(float(real.mean()), abs=1e-4)
    assert card.score_std == pytest.approx(float(real.std()), abs=1e-4)
    assert model.heads.means == pytest.approx([float(x[batch.mask_PK].mean()) for x in (kind, long)], abs=1e-4)


def test_SAV_the_folder_has_one_output_and_the_heads_beside_it(trained, tmp_path):
    """Live, reloaded, merged, and plain transformers: one score; heedful reads the heads after it."""
    model, card, _, out, _ = trained
    prompts = [(Message("user", f"Q {n}"),) for n in range(3)]
    answers = ["kind word", "rude word word word", "kind"]
    live = model.output_texts(prompts, answers, micro_batch_tokens=64)
    assert all(len(row) == 3 for row in live)
    reward = build_reward(out, device=CPU, dtype=torch.float32)
    value = build_scalar(out, lora=LoraConfig(rank=4), device=CPU, dtype=torch.float32)  # PPO's, adapters still at 0
    for part in (reward, value):
        found = part.output_texts(prompts, answers, micro_batch_tokens=10**4)
        assert torch.allclose(torch.tensor(found), torch.tensor(live), atol=1e-4)
    assert [row[0] for row in live] == pytest.approx(
        model.score_texts(prompts, answers, micro_batch_tokens=64), abs=1e-5
    )
    assert not any("heads" in name for name in value.trainable_parameters())
    plain = AutoModelForSequenceClassification.from_pretrained(out)
    assert plain.config.num_labels == 1 and plain.score.weight.shape[0] == 1
    assert sorted(p.name for p in out.glob("*.safetensors")) == ["model.safetensors"]  # servers load all of these
    assert head_names(out) == ["kind", "long"] and head_names(out / "..") == []
    verify_reward(out)


def test_REW_07_the_card_of_the_folder_on_a_file_says_what_training_said(trained, tmp_path):
    _, card, _, out, _ = trained
    write_jsonl(tmp_path / "heldout.jsonl", [write_master(rated(n)) for n in range(100, 108)])
    found = card_of_file(str(out), str(tmp_path / "heldout.jsonl"), device="cpu", dtype="float32")
    assert found.attributes == card.attributes and found.accuracy == card.accuracy
    assert "attribute kind" in dict(parts(found)) and found.disagreement is None
    assert found.loss == pytest.approx(card.loss, rel=1e-4) and found.labels_loss is None


def test_REW_07_ratings_of_a_ranking_of_ties_count_alike_in_both(trained, tmp_path):
    model, _, _, out, _ = trained
    records = [rated(n) for n in range(100, 108)]
    records[:3] = [dataclasses.replace(r, consensus=dict.fromkeys(r.consensus, 1)) for r in records[:3]]
    write_jsonl(tmp_path / "heldout.jsonl", [write_master(r) for r in records])
    found = card_of_file(str(out), str(tmp_path / "heldout.jsonl"), device="cpu", dtype="float32")
    samples = tokenise.rankings(
        records, [r.consensus for r in records], model.tokenizer, max_tokens=200, keep_all_tied=True
    ).samples
    card = reward_card(model, samples, RewardConfig(attributes=ATTRIBUTES), seed=0, heads=model.heads)
    assert found.attributes == card.attributes and found.attributes["kind"].num_prompts == 8
    assert (found.accuracy, found.num_prompts, found.num_tied_pairs) == (card.accuracy, 5, card.num_tied_pairs)
    assert found.num_tied_pairs >= 18 and found.loss == pytest.approx(card.loss, rel=1e-3)
    # what was trained is another number: the mean over the heads
    assert card.labels_loss < card.loss


def moved(content):
    """Moves both heads so that the score stays as it is."""
    factors = [w / d for w, d in zip(content["weights"], content["deviations"], strict=True)]
    for row, factor in zip(content["weight"], (factors[1], -factors[0]), strict=True):
        row[:] = [x + 10 * factor for x in row]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content.pop("weight"), "does not hold the heads"),
        (lambda content: content["names"].append("third"), "not as many rows as names"),
        (lambda content: content.update(weight=[row[:-1] for row in content["weight"]]), "do not fit the model's own"),
        (lambda content: content.update(weight=[[math.nan] * 32] * 2), "a row not finite"),
        (lambda content: content.update(kind="committee"), "its kind is 'committee'"),
        (lambda content: content.update(kind=["ensemble"]), "its kind is"),
        (lambda content: content.update(names=["kind", "kind"]), "each another"),
        (lambda content: content.update(names=["kind", 7]), "each another"),
        (lambda content: content.update(weights=["1.0", -0.25]), "weights must be finite numbers"),
        (lambda content: content.update(weights=[True, -0.25]), "weights must be finite numbers"),
        (lambda content: content.update(means=[math.inf, 0.0]), "means must be finite numbers"),
        (lambda content: content.update(deviations=[1.0, 10**400]), "too large"),
        (lambda content: content.update(deviations=[1.0, 0.0]), "a deviation is not above 0"),
        (lambda content: content.update(deviations=[2 * d for d in content["deviations"]]), "not the model's own"),
        (lambda content: content.update(weights=[1.001, -0.25]), "not the model's own score"),
        (lambda content: content.update(kind="ensemble"), "not the model's own score"),
        (lambda content: content["weight"][1].reverse(), "not the model's own score"),
        (moved, "a head says"),
        (None, "knows 2 heads and the folder has 0"),
    ],
)
def test_SAV_damaged_heads_are_found(trained, tmp_path, damage, said):
    import shutil

    out = shutil.copytree(trained[3], tmp_path / "out")
    content = json.loads((out / HEADS_FILE).read_text())
    if damage is None:
        (out / HEADS_FILE).unlink()
    else:
        damage(content)
        (out / HEADS_FILE).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=said):
        verify_reward(out)


def test_the_loss_is_the_mean_over_heads_of_each_on_its_own_prompts(folder):
    """Two cut parts against the objective written down by hand, answers without a rating left out."""
    model = scalar(folder)
    samples = with_attributes(samples_of(model, 4), ATTRIBUTES)
    loss = RewardLoss(model, RewardConfig(attributes=ATTRIBUTES), seed=0)
    parts = loss.parts([ranking_batch(samples[:1], model.pad_id), ranking_batch(samples[1:], model.pad_id)])
    total = sum(loss(part).loss for part in parts)
    batch = ranking_batch(samples, model.pad_id)
    states = model.ranking_states(batch)[batch.rows_PK, batch.columns_PK]
    expected = torch.zeros(())
    for h, name in enumerate(ATTRIBUTES):
        costs = []
        for p, sample in enumerate(samples):
            given = sample.ratings.get(name, {})
            scores = dict(zip(sample.answer_ids, (states[p] @ loss.heads.weight_HD[h]).unbind(), strict=False))
            pairs = [(a, b) for a in given for b in given if given[a] > given[b]]
            if pairs:
                cost = [-torch.nn.functional.logsigmoid(scores[a] - scores[b]) for a, b in pairs]
                costs.append(torch.stack(cost).mean())
        assert len(costs) == (3 if name == "long" else 4)
        expected = expected + torch.stack(costs).mean() / 2
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    own, by_hand = (torch.autograd.grad(x, [loss.heads.weight_HD], retain_graph=True)[0] for x in (total, expected))
    assert torch.allclose(own, by_hand, atol=1e-6)


def test_the_length_penalty_takes_length_out_of_every_head(folder, tmp_path):
    samples = samples_of(scalar(folder), 24)
    attributes = {"kind": 1.0, "overall": 1.0}
    found = []
    for weight in (0.0, 30.0):
        model = scalar(folder)
        train(model, samples, samples, tmp_path / str(weight), epochs=6, attributes=attributes, length_penalty=weight,
              **({"length_target": 0.0} if weight else {}))  # fmt: skip
        with torch.no_grad():
            batch = ranking_batch(samples, model.pad_id)
            states = model.ranking_states(batch)[batch.rows_PK, batch.columns_PK]
            found.append([
                abs(float(preference.length_correlation(x, batch.lengths_PK, batch.mask_PK)))
                for x in (*model.heads.scalars(states).unbind(-1), model.scalars(states))
            ])  # fmt: skip
    assert found[0][1] > 0.25 and found[1][1] < 0.15 and sum(found[1]) < 0.5 * sum(found[0]), found


@pytest.mark.parametrize("name", OPTIONS)
def test_PPO_10_the_cut_into_micro_batches_changes_nothing(folder, tmp_path, name):
    found = []
    for tokens in (1, 10**6):
        model = scalar(folder)
        options = {"attributes": ATTRIBUTES, **OPTIONS[name]}
        card, rows = train(model, samples_of(model), samples_of(model, 4, 50), tmp_path / str(tokens), epochs=2,
                           optimizer=SLOW, micro_batch_tokens=tokens, **options)  # fmt: skip
        found.append((flat(model), rows, card))
    (weights, rows, card), (others, other_rows, other_card) = found
    assert torch.allclose(weights, others, atol=5e-5)
    own = "accuracy/long" if options["attributes"] else "disagreement"
    for metric in ("loss_nats", "gradient_norm", "accuracy", own, "length_correlation"):
        series, first = ([r[f"reward/{metric}"] for r in x] for x in (rows, other_rows))
        assert series == pytest.approx(first, rel=1e-3, abs=1e-5)
    assert card.loss == pytest.approx(other_card.loss, rel=1e-4)
    assert card.attributes.keys() == other_card.attributes.keys()


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_RES_05_resume_is_exact(folder, tmp_path, monkeypatch, name, share_prompts):
    """Stopped after two of four steps and gone on: the same bits as without a stop, the heads' too."""
    options = {"attributes": ATTRIBUTES, **OPTIONS[name]}
    config = RewardConfig(epochs=2, prompts_per_step=4, optimizer=RATE, share_prompts=share_prompts, **options)

    def run(path, stop=None):
        model = scalar(folder)
        with monkeypatch.context() as patch:
            if stop:
                patch.setattr(loop, "_stop_signals", stop_at(stop))
            stage = StageFolder(path, "reward", 2)
            card = train_reward(model, samples_of(model), samples_of(model, 4, 50), config, stage, seed=0)
        return card, model.heads, flat(model)

    card, heads, weights = run(tmp_path / "straight")
    for stop in (2, 4):
        with pytest.raises(loop.Interrupted):
            run(tmp_path / str(stop), stop=stop)
        again, other, resumed = run(tmp_path / str(stop))
        assert torch.equal(weights, resumed) and again == card
        assert (other.means, other.deviations) == (heads.means, heads.deviations)


def test_an_ensemble_learns_each_head_from_its_own_prompts(folder):
    """Prompts are drawn with replacement once per head; the loss is that of copies, and of the mean over heads."""
    model = scalar(folder)
    samples = samples_of(model, 6)
    drawn = with_resamples(samples, 4, seed=0)
    counts = [[s.heads[h].weight for s in drawn] for h in range(4)]
    assert [sum(row) for row in counts] == [6.0] * 4 and len({tuple(row) for row in counts}) == 4
    assert with_resamples(samples, 4, seed=0) == drawn != with_resamples(samples, 4, seed=1)
    assert [h.ranks for h in drawn[2].heads] == [samples[2].ranks] * 4
    loss = RewardLoss(model, RewardConfig(ensemble=4), seed=0)
    total = sum(loss(part).loss for part in loss.parts([ranking_batch(drawn[:2], model.pad_id),
                                                        ranking_batch(drawn[2:], model.pad_id)]))  # fmt: skip
    batch = ranking_batch(samples, model.pad_id)
    heads = loss.heads.scalars(model.ranking_states(batch)[batch.rows_PK, batch.columns_PK])
    expected = torch.zeros(())
    for h, row in enumerate(counts):
        places = [i for i, count in enumerate(row) for _ in range(int(count))]
        scores = heads[places][..., h]
        expected = expected + preference.ranking(scores, batch.ranks_PK[places], batch.mask_PK[places]).loss / 4
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


@torch.no_grad()
def test_the_score_of_an_ensemble_is_the_mean_and_the_card_says_where_it_is_split(folder, tmp_path):
    model = scalar(folder)
    heldout = samples_of(model, 16, start=100)
    with torch.enable_grad():
        card, rows = train(model, samples_of(model, 16), heldout, tmp_path, epochs=2, ensemble=3)
    batch = ranking_batch(heldout, model.pad_id)
    heads = model.heads.scalars(model.ranking_states(batch)[batch.rows_PK, batch.columns_PK])
    scores = model.ranking_scores(batch)
    assert torch.allclose(scores, heads.mean(-1), atol=1e-5) and model.heads.kind == "ensemble"
    assert card.disagreement == pytest.approx(float(preference.disagreement(heads, batch.mask_PK)), rel=1e-3)
    assert rows[-1]["reward/heldout_disagreement"] == card.disagreement
    assert 0 < rows[-1]["reward/disagreement"] < 1 and card.attributes == {}
    better = preference.better(batch.ranks_PK, batch.mask_PK)
    right = torch.stack([(x[:, :, None] > x[:, None, :])[better] for x in (*heads.unbind(-1), scores)])
    agree = (right[:3] == right[0]).all(dim=0)
    for found, chosen in ((card.heads_agree, agree), (card.heads_disagree, ~agree)):
        assert found.num_pairs == int(chosen.sum()) > 0
        assert found.over_pairs == pytest.approx(float(right[3][chosen].float().mean()))
    save_reward(model.model, model.tokenizer, tmp_path / "out", score_mean=0, score_std=1, heads=model.heads)
    write_jsonl(tmp_path / "heldout.jsonl", [write_master(rated(n)) for n in range(100, 116)])
    again = card_of_file(str(tmp_path / "out"), str(tmp_path / "heldout.jsonl"), device="cpu", dtype="float32")
    assert again.disagreement == pytest.approx(card.disagreement, rel=1e-3)
    assert (again.heads_agree, again.heads_disagree) == (card.heads_agree, card.heads_disagree)
    likelihood = preference.ranking(scores, batch.ranks_PK, batch.mask_PK).loss
    assert card.loss == pytest.approx(float(likelihood), rel=1e-4)  # of the score that is saved


def test_train_head_leaves_the_trunk(folder, tmp_path):
    model, before = scalar(folder), scalar(folder)
    fast = {**RATE, "learning_rate": 0.05}
    card, _ = train(model, samples_of(model), samples_of(model), tmp_path, train="head", attributes=ATTRIBUTES,
                    epochs=40, optimizer=fast)  # fmt: skip
    trunk, untouched = (m.base.base_model.state_dict() for m in (model, before))
    assert all(torch.equal(value, untouched[name]) for name, value in trunk.items())
    assert card.attributes["long"].value > 0.9


def test_rankings_that_tell_nothing_apart_are_left_out(folder, tmp_path, capsys):
    model = scalar(folder)
    samples = samples_of(model, 6)
    silent = [dataclasses.replace(s, ratings={"kind": dict.fromkeys(s.answer_ids, 1.0)}) for s in samples[:2]]
    config = {"attributes": {"kind": 1.0}, "epochs": 1, "prompts_per_step": 2}
    _, rows = train(model, silent + samples[2:], samples, tmp_path / "a", **config)
    assert len(rows) == 2 and "2 of 6 rankings tell no answers apart in any attribute" in capsys.readouterr().err
    _, rows = train(scalar(folder), silent + samples[2:], samples, tmp_path / "b", **config, ties="half")
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length_head": True}, "length_head works on one score"),
        ({"labels": "votes"}, "take labels: ranks"),
        ({"margin": 0.5}, "margin: 0"),
        ({"baits_per_ranking": 1}, "needs overall among the attributes"),
        ({"attributes": {"kind": 0.0}}, "a weight of 0"),
        ({"ensemble": 2}, "ensemble does not go with attributes"),
        ({"attributes": {}, "length_head": True, "ensemble": 2}, "ensemble does not go with .* length_head"),
        ({"attributes": {"very kind": 1.0}}, "'very kind' must be one word"),
    ],
)
def test_what_attributes_do_not_go_with_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        RewardConfig(**{"attributes": ATTRIBUTES, **options})
