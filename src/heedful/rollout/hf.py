"""The in-process engine: a decode loop on a transformers model with a key-value cache.

It keeps its own copy of the weights in the compute dtype, adapters merged: decoding reads every weight once per token,
so half the bytes is twice the speed, and unmerged adapters would add two small products per layer and token. On CPUs
the copy is laid out for decoding (:mod:`~heedful.rollout.packed`).
A prompt is read once for all its answers; finished rows leave the batch. Each row draws from its own random stream, one
uniform number per token, which it turns into a token by inverting the cumulative distribution: no [B, T, V] history
exists.

Shapes: B rows, T prompt tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heedful.config.ppo import SamplingConfig
from heedful.data.chat import answer_text, end_token_ids
from heedful.errors import EngineError
from heedful.models.lora import merged_state
from heedful.models.parts import LanguageModel
from heedful.records import Completion
from heedful.rollout.engine import Request, Sampling, sample_seed
from heedful.rollout.lean import lean_step
from heedful.rollout.packed import JoinedPart, PackedLinear, can_pack, group_queries, pack_layers, takers

COMPACT_BELOW = 0.8
"""Finished rows are dropped once the rest is below this share; each drop copies the cache."""
PROMPTS_TOGETHER = 16
"""Prompts that are read in one forward, sorted by length; few enough to save padding, enough for full products."""
BLOCK = 256
"""Tokens whose probabilities are summed before a sampler looks among them."""
ON_THE_HEAP = 2**19
"""Probabilities that a CPU works on at once: they stay in its cache, and in the heap. Larger tensors may come from the
system and go back at every operation, which costs several times what the operation does."""
HEAD = "lm_head.weight"


@dataclass
class _Row:
    request: Request
    uniforms: list[float]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


def build_engine(policy: LanguageModel, config: SamplingConfig) -> HFEngine:
    """The engine of a PPO run."""
    return HFEngine(policy, end_token_ids(policy.tokenizer), batch_size=config.answers_together)


class HFEngine:
    """Decodes with transformers in this process."""

    def __init__(self, policy: LanguageModel, end_ids: Sequence[int], *, batch_size: int = 64) -> None:
        self._tokenizer = policy.tokenizer
        self._device = policy.device
        self._end_ids = torch.tensor(sorted(end_ids), device=policy.device)
        self._pad_id = int(policy.tokenizer.pad_token_id)
        self._batch_size = batch_size
        self._model = _inference_copy(policy)
        self._resting: dict[Tensor, torch.Size] = {}  # empty ones, with the shapes that they had
        on_cpu = policy.device.type == "cpu"
        self.num_packed = pack_layers(self._model) if on_cpu and policy.dtype == torch.bfloat16 and can_pack() else 0
        """Layers whose weights are kept in the order that the CPU reads; 0 where it cannot or need not."""
        self.groups_queries = on_cpu and group_queries(self._model)
        self.sync(policy, version=0)
        self._lean = lean_step(self._model, self._new_cache()) if self.num_packed else None

    @property
    def is_lean(self) -> bool:
        """Whether steps are made without what a general model does between its products."""
        return self._lean is not None

    @torch.no_grad()
    def sync(self, policy: LanguageModel, *, version: int) -> None:
        """Copy the policy's weights, adapters merged in float32 and rounded once."""
        for matrix, shape in self._resting.items():
            matrix.data = matrix.new_empty(shape)
        self._resting = {}
        take = takers(self._model)
        missing = set(take)
        for name, tensor in merged_state(policy.model):
            if name not in take:
                raise EngineError(f"the policy has a weight {name!r} that the rollout model lacks")
            take[name](tensor)
            missing.discard(name)
        if self._model.config.tie_word_embeddings and HEAD in missing:
            take[HEAD](self._model.get_input_embeddings().weight)
            missing.discard(HEAD)
        if missing:
            raise EngineError(f"the rollout model was not given {min(missing)!r} by the policy")
        self._version = version

    def rest(self) -> None:
        """See :class:`~heedful.rollout.engine.Engine`: matrices are let go, so that their memory is there for training.

        Of SmolLM2-135M 0.35 GiB; to ask the system for it again takes a CPU 0.1 s at the next ``sync``.
        """
        for layer in self._model.modules():
            if isinstance(layer, (PackedLinear, JoinedPart)):
                layer.let_go()
        kept = self._model.state_dict().keys()  # what is not in there is not brought by a sync
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if name in kept and tensor.dim() > 1:
                self._resting[tensor] = tensor.shape
                tensor.data = tensor.new_empty(0)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """See :class:`~heedful.rollout.engine.Engine`. Rows of like length, and of one prompt, are decoded together."""
        if self._resting:
            raise EngineError("the engine has let its weights go; call sync before the next generate")
        self._check_length(requests, sampling)
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
        done: dict[int, Completion] = {}
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            rows = [_Row(requests[i], _uniforms(seed, requests[i], sampling)) for i in chosen]
            self._decode(rows, sampling)
            done.update({i: self._completion(row) for i, row in zip(chosen, rows, strict=True)})
            if on_done is not None:
                on_done(len(chosen))
        return [done[i] for i in range(len(requests))]

    def _check_length(self, requests: Sequence[Request], sampling: Sampling) -> None:
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        longest = max((len(r.prompt_ids) for r in requests), default=0)
        if limit is not None and longest + sampling.max_new_tokens - 1 > limit:  # the last token is not read
            raise EngineError(
                f"a prompt of {longest} tokens and an answer of up to {sampling.max_new_tokens} do not fit the {limit} "
                f"positions of this model; lower max_prompt_tokens or max_new_tokens"
            )

    def _decode(self, rows: list[_Row], sampling: Sampling) -> None:
        """Fill ``rows`` with sampled ids and log-probs."""
        ids_BT, mask_BT, cache = self._prefill([row.request.prompt_ids for row in rows])
        positions_BT = mask_BT.sum(dim=1, keepdim=True) - 1
        active = list(rows)
        inputs_BT = ids_BT[:, -1:]
        for t in range(sampling.max_new_tokens):
            logits_BV, cache = self._step(inputs_BT, mask_BT, positions_BT, cache)
            uniforms_B = torch.tensor([row.uniforms[t] for row in active], device=self._device, dtype=torch.float64)
            tokens_B, logprobs_B = _sample(logits_BV, uniforms_B, sampling.temperature)
            ended = torch.isin(tokens_B, self._end_ids).tolist()
            for row, token, logprob, end in zip(active, tokens_B.tolist(), logprobs_B.tolist(), ended, strict=True):
                if not row.finished:
                    row.ids.append(token)
                    row.logprobs.append(logprob)
                    row.finished = end
            alive = [i for i, row in enumerate(active) if not row.finished]
            if not alive or t + 1 == sampling.max_new_tokens:
                return
            positions_BT = positions_BT + 1
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(active), 1)], dim=1)
            inputs_BT = tokens_B[:, None]
            if len(alive) < COMPACT_BELOW * len(active):
                keep = torch.tensor(alive, device=self._device)
                cache.batch_select_indices(keep)
                inputs_BT, mask_BT, positions_BT = inputs_BT[keep], mask_BT[keep], positions_BT[keep]
                active = [active[i] for i in alive]

    def _step(self, ids_B1: Tensor, mask_BT: Tensor, positions_B1: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits [B, V] after one more token of every row, and the cache with it."""
        if self._lean is not None:
            return self._lean(ids_B1, mask_BT, positions_B1, cache), cache
        out = self._model(
            input_ids=ids_B1, attention_mask=mask_BT, position_ids=positions_B1, cache=cache, use_cache=True
        )
        return out.logits[:, -1], out.cache

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor, Any]:
        """Prompts as int64 [B, T] with their mask, and the cache after all tokens but the last.

        Equal prompts are read once, and prompts of like length together, so that little padding is read.
        """
        place = {tuple(prompt): n for n, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        distinct = list(place)
        # a part of one-token prompts would have nothing to join
        can_part = self.groups_queries and min(map(len, distinct)) > 1 and self._new_cache().can_join
        together = PROMPTS_TOGETHER if can_part else len(distinct)
        read = [self._read(distinct[n : n + together]) for n in range(0, len(distinct), together)]
        cache = read[0] if len(read) == 1 else self._new_cache().joined(read)
        if cache is not None and len(place) < len(prompts):
            cache.batch_select_indices(torch.tensor([place[tuple(prompt)] for prompt in prompts], device=self._device))
        return *self._left_padded(prompts), cache

    def _read(self, prompts: Sequence[Sequence[int]]) -> Any:
        """The cache after all tokens of prompts but the last, by the trunk alone.

        The last one is the first step of the decoding: the head then sees one contiguous row per prompt. Given the last
        column of [B, T, D] it would copy its whole weight for every row (PyTorch's product of a strided batch).
        """
        ids_BT, mask_BT = self._left_padded(prompts)
        cache = self._new_cache()
        if ids_BT.shape[1] == 1:
            return cache
        ids_BT, mask_BT = ids_BT[:, :-1], mask_BT[:, :-1]
        positions_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)
        return self._model.base_model(
            input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, cache=cache, use_cache=True
        ).cache

    def _new_cache(self) -> Any:
        """An empty cache, None for the model's own: attention that is not known to be plain may count on its width."""
        if not self.groups_queries:
            return None
        from heedful.rollout.kv import GrowingCache

        return GrowingCache(self._model.config)

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """int64 [B, T] ids and mask, prompts flush right so that every next token sits in the same column."""
        width = max(map(len, prompts))
        ids = [[self._pad_id] * (width - len(p)) + list(p) for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def _completion(self, row: _Row) -> Completion:
        return completion(row.request, row.ids, row.logprobs, row.finished, self._version, self._tokenizer)


def completion(
    request: Request, ids: list[int], logprobs: list[float], finished: bool, version: int, tokenizer: Any
) -> Completion:
    """The record of one answer. Its text is what a demonstration of this answer would hold: no special token, no
    padding or end mark, and nothing that the template writes around answers ever reaches a reward (REW-10)."""
    return Completion(
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        prompt_ids=request.prompt_ids,
        ids=ids,
        logprobs=logprobs,
        finish_reason="stop" if finished else "length",
        policy_version=version,
        text=answer_text(tokenizer, ids),
    )


def _sample(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] under softmax(logits / temperature); temperature 0 takes the best token."""
    num_rows, vocabulary = logits_BV.shape
    together = max(1, ON_THE_HEAP // vocabulary) if logits_BV.device.type == "cpu" else num_rows
    drawn = [_sample_rows(logits_BV[n : n + together], uniforms_B[n : n + together], temperature)
             for n in range(0, num_rows, together)]  # fmt: skip
    return torch.cat([tokens_B for tokens_B, _ in drawn]), torch.cat([logprobs_B for _, logprobs_B in drawn])


def _sample_rows(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    if not all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(logits_BV)):  # both are NaN if any logit is
        raise EngineError("the policy's logits are not finite during sampling; its weights are damaged or overflowed")
    logits_BV = logits_BV.float()
    probs_BV = torch.softmax(logits_BV if temperature in (0, 1) else logits_BV / temperature, dim=-1)
    blocks_BNK = functional.pad(probs_BV, (0, -probs_BV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    # running sums in float64: in float32 those over a large vocabulary would move small probabilities
    blocks_BN = blocks_BNK.sum(dim=-1).double()
    if temperature > 0:
        block_B, uniforms_B = _invert(blocks_BN, uniforms_B)
        within_BK = blocks_BNK[torch.arange(len(block_B), device=block_B.device), block_B].double()
        tokens_B = block_B * BLOCK + _invert(within_BK, uniforms_B)[0]
    else:
        tokens_B = probs_BV.argmax(dim=-1)
    chosen_B = probs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B, (chosen_B.log() - blocks_BN.sum(dim=-1).log()).float()


def _invert(masses_BN: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Where a row's running sum first exceeds that share of its whole (never a mass of 0), and what share is left."""
    sums_BN = masses_BN.cumsum(dim=-1)
    wholes_B = sums_BN[:, -1]
    # rounded, a share just below 1 may be all
    points_B1 = torch.minimum(uniforms_B * wholes_B, torch.nextafter(wholes_B, torch.zeros_like(wholes_B)))[:, None]
    chosen_B1 = torch.searchsorted(sums_BN, points_B1, right=True)
    mass_B1 = masses_BN.gather(1, chosen_B1)
    left_B1 = (points_B1 - sums_BN.gather(1, chosen_B1) + mass_B1) / mass_B1
    return chosen_B1.squeeze(1), left_B1.squeeze(1).clamp(min=0)


def _uniforms(seed: int, request: Request, sampling: Sampling) -> list[float]:
    """One number in [0, 1) per token, from the row's own stream."""
    generator = torch.Generator().manual_seed(sample_seed(seed, request.prompt_id, request.sample_index))
    return torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64).tolist()


def _inference_copy(policy: LanguageModel) -> Any:
    """A frozen model of the policy's shape in the compute dtype, adapters left out."""
    config = copy.deepcopy(policy.base.config)
    devices = [policy.device] if policy.device.type == "cuda" else []
    # first weights are drawn, but the run's random stream must not depend on when the engine was made
    with torch.random.fork_rng(devices=devices), torch.device(policy.device):
        model = type(policy.base)._from_config(config, dtype=policy.dtype)
    return model.requires_grad_(False).eval()
