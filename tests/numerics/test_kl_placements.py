"""Where the KL acts: the expected gradient of every placement, by enumeration of all answers of a tiny policy.

The policy has its own logits in each of its 7 states; answers have up to 3 of 3 tokens, of which 0 ends. The objective
is J = E[score − β Σ_t KL_t]. What PPO's pieces give on *all* answers, each weighed by its probability, is compared with
∇J by autograd, and what is left out with the derivation in :func:`heedful.objectives.kl.estimate`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from closeness import assert_close
from torch import Tensor

from heedful.objectives import advantages, kl, masked, policy, shaping

VOCABULARY, LONGEST, BETA = 3, 3, 0.3
IN_REWARD = ("k1", "k2", "k3", "abs", "exact", "none")
IN_LOSS = ("none", "k2", "k3", "abs", "exact")
COMPLETE = {("k1", "none"), *itertools.product(("k1", "k3", "exact"), ("k2", "exact"))}


def answers() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, number of the state before each, and mask of every answer: ended by token 0, or cut at the limit."""
    states = [p for n in range(LONGEST) for p in itertools.product(range(1, VOCABULARY), repeat=n)]
    whole = [(*p, 0) for p in states] + list(itertools.product(range(1, VOCABULARY), repeat=LONGEST))
    tokens_BT = torch.tensor([[*y, *[0] * (LONGEST - len(y))] for y in whole])
    states_BT = torch.tensor([[states.index(y[:t]) if t < len(y) else 0 for t in range(LONGEST)] for y in whole])
    return tokens_BT, states_BT, torch.arange(LONGEST) < torch.tensor([len(y) for y in whole])[:, None]


TOKENS_BT, STATES_BT, MASK_BT = answers()
torch.manual_seed(0)
NUM_STATES = int(STATES_BT.max()) + 1
REFERENCE_SV = torch.randn(NUM_STATES, VOCABULARY, dtype=torch.float64).log_softmax(-1)
LOGITS_SV = REFERENCE_SV + 0.7 * torch.randn(NUM_STATES, VOCABULARY, dtype=torch.float64)
OLD_SV = LOGITS_SV + 0.1 * torch.randn(NUM_STATES, VOCABULARY, dtype=torch.float64)
SCORES_B = torch.randn(len(TOKENS_BT), dtype=torch.float64)
VALUES_BT = torch.randn(NUM_STATES, dtype=torch.float64)[STATES_BT]  # any baseline: it must not matter


def of_tokens(table_SV: Tensor) -> Tensor:
    """[B, T]: a table's entry for each token of each answer."""
    return table_SV[STATES_BT, TOKENS_BT]


def probabilities(logits_SV: Tensor) -> Tensor:
    """[B]: of each answer."""
    return (of_tokens(logits_SV.log_softmax(-1)) * MASK_BT).sum(1).exp()


def exact_kl(logits_SV: Tensor) -> Tensor:
    """[S]: of each state."""
    return kl.exact(logits_SV, REFERENCE_SV)


def gradient(loss: Tensor, logits_SV: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits_SV)[0]


def right_gradient(beta: float = BETA) -> Tensor:
    """∇J from its definition."""
    logits_SV = LOGITS_SV.clone().requires_grad_()
    kl_B = (exact_kl(logits_SV)[STATES_BT] * MASK_BT).sum(1)
    return gradient((probabilities(logits_SV) * (SCORES_B - beta * kl_B)).sum(), logits_SV)


def placed_gradient(in_reward: str, in_loss: str, whiten: bool = False) -> tuple[Tensor, float]:
    """The expected ascent direction of PPO's pieces, and by what whitening multiplied it."""
    logits_SV = LOGITS_SV.clone().requires_grad_()
    logprobs_BT = of_tokens(logits_SV.log_softmax(-1))
    old_BT, reference_BT = logprobs_BT.detach(), of_tokens(REFERENCE_SV)
    if in_reward == "none":
        penalty_BT = torch.zeros_like(old_BT)
    elif in_reward == "exact":
        penalty_BT = exact_kl(logits_SV).detach()[STATES_BT]
    else:
        penalty_BT = kl.estimate(old_BT, reference_BT, in_reward)
    if in_loss != "none":
        penalty_BT = shaping.of_later_tokens(penalty_BT, MASK_BT)
    rewards_BT = shaping.token_rewards(SCORES_B, penalty_BT, MASK_BT, kl_coefficient=BETA)
    advantages_BT, _ = advantages.gae(rewards_BT, VALUES_BT, MASK_BT, gamma=1.0, lam=1.0)
    scale = 1.0
    if whiten:
        scale = float(torch.rsqrt(masked.var(advantages_BT, MASK_BT) + 1e-8))
        advantages_BT = masked.whiten(advantages_BT, MASK_BT)
    weight_B = probabilities(LOGITS_SV)  # every answer once, instead of samples
    loss = policy.ppo_clip(
        logprobs_BT, old_BT, weight_B[:, None] * advantages_BT, MASK_BT, denominator=1, clip_low=0.2, clip_high=0.2
    ).loss
    weights_B = BETA * scale * weight_B
    if in_loss == "exact":
        kl_BT = exact_kl(logits_SV)[STATES_BT]
        loss = loss + kl.exact_loss_term(kl_BT, MASK_BT, weights_B=weights_B, denominator=1).loss
    elif in_loss != "none":
        loss = loss + kl.loss_term(
            logprobs_BT, reference_BT, old_BT, MASK_BT, kind=in_loss, weights_B=weights_B, denominator=1
        ).loss  # fmt: skip
    return -gradient(loss, logits_SV), scale


def in_states(per_state_S: Tensor) -> Tensor:
    """E[Σ_t x of the state of token t], with the visits of LOGITS_SV fixed."""
    return (probabilities(LOGITS_SV)[:, None] * per_state_S[STATES_BT] * MASK_BT).sum()


def own(kind: str, logits_SV: Tensor = LOGITS_SV) -> Tensor:
    """The last column of the table: Σ over visited states of the gradient that a loss of this kind follows."""
    leaf_SV = logits_SV.clone().requires_grad_()
    logp_SV = leaf_SV.log_softmax(-1)
    followed_S = {
        "exact": exact_kl(leaf_SV),
        "k2": exact_kl(leaf_SV),
        "k3": kl.exact(REFERENCE_SV, leaf_SV),
        "abs": (logp_SV.exp() - REFERENCE_SV.exp()).abs().sum(-1),
        "k1": 0 * exact_kl(leaf_SV),
    }[kind]
    return gradient(in_states(followed_S), leaf_SV)


def push(kind: str, logits_SV: Tensor = LOGITS_SV) -> Tensor:
    """The fourth column, E[∇log π · k] from the definition, summed over visited states."""
    leaf_SV = logits_SV.clone().requires_grad_()
    logp_SV = leaf_SV.log_softmax(-1)
    return gradient(in_states((logp_SV.exp() * table(kind, logits_SV)).sum(-1)), leaf_SV)


def table(kind: str, logits_SV: Tensor = LOGITS_SV) -> Tensor:
    """[S, V]: k of every token in every state, without gradient."""
    if kind == "exact":
        return exact_kl(logits_SV)[:, None].expand(-1, VOCABULARY)
    return kl.estimate(logits_SV.log_softmax(-1), REFERENCE_SV, kind)


def later(kind: str) -> Tensor:
    """E[Σ_t ∇log π_t · Σ_{s>t} mean value of k in the state of s]."""
    mean_S = (LOGITS_SV.softmax(-1) * table(kind)).sum(-1)
    mean_BT = torch.where(MASK_BT, mean_S[STATES_BT], 0.0)
    after_BT = mean_BT.flip(1).cumsum(1).flip(1) - mean_BT
    leaf_SV = LOGITS_SV.clone().requires_grad_()
    logprobs_BT = of_tokens(leaf_SV.log_softmax(-1)) * MASK_BT
    return gradient((probabilities(LOGITS_SV)[:, None] * logprobs_BT * after_BT).sum(), leaf_SV)


def test_the_enumeration_is_complete():
    assert_close(probabilities(LOGITS_SV).sum(), 1.0, largest=1e-12)
    assert_close(right_gradient(), right_gradient(0.0) - BETA * (own("exact") + later("exact")), largest=1e-12)


@pytest.mark.parametrize("in_loss", IN_LOSS)
@pytest.mark.parametrize("in_reward", IN_REWARD)
def test_every_placement_is_what_the_derivation_says(in_reward, in_loss):
    kept = torch.zeros_like(LOGITS_SV)
    if in_reward != "none":
        kept = later(in_reward) + (push(in_reward) if in_loss == "none" else 0)
    if in_loss != "none":
        kept = kept + own(in_loss)
    actual, _ = placed_gradient(in_reward, in_loss)
    assert_close(actual, right_gradient(0.0) - BETA * kept, largest=1e-12)
    gap = float((actual - right_gradient()).norm() / (right_gradient() - right_gradient(0.0)).norm())
    assert (gap < 1e-12) == ((in_reward, in_loss) in COMPLETE), f"part of the KL's gradient left out: {gap:.3f}"
    assert gap < 1e-12 or gap > 0.02


def test_what_each_incomplete_placement_leaves_out():
    right = right_gradient()
    assert_close(placed_gradient("exact", "none")[0] - right, BETA * own("exact"), largest=1e-12)
    assert_close(placed_gradient("k3", "none")[0] - right, BETA * own("k3"), largest=1e-12)
    for in_loss in ("k2", "exact"):
        assert_close(placed_gradient("none", in_loss)[0] - right, BETA * later("exact"), largest=1e-12)
    assert_close(push("k1"), own("exact"), largest=1e-12)
    assert_close(push("k3"), own("exact") - own("k3"), largest=1e-12)
    assert_close(push("exact"), torch.zeros_like(right), largest=1e-12)
    for kind in ("k1", "k3"):
        assert_close(later(kind), later("exact"), largest=1e-12)


def test_to_first_order_k2_and_k3_in_the_reward_do_not_push_the_token_itself():
    direction_SV = torch.randn(REFERENCE_SV.shape, dtype=torch.float64)
    for small in (1e-2, 1e-3, 1e-4):
        near_SV = REFERENCE_SV + small * direction_SV
        whole = float(own("exact", near_SV).norm())
        assert 0.1 < whole / small < 10
        for kind in ("k2", "k3"):
            assert float(push(kind, near_SV).norm()) < 5 * small * whole
        assert float((push("abs", near_SV) - own("exact", near_SV)).norm()) > 0.1 * whole


@pytest.mark.parametrize(("in_reward", "in_loss"), sorted(COMPLETE))
def test_whitening_does_not_change_the_trade(in_reward, in_loss):
    actual, scale = placed_gradient(in_reward, in_loss, whiten=True)
    assert scale != 1
    assert_close(actual, scale * right_gradient(), largest=1e-11)


@pytest.mark.parametrize("kind", ["k2", "k3", "abs", "exact"])
def test_loss_terms_keep_their_gradient_after_the_first_update(kind):
    """The answers come from OLD_SV; in every state that they visit, the gradient is that of the policy as it is now."""
    leaf_SV = LOGITS_SV.clone().requires_grad_()
    weight_B = probabilities(OLD_SV)
    if kind == "exact":
        loss = kl.exact_loss_term(exact_kl(leaf_SV)[STATES_BT], MASK_BT, weights_B=weight_B, denominator=1).loss
    else:
        loss = kl.loss_term(
            of_tokens(leaf_SV.log_softmax(-1)), of_tokens(REFERENCE_SV), of_tokens(OLD_SV.log_softmax(-1)), MASK_BT,
            kind=kind, weights_B=weight_B, denominator=1,
        ).loss  # fmt: skip
    followed_S = {
        "k3": kl.exact(REFERENCE_SV, leaf_SV),
        "abs": (leaf_SV.softmax(-1) - REFERENCE_SV.exp()).abs().sum(-1),
    }
    right = (weight_B[:, None] * followed_S.get(kind, exact_kl(leaf_SV))[STATES_BT] * MASK_BT).sum()
    assert_close(gradient(loss, leaf_SV), gradient(right, leaf_SV), largest=1e-12)
