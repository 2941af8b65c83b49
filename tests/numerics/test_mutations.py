"""The tests of the objectives must notice a wrong sign, mask, denominator, clip or index.

Each mutant is one small change of the source. It is loaded as a module, put in the place of the real one in that
module's own test file, and the tests of that file run until one fails. A mutant that survives is a hole in the tests,
or shows that the code it changes is not needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

MUTANTS: dict[str, list[tuple[str, str]]] = {
    "masked": [
        ("torch.where(loss_mask_BT, at_least_float32(x_BT), 0.0)", "at_least_float32(x_BT) * loss_mask_BT"),
        ("torch.where(loss_mask_BT, at_least_float32(x_BT), 0.0)", "at_least_float32(x_BT)"),
        (
            "torch.where(loss_mask_BT, at_least_float32(x_BT), 0.0)",
            "torch.where(~loss_mask_BT, at_least_float32(x_BT), 0.0)",
        ),
        ("torch.where(loss_mask_BT, at_least_float32(x_BT), 0.0)", "torch.where(loss_mask_BT, x_BT, 0.0)"),
        ("x_BT.shape != loss_mask_BT.shape", "x_BT.ndim != loss_mask_BT.ndim"),
        ("loss_mask_BT.sum() if denominator is None", "loss_mask_BT.numel() if denominator is None"),
        ("torch.where(count == 0, torch.ones_like(count), count)", "count"),
        ("torch.where(count == 0, torch.ones_like(count), count)", "count.clamp(min=1)"),
        ("torch.where(count == 0, 0.0, total /", "torch.where(count < 0, 0.0, total /"),
        ("x_BT.sum(dim=1, keepdim=True) if count.ndim else x_BT.sum()", "x_BT.sum()"),
        ("x_BT.sum(dim=1, keepdim=True) if", "x_BT.sum(dim=1) if"),
        ("count.ndim and count.shape != (len(x_BT), 1)", "count.ndim > 2"),
        ("count = count.to(total.dtype)", "pass"),
        ("count - 1 if unbiased else count", "count if unbiased else count - 1"),
        ("count - 1 if unbiased else count", "count"),
        (
            "return counted(once_BT - _mean(once_BT, loss_mask_BT), loss_mask_BT)",
            "return counted(once_BT, loss_mask_BT)",
        ),
        ("counted(x_BT - mean, loss_mask_BT)", "(x_BT - mean)"),
        ("counted(x_BT - mean, loss_mask_BT)", "_deviation(x_BT, loss_mask_BT)"),
        ("torch.rsqrt(var + eps)", "torch.rsqrt(var)"),
        ("torch.rsqrt(var + eps)", "1 / (var.sqrt() + eps)"),
        ("    if var is None:\n        var =", "    if True:\n        var ="),
        ("if not shift_mean:", "if shift_mean:"),
        ("if mean is None else mean)\n    return", "if True else mean)\n    return"),
        ("return counted(white_BT, loss_mask_BT)", "return white_BT"),
    ],
    "kl": [
        (
            "at_least_float32(logprobs_BT) - at_least_float32(reference_logprobs_BT)",
            "at_least_float32(reference_logprobs_BT) - at_least_float32(logprobs_BT)",
        ),
        (
            "at_least_float32(logprobs_BT) - at_least_float32(reference_logprobs_BT)",
            "(logprobs_BT - reference_logprobs_BT.to(logprobs_BT.dtype)).float()",
        ),
        ("rho_BT**2 / 2", "rho_BT**2"),
        ("(-rho_BT).clamp(max=_MAX_EXPONENT)", "(-rho_BT)"),
        ("(-rho_BT).clamp(max=_MAX_EXPONENT)", "rho_BT.clamp(max=_MAX_EXPONENT)"),
        (" + tangent * beyond_BT", ""),
        (" + tangent * beyond_BT", " - tangent * beyond_BT"),
        ("beyond_BT + rho_BT", "beyond_BT - rho_BT"),
        ("torch.expm1(exponent_BT)", "torch.exp(exponent_BT) - 1"),
        ("torch.expm1(exponent_BT)", "torch.exp(exponent_BT)"),
        ("return rho_BT.abs()", "return rho_BT"),
        ('kind: Kind = "k1"', 'kind: Kind = "k3"'),
        ("(logp_BTV.exp() * difference_BTV)", "(logq_BTV.exp() * difference_BTV)"),
        ("torch.where(possible_BTV, logq_BTV, 0.0)", "logq_BTV"),
        (
            "logq_BTV = torch.log_softmax(at_least_float32(reference_logits_BTV), dim=-1)",
            "logq_BTV = reference_logits_BTV",
        ),
        ('if kind not in ("k2", "k3", "abs"):', 'if kind not in ("k1", "k2", "k3", "abs"):'),
        ("    logprobs_BT = masked.counted(logprobs_BT, loss_mask_BT)\n", ""),
        ("reference_logprobs_BT.detach(), kind)", "reference_logprobs_BT, kind)"),
        ("logprobs_BT.detach() - old", "logprobs_BT - old"),
        ("logprobs_BT.detach() - old", "-logprobs_BT.detach() + old"),
        ("- old_logprobs_BT.detach()", "- old_logprobs_BT"),
        ("log_ratio_BT.clamp(max=_MAX_EXPONENT).exp()", "log_ratio_BT.exp()"),
        ("log_ratio_BT.clamp(max=_MAX_EXPONENT).exp()", "log_ratio_BT.clamp(max=0).exp()"),
        ("ratio_BT * estimate(logprobs_BT", "estimate(logprobs_BT"),
        (
            "ratio_BT * estimate(logprobs_BT, reference_logprobs_BT.detach(), kind)",
            "ratio_BT * estimate(logprobs_BT, logprobs_BT)",
        ),
        ("ratio_BT * estimate(logprobs_BT, reference_logprobs_BT.detach(), kind)", "ratio_BT * logprobs_BT"),
        (
            "ratio_BT * estimate(logprobs_BT, reference_logprobs_BT.detach(), kind)",
            'ratio_BT * estimate(logprobs_BT, reference_logprobs_BT, "k2")',
        ),
        ("weights_B.detach()[:, None] * kl_BT", "kl_BT"),
        ("weights_B.detach()[:, None] * kl_BT", "weights_B.detach().mean() * kl_BT"),
        ("weights_B.detach()[:, None] * kl_BT", "weights_B[:, None] * kl_BT"),
        ("weights_B.detach()[:, None] * kl_BT", "-weights_B.detach()[:, None] * kl_BT"),
        ("* kl_BT, loss_mask_BT, denominator=denominator", "* kl_BT, loss_mask_BT"),
        (
            "masked.mean(kl_BT.detach(), loss_mask_BT, denominator=denominator)",
            "masked.mean(kl_BT.detach(), loss_mask_BT)",
        ),
        ("masked.mean(kl_BT.detach()", "masked.mean(kl_BT"),
        ("masked.mean(kl_BT.detach()", "masked.mean(weights_B[:, None] * kl_BT.detach()"),
        ("len(kl_B) < 4", "len(kl_B) < 1"),
        ("len(kl_B) < 4", "len(kl_B) < 5"),
        ("median = kl_B.quantile(0.5)", "median = kl_B.mean()"),
        ("median = kl_B.quantile(0.5)", "median = kl_B.median()"),
        ("(kl_B - median).abs().quantile(0.5)", "(kl_B - median).abs().mean()"),
        ("(kl_B - median).abs().quantile(0.5)", "(kl_B - median).abs().median()"),
        ("_DEVIATION_PER_MAD * (kl_B", "(kl_B"),
        ("torch.where(deviation > 0, deviation, torch.inf)", "deviation"),
        ("torch.inf) - threshold", "torch.inf)"),
        ("slope * beyond_B.clamp(min=0)", "slope * beyond_B.abs()"),
        ("slope * beyond_B.clamp(min=0)", "beyond_B.clamp(min=0)"),
        (".clamp(max=max_weight)", ""),
        ("ones_B + slope", "slope"),
        ("@torch.no_grad()\n", ""),
        ("kl_B = at_least_float32(kl_B)", "pass"),
    ],
    "advantages": [
        ("- values_TB[t]\n", "+ values_TB[t]\n"),
        ("gamma * next_value_B", "next_value_B"),
        ("gamma * lam * next_advantage_B", "gamma * next_advantage_B"),
        ("gamma * lam * next_advantage_B", "lam * next_advantage_B"),
        ("lam * next_advantage_B, next_advantage_B)", "lam * next_advantage_B, 0 * next_advantage_B)"),
        ("torch.where(counts_B, values_TB[t], next_value_B)", "values_TB[t]"),
        ("range(len(rewards_TB) - 1, -1, -1)", "range(len(rewards_TB) - 1, 0, -1)"),
        ("range(len(rewards_TB) - 1, -1, -1)", "range(len(rewards_TB) - 2, -1, -1)"),
        ("range(len(rewards_TB) - 1, -1, -1)", "range(len(rewards_TB))"),
        (
            "torch.zeros_like(values_TB[0]) if bootstrap_B is None else bootstrap_B.to(values_TB)",
            "torch.zeros_like(values_TB[0])",
        ),
        ("return counted(advantages_TB.T, loss_mask_BT)", "return advantages_TB.T"),
        ("gains_BT + values_TB.T", "gains_BT - values_TB.T"),
        ("gains_BT + values_TB.T", "gains_BT"),
        ("gains_BT + values_TB.T", "advantages_BT + values_TB.T"),
        ("advantages_BT = decayed(lam)", "advantages_BT = decayed(lam if value_lam is None else value_lam)"),
        ("advantages_BT if value_lam is None else", "advantages_BT if not value_lam else"),
        ("at_least_float32(values_BT).T", "values_BT.T"),
        ("torch.where(counts_B, delta_B +", "torch.where(counts_B | True, delta_B +"),
        ("@torch.no_grad()\n", ""),
    ],
    "shaping": [
        ("score_BT - kl_coefficient", "score_BT + kl_coefficient"),
        ("kl_coefficient * at_least_float32(kl_BT)", "kl_coefficient * kl_BT"),
        ("kl_coefficient * at_least_float32(kl_BT)", "kl_coefficient * at_least_float32(kl_BT) * (num_left_BT > 1)"),
        ("return counted(score_BT -", "return (score_BT -"),
        ("at_least_float32(kl_BT), loss_mask_BT)", "at_least_float32(kl_BT)) * loss_mask_BT"),
        ("num_left_BT == 1", "num_left_BT == 0"),
        ("num_left_BT == 1", "num_left_BT == 2"),
        ("num_left_BT == 1", "num_left_BT >= 1"),
        ("loss_mask_BT.flip(1).cumsum(1).flip(1)", "loss_mask_BT.cumsum(1)"),
        ("    scores_B = at_least_float32(scores_B)\n", ""),
        ("scores_B.clamp(-score_clip, score_clip)", "scores_B.clamp(max=score_clip)"),
        ("scores_B.clamp(-score_clip, score_clip)", "scores_B.clamp(min=-score_clip)"),
        ("torch.where(finished_B, scores_B, cut_B)", "torch.where(~finished_B, scores_B, cut_B)"),
        ("torch.where(finished_B, scores_B, cut_B)", "scores_B"),
        ("scores_B - missing_end_penalty", "scores_B + missing_end_penalty"),
        ("scores_B - missing_end_penalty", "-missing_end_penalty"),
        ("if missing_end_score is None", "if not missing_end_score"),
        ("scores_B.new_tensor(missing_end_score)", "scores_B + missing_end_score"),
        ("overlong_full_tokens <= overlong_from_tokens", "overlong_full_tokens < overlong_from_tokens"),
        ("overlong_full_tokens is None or ", ""),
        ("lengths_B - overlong_from_tokens", "lengths_B"),
        ("overlong_full_tokens - overlong_from_tokens", "overlong_full_tokens"),
        ("scores_B - overlong_penalty", "scores_B + overlong_penalty"),
        ("overlong_penalty * excess_B", "excess_B"),
        ("excess_B.clamp(0, 1)", "excess_B.clamp(min=0)"),
        ("excess_B.clamp(0, 1)", "excess_B.clamp(max=1)"),
        ("excess_B.clamp(0, 1)", "(excess_B > 0)"),
        ("@torch.no_grad()\ndef answer_scores", "def answer_scores"),
        ("@torch.no_grad()\ndef token_rewards", "def token_rewards"),
        ("@torch.no_grad()\ndef of_later_tokens", "def of_later_tokens"),
        ("kl_BT[:, t], next_B)", "kl_BT[:, t], 0 * next_B)"),
        ("torch.where(loss_mask_BT[:, t], kl_BT[:, t], next_B)", "kl_BT[:, t]"),
        (
            "torch.where(loss_mask_BT[:, t], kl_BT[:, t], next_B)",
            "next_B + kl_BT[:, t] * loss_mask_BT[:, t]",
        ),
        ("return counted(later_BT, loss_mask_BT)", "return later_BT"),
        ("range(kl_BT.shape[1] - 1, -1, -1)", "range(kl_BT.shape[1])"),
        ("range(kl_BT.shape[1] - 1, -1, -1)", "range(kl_BT.shape[1] - 1, 0, -1)"),
        ("range(kl_BT.shape[1] - 1, -1, -1)", "range(kl_BT.shape[1] - 2, -1, -1)"),
    ],
    "policy": [
        ("masked.counted(log_ratio_BT, loss_mask_BT)", "masked.counted(-log_ratio_BT, loss_mask_BT)"),
        ("masked.counted(log_ratio_BT, loss_mask_BT)", "log_ratio_BT"),
        ("masked.counted(log_ratio_BT, loss_mask_BT)", "(log_ratio_BT * loss_mask_BT)"),
        (".clamp(max=_MAX_LOG_RATIO).exp()", ".exp()"),
        ("masked.at_least_float32(old_logprobs_BT).detach()", "masked.at_least_float32(old_logprobs_BT)"),
        (
            "masked.at_least_float32(logprobs_BT) - masked.at_least_float32(old_logprobs_BT)",
            "logprobs_BT - old_logprobs_BT",
        ),
        ("masked.at_least_float32(advantages_BT).detach()", "masked.at_least_float32(advantages_BT)"),
        ("    with torch.no_grad():\n", "    if True:\n"),
        ("plain_BT = -advantages_BT", "plain_BT = advantages_BT"),
        ("clipped_BT = -advantages_BT", "clipped_BT = advantages_BT"),
        ("clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_high, 1 + clip_low)"),
        ("clamp(1 - clip_low, 1 + clip_high)", "clamp(max=1 + clip_high)"),
        ("clamp(1 - clip_low, 1 + clip_high)", "clamp(min=1 - clip_low)"),
        ("torch.maximum(plain_BT, clipped_BT)", "torch.minimum(plain_BT, clipped_BT)"),
        ("torch.maximum(plain_BT, clipped_BT)", "clipped_BT"),
        ("advantages_BT < 0", "advantages_BT > 0"),
        ("-advantages_BT * dual_clip", "-advantages_BT * (dual_clip - 1)"),
        (
            "torch.minimum(loss_BT, ceiling_BT), loss_mask_BT, denominator=denominator",
            "torch.minimum(loss_BT, ceiling_BT), loss_mask_BT",
        ),
        ("(clipped_BT > plain_BT).float()", "(clipped_BT != plain_BT).float()"),
        ("(clipped_BT > plain_BT).float()", "(clipped_BT >= plain_BT).float()"),
        ("(loss_BT > ceiling_BT)", "(loss_BT < ceiling_BT)"),
        ("masked.mean(x, loss_mask_BT, denominator=denominator)", "masked.mean(x, loss_mask_BT)"),
        ('kl.estimate(old_logprobs_BT, logprobs_BT, "k3")', 'kl.estimate(logprobs_BT, old_logprobs_BT, "k3")'),
        ("(ratio_BT - 1).abs()", "ratio_BT - 1"),
        ("masked.mean(entropy_BT, loss_mask_BT, denominator=denominator)", "masked.mean(entropy_BT, loss_mask_BT)"),
        (
            "masked.mean(entropy_BT, loss_mask_BT, denominator=denominator)",
            "(entropy_BT * loss_mask_BT).sum() / denominator",
        ),
        ("LossOut(-coefficient * entropy", "LossOut(coefficient * entropy"),
        ("LossOut(-coefficient * entropy", "LossOut(-entropy"),
        ("entropy.detach()", "entropy"),
        ('"entropy_bonus_nats": entropy.', '"entropy_bonus_nats": coefficient * entropy.'),
    ],
    "value": [
        ("(-clip, clip)", "(-clip, 2 * clip)"),
        ("(-clip, clip)", "(0, clip)"),
        ("old_values_BT + (values_BT - old_values_BT)", "returns_BT + (values_BT - old_values_BT)"),
        ("torch.maximum(plain_BT, clipped_BT) / 2", "torch.minimum(plain_BT, clipped_BT) / 2"),
        ("torch.maximum(plain_BT, clipped_BT) / 2", "torch.maximum(plain_BT, clipped_BT)"),
        ("/ 2, loss_mask_BT, denominator=denominator", "/ 2, loss_mask_BT"),
        ("values_BT = masked.counted(values_BT, loss_mask_BT)\n    old", "old"),
        ("masked.counted(values_BT, loss_mask_BT)", "values_BT * loss_mask_BT"),
        ('"value_mean": values_BT.detach()', '"value_mean": values_BT'),
        ("(clipped_BT > plain_BT)", "(clipped_BT != plain_BT)"),
        ("(clipped_BT > plain_BT)", "(clipped_BT < plain_BT)"),
        ("masked.mean(x, loss_mask_BT, denominator=denominator)", "masked.mean(x, loss_mask_BT)"),
        (
            "masked.var(returns_BT - values_BT, loss_mask_BT)",
            "masked.mean((returns_BT - values_BT) ** 2, loss_mask_BT)",
        ),
        ("1 - left / torch", "left / torch"),
        ("total > 1e-12 *", "total >= 0 *"),
    ],
    "preference": [
        ("masked.at_least_float32(chosen_N) - masked.at_least_float32(rejected_N)", "(rejected_N - chosen_N).float()"),
        ("masked.at_least_float32(chosen_N) - masked.at_least_float32(rejected_N)", "chosen_N - rejected_N"),
        ("difference_N - margin_N", "difference_N + margin_N"),
        ("masked.mean(_correct(difference_N)", "masked.mean(_correct(target_N)"),
        (
            "scores_PK = masked.counted(scores_PK, mask_PK)\n    difference_PKK",
            "scores_PK = scores_PK.float()\n    difference_PKK",
        ),
        (
            "difference_PKK = scores_PK[:, :, None] - scores_PK[:, None, :]",
            "difference_PKK = scores_PK[:, None, :] - scores_PK[:, :, None]",
        ),
        ("num_pairs_P.clamp(min=1)[:, None, None]", "num_pairs_P.clamp(min=1).max()"),
        ("num_pairs_P.clamp(min=1)[:, None, None]", "num_pairs_P[:, None, None]"),
        ("(num_pairs_P > 0).sum() if denominator is None", "len(x_PKK) if denominator is None"),
        ("(num_pairs_P > 0).sum() if denominator is None else denominator", "(num_pairs_P > 0).sum()"),
        (
            "mask_PK[:, :, None] & mask_PK[:, None, :]\n    return real",
            "mask_PK[:, :, None] | mask_PK[:, None, :]\n    return real",
        ),
        ("ranks_PK[:, :, None] < ranks_PK[:, None, :]", "ranks_PK[:, :, None] > ranks_PK[:, None, :]"),
        ("ranks_PK[:, :, None] < ranks_PK[:, None, :]", "ranks_PK[:, :, None] <= ranks_PK[:, None, :]"),
        ("target * (1 - 2 * label_smoothing) + label_smoothing", "target * (1 - label_smoothing) + label_smoothing"),
        ("target * (1 - 2 * label_smoothing) + label_smoothing", "target * (1 - 2 * label_smoothing)"),
        ("target * (1 - 2 * label_smoothing) + label_smoothing", "target"),
        ("- (1 - q) * logsigmoid(-difference)", "+ (1 - q) * logsigmoid(-difference)"),
        ("- (1 - q) * logsigmoid(-difference)", "- (1 - q) * logsigmoid(difference)"),
        ("-q * logsigmoid(difference)", "-q * torch.sigmoid(difference).log()"),
        ("not 0 <= label_smoothing < 0.5", "not 0 <= label_smoothing <= 0.5"),
        ("(difference > 0).float()", "(difference >= 0).float()"),
        ("0.5 * (difference == 0)", "0.0 * (difference == 0)"),
        # labels
        ("pair_PKK & ~targets_PKK.isnan()", "pair_PKK"),
        ("targets_PKK.to(difference.dtype).nan_to_num(1.0)", "targets_PKK.to(difference.dtype)"),
        ("targets_PKK.to(difference.dtype).nan_to_num(1.0)", "targets_PKK.mT.to(difference.dtype).nan_to_num(1.0)"),
        ('if ties == "half":', 'if ties == "skip":'),
        (".triu(diagonal=1)", ".triu()"),
        (".triu(diagonal=1)", ""),
        ("(real_PKK & _tied(ranks_PK))", "_tied(ranks_PK)"),
        ("torch.where(tied_PKK, 0.5, target_PKK)", "target_PKK"),
        ("torch.where(tied_PKK, 0.5, target_PKK)", "torch.where(tied_PKK, 1.0, target_PKK)"),
        ("torch.where(tied_PKK, 0.0, margins_PKK.to(difference.dtype))", "margins_PKK.to(difference.dtype)"),
        ("difference - torch.where(tied_PKK", "difference + torch.where(tied_PKK"),
        (
            "told_apart_PKK = pair_PKK & better(ranks_PK, mask_PK)\n    return LossOut(",
            "told_apart_PKK = pair_PKK\n    return LossOut(",
        ),
        (
            "told_apart_PKK = pair_PKK & better(ranks_PK, mask_PK)\n    metrics",
            "told_apart_PKK = pair_PKK\n    metrics",
        ),
        (
            "return pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties).sum",
            "return pairs(ranks_PK, mask_PK, ties=ties).sum",
        ),
        (
            "return pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties).sum",
            "return pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK).sum",
        ),
        (
            "return (num_pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties) > 0)",
            "return (num_pairs(ranks_PK, mask_PK, ties=ties) > 0)",
        ),
        (
            "return (num_pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK, ties=ties) > 0)",
            "return (num_pairs(ranks_PK, mask_PK, targets_PKK=targets_PKK) > 0)",
        ),
        ("scores_PK.detach())", "scores_PK)"),
        ("torch.where(pair_PKK, scores_PK[:, :, None] - scores_PK[:, None, :], 0.0)", "pair_PKK.float()"),
        ("if weights_P is not None:", "if False:"),
        ("weight_PKK * weights_P[:, None, None]", "weights_P[:, None, None]"),
        ("denominator, weights_P),\n        order(", "denominator),\n        order("),
        (
            "LossOut(_per_prompt(loss_PKK, pair_PKK, denominator, weights_P), metrics",
            "LossOut(_per_prompt(loss_PKK, pair_PKK, denominator), metrics",
        ),
        # every token
        ("torch.where(mask_PK, lengths_PK, 1)\n    place_T", "lengths_PK\n    place_T"),
        ("(place_T < lengths_PK[:, :, None]) & mask_PK[:, :, None]", "(place_T < lengths_PK[:, :, None])"),
        ("(place_T < lengths_PK[:, :, None]) & mask_PK[:, :, None]", "mask_PK[:, :, None].expand_as(values_PKT)"),
        ("place_T.minimum(lengths_PK[:, :, None] - 1)", "place_T.expand_as(values_PKT)"),
        ("place_T.minimum(lengths_PK[:, :, None] - 1)", "place_T.minimum(lengths_PK[:, :, None]).clamp(max=T - 1)"),
        ("torch.where(real_PKT, masked.at_least_float32(values_PKT), 0.0)", "masked.at_least_float32(values_PKT)"),
        ("torch.where(real_PKT, masked.at_least_float32(values_PKT), 0.0)", "torch.where(real_PKT, values_PKT, 0.0)"),
        ("torch.where(real_PKT, token_ids_PKT, -1)", "token_ids_PKT"),
        (".cummax(dim=3).values", ""),
        ("torch.maximum(lengths_PK[:, :, None]", "torch.minimum(lengths_PK[:, :, None]"),
        ("differs_PKKT & (place_T < longer_PKK[..., None])", "differs_PKKT"),
        ("differs_PKKT & (place_T < longer_PKK[..., None])", "place_T < longer_PKK[..., None]"),
        ("values_PKT[:, :, None] - values_PKT[:, None, :]", "values_PKT[:, None, :] - values_PKT[:, :, None]"),
        (".sum(dim=3) / counts_PKKT.sum(dim=3)", ".sum(dim=3) / longer_PKK"),
        ("order(values_PKT[..., -1]", "order(values_PKT[..., 0]"),
        # what keeps scores honest
        ("(mask_PK.sum(dim=1) - 1).clamp(min=0)", "mask_PK.sum(dim=1)"),
        ("_centred(x_PK, mask_PK) / deviation(", "x_PK / deviation("),
        ("_centred(x_PK, mask_PK) / deviation(x_PK, mask_PK).clamp(min=_EPS)", "_centred(x_PK, mask_PK)"),
        ("standard_HPK.std(dim=0)", "standard_HPK.std(dim=0, unbiased=False)"),
        ("masked.mean(standard_HPK.std(dim=0), mask_PK)", "standard_HPK.std(dim=0).mean()"),
        ("(mask_PK.sum(dim=1) - 1).clamp(min=0).sum().clamp(min=1)", "(mask_PK.sum(dim=1) - 1).clamp(min=0).sum()"),
        ("(_centred(scores_PK, mask_PK) ** 2).sum() / num_free", "(scores_PK**2).sum() / num_free"),
        ("scores_PK.sum(dim=1) / mask_PK.sum(dim=1).clamp(min=1)\n    square", "scores_PK.mean(dim=1)\n    square"),
        ("scores_PK.sum(dim=1) / mask_PK.sum(dim=1).clamp(min=1)\n    square", "scores_PK.sum(dim=1)\n    square"),
        ("scores_PK = masked.counted(scores_PK, mask_PK)\n    mean_P", "mean_P"),
        ("(mean_P**2).sum() / denominator", "(mean_P**2).mean()"),
        ("(mean_P**2).sum() / denominator", "(scores_PK**2).sum() / denominator"),
        ("coefficient * square", "square"),
        ("square.detach()", "square"),
        ("(deviation_PK**2).sum(dim=1) / mask_PK.sum(dim=1).clamp(min=1)", "(deviation_PK**2).mean(dim=1)"),
        ("(deviation_PK**2).sum(dim=1) / mask_PK.sum(dim=1).clamp(min=1)", "(deviation_PK**2).sum(dim=1)"),
        ("variance_P.clamp(min=_EPS).sqrt()", "variance_P.sqrt()"),
        ("variance_P.clamp(min=_EPS).sqrt()", "variance_P"),
        ("(spread_P - limit).clamp(min=0)", "(spread_P - limit)"),
        ("(spread_P - limit).clamp(min=0)", "spread_P"),
        ("coefficient * (excess_P**2).sum() / denominator", "(excess_P**2).sum() / denominator"),
        ("coefficient * (excess_P**2).sum() / denominator", "coefficient * excess_P.sum() / denominator"),
        ("(spread_P.sum() / denominator).detach()", "spread_P.sum() / denominator"),
        ("(spread_P.sum() / denominator).detach()", "spread_P.mean().detach() * 2"),
        ("score_PK = _centred(scores_PK, mask_PK)\n", "score_PK = masked.counted(scores_PK, mask_PK)\n"),
        (".to(score_PK.dtype).log(), mask_PK)", ".to(score_PK.dtype), mask_PK)"),
        ("is_defined = product > _EPS", "is_defined = product >= 0"),
        ("torch.where(is_defined, product, 1.0).rsqrt()", "product.rsqrt()"),
        ("(score_PK * length_PK).sum()", "-(score_PK * length_PK).sum()"),
        ("(score_PK**2).sum() * (length_PK**2).sum()", "(score_PK**2).sum()"),
        ("return masked.counted(x_PK - mean_P1, mask_PK)", "return x_PK - mean_P1"),
    ],
    "likelihood": [
        ("loss = -masked", "loss = masked"),
        (", loss_mask_BT, denominator=denominator", ", loss_mask_BT"),
        (
            "masked.mean(logprobs_BT, loss_mask_BT, denominator=denominator)",
            "(logprobs_BT * loss_mask_BT).sum() / denominator",
        ),
        ("loss.detach()", "loss"),
    ],
    "logprobs": [
        ("hidden_BTD[loss_mask_BT].to(dtype)", "hidden_BTD[loss_mask_BT]"),
        ("zeros_BT.masked_scatter(loss_mask_BT, x_N)", "zeros_BT.masked_scatter(loss_mask_BT, x_N.flip(0))"),
        ("at_least_float32(a @ b)", "a @ b"),
        ("min(start + step, size)", "min(start + step, size - 1)"),
        ("logits_Cv *= self.logit_scale / self.temperature", "pass"),
        (".tanh_().mul_(self.softcap / self.temperature)", ".tanh_()"),
        ("elif self.logit_scale != self.temperature", "elif self.logit_scale != 1"),
        ("(self.temperature / self.softcap)", "(1 / self.softcap)"),
        (".square_().neg_().add_(1)", ".square_()"),
        ("grad_Cv *= slope_Cv", "pass"),
        ("outer = self.logit_scale / self.temperature", "outer = self.logit_scale"),
        ("outer = self.logit_scale / self.temperature", "outer = 1 / self.temperature"),
        ("grad_V[vocabulary] += grad", "grad_V[vocabulary] = grad"),
        ("is_first=chunk.start == 0", "is_first=True"),
        ("is_first=vocabulary.start == 0", "is_first=True"),
        ('"dtype": at_least_float32(rows_ND[:0]).dtype', '"dtype": rows_ND.dtype'),
        ("if needs_weight else None", "if True else None"),
        ("None if bias_V is None else bias_V[vocabulary]", "None if bias_V is None else bias_V[: len(weight_vD)]"),
        ("place_C < vocabulary.stop - vocabulary.start", "place_C <= vocabulary.stop - vocabulary.start"),
        ("(place_C >= 0) & ", ""),
        ("return target_N - lse_N", "return target_N + lse_N"),
        ("[:, 0], target_N[chunk])", "[:, 0], 0.0)"),
        ("mul_(-grad_C[:, None])", "mul_(grad_C[:, None])"),
        ("grad_C[:, None] + grad_entropy_C1", "grad_C[:, None] - grad_entropy_C1"),
        ("grad_entropy_C1 * entropy_N[chunk, None]", "entropy_N[chunk, None]"),
        (".add_(all_C1).mul_(probs_Cv).neg_()", ".add_(all_C1).mul_(probs_Cv)"),
        (".clamp_(min=_LEAST)", ""),
        ("lse_C[:, None].clamp(min=_LEAST)", "lse_C[:, None]"),
        ("(lse_KN - lse_N).clamp(min=_LEAST)", "(lse_KN - lse_N)"),
        (".scatter_add_(1, place_C1, torch.where(is_within_C, grad_C, 0.0)[:, None])", ""),
        ("torch.where(is_within_C, grad_C, 0.0)", "grad_C"),
        ("within_KN[k, chunk] = -(", "within_KN[k, chunk] = ("),
        ("* (within_KN - logp_KN)", "* (within_KN + logp_KN)"),
        ("* (within_KN - logp_KN)", "* within_KN"),
        ("lse_KN[k, chunk])", "lse_KN[k - 1, chunk])"),
        ("kl.exact(logits_Cv, reference_Cv)", "kl.exact(reference_Cv, logits_Cv)"),
        ("(within_KN + logp_KN - logq_KN)", "(within_KN - logp_KN + logq_KN)"),
        ("(within_KN + logp_KN - logq_KN)", "within_KN"),
        (
            "torch.where(probs_KN > 0, probs_KN * (within_KN + logp_KN - logq_KN), 0.0)",
            "(probs_KN * (within_KN + logp_KN - logq_KN))",
        ),
        (".sub_(kl_N[chunk, None])", ""),
        (
            "torch.where(probs_Cv > 0, probs_Cv * difference_Cv * grad_N[chunk, None], 0.0)",
            "probs_Cv * difference_Cv * grad_N[chunk, None]",
        ),
        (" * grad_N[chunk, None], 0.0)", ", 0.0)"),
        (
            "reference = reference_ND, reference_weight_VD, reference_bias_V",
            "reference = reference_ND, reference_weight_VD, bias_V",
        ),
        ("[2].sub_(reference_lse_N[chunk, None])", "[2]"),
    ],
}


def load(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutant_of(name: str, old: str, new: str) -> types.ModuleType:
    """The module ``heedful.objectives.name`` with one passage of its source replaced."""
    path = importlib.import_module(f"heedful.objectives.{name}").__file__
    assert path is not None
    source = Path(path).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{name}: {old!r} occurs {source.count(old)} times; the mutant must be unambiguous"
    module = types.ModuleType(f"mutant_{name}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.replace(old, new), f"{name}.py with {new!r}", "exec"), module.__dict__)
    return module


def first_failure(tests: types.ModuleType) -> str | None:
    """Name of the first test of the file that fails, or None."""
    for name, test in list(vars(tests).items()):
        if name.startswith("test_"):
            try:
                test()
            except Exception:
                return name
    return None


@pytest.mark.parametrize("name", list(MUTANTS))
def test_every_mutant_is_killed(name: str) -> None:
    tests = load(Path(__file__).with_name(f"test_objective_{name}.py"), f"mutation_run_{name}")
    assert first_failure(tests) is None, "the tests fail on the real module"
    survivors = []
    for old, new in MUTANTS[name]:
        setattr(tests, name, mutant_of(name, old, new))
        if first_failure(tests) is None:
            survivors.append(f"{old!r} → {new!r}")
    sys.modules.pop(f"mutant_{name}", None)
    assert not survivors, "no test fails for: " + "; ".join(survivors)
