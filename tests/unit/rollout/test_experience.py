"""Scripted answers become experience whose every number is known."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heedful.batches import TokenBatch
from heedful.config.ppo import KLConfig, OutlierConfig, PPOConfig, SamplingConfig
from heedful.config.section import LoraConfig
from heedful.models.roles import Roles
from heedful.objectives import value
from heedful.records import Completion, Rollout
from heedful.rollout.experience import build_experience, partition
from toy_parts import roles

PROMPT, EOS, PAD = [11, 12, 13], 2, 0


class Scripted:
    """A part that answers with given numbers, by the row's id."""

    device = torch.device("cpu")

    def __init__(self, rows, outside=7.0):
        self._rows, self._outside = rows, outside

    def _stream(self, batch: TokenBatch):
        """Given numbers on counted tokens, something else outside: nobody may look there."""
        stream_BT = torch.full(batch.inputs_BT.shape, self._outside)
        for row, name in enumerate(batch.ids):
            stream_BT[row, batch.loss_mask_BT[row]] = torch.tensor(self._rows[name])
        return stream_BT

    is_shared, head = False, None

    def exact_kl_of(self, hidden, batch, reference_hidden, reference_head, *, temperature=1.0):
        return (hidden - reference_hidden).abs()

    def hidden(self, batch):
        return self._stream(batch)

    def logprobs_of(self, hidden, batch, *, temperature=1.0, with_entropy=False):
        return hidden, (torch.ones_like(hidden) if with_entropy else None)

    def values(self, batch, policy_hidden=None):
        return self._stream(batch)

    def values_after(self, ids_NT):
        return torch.tensor([0.7])


def rollout(name, ids, score, finish="stop"):
    c = Completion(name, 0, PROMPT, ids, [0.0] * len(ids), finish, 0, "")
    return Rollout(c, {"fixed": score}, score)


def build(rollouts, logprobs, reference, values, *, parts=None, **config):
    settings = PPOConfig(**{"whiten_advantages": False, "missing_end_penalty": 0.0, "prompts_per_step": len(rollouts),
                            **config})  # fmt: skip
    scripted = Roles(Scripted(logprobs), Scripted(reference, 3.0), Scripted(values, -9.0), None)  # type: ignore[arg-type]
    return build_experience(
        rollouts, parts or scripted, settings, kl_coefficient=settings.kl.coefficient, pad_id=PAD,
        generator=torch.Generator().manual_seed(0), check=lambda *_: None,
    )  # fmt: skip


def counted(x_BT, experience, row=0):
    return x_BT[row][experience.batch.tokens.loss_mask_BT[row]].tolist()


@pytest.mark.parametrize("company", [[], [20, 21, 22, 23, 24]])
def test_PPO_01_the_score_lands_on_the_end_token(company):
    rollouts = [rollout("a", [7, 8, EOS], 1.0)]
    logprobs, reference, values = {"a/0": [-1, -2, -0.5]}, {"a/0": [-1.2, -1.5, -0.5]}, {"a/0": [0.5, 0.4, 0.3]}
    if company:  # a longer answer in the batch: two pads after the end
        rollouts.append(rollout("b", company, 0.5))
        for stream in (logprobs, reference, values):
            stream["b/0"] = [-1.0] * 5
    e = build(rollouts, logprobs, reference, values, kl=KLConfig(coefficient=0.1), lam=0.95)
    assert counted(e.batch.rewards_BT, e) == pytest.approx([-0.02, 0.05, 1.0], abs=1e-6)
    assert counted(e.batch.advantages_BT, e) == pytest.approx([0.46425, 0.615, 0.7], abs=1e-6)
    assert counted(e.batch.returns_BT, e) == pytest.approx([0.96425, 1.015, 1.0], abs=1e-6)
    outside = ~e.batch.tokens.loss_mask_BT
    for stream in (e.batch.rewards_BT, e.batch.advantages_BT, e.batch.returns_BT, e.kl_BT, e.entropy_BT):
        assert not stream[outside].any()


@pytest.mark.parametrize(
    "finish, bootstrap, expected",
    [("length", False, [-0.47, -0.6]), ("length", True, [0.195, 0.1]), ("stop", True, [-0.47, -0.6])],
)
def test_PPO_03_the_end_of_a_cut_answer(finish, bootstrap, expected):
    """The last case ends exactly at the limit and is finished all the same."""
    same, ids = {"a/0": [-1.0, -1.0]}, [7, 8 if finish == "length" else EOS]
    e = build([rollout("a", ids, 0.0, finish)], same, same, {"a/0": [0.5, 0.6]}, bootstrap_truncated=bootstrap)
    # λ = 0.95: A_0 = δ_0 + 0.95 A_1
    assert counted(e.batch.advantages_BT, e) == pytest.approx(expected, abs=1e-6)


def test_PPO_14_the_values_are_those_of_the_states_before_each_token():
    e = build([rollout("a", [7, 8, 9, EOS], 1.0), rollout("b", [5, 6, 7, 8, 9, EOS], 0.0)],
              {"a/0": [-1.0] * 4, "b/0": [-1.0] * 6}, {"a/0": [-1.0] * 4, "b/0": [-1.0] * 6},
              {"a/0": [0.1] * 4, "b/0": [0.2] * 6})  # fmt: skip
    mask_T = e.batch.tokens.loss_mask_BT[0]
    assert mask_T.nonzero().flatten().tolist() == [2, 3, 4, 5]  # from the state after the last prompt token
    assert int(mask_T.sum()) == 4

    def loss(values_BT):
        b = e.batch
        denominator = b.tokens.num_counted_tokens
        mask = b.tokens.loss_mask_BT
        return float(value.clipped_mse(values_BT, b.old_values_BT, b.returns_BT, mask, denominator=denominator,
                                       clip=None).loss)  # fmt: skip

    base = loss(e.batch.old_values_BT)
    moved = []
    for t in range(mask_T.numel()):
        changed_BT = e.batch.old_values_BT.clone()
        changed_BT[0, t] += 1
        if loss(changed_BT) != base:
            moved.append(t)
    assert moved == [2, 3, 4, 5]


def test_a_missing_end_costs_and_scores_are_clipped():
    rollouts = [rollout("a", [7], 9.0, "length"), rollout("b", [EOS], 9.0), rollout("c", [EOS], -9.0)]
    zeros = {f"{n}/0": [0.0] for n in "abc"}
    e = build(rollouts, zeros, zeros, zeros, score_clip=5.0, missing_end_penalty=1.5)
    assert [counted(e.batch.rewards_BT, e, row) for row in range(3)] == [[3.5], [5.0], [-5.0]]
    assert e.batch.scores_B.tolist() == [9.0, 9.0, -9.0]


def test_PPO_05_PPO_06_whitening_is_over_the_counted_tokens_of_the_step():
    zeros, many = {"a/0": [0.0], "b/0": [0.0], "c/0": [0.0]}, [rollout(n, [EOS], s) for n, s in zip("abc", (2, 4, 6))]
    e = build(many, zeros, zeros, zeros, whiten_advantages=True, score_clip=None)
    found = [counted(e.batch.advantages_BT, e, row)[0] for row in range(3)]
    assert found == pytest.approx([-1.224745, 0, 1.224745], abs=1e-5)
    one = build(many[:1], zeros, zeros, zeros, whiten_advantages=True, score_clip=None)
    assert counted(one.batch.advantages_BT, one) == [0.0]


@pytest.mark.parametrize("micro_batch_tokens", [1, 10, 10**6])
def test_RES_10_whitening_does_not_see_the_cut(micro_batch_tokens):
    names, zeros = "abcde", {f"{n}/0": [0.0] for n in "abcde"}
    many = [rollout(n, [EOS], s) for n, s in zip(names, (1, 3, 10, 20, 30))]
    e = build(many, zeros, zeros, zeros, whiten_advantages=True, score_clip=None, micro_batch_tokens=micro_batch_tokens)
    found = [counted(e.batch.advantages_BT, e, row)[0] for row in range(5)]
    assert found == pytest.approx([-1.085542, -0.901552, -0.257586, 0.662365, 1.582316], abs=1e-5)


@pytest.mark.parametrize("in_reward, in_loss, expected", [
    ("k1", "none", [-0.1, -0.2, 0.7]),
    ("k1", "k2", [-0.2, -0.3, 1.0]),  # that of the next token
    ("k2", "k2", [-0.2, -0.45, 1.0]),
    ("none", "k2", [0.0, 0.0, 1.0]),
])  # fmt: skip
def test_the_penalty_is_of_the_token_itself_or_of_later_ones(in_reward, in_loss, expected):
    leash = KLConfig(coefficient=0.1, in_reward=in_reward, in_loss=in_loss)
    one = [rollout("a", [7, 8, EOS], 1.0)]
    e = build(one, {"a/0": [-1.0] * 3}, {"a/0": [-2.0, -3.0, -4.0]}, {"a/0": [0.0] * 3}, kl=leash)
    assert counted(e.batch.rewards_BT, e) == pytest.approx(expected)
    assert counted(e.kl_BT, e) == [1.0, 2.0, 3.0]  # what is logged is the KL, wherever it acts


def test_outliers_are_found_by_the_exact_kl_where_there_is_one():
    """One token of the last answer was unlikely under the policy, whose distribution is far from the reference."""
    names = "abcde"
    logprobs = {f"{n}/0": [kl - 3.0] for n, kl in zip(names, (0.0, 0.1, 0.2, 0.3, -3.0))}
    rows, many = {name: [-3.0] for name in logprobs}, [rollout(n, [EOS], 0.0) for n in names]
    outliers = OutlierConfig(max_weight=2.0)
    for in_reward, expected in (("k1", [1.0] * 5), ("exact", [1.0] * 4 + [2.0])):
        e = build(many, logprobs, rows, rows, kl=KLConfig(in_reward=in_reward, outliers=outliers))
        assert e.kl_weights_B.tolist() == pytest.approx(expected)


def test_the_value_has_a_decay_of_its_own():
    one, rows = [rollout("a", [7, EOS], 1.0)], {"a/0": [-1.0, -1.0]}
    e = build(one, rows, rows, {"a/0": [0.2, 0.4]}, gamma=0.9, lam=0.5, value_lam=1.0)
    assert counted(e.batch.advantages_BT, e) == pytest.approx([0.9 * 0.4 - 0.2 + 0.9 * 0.5 * 0.6, 0.6])
    assert counted(e.batch.returns_BT, e) == pytest.approx([0.9, 1.0])


@pytest.mark.parametrize("options, expected", [
    ({"missing_end_score": -1.5}, [2.0, -1.5]),
    ({"overlong_from_tokens": 2, "overlong_penalty": 0.6}, [2.0, 2.7]),
    ({"overlong_from_tokens": 2, "overlong_penalty": 0.6, "missing_end_penalty": 1.0, "score_clip": 2.5}, [2.0, 1.2]),
])  # fmt: skip
def test_what_an_answer_is_worth(options, expected):
    rows = {"a/0": [0.0] * 2, "b/0": [0.0] * 3}
    both = [rollout("a", [7, EOS], 2.0), rollout("b", [7, 8, 9], 3.0, "length")]
    e = build(both, rows, rows, rows, sampling=SamplingConfig(max_new_tokens=4), **options)
    assert e.batch.rewards_BT.sum(dim=1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("whiten_rewards", [False, True])
@pytest.mark.parametrize("whiten_advantages", [False, True])
def test_a_kl_in_the_loss_is_scaled_as_the_advantages_are(whiten_rewards, whiten_advantages):
    """Whitening must not change the trade between score and KL; nor does it hide an outlier's stronger penalty."""
    names, zeros = "abcde", {f"{n}/0": [0.0] for n in "abcde"}
    many = [rollout(n, [EOS], s) for n, s in zip(names, (1, 3, 10, 20, 30))]
    logprobs = {f"{n}/0": [kl - 3.0] for n, kl in zip(names, (0.0, 0.1, 0.2, 0.3, 3.0))}
    reference = {name: [-3.0] for name in zeros}
    leash = KLConfig(coefficient=0.5, in_loss="k2", outliers=OutlierConfig(max_weight=2.0))
    e = build(many, logprobs, reference, zeros, kl=leash, score_clip=None, whiten_rewards=whiten_rewards,
              whiten_advantages=whiten_advantages)  # fmt: skip
    found = [counted(e.batch.advantages_BT, e, row)[0] for row in range(5)]
    scale = (found[4] - found[0]) / 29  # answers of one token whose values are 0: advantages are scores
    assert scale == pytest.approx(1 / 10.870143 if whiten_rewards or whiten_advantages else 1.0)
    assert e.batch.rewards_BT.sum() == pytest.approx(64)  # whitened or not: rewards keep their mean
    assert e.batch.kl_loss_weights_B.tolist() == pytest.approx([0.5 * scale] * 4 + [0.5 * 2 * scale])


@pytest.mark.parametrize("kind, expected", [("k1", 1.0), ("k2", 0.5), ("abs", 1.0), ("k3", 0.367879)])
def test_the_estimator_of_the_penalty_is_the_recipes(kind, expected):
    e = build([rollout("a", [EOS], 0.0)], {"a/0": [-1.0]}, {"a/0": [-2.0]}, {"a/0": [0.0]},
              kl=KLConfig(coefficient=2.0, in_reward=kind))  # fmt: skip
    assert counted(e.batch.rewards_BT, e) == pytest.approx([-2 * expected], abs=1e-5)
    assert counted(e.kl_BT, e) == [1.0]  # what is logged is always the unbiased one


def test_every_stream_is_shown_to_the_guard_with_its_own_rows():
    seen = {}

    def check(name, stream, tokens):
        assert len(stream) == len(tokens.ids)
        seen.setdefault(name, []).extend(tokens.ids)

    rollouts = [rollout(n, [7, EOS], 1.0) for n in "abc"]
    rows = {f"{n}/0": [-1.0, -1.0] for n in "abc"}
    build_experience(
        rollouts, Roles(*(Scripted(rows) for _ in range(3)), None),  # type: ignore[arg-type]
        PPOConfig(prompts_per_step=3, micro_batch_tokens=5), kl_coefficient=0.1, pad_id=PAD,
        generator=torch.Generator().manual_seed(0), check=check,
    )  # fmt: skip
    derived = {"scores", "KL", "rewards", "advantages"}
    assert set(seen) == {"log-probs", "reference log-probs", "values", "entropy"} | derived
    assert all(sorted(ids) == ["a/0", "b/0", "c/0"] for ids in seen.values())


def test_a_partition_meets_every_row_once_within_the_budget():
    config = PPOConfig(prompts_per_step=12, minibatches=3, micro_batch_tokens=50)
    lengths = [5, 30, 12, 49, 60, 7, 8, 9, 10, 11, 2, 25]
    cut = partition(lengths, config, torch.Generator().manual_seed(3))
    assert [sum(map(len, minibatch)) for minibatch in cut] == [4, 4, 4]
    assert sorted(row for minibatch in cut for rows in minibatch for row in rows) == list(range(12))
    for rows in (rows for minibatch in cut for rows in minibatch):
        assert len(rows) == 1 or len(rows) * max(lengths[r] for r in rows) <= 50
    other = partition(lengths, config, torch.Generator().manual_seed(4))
    assert cut != other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_PPO_08_the_reference_is_the_start_exactly(tmp_path_factory, dtype, lora, kind):
    """Dropout is 0.1 in the models' configs."""
    parts = roles(tmp_path_factory.getbasetemp(), dtype=dtype, lora=lora, kind=kind)
    config = PPOConfig(prompts_per_step=4, micro_batch_tokens=30, sampling=SamplingConfig(temperature=0.7))
    rollouts = [rollout(n, list(range(40, 43 + i)), 1.0) for i, n in enumerate("abcd")]
    e = build(rollouts, {}, {}, {}, parts=parts, **config.model_dump())
    assert not e.kl_BT.any() and e.batch.old_logprobs_BT.any()
    found = [getattr(e.batch, f.name) for f in dataclasses.fields(e.batch) if f.name != "tokens"]
    streams = [x for x in found if x is not None]
    assert len(streams) == 8 and {stream.dtype for stream in streams} == {torch.float32}
