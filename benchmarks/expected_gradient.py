"""Where each placement of the KL leads in theory: its expected gradient, summed over every answer, followed to the end.

An independent calculation: one free logit per state and token, float64, no sampling, no value model and no code of the
product's objectives. S states (prompt and what was said so far), N answers, T places, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from enumerable import World
from torch import Tensor

from heedful.data.collate import completion_batch
from heedful.models.parts import LanguageModel


@dataclass(frozen=True)
class Tree:
    """All states of a world with the reference's next-token log-probs."""

    states_NT: Tensor
    """int64 [N, T]: the state in which each token of each answer is said, 0 past its end"""
    tokens_NT: Tensor
    """int64 [N, T]"""
    mask_NT: Tensor
    """bool [N, T]"""
    reference_SV: Tensor
    """float64 [S, V] log π_ref"""

    def of_answers(self, logprobs_SV: Tensor) -> Tensor:
        """The log-prob of every token of every answer [N, T], 0 past the end."""
        return torch.where(self.mask_NT, logprobs_SV[self.states_NT, self.tokens_NT], 0.0)


@torch.no_grad()
def tree(world: World, policy: LanguageModel) -> Tree:
    """The states of a world, and what ``policy`` (here the reference) says in each."""
    numbers: dict[tuple[int, ...], int] = {}
    width = max(map(len, world.answer_ids))
    states_NT, tokens_NT = (torch.zeros(len(world.answer_ids), width, dtype=torch.int64) for _ in range(2))
    for n, (prompt, answer) in enumerate(zip(world.prompt_ids, world.answer_ids, strict=True)):
        for t, token in enumerate(answer):
            states_NT[n, t] = numbers.setdefault((*prompt, *answer[:t]), len(numbers))
            tokens_NT[n, t] = token
    lengths_N = torch.tensor([len(answer) for answer in world.answer_ids])
    vocabulary = len(policy.tokenizer)
    rows = [(list(state), [v]) for state in numbers for v in range(vocabulary)]
    batch = completion_batch([s for s, _ in rows], [v for _, v in rows], policy.pad_id)
    reference_SV = policy.logprobs(batch)[0].double().sum(dim=1).reshape(-1, vocabulary)
    return Tree(states_NT, tokens_NT, torch.arange(width) < lengths_N[:, None], reference_SV.log_softmax(-1))


def estimator(rho: Tensor, kind: str) -> Tensor:
    """k1 = ρ, k2 = ρ²/2, k3 = e^(−ρ) − 1 + ρ, abs = |ρ|."""
    return {"k1": lambda: rho, "k2": lambda: rho**2 / 2, "k3": lambda: (-rho).exp() - 1 + rho, "abs": rho.abs}[kind]()


def surrogate(world: World, tree: Tree, logprobs_SV: Tensor, beta: float, in_reward: str, in_loss: str) -> Tensor:
    """A number whose gradient is the expected gradient of the placement (mean over prompts).

    Σ_y π(y) Σ_t [ log π(y_t) G_t − β ℓ_t ] with π(y) and G_t held fixed: G_t sums what the reward holds from token t on
    (from t + 1 on for the KL, where the loss has that of token t itself), and ℓ_t is the loss term.
    """
    logprobs_NT, reference_NT = tree.of_answers(logprobs_SV), tree.of_answers(tree.reference_SV)
    weights_N = logprobs_NT.sum(1).exp().detach()
    kl_S = (logprobs_SV.exp() * (logprobs_SV - tree.reference_SV)).sum(-1)
    kl_NT = torch.where(tree.mask_NT, kl_S[tree.states_NT], 0.0)

    def value(kind: str) -> Tensor:
        return kl_NT if kind == "exact" else estimator(logprobs_NT - reference_NT, kind)

    gains_NT = torch.where(tree.mask_NT, world.rewards_N[:, None], 0.0)
    if in_reward != "none":
        penalty_NT = value(in_reward)
        from_here_NT = penalty_NT.flip(1).cumsum(1).flip(1)
        gains_NT = gains_NT - beta * (from_here_NT if in_loss == "none" else from_here_NT - penalty_NT)
    total_NT = logprobs_NT * gains_NT.detach()
    if in_loss != "none":
        total_NT = total_NT - beta * value(in_loss)
    return (weights_N * torch.where(tree.mask_NT, total_NT, 0.0).sum(1)).sum() / world.num_prompts


def limit(
    world: World, tree: Tree, beta: float, in_reward: str, in_loss: str, *, steps: int = 1500, rate: float = 0.05
) -> Tensor:
    """log π(y|x) of every answer [N] where ascent along the expected gradient from π_ref ends."""
    logits_SV = tree.reference_SV.clone().requires_grad_()
    adam = torch.optim.Adam([logits_SV], lr=rate, betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, 2 * (1 - step / steps)))
    for _ in range(steps):
        adam.zero_grad()
        (-surrogate(world, tree, logits_SV.log_softmax(-1), beta, in_reward, in_loss)).backward()
        adam.step()
        decay.step()
    return tree.of_answers(logits_SV.detach().log_softmax(-1)).sum(1)
