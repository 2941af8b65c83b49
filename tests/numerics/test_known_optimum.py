"""The fast part of benchmarks/known_optimum.py: the counting, the derivation of every placement, three short runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from enumerable import PROMPTS, TASKS, save_policy, tokenizer, world  # noqa: E402
from expected_gradient import surrogate, tree  # noqa: E402
from known_optimum import COMPLETE, INCOMPLETE, REQUIRED, fresh_roles, run, settings  # noqa: E402

BETA = 0.7


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return fresh_roles(save_policy(tmp_path_factory.mktemp("optimum"))).policy


@pytest.fixture(scope="module")
def counted(reference):
    w = world(tokenizer(), TASKS["random"])
    return w, tree(w, reference), w.logprobs(reference)


def some_policy(states, seed=0):
    """Log-probs [S, V] far from the reference."""
    noise = torch.randn(states.reference_SV.shape, generator=torch.Generator().manual_seed(seed)).double()
    return (states.reference_SV + noise).log_softmax(-1).requires_grad_()


def test_every_answer_is_counted_once(counted):
    w, states, reference_N = counted
    num_others, limit = len(tokenizer()) - 1, 3
    assert len(w.answer_ids) == len(PROMPTS) * (sum(num_others**n for n in range(limit)) + num_others**limit)
    assert len({(tuple(p), tuple(a)) for p, a in zip(w.prompt_ids, w.answer_ids)}) == len(w.answer_ids)
    torch.testing.assert_close(states.of_answers(states.reference_SV).sum(1), reference_N, atol=1e-5, rtol=0)


@pytest.mark.parametrize("beta", [0.2, 1.0, 5.0])
def test_the_optimum_is_the_optimum(counted, beta):
    """J* = β log E_ref[exp(r / β)], and what any other policy lacks is β KL(π ‖ π*)."""
    w, states, reference_N = counted
    best_N = w.optimum(reference_N, beta)
    total_P = w.per_prompt((reference_N + w.rewards_N / beta).exp())
    assert w.objective(best_N, reference_N, beta) == pytest.approx(float((beta * total_P.log()).mean()), abs=1e-9)
    other_N = states.of_answers(some_policy(states).detach()).sum(1)
    lacking = w.objective(best_N, reference_N, beta) - w.objective(other_N, reference_N, beta)
    assert lacking == pytest.approx(beta * w.expected(other_N, other_N - best_N), abs=1e-4) and lacking > 0.01


def own_and_later(w, states, logprobs_SV):
    """The two parts of the KL's gradient, from the exact KL of every state: Σ ∇K_t, and Σ ∇log π_t · Σ_{s>t} K_s."""
    kl_S = (logprobs_SV.exp() * (logprobs_SV - states.reference_SV)).sum(-1)
    kl_NT = torch.where(states.mask_NT, kl_S[states.states_NT], 0.0)
    logprobs_NT = states.of_answers(logprobs_SV)
    weights_N1 = logprobs_NT.sum(1, keepdim=True).exp().detach() / w.num_prompts
    later_NT = (kl_NT.flip(1).cumsum(1).flip(1) - kl_NT).detach()
    return (weights_N1 * kl_NT).sum(), (weights_N1 * logprobs_NT * later_NT).sum()


def gradient(x, logprobs_SV):
    (found,) = torch.autograd.grad(x, logprobs_SV, retain_graph=True)
    # along the simplex of each state: what a softmax lets through
    return found - logprobs_SV.detach().exp() * found.sum(-1, keepdim=True)


def of_placement(counted, placement, logprobs_SV):
    w, states, _ = counted
    return gradient(surrogate(w, states, logprobs_SV, BETA, *placement.split("+")), logprobs_SV)


def of_objective(counted, logprobs_SV):
    w, states, _ = counted
    logprobs_N, reference_N = (states.of_answers(x).sum(1) for x in (logprobs_SV, states.reference_SV))
    gains_N = w.rewards_N - BETA * (logprobs_N - reference_N)
    return gradient((logprobs_N.exp() * gains_N).sum() / w.num_prompts, logprobs_SV)


@pytest.mark.parametrize("placement", [*REQUIRED, *COMPLETE])
def test_complete_placements_have_the_gradient_of_the_objective(counted, placement):
    logprobs_SV = some_policy(counted[1])
    expected = of_objective(counted, logprobs_SV)
    torch.testing.assert_close(of_placement(counted, placement, logprobs_SV), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("placement", INCOMPLETE)
def test_the_others_do_not(counted, placement):
    logprobs_SV = some_policy(counted[1])
    gap = of_placement(counted, placement, logprobs_SV) - of_objective(counted, logprobs_SV)
    assert gap.norm() > 0.1 * of_objective(counted, logprobs_SV).norm()


def test_what_they_leave_out(counted):
    w, states, _ = counted
    logprobs_SV = some_policy(states)
    own, later = (BETA * gradient(x, logprobs_SV) for x in own_and_later(w, states, logprobs_SV))
    whole = of_objective(counted, logprobs_SV)
    left_out = {"exact+none": own, "none+exact": later, "none+k2": later, "none+k1": own + later}
    for placement, part in left_out.items():
        torch.testing.assert_close(of_placement(counted, placement, logprobs_SV), whole + part, atol=1e-12, rtol=0)


def test_what_the_estimators_follow_instead(counted):
    """Each identity of docs/11c that is no multiple of own and later: what of the score's gradient is left after it."""
    w, states, _ = counted
    logprobs_SV = some_policy(states)
    pi_SV, ref_SV = logprobs_SV.exp(), states.reference_SV.exp()
    rho_SV = logprobs_SV - states.reference_SV
    visits_NT = states.of_answers(logprobs_SV).sum(1, keepdim=True).exp().detach() / w.num_prompts

    def over_states(x_S):
        return gradient((visits_NT * torch.where(states.mask_NT, x_S[states.states_NT], 0.0)).sum(), logprobs_SV)

    reverse = over_states((ref_SV * -rho_SV).sum(-1))
    distance = over_states((pi_SV - ref_SV).abs().sum(-1))
    half_square = over_states((pi_SV * rho_SV**2 / 2).sum(-1))
    own, later = (gradient(x, logprobs_SV) for x in own_and_later(w, states, logprobs_SV))

    def of_kl(placement):
        with_kl, without = (of_placement(counted, p, logprobs_SV) for p in (placement, "none+k1"))
        return -(with_kl - without) / BETA

    # k2's later part is that of E[ρ²/2], so only its own push is compared: on the last token there is no later one
    last_S = torch.zeros(len(ref_SV), dtype=torch.bool)
    last_S[states.states_NT[:, -1][states.mask_NT[:, -1]]] = True
    for found, expected in (
        (of_kl("none+k3"), reverse),
        (of_kl("none+abs"), distance),
        (of_kl("k3+none"), own - reverse + later),
        (of_kl("k2+none")[last_S], (half_square - own)[last_S]),
    ):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("placement", ["k2+none", "k3+none"])
def test_k2_and_k3_in_the_reward_leave_out_own_near_the_reference(counted, placement):
    """Of the KL's gradient, first order in ρ, they have *later* (which is of second order) and nothing of *own*."""
    w, states, _ = counted
    sizes = []
    for step in (1e-2, 1e-3):
        logprobs_SV = (states.reference_SV + step * some_policy(states).detach()).log_softmax(-1).requires_grad_()
        of_kl = of_placement(counted, placement, logprobs_SV) - of_placement(counted, "none+k1", logprobs_SV)
        own, _ = own_and_later(w, states, logprobs_SV)
        sizes.append(float(of_kl.norm() / (BETA * gradient(own, logprobs_SV)).norm()))
    assert sizes[0] < 0.1 and sizes[1] < sizes[0] / 5


def test_k1_in_the_loss_is_refused():
    with pytest.raises(ValueError, match="in_loss: k1 has an expected gradient of 0"):
        settings(BETA, "k1+k1", steps=1, samples=2)


@pytest.mark.parametrize(("placement", "steps"), [("k1+none", 60), ("exact+exact", 120)])
def test_PPO_reaches_the_optimum(placement, steps):
    """The exact form needs more steps: its noise does not vanish at the optimum, that of k1 does."""
    row = run(placement, "end", BETA, steps=steps, samples=384, theory=False, ema_decay=0.95)
    assert row.share > 0.99 and row.distance_nats < 0.01


def test_PPO_with_the_exact_KL_in_the_reward_alone_runs_away():
    row = run("exact+none", "end", BETA, steps=30, samples=256, theory=False, ema_decay=0.9)
    assert row.share < 0 and row.kl_nats > 2 * row.optimum_kl_nats
