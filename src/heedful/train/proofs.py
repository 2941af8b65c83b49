"""What a set-up must show before it is trained: one function per proof.

Dimension letters: B sequences, T tokens, N counted tokens or sequences, D hidden width.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heedful.batches import TokenBatch
from heedful.config.ppo import PPOConfig
from heedful.data import chat
from heedful.models.parts import ScalarModel
from heedful.models.quantise import ANSWERS, LARGEST_BOUND_NATS, MEAN_BOUND_NATS
from heedful.models.roles import Reward, Roles
from heedful.objectives import kl
from heedful.records import Message
from heedful.runs.progress import peak_memory_bytes
from heedful.train.bench import Bench
from heedful.train.guard import TOLERANCE
from heedful.train.moments import reserve

SAMPLER_BOUNDS = {
    torch.float64: (1e-3, 0.05), torch.float32: (1e-3, 0.05), torch.bfloat16: (0.05, 2.0), torch.float16: (0.02, 1.0)
}  # fmt: skip
"""Mean and largest |log-prob of the sampler − of the trainer| (nats) that rounding may cause: the sampler decodes token
by token with rounded, merged weights. Another temperature, mask or template is off by tenths of a nat in the mean."""
READING_BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest share of the score's size by which padding may move it."""
ANSWERS_END = "answers end"
MIN_END_PROBABILITY = 1e-3
MIN_ENTROPY_NATS = 1e-4


@dataclass(frozen=True)
class Finding:
    """What a proof found."""

    passed: bool
    measured: str
    bound: str
    advice: str


# Tokens: no model is asked.


def template_round_trip(bench: Bench) -> Finding:
    """Prompts read as the template writes them, and a prompt with its answer is the start of the finished chat."""
    answer = Message("assistant", "Yes, of course.")
    bound = "prompt ids spell the template's text, and with an answer the beginning of the finished chat"
    advice = "mend the tokenizer's chat template, or set a built-in one (heedful.data.chat.set_template)"
    num_resplit = 0
    for prompt, ids in bench.prompts:
        text = chat.render(bench.tokenizer, prompt.messages, add_generation_prompt=True)
        if _spelled(bench.tokenizer, ids) != _plain(bench.tokenizer, text):
            measured = f"the ids of prompt {prompt.id!r} spell another text than the template's"
            return Finding(False, measured, bound, f"{advice}; unknown characters count too")
        whole = chat.render(bench.tokenizer, [*prompt.messages, answer], add_generation_prompt=False)
        spoken = chat.answer_ids(bench.tokenizer, answer.content)
        # a generation prompt may open a thinking tag, which the finished chat leaves out
        start = re.sub(r"<\w+>\s*$", "", text)
        if not whole.startswith(start) or answer.content not in whole[len(start) :]:
            measured = f"with an answer the template writes prompt {prompt.id!r} differently than without"
            return Finding(False, measured, bound, advice)
        if start == text and not _plain(bench.tokenizer, whole).startswith(_spelled(bench.tokenizer, [*ids, *spoken])):
            measured = f"prompt {prompt.id!r} and its answer spell another text than the finished chat"
            return Finding(False, measured, bound, advice)
        at_once = bench.tokenizer(whole, add_special_tokens=False)["input_ids"]
        skipped = int(ids[:1] != at_once[:1])  # a begin token that the tokenizer adds
        num_resplit += [*ids, *spoken][skipped:] != at_once[: len(ids) + len(spoken) - skipped]
    same = f"{len(bench.prompts)} prompts read back"
    if num_resplit:  # both sides of the border are always encoded apart, so this is no fault
        same += f"; {num_resplit} would be cut into other tokens if encoded with their answer at once"
    return Finding(True, same, bound, advice)


def _spelled(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids, without a begin token that the tokenizer, not the template, put there."""
    return _plain(tokenizer, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _plain(tokenizer: Any, text: str) -> str:
    """The text as far as every tokenizer keeps it: letters normalised, one blank for many, no begin token."""
    begin = tokenizer.bos_token
    text = text.strip()
    while begin and text.startswith(begin):
        text = text.removeprefix(begin).lstrip()
    return " ".join(unicodedata.normalize("NFKC", text).split())


def one_begin_token(bench: Bench) -> Finding:
    """Begin-of-sequence stands once where the model knows it, whoever writes it."""
    bound, advice = "exactly one", "let either the chat template or the tokenizer (add_bos_token) write it"
    begin = bench.tokenizer.bos_token_id
    if begin is None:
        return Finding(True, "this tokenizer has none", bound, advice)
    expected = bench.tokenizer("a")["input_ids"][:1] == [begin]
    for prompt, ids in bench.prompts:
        num = next((n for n, id in enumerate(ids) if id != begin), len(ids))
        if num > 1 or (expected and num == 0):
            return Finding(False, f"prompt {prompt.id!r} starts with {num} begin tokens", bound, advice)
    written = bench.prompts[0][1][0] == begin
    return Finding(True, "one" if written else "none, as this tokenizer has it", bound, advice)


def one_vocabulary(bench: Bench) -> Finding:
    """A value model of its own reads the policy's ids, so they must mean the same to both."""
    bound = "policy and value model have one vocabulary"
    advice = "train the reward model from this policy's family, or set ppo.value_from to policy or trunk"
    part = bench.roles.value.part
    if not isinstance(part, ScalarModel):
        return Finding(True, "the value reads the policy's own states", bound, advice)
    own, other = bench.tokenizer.get_vocab(), part.tokenizer.get_vocab()
    differing = sorted(word for word in own.keys() | other.keys() if own.get(word) != other.get(word))
    # a pad token that only one of them was given is never read
    differing = [word for word in differing if word not in (bench.tokenizer.pad_token, part.tokenizer.pad_token)]
    if differing:
        measured = f"{len(differing)} tokens have different ids, such as {differing[0]!r}"
        return Finding(False, measured, bound, advice)
    return Finding(True, f"{len(own)} tokens in common", bound, advice)


def end_token(bench: Bench) -> Finding:
    """The token that ends a turn is one of the model's own, is no padding, and closes every answer."""
    ends, policy = chat.end_token_ids(bench.tokenizer), bench.roles.policy
    names = ", ".join(repr(bench.tokenizer.convert_ids_to_tokens(end)) for end in ends)
    bound, advice = "in the vocabulary, and no padding", "give the tokenizer an end token and a pad token of its own"
    rows = len(policy.head.weight_VD)
    if max(ends) >= rows:
        return Finding(False, f"{names} is beyond the {rows} rows of the model", bound, advice)
    if policy.pad_id in ends:
        return Finding(False, f"{names} is the padding too", bound, advice)
    return Finding(True, names, bound, advice)


# Memory.


def longest_batch_fits(bench: Bench) -> Finding:
    """The largest micro-batch goes through every forward and backward, with room for the optimizers' moments."""
    roles, config = bench.roles, bench.config
    batch, trained = bench.full_batch(), {**roles.policy.trainable_parameters(), **_prefixed(roles)}
    moments = [*reserve(roles.policy.trainable_parameters().values(), offloaded=config.optimizer.offload),
               *reserve(_prefixed(roles).values(), offloaded=config.value_optimizer.offload)]  # fmt: skip
    reference_BTD = roles.reference.hidden(batch)
    roles.reference.logprobs_of(reference_BTD, batch, temperature=config.sampling.temperature)
    roles.offload.send_away()  # as before an update
    kept_BT = roles.value.values(batch) if bench.holds_two_graphs else None
    losses: list[Callable[[], Tensor]] = [lambda: _policy_loss(bench, batch, reference_BTD)]
    if not roles.value.is_shared:
        losses.append(lambda: (roles.value.values(batch) if kept_BT is None else kept_BT).square().mean())
    gradients = []
    for loss in losses:
        found = torch.autograd.grad(loss(), list(trained.values()), allow_unused=True)
        gradients += [float(g.norm()) for g in found if g is not None]
        del found
    ids_BT, mask_BT = batch.inputs_BT, batch.attention_mask_BT
    for reader in bench.readers.values():
        rows = ids_BT % reader.part.base.config.get_text_config().vocab_size  # its tokenizer may be another
        reader.scores(rows.to(reader.part.device), mask_BT.to(reader.part.device))
    if config.bootstrap_truncated:  # reads one token further than the training batches
        ids = bench.longest_ids + bench.longest_ids[-1:] * config.sampling.max_new_tokens
        roles.value.values_after(torch.tensor([ids], device=roles.value.device))
    del moments
    peak = f"{bench.longest_batch}, peak {_peak_bytes(roles.policy.device) / 2**30:.2f} GiB"
    finite = all(math.isfinite(g) for g in gradients)
    measured = peak if finite else f"{peak}, but the gradient is not finite"
    return Finding(finite, measured, "it fits, with a finite gradient", "set model.dtype to float32")


def _prefixed(roles: Roles) -> dict[str, torch.nn.Parameter]:
    """The value's trained weights, under names that are not the policy's."""
    return {f"value/{name}": p for name, p in roles.value.trainable_parameters().items()}


def _policy_loss(bench: Bench, batch: TokenBatch, reference_BTD: Tensor) -> Tensor:
    """A scalar that needs all that the policy's real loss needs; with a shared trunk the value's too."""
    roles, config = bench.roles, bench.config
    hidden_BTD = roles.policy.hidden(batch)
    temperature = config.sampling.temperature
    logprobs_BT, entropy_BT = roles.policy.logprobs_of(
        hidden_BTD, batch, temperature=temperature, with_entropy=config.entropy_coefficient > 0
    )
    terms = [logprobs_BT.sum()]
    if entropy_BT is not None:
        terms.append(entropy_BT.sum())
    if config.kl.in_loss == "exact":
        exact_BT = roles.policy.exact_kl_of(
            hidden_BTD, batch, reference_BTD, roles.reference.head, temperature=temperature
        )
        terms.append(exact_BT.sum())
    if roles.value.is_shared:
        terms.append(roles.value.values(batch, hidden_BTD).sum())
    return torch.stack(terms).sum() / batch.num_counted_tokens


def _peak_bytes(device: torch.device) -> int:
    """The most memory that was held so far: of the GPU, else of the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory_bytes()


def memory_advice(config: PPOConfig) -> str:
    """Which options to change when memory runs out, the cheapest first."""
    advice = []
    if config.micro_batch_tokens > 1:
        advice.append(f"lower ppo.micro_batch_tokens (now {config.micro_batch_tokens})")
    if not config.activation_checkpointing:
        advice.append("set ppo.activation_checkpointing to true")
    if config.lora is None:
        advice.append("train adapters only (--ppo.lora.rank 16)")
    if config.roles is None and config.value_from == "reward":
        advice.append("hold all parts on one base (--ppo.roles shared, with reward.lora)")
    advice.append(f"lower ppo.sampling.max_new_tokens (now {config.sampling.max_new_tokens})")
    return ", or ".join(advice)


# Answers: the engine, the trainer, the reference, the value.


def sampler_is_trainer(bench: Bench) -> Finding:
    """The engine's log-probs of its own answers are those of the training forward."""
    gap_N = (bench.streams.logprobs_N - bench.logprobs_of_sampler()).abs()
    mean, largest = float(gap_N.mean()), float(gap_N.max())
    mean_bound, largest_bound = SAMPLER_BOUNDS[bench.roles.policy.dtype]
    return Finding(
        mean <= mean_bound and largest <= largest_bound,
        f"log-probs differ by {mean:.2g} nats in the mean, {largest:.2g} at most, over {len(gap_N)} tokens",
        f"at most {mean_bound:g} and {largest_bound:g}",
        "engine and trainer must have one model, temperature and template; try model.attention eager and model.dtype "
        "float32",
    )


def first_ratio_is_1(bench: Bench) -> Finding:
    """Scoring forward and training forward are one function: ratio 1, nothing clipped."""
    ratio_N = (bench.logprobs_of_trainer() - bench.streams.logprobs_N).exp()
    gap = float((ratio_N - 1).abs().max())
    outside_N = (ratio_N < 1 - bench.config.clip_low) | (ratio_N > 1 + bench.config.clip_high)
    clipped, bound = float(outside_N.float().mean()), TOLERANCE[bench.roles.policy.dtype]
    return Finding(
        gap <= bound and clipped == 0,
        f"the ratio differs from 1 by {gap:.2g}, clip fraction {clipped:.2g}",
        f"at most {bound:g}, and 0",
        "some dropout is active or a kernel is not deterministic; try model.attention eager and model.dtype float32",
    )


def reference_is_policy(bench: Bench) -> Finding:
    """Before the first step policy and reference are one model: every KL is 0, or what int8 makes of it."""
    s = bench.streams
    if not bench.roles.reference.is_exact:
        gap_N = (s.logprobs_N - s.reference_logprobs_N).abs()
        mean, largest = float(gap_N.mean()), float(gap_N.max())
        return Finding(
            mean <= MEAN_BOUND_NATS and largest <= LARGEST_BOUND_NATS,
            f"the reference is the policy in int8: the KL starts at {float(s.exact_kl_N.mean()):.2g} nats per token, "
            f"log-probs differ by {mean:.2g} in the mean, {largest:.2g} at most",
            f"log-probs that differ by at most {MEAN_BOUND_NATS:g} in the mean and {LARGEST_BOUND_NATS:g} on a token",
            "set ppo.frozen_weights to float",
        )
    kinds: tuple[kl.Kind, ...] = ("k1", "k2", "k3", "abs")
    estimates: dict[str, Tensor] = {kind: kl.estimate(s.logprobs_N, s.reference_logprobs_N, kind) for kind in kinds}
    found = {name: float(kl_N.abs().max()) for name, kl_N in {**estimates, "exact": s.exact_kl_N}.items()}
    worst, bound = max(found, key=found.__getitem__), TOLERANCE[bench.roles.policy.dtype]
    return Finding(
        found[worst] <= bound,
        f"{worst} is {found[worst]:.2g} nats on a token" if found[worst] else f"{', '.join(found)} are 0",
        f"at most {bound:g} on every token",
        "load both from one folder in one dtype; new adapters must start at zero, and no dropout may be active",
    )


def answers_end(bench: Bench) -> Finding:
    """The policy can say an end token."""
    ends = chat.end_token_ids(bench.tokenizer)
    bound = f"some answer ends, or an end token has probability {MIN_END_PROBABILITY:g} somewhere"
    advice = "look at the chat template's end of turn, and whether SFT trained it (sft.too_long: drop)"
    num = sum(c.finish_reason == "stop" for c in bench.completions)
    if num:
        return Finding(True, f"{num} of {len(bench.completions)} sampled answers end", bound, advice)
    rows = len(bench.roles.policy.head.weight_VD)
    highest = max((_highest_end_probability(bench, end) for end in ends if end < rows), default=0.0)
    measured = f"none of {len(bench.completions)} sampled answers ends, and the end's probability is {highest:.2g}"
    return Finding(highest >= MIN_END_PROBABILITY, f"{measured} at most", bound, advice)


def _highest_end_probability(bench: Bench, end: int) -> float:
    """The largest π(end) after any token of the sampled answers, and after a finished short one."""
    policy, temperature = bench.roles.policy, bench.config.sampling.temperature
    finished = [chat.answer_ids(bench.tokenizer, "Yes.")[:-1] + [end]] * len(bench.prompts)
    short = bench.micro_batches([ids for _, ids in bench.prompts], finished)
    highest = 0.0
    with torch.no_grad():
        for _, part in [*short, *bench.parts]:
            asked = replace(part, targets_BT=torch.full_like(part.targets_BT, end))
            logprobs_BT, _ = policy.logprobs(asked, temperature=temperature)
            highest = max(highest, float(logprobs_BT[part.loss_mask_BT].max().exp()))
    return highest


def values_and_entropy(bench: Bench) -> Finding:
    """Values are numbers, and the policy has a choice to learn from."""
    values_N, entropy = bench.streams.values_N, float(bench.streams.entropy_N.mean())
    finite = bool(torch.isfinite(values_N).all())
    mean, std = float(values_N.mean()), float(values_N.std(correction=0))
    return Finding(
        finite and entropy > MIN_ENTROPY_NATS,
        f"values {mean:.2f} ± {std:.2f}, entropy {entropy:.2g} nats per token",
        f"finite values, entropy above {MIN_ENTROPY_NATS:g}",
        "the value model is damaged, train it again" if not finite else "raise ppo.sampling.temperature, or start from "
        "a policy that was trained less: from answers that are all the same nothing is learnt",
    )


# The reward.


def rewards_are_numbers(bench: Bench) -> Finding:
    """Every part of the reward answers, with one finite number per answer."""
    rollouts = bench.scoring([p for p, _ in bench.prompts], bench.completions, update=False)
    raw = {name: torch.tensor([r.raw_parts[name] for r in rollouts]) for name in rollouts[0].raw_parts}
    shown = [f"{name} {float(x.mean()):.2f} ± {float(x.std(correction=0)):.2f}" for name, x in raw.items()]
    return Finding(True, ", ".join(shown), "one finite number per answer", "")


def reward_is_read_at_the_end(bench: Bench) -> Finding:
    """Padding on either side, pads that are end tokens, and company in the batch do not move a score."""
    bound, advice = READING_BOUNDS[bench.roles.policy.dtype], "report this model: its scores depend on padding"
    words = f"padding, its side, its token and the batch size move a score by at most {bound:g} of the scalars' size"
    if not bench.readers:
        return Finding(True, "no model judges", words, advice)
    worst, where = max((_reading_gap(bench, reader), name) for name, reader in bench.readers.items())
    measured = f"{where} moves by {worst:.2g} of the scalars' size"
    return Finding(worst <= bound, measured, words, advice)


def _reading_gap(bench: Bench, reader: Reward) -> float:
    """The largest distance of a score from the scalar after the last token of the sequence alone, in score sizes."""
    part, prompt = reader.part, bench.prompts[0][0]
    messages = [prompt.messages] * len(ANSWERS)
    sequences = [
        chat.prompt_ids(part.tokenizer, prompt.messages) + chat.answer_ids(part.tokenizer, answer) for answer in ANSWERS
    ]
    scalars = [_scalars(reader, ids) for ids in sequences]
    expected_N = torch.stack([scalars_T[-1] for scalars_T in scalars])
    budgets = (1, 10**6)  # every answer alone, and all together
    read = [torch.tensor(reader.score_texts(messages, ANSWERS, micro_batch_tokens=n)) for n in budgets]
    width = max(map(len, sequences))
    for pad in (part.pad_id, chat.end_token_ids(part.tokenizer)[0]):
        for total in (width, width + 7):
            for left in (False, True):
                ids_NT, mask_NT = _padded(sequences, total, pad, left)
                read.append(reader.scores(ids_NT.to(part.device), mask_NT.to(part.device)).cpu())
    # not that of the scores alone: where they happen to be near 0 rounding would look large
    size = max(float(scalars_T.abs().max()) for scalars_T in scalars)
    return max(float((found_N - expected_N).abs().max()) for found_N in read) / max(size, 1e-6)


def _scalars(reader: Reward, ids: list[int]) -> Tensor:
    """[T]: the scalar after each token, by the forward that gives one per token."""
    ids_1T = torch.tensor([ids], device=reader.part.device)
    ones_1T, positions_1T = torch.ones_like(ids_1T), torch.arange(len(ids), device=ids_1T.device)[None]
    with torch.no_grad(), reader.part.reference():
        return reader.part.values(TokenBatch(ids_1T, ids_1T, ones_1T.bool(), ones_1T, positions_1T))[0].cpu()


def _padded(sequences: Sequence[list[int]], width: int, pad: int, left: bool) -> tuple[Tensor, Tensor]:
    """int64 [N, T] ids and mask."""
    ids, mask = [], []
    for s in sequences:
        room = width - len(s)
        ids.append([pad] * room + s if left else s + [pad] * room)
        mask.append([0] * room + [1] * len(s) if left else [1] * len(s) + [0] * room)
    return torch.tensor(ids), torch.tensor(mask)


ALL: dict[str, Callable[[Bench], Finding]] = {
    "template round trip": template_round_trip,
    "one begin token": one_begin_token,
    "one vocabulary": one_vocabulary,
    "end token": end_token,
    "longest batch fits": longest_batch_fits,
    ANSWERS_END: answers_end,
    "sampler is trainer": sampler_is_trainer,
    "first ratio is 1": first_ratio_is_1,
    "reference is policy": reference_is_policy,
    "values and entropy": values_and_entropy,
    "rewards are numbers": rewards_are_numbers,
    "reward read at the end": reward_is_read_at_the_end,
}
"""By name, in the order of the test: what costs little first."""
