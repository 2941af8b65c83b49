"""What each option of the update does to the weights: seen on whole steps of a tiny model."""

from __future__ import annotations

import pytest
import torch

from heedful.batches import ExperienceBatch, TokenBatch
from heedful.config.ppo import BestConfig, GuardConfig, KLConfig, OutlierConfig, PPOConfig, PTXConfig, SamplingConfig
from heedful.config.section import LoraConfig
from heedful.data.chat import end_token_ids
from heedful.data.collate import token_batch
from heedful.errors import ConfigError
from heedful.records import TokenSample
from heedful.rollout.fake import FakeEngine
from heedful.rollout.scaling import Batch, Running
from heedful.runs.folder import StageFolder
from heedful.train.forensics import Recorder
from heedful.train.update import Outcome, Update, _Minibatch, denominators
from toy_parts import disturb, roles
from toy_ppo import RATE, largest_gap, train, weights

LORA = LoraConfig(rank=4)
SAMPLES = [TokenSample([5, 6, 7 + n, 8, 2], [False, False, True, True, True], f"d{n}") for n in range(5)]
MANY = {"epochs": 3, "minibatches": 2}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo-option-models")


class Nothing:
    """Every answer is worth 0."""

    name, weight = "nothing", 1.0

    def __call__(self, prompts, completions):
        return [0.0] * len(completions)


class Words:
    """Answers of different worth, so that every loss has something to do."""

    name, weight = "words", 1.0

    def __call__(self, prompts, completions):
        return [sum(c.ids) % 7 / 3 for c in completions]


EVERY_LOSS = {
    "loss_average": "sequences", "entropy_coefficient": 0.1, "kl": KLConfig(in_reward="exact", in_loss="exact"),
    "ptx": PTXConfig(prompts_per_step=3), "whiten_rewards": True, "value_lam": 0.7, "dual_clip": 2.0,
    "overlong_from_tokens": 2,
}  # fmt: skip


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("value_from", ["reward", "policy", "trunk", "frozen_trunk"])
def test_PPO_10_no_loss_option_sees_the_cut_into_micro_batches(models, tmp_path, lora, value_from):
    """Answers of 2 to 8 tokens, so that averages by token, by answer and by micro-batch differ."""
    found = []
    for micro_batch_tokens in (1, 10**6):
        parts = roles(models, lora=lora, value_from=value_from)
        (end, *_) = ends = end_token_ids(parts.policy.tokenizer)
        engine = FakeEngine(
            lambda r, end=end: [*range(40, 41 + int(r.prompt_id[1:])), end], ends, parts.policy.tokenizer
        )
        train(parts, tmp_path / str(micro_batch_tokens), micro_batch_tokens=micro_batch_tokens, engine=engine,
              rewards=[Words()], demonstrations=SAMPLES, steps=2, epochs=2, minibatches=2, value_from=value_from,
              **EVERY_LOSS)  # fmt: skip
        found.append(weights(parts))
    assert largest_gap(*found) < 1e-5
    assert largest_gap(weights(roles(models, lora=lora, value_from=value_from)), found[0]) > 1e-3


def test_the_clips_reach_the_loss_under_their_own_names(models, tmp_path):
    """Ratio 1.5 of a good token, 0.5 and 5 of bad ones."""
    parts = roles(models)
    config = PPOConfig(clip_low=0.1, clip_high=0.3, dual_clip=2.0, epochs=2)
    update = Update(parts, config, None, None, None, Recorder(StageFolder(tmp_path, "ppo", 3), parts, config))
    tokens = token_batch([SAMPLES[0]], 0)
    with torch.no_grad():
        old_BT, _ = parts.policy.logprobs(tokens)
    zeros_BT, counts_BT = torch.zeros_like(old_BT), tokens.loss_mask_BT
    old_BT[counts_BT] -= torch.tensor([1.5, 0.5, 5.0]).log()
    advantages_BT = zeros_BT.clone()
    advantages_BT[counts_BT] = torch.tensor([1.0, -1.0, -1.0])
    batch = ExperienceBatch(tokens, old_BT, zeros_BT, zeros_BT, zeros_BT, advantages_BT, zeros_BT, torch.zeros(1),
                            torch.zeros(1))  # fmt: skip
    ratios = []
    out = update.policy_loss(batch, 3.0, ratios)
    assert out.loss.item() == pytest.approx((-1.3 + 0.9 + 2.0) / 3, abs=1e-5)
    assert ratios[0].tolist() == pytest.approx([1.5, 0.5, 5.0], rel=1e-4)


@pytest.mark.parametrize("value_from, weight", [("reward", 1.0), ("trunk", 0.3), ("frozen_trunk", 1.0)])
def test_only_a_trained_trunk_weighs_the_value_loss(models, tmp_path, value_from, weight):
    parts = roles(models, value_from=value_from)
    config = PPOConfig(value_from=value_from).model_copy(update={"value_coefficient": 0.3})
    update = Update(parts, config, None, None, None, Recorder(StageFolder(tmp_path, "ppo", 3), parts, config))
    tokens = token_batch([SAMPLES[0]], 0)
    zeros_BT = torch.zeros_like(tokens.inputs_BT, dtype=torch.float32)
    batch = ExperienceBatch(tokens, zeros_BT, zeros_BT, zeros_BT, zeros_BT, zeros_BT, zeros_BT + 1, torch.zeros(1),
                            torch.zeros(1))  # fmt: skip
    out = update.value_loss(batch, 3.0, None)
    assert out.loss.item() == pytest.approx(weight * out.metrics["value_loss"].item()) and out.loss.item() > 0


def test_the_KL_of_the_loss_is_that_of_the_experience_at_any_temperature(models, tmp_path):
    """Before the first update both look at the same distributions."""
    parts = roles(models, lora=LORA)
    disturb(parts.policy, 0.05)
    sampling = SamplingConfig(max_new_tokens=8, temperature=0.3)
    row = _from_step_one(parts, tmp_path, kl=KLConfig(in_reward="exact", in_loss="exact"), rewards=[Words()],
                         sampling=sampling, samples_per_prompt=4)[0]  # fmt: skip
    assert row["ppo/kl_exact_nats"] / row["ppo/answer_tokens_mean"] == pytest.approx(row["ppo/kl_loss_nats"], rel=1e-5)
    assert row["ppo/kl_exact_nats"] == pytest.approx(row["ppo/kl_nats"], rel=0.5) and row["ppo/kl_exact_nats"] > 0.1


def test_a_minibatch_is_skipped_for_its_mean_ratio_not_its_largest(models, tmp_path):
    parts, config, out = roles(models), PPOConfig(skip_ratio_above=2.0, epochs=2), Outcome()
    update = Update(parts, config, None, None, None, Recorder(StageFolder(tmp_path, "ppo", 3), parts, config))
    second = _Minibatch(0, 0, 1, [], [])
    assert update._may_move({"ratio_mean": 1.5, "ratio_max": 50.0, "approx_kl_nats": 1.0}, second, out)
    assert not update._may_move({"ratio_mean": 2.5, "ratio_max": 3.0, "approx_kl_nats": 1.0}, second, out)
    assert out.num_skipped == 1 and out.stopped_at_epoch is None


def test_sequences_weigh_alike_whatever_their_length():
    batches = [_experience([3, 1]), _experience([4])]
    assert denominators(batches, "tokens") == [8.0, 8.0]
    first, second = denominators(batches, "sequences")
    assert first.tolist() == [[9.0], [3.0]] and second.tolist() == [[12.0]]


def _experience(lengths):
    """As much of an experience batch as the denominators look at."""
    rows = [TokenSample([1] + [2] * n, [False] + [True] * n) for n in lengths]

    class Batch:
        tokens: TokenBatch = token_batch(rows, 0)

    return Batch()


def test_the_policy_stops_its_epochs_at_the_KL_limit_and_the_value_goes_on(models, tmp_path):
    free = train(roles(models), tmp_path / "free", rewards=[Words()], **MANY)[0]
    row = train(roles(models), tmp_path / "held", rewards=[Words()], kl=KLConfig(stop_above_nats=1e-9), **MANY)[0]
    assert free["ppo/num_policy_updates"] == 6 and free["ppo/stopped_early"] == 0
    assert row["ppo/num_policy_updates"] == 1 and row["ppo/stopped_early"] == 1
    assert row["ppo/value_loss"] != 0 and row["ppo/approx_kl_nats"] > 0


def test_the_KL_limit_is_looked_at_before_the_weights_move(models, tmp_path):
    """One update within the limit, then none: the weights are those of a single update."""
    once, held = roles(models, value_from="trunk"), roles(models, value_from="trunk")
    options = {"rewards": [Words()], "value_from": "trunk"}
    train(once, tmp_path / "once", **options)
    train(held, tmp_path / "held", epochs=4, kl=KLConfig(stop_above_nats=1e-9), **options)
    assert largest_gap(weights(once), weights(held)) == 0


def test_skipped_and_stopped_steps_count_for_the_schedule(models, tmp_path):
    """The rate of the last step is the same whatever was left out before."""
    linear = {**RATE, "schedule": "linear"}
    options = {"steps": 3, "optimizer": linear, "rewards": [Words()], **MANY}
    plain = train(roles(models), tmp_path / "plain", **options)
    stopped = train(roles(models), tmp_path / "stopped", kl=KLConfig(stop_above_nats=1e-9), **options)
    skipped = train(roles(models), tmp_path / "skipped", skip_ratio_above=1 + 1e-9, **options)
    assert [row["ppo/num_policy_updates"] for row in stopped] == [1, 1, 1]
    assert sum(row["ppo/num_skipped_minibatches"] for row in skipped) > 0
    last = plain[2]["ppo/policy_learning_rate"]
    assert skipped[2]["ppo/policy_learning_rate"] == pytest.approx(last)
    of_the_held_one = RATE["learning_rate"] * (1 - 13 / 18)
    assert stopped[2]["ppo/policy_learning_rate"] == pytest.approx(of_the_held_one)
    shared = train(roles(models, value_from="trunk"), tmp_path / "shared", value_from="trunk", value_optimizer=linear,
                   kl=KLConfig(stop_above_nats=1e-9), **options)  # fmt: skip
    assert shared[2]["ppo/value_learning_rate"] == pytest.approx(of_the_held_one)


@pytest.mark.parametrize(
    "kl", [{"in_reward": "none", "in_loss": "exact"}, {"in_reward": "none", "in_loss": "k2"},
           {"in_reward": "none", "in_loss": "k3"}, {"in_reward": "k1"}, {"in_reward": "exact", "in_loss": "exact"}],
    ids=lambda kl: "+".join(kl.values()),
)  # fmt: skip
def test_a_leash_alone_pulls_the_policy_back(models, tmp_path, kl):
    """No reward at all, and a policy that has been moved away from its reference."""
    parts = roles(models, lora=LORA)
    disturb(parts.policy, 0.05)
    rows = _from_step_one(parts, tmp_path, kl=KLConfig(coefficient=1.0, **kl), steps=12, rewards=[Nothing()],
                          samples_per_prompt=16, lam=1.0, missing_end_penalty=0.0)  # fmt: skip
    first, last = (sum(r["ppo/kl_nats"] for r in part) for part in (rows[:3], rows[-3:]))
    assert first > 0.5 and last < 0.7 * first


def _from_step_one(parts, path, **options):
    """Train without the proof that policy and reference are equal at the start, since here they are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.train.ppo._prove_start", lambda *_: None)
        return train(parts, path, optimizer={**RATE, "learning_rate": 3e-3, "epsilon": 1e-8}, **options)


def test_entropy_bonus_broadens_the_policy(models, tmp_path):
    rows = [train(roles(models), tmp_path / str(c), steps=6, rewards=[Nothing()], entropy_coefficient=c,
                  kl=KLConfig(coefficient=0.0), missing_end_penalty=0.0) for c in (0.0, 1.0)]  # fmt: skip
    assert rows[1][-1]["ppo/entropy_nats"] > rows[0][-1]["ppo/entropy_nats"] + 0.05
    assert rows[1][0]["ppo/entropy_bonus_nats"] == pytest.approx(rows[1][0]["ppo/entropy_nats"], rel=1e-4)


@pytest.mark.parametrize("value_from", ["reward", "trunk"])
def test_ptx_teaches_the_demonstrations(models, tmp_path, value_from):
    rows = train(roles(models, value_from=value_from), tmp_path, steps=8, rewards=[Nothing()],
                 demonstrations=SAMPLES, ptx=PTXConfig(prompts_per_step=5), value_from=value_from)  # fmt: skip
    assert rows[-1]["ppo/ptx_loss_nats"] < 0.8 * rows[0]["ppo/ptx_loss_nats"]


@pytest.mark.parametrize("value_from", ["trunk", "frozen_trunk"])
def test_only_the_head_learns_during_the_warm_up_of_a_shared_trunk(models, tmp_path, value_from):
    parts = roles(models, value_from=value_from)
    before = weights(parts)
    rows = train(parts, tmp_path, steps=2, value_warmup_steps=1, value_from=value_from, rewards=[Words()],
                 optimizer={**RATE, "learning_rate": 1e-30})  # fmt: skip
    after = weights(parts)
    assert rows[0]["ppo/num_policy_updates"] == 0 and rows[1]["ppo/num_policy_updates"] == 1
    head = [name for name in before if name.startswith("value/")]
    assert all(not torch.equal(before[name], after[name]) for name in head)
    assert max(float((before[n] - after[n]).abs().max()) for n in before if n.startswith("policy/")) < 1e-20


def test_a_value_on_a_frozen_trunk_leaves_the_policy_s_gradient_alone(models, tmp_path):
    """With the values at 0 in both, the first update of the policy is that of a value model of its own."""
    moved = []
    for value_from, loss_weight in (("policy", None), ("frozen_trunk", None), ("trunk", 1.0)):
        parts = roles(models, value_from=value_from)
        if value_from == "trunk":
            torch.nn.init.constant_(parts.value.part.model.weight, 0.01)  # a head of zeros sends no gradient back
        extra = {} if loss_weight is None else {"value_coefficient": loss_weight}
        train(parts, tmp_path / value_from, rewards=[Words()], value_from=value_from, **extra)
        moved.append({n: w for n, w in weights(parts).items() if n.startswith("policy/")})
    assert largest_gap(moved[0], moved[1]) == 0
    assert largest_gap(moved[0], moved[2]) > 1e-5


def test_an_outlier_s_penalty_is_raised_and_the_others_are_not(models, tmp_path):
    parts = roles(models, lora=LORA)
    disturb(parts.policy, 0.05)
    row = _from_step_one(parts, tmp_path, samples_per_prompt=8, rewards=[Nothing()], missing_end_penalty=0.0,
                         kl=KLConfig(outliers=OutlierConfig(threshold=1.0, slope=1.0, max_weight=3.0)))[0]  # fmt: skip
    assert 0 < row["ppo/kl_outlier_rate"] < 0.5 and 1 < row["ppo/kl_weight_max"] <= 3
    assert row["ppo/reward_mean"] < -0.05 * row["ppo/kl_nats"]  # a plain leash would give exactly that


def test_the_guard_s_coefficient_is_the_one_that_is_used_and_logged(models, tmp_path):
    class Rising:
        name, weight, calls = "rising", 1.0, 0

        def __call__(self, prompts, completions):
            self.calls += 1
            return [self.calls + n / 10 for n, _ in enumerate(completions)]

    rows = train(roles(models), tmp_path, steps=5, rewards=[Rising()], score_clip=None,
                 kl=KLConfig(guard=GuardConfig(window_steps=1, kl_rise_nats=1e-6, factor=2.0, limit=3.0)))  # fmt: skip
    used = [row["ppo/kl_coefficient"] for row in rows]
    assert used[:2] == [0.05, 0.05] and max(used) > 0.05
    assert all(row["ppo/kl_coefficient"] == pytest.approx(0.05 * row["ppo/kl_guard"]) for row in rows)


@pytest.mark.parametrize("scaler", [Batch, Running])
def test_the_guard_sees_a_climb_that_the_scaling_hides(models, tmp_path, scaler):
    """A batch's own scores have mean 0 whatever they are; running statistics follow a steady climb."""

    class Rising:
        name, weight, calls = "rising", 1.0, 0

        def __call__(self, prompts, completions):
            self.calls += 1
            return [self.calls + n / 10 for n, _ in enumerate(completions)]

    guard = GuardConfig(window_steps=2, kl_rise_nats=1e-6, factor=2.0, limit=3.0)
    rows = train(roles(models), tmp_path, steps=6, rewards=[Rising()], scalers={"rising": scaler()},
                 kl=KLConfig(guard=guard))  # fmt: skip
    assert rows[-1]["ppo/kl_guard"] > 1


def test_PPO_11_the_coefficient_stays_while_only_the_value_learns(models, tmp_path):
    kl = KLConfig(coefficient=0.2, target=6.0, horizon=100)
    rows = train(roles(models), tmp_path, steps=5, value_warmup_steps=2, kl=kl)
    used = [row["ppo/kl_coefficient"] for row in rows]
    assert used[:3] == [0.2] * 3  # that of step 2 moves the policy for the first time, from a KL of 0
    assert used[3] == pytest.approx(0.2 * (1 - 0.2 * 6 / 100)) and used[4] != used[3]


@pytest.mark.parametrize("num_answers", [3, 4])
def test_outliers_of_less_than_four_answers_are_refused(num_answers):
    options = {"prompts_per_step": num_answers, "kl": KLConfig(outliers=OutlierConfig())}
    if num_answers == 4:
        PPOConfig(**options)
        return
    with pytest.raises(ValueError, match="kl.outliers compares the answers of a step: 4 or more, not 3"):
        PPOConfig(**options)


def test_the_average_is_what_is_kept(models, tmp_path):
    plain, averaged = roles(models), roles(models)
    start = weights(plain)
    train(plain, tmp_path / "plain", rewards=[Words()])
    train(averaged, tmp_path / "averaged", rewards=[Words()], ema_decay=0.75)
    last, kept = weights(plain), weights(averaged)
    for name in (n for n in start if n.startswith("policy/")):
        assert torch.allclose(kept[name], 0.75 * start[name] + 0.25 * last[name], atol=1e-7)
    assert largest_gap(last, kept) > 1e-4


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_the_best_by_gold_is_kept_and_its_prompts_are_not_trained_on(models, tmp_path, ema_decay):
    """Gold likes the second step best; a run of two steps ends with the same weights."""
    asked = []

    class Watching(Words):
        def __call__(self, prompts, completions):
            asked.append({p.id for p in prompts})
            return super().__call__(prompts, completions)

    golds = iter([[1.0, 1.0], [3.0, 3.0], [2.0, 2.0]])
    parts, short = roles(models), roles(models)
    options = {"prompts_per_step": 4, "ema_decay": ema_decay}
    best = BestConfig(by="gold", every_steps=1, num_prompts=2)
    rows = train(parts, tmp_path / "best", steps=3, best=best, gold=lambda *_: next(golds), rewards=[Watching()],
                 **options)  # fmt: skip
    assert [row["ppo/gold_mean"] for row in rows] == [1.0, 3.0, 2.0]
    validation = [ids for ids in asked if len(ids) == 2]
    assert len(validation) == 3 and all(ids == validation[0] for ids in validation)
    assert all(not ids & validation[0] for ids in asked if len(ids) == 4)
    golds = iter([[1.0, 1.0], [3.0, 3.0]])
    train(short, tmp_path / "short", steps=2, best=best, gold=lambda *_: next(golds), rewards=[Words()], **options)
    one, two = ({n: w for n, w in weights(p).items() if n.startswith("policy/")} for p in (parts, short))
    assert largest_gap(one, two) == 0


def test_the_best_by_validation_pays_for_answers_that_do_not_end(models, tmp_path):
    """After the second step the answers score higher and no longer end, which costs more than it brings."""
    parts, short = roles(models), roles(models)
    end = end_token_ids(parts.policy.tokenizer)[0]

    class Engine(FakeEngine):
        def sync(self, policy, *, version):
            super().sync(policy, version=version)
            self.version = version

    def run(part, path, steps):
        engine = Engine(lambda r: [5] * 8 if engine.version == 2 else [5, 6, end], [end], part.policy.tokenizer)
        return train(part, path, steps=steps, engine=engine, best=BestConfig(every_steps=1, num_prompts=2),
                     prompts_per_step=4)  # fmt: skip

    rows = run(parts, tmp_path / "long", 2)
    assert [row["ppo/validation_score"] for row in rows] == [3 / 8, 1.0]
    assert [row["ppo/validation_reward"] for row in rows] == [3 / 8, 0.0]
    run(short, tmp_path / "short", 1)
    one, two = ({n: w for n, w in weights(p).items() if n.startswith("policy/")} for p in (parts, short))
    assert largest_gap(one, two) == 0


def test_more_validation_prompts_than_prompts_are_refused(models, tmp_path):
    with pytest.raises(ConfigError, match="ppo.best.num_prompts sets 6 prompts aside and there are 6"):
        train(roles(models), tmp_path, best=BestConfig(num_prompts=6))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kl": {"in_loss": "k1"}}, "in_loss: k1 has an expected gradient of 0"),
        ({"kl": {"in_reward": "none"}}, "in_reward and in_loss are both none"),
        ({"kl": {"coefficient": 0.0, "guard": {}}}, "guard multiplies coefficient, which is 0"),
        ({"kl": {"coefficient": 0.0, "outliers": {}}}, "outliers multiplies coefficient, which is 0"),
        ({"overlong_from_tokens": 128}, r"overlong_from_tokens \(128\) must be below sampling.max_new_tokens \(128\)"),
        ({"rewards": {}}, "rewards is empty"),
        ({"kl": {"horizon": 500}}, "kl.horizon has no effect as things stand: it needs kl.target"),
        ({"overlong_penalty": 2.0}, "overlong_penalty has no effect"),
        ({"value_coefficient": 0.5}, "value_coefficient has no effect"),
        ({"missing_end_score": -1.0, "missing_end_penalty": 2.0}, "missing_end_penalty has no effect"),
        ({"kl": {"stop_above_nats": 0.1}}, "kl.stop_above_nats looks at what earlier updates of the step did"),
        ({"dual_clip": 3.0}, "dual_clip looks at what earlier updates of the step did"),
        ({"skip_ratio_above": 10.0}, "skip_ratio_above looks at what earlier updates of the step did"),
        ({"score_scaling": "batch", "prompts_per_step": 1}, "makes the only answer of a step 0"),
        ({"rewards": {"a": {}}}, "one of model, function or url; 0 are given"),
        ({"rewards": {"a": {"model": "x", "url": "http://y"}}}, "one of model, function or url; 2 are given"),
        ({"rewards": {"a": {"model": "x", "weight": 0}}}, "a part of weight 0"),
        ({"rewards": {"a": {"function": "m:f", "head": 1}}}, "head chooses an output of a model"),
        ({"rewards": {"a": {"function": "m:f", "scaling": "card"}}}, "only a model has a reward card"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**options, sampling=SamplingConfig())
