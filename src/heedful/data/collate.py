"""Token samples become tensors. The shift from tokens to predictions happens here and nowhere else.

B sequences or rows, T predicted tokens, R rows of rankings, P prompts, K answers. What counts is decided by the
``loss_mask`` that came with the tokens or by lengths; never by comparing ids with a pad or end id, which may be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful.batches import RankingBatch, TokenBatch
from heedful.data.packing import RankingShape, ranking_rows
from heedful.data.tokenise import RankingSample
from heedful.errors import DataError
from heedful.records import TokenSample


def token_batch(samples: Sequence[TokenSample], pad_id: int) -> TokenBatch:
    """One sample per row, right-padded to T = longest - 1.

    Raises:
        DataError: no samples, or one with fewer than two ids.
    """
    return _batch([[sample] for sample in samples], pad_id, packed=False)


def packed_batch(rows: Sequence[Sequence[TokenSample]], pad_id: int) -> TokenBatch:
    """Several samples per row, for a model that is given ``block_attention_mask`` and ``position_ids_BT``.

    Each sample is shifted on its own, so a prediction from the last token of one to the first of the next does not
    exist.

    Raises:
        DataError: no rows, an empty row, or a sample with fewer than two ids.
    """
    return _batch(rows, pad_id, packed=True)


def block_attention_mask(
    attention_mask_BT: Tensor, dtype: torch.dtype = torch.bool, *, prompts_BT: Tensor | None = None
) -> Tensor:
    """Causal attention within each packed sample, [B, 1, T, T]: True, or 0.0 for a float ``dtype``, = may be seen.

    For transformers' "sdpa" (bool or float) and "eager" (float only: it adds the mask) attention. Padding sees itself,
    so that no softmax is over nothing.

    Args:
        attention_mask_BT: int64 [B, T], the number of the sample of each input token, 0 = padding.
        prompts_BT: int64 [B, T], the number of another sample that each token sees too (the prompt of an answer).
    """
    T = attention_mask_BT.shape[1]
    same_BTT = attention_mask_BT[:, :, None] == attention_mask_BT[:, None, :]
    if prompts_BT is not None:
        same_BTT = same_BTT | (prompts_BT[:, :, None] == attention_mask_BT[:, None, :])
    real_BTT = (attention_mask_BT > 0)[:, None, :]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=attention_mask_BT.device).tril()
    itself_TT = torch.eye(T, dtype=torch.bool, device=attention_mask_BT.device)
    seen_B1TT = ((same_BTT & real_BTT & causal_TT) | itself_TT)[:, None]
    if dtype == torch.bool:
        return seen_B1TT
    return torch.zeros_like(seen_B1TT, dtype=dtype).masked_fill(~seen_B1TT, torch.finfo(dtype).min)


def ranking_shape(sample: RankingSample) -> RankingShape:
    """The lengths of a ranking's prompt and answers."""
    num_prompt = sample.num_prompt_tokens
    return RankingShape(num_prompt, tuple(len(sequence) - num_prompt for sequence in sample.sequences))


def ranking_batch(
    samples: Sequence[RankingSample], pad_id: int, *, attention_tokens: float | None = None
) -> RankingBatch:
    """P rankings of up to K answers: packed, prompts shared where it pays, or in separate rows.

    Args:
        attention_tokens: as in :func:`~heedful.data.packing.ranking_rows`; None = separate rows.

    Raises:
        DataError: no samples.
    """
    if not samples:
        raise DataError("a batch needs at least one ranking")
    P, K = len(samples), max(len(sample.sequences) for sample in samples)
    rows_PK, columns_PK, ranks_PK, lengths_PK = (torch.zeros(P, K, dtype=torch.int64) for _ in range(4))
    mask_PK, baits_PK = (torch.zeros(P, K, dtype=torch.bool) for _ in range(2))
    strengths_PKK, targets_PKK = torch.zeros(P, K, K), torch.ones(P, K, K)
    ids: list[list[int]] = []
    numbers: list[list[int]] = []
    prompts: list[list[int]] = []
    positions: list[list[int]] = []
    for r, row in enumerate(ranking_rows([ranking_shape(sample) for sample in samples], attention_tokens)):
        for stream in (ids, numbers, prompts, positions):
            stream.append([])
        number = 0
        for block in row:
            sample, p = samples[block.ranking], block.ranking
            number += 1
            num_prompt, prompt = sample.num_prompt_tokens, number
            ids[r] += sample.sequences[block.answers[0]][:num_prompt]
            numbers[r] += [prompt] * num_prompt
            positions[r] += range(num_prompt)
            for k in block.answers:
                number += 1
                answer = sample.sequences[k][num_prompt:]
                ids[r] += answer
                numbers[r] += [number] * len(answer)
                positions[r] += range(num_prompt, num_prompt + len(answer))
                rows_PK[p, k], columns_PK[p, k], lengths_PK[p, k] = r, len(ids[r]) - 1, len(answer)
            prompts[r] += [prompt] * block.num_tokens
    for p, sample in enumerate(samples):
        num = len(sample.sequences)
        mask_PK[p, :num] = True
        ranks_PK[p, :num] = torch.tensor(sample.ranks)
        baits_PK[p, :num] = torch.tensor([kind == "bait" for kind in sample.kinds or [""] * num])
        ranks_K = ranks_PK[p, :num]
        distance_KK = (ranks_K[:, None] - ranks_K).abs().float()
        strengths_PKK[p, :num, :num] = distance_KK if sample.strengths is None else torch.tensor(sample.strengths)
        if sample.targets is not None:
            targets_PKK[p, :num, :num] = torch.tensor(sample.targets)
    numbers_RT = _padded(numbers, 0)
    is_packed = attention_tokens is not None
    return RankingBatch(
        ids_RT=_padded(ids, pad_id),
        attention_mask_RT=numbers_RT if is_packed else (numbers_RT > 0).long(),
        position_ids_RT=_padded(positions, 0),
        rows_PK=rows_PK,
        columns_PK=columns_PK,
        ranks_PK=ranks_PK,
        mask_PK=mask_PK,
        baits_PK=baits_PK,
        lengths_PK=lengths_PK,
        strengths_PKK=strengths_PKK,
        targets_PKK=None if all(sample.targets is None for sample in samples) else targets_PKK,
        head_ranks_HPK=_head_ranks(samples, K) if samples[0].heads else None,
        head_weights_HP=torch.tensor([[h.weight for h in s.heads] for s in samples]).T if samples[0].heads else None,
        prompts_RT=_padded(prompts, 0) if is_packed else None,
        ids=tuple(sample.group_id for sample in samples),
    )


def _head_ranks(samples: Sequence[RankingSample], K: int) -> Tensor:
    """int64 [H, P, K], 0 where a head is taught nothing."""
    rows = [[[*h.ranks, *[0] * (K - len(h.ranks))] for h in sample.heads] for sample in samples]
    return torch.tensor(rows, dtype=torch.int64).transpose(0, 1).contiguous()


def completion_batch(
    prompt_ids: Sequence[list[int]],
    answer_ids: Sequence[list[int]],
    pad_id: int,
    ids: Sequence[str] | None = None,
) -> TokenBatch:
    """Prompts with the answers that were sampled; exactly the answers' tokens count, whatever their ids.

    The first answer token is predicted from the last prompt token, so row b has ``len(answer_ids[b])`` counted targets
    that start at ``len(prompt_ids[b]) - 1``.

    Raises:
        DataError: numbers differ, or a prompt or an answer is empty (an answer holds at least its end token).
    """
    if len(prompt_ids) != len(answer_ids):
        raise DataError(f"{len(prompt_ids)} prompts came with {len(answer_ids)} answers; give one answer per prompt")
    names = [str(row) for row in range(len(prompt_ids))] if ids is None else list(ids)
    samples = []
    for name, prompt, answer in zip(names, prompt_ids, answer_ids, strict=True):
        if not prompt or not answer:
            raise DataError(f"completion {name!r} has an empty {'answer' if prompt else 'prompt'}")
        loss_mask = [False] * len(prompt) + [True] * len(answer)
        samples.append(TokenSample([*prompt, *answer], loss_mask, name))
    return token_batch(samples, pad_id)


def _batch(rows: Sequence[Sequence[TokenSample]], pad_id: int, *, packed: bool) -> TokenBatch:
    inputs: list[list[int]] = []
    targets: list[list[int]] = []
    loss_mask: list[list[int]] = []
    numbers: list[list[int]] = []
    positions: list[list[int]] = []
    for row in rows:
        for stream in (inputs, targets, loss_mask, numbers, positions):
            stream.append([])
        for number, sample in enumerate(row, start=1):
            num_predictions = len(sample.ids) - 1
            if num_predictions < 1:
                raise DataError(f"sample {sample.id!r} has fewer than two tokens, so nothing is predicted")
            if len(sample.loss_mask) != len(sample.ids):
                raise DataError(f"sample {sample.id!r}: {len(sample.ids)} ids but a mask of {len(sample.loss_mask)}")
            inputs[-1] += sample.ids[:-1]
            targets[-1] += sample.ids[1:]
            loss_mask[-1] += sample.loss_mask[1:]
            numbers[-1] += [number] * num_predictions
            positions[-1] += range(num_predictions)
    if not all(inputs) or not inputs:
        raise DataError("a batch needs at least one sample in every row")
    return TokenBatch(
        inputs_BT=_padded(inputs, pad_id),
        targets_BT=_padded(targets, pad_id),
        loss_mask_BT=_padded(loss_mask, 0).bool(),
        attention_mask_BT=_padded(numbers, 0),
        position_ids_BT=_padded(positions, 0),
        ids=tuple(sample.id for row in rows for sample in row),
        packed=packed,
    )


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """int64 [len(rows), longest row], right-padded."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)
