"""The two kinds of part that every loop works with: a language model and a scalar model.

Dimension letters: B sequences, N sequences to score, T tokens, V vocabulary, D hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from heedful.batches import RankingBatch, TokenBatch
from heedful.data.packing import token_budget_batches
from heedful.errors import ModelError
from heedful.models.fused import fuse
from heedful.models.hardware import autocast
from heedful.models.heads import Heads
from heedful.models.load import scalar_head
from heedful.models.lora import Adapters, base_of, is_adapted, one_list
from heedful.models.output import Head, read_head
from heedful.models.ragged import can_be_ragged, is_possible, is_worth_it, last_hidden_states, widened
from heedful.objectives.logprobs import exact_kl, token_logprobs
from heedful.records import Message


class Part(ABC):
    """A transformers model (with LoRA adapters or without), its tokenizer, and where and how precisely it computes."""

    @abstractmethod
    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype, adapters: Adapters | None = None
    ) -> None:
        """``dtype`` is the compute precision; weights keep their own. ``adapters``: where the model is shared."""
        self.model, self.tokenizer, self.device, self.dtype, self.adapters = model, tokenizer, device, dtype, adapters
        self.pad_id, self._packing_checked = int(tokenizer.pad_token_id), False
        self._off = Adapters((), one_list(model)) if is_adapted(model) and adapters is None else None
        fuse(self.base, device, dtype)
        self._can_be_ragged: dict[bool, bool] = {}  # with prompts or without, once tried

    @property
    def rounding(self) -> float:
        """What two right ways to the same hidden states may differ by, as a share of them."""
        return 1e-3 if self.dtype == torch.float32 else 0.05

    @property
    def base(self) -> Any:
        """The transformers model itself; adapters act inside it."""
        return base_of(self.model)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Exactly what an optimizer may move, by name; tied weights once."""
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return own if self.adapters is None else {name: p for name, p in own.items() if self.adapters.own(name)}

    def acting(self) -> AbstractContextManager[None]:
        """Inside, a model that parts share computes with this part's adapters; any other model as ever."""
        return nullcontext() if self.adapters is None else self.adapters.acting()

    def reference(self) -> AbstractContextManager[Any]:
        """Inside, a model with adapters computes as if it had none (its scalar head: the original one).

        On a model that parts share every part computes with its own, and what is frozen there is a part of its own.
        """
        return nullcontext() if self._off is None else self._off.acting()

    def hidden(self, batch: TokenBatch) -> Tensor:
        """Last hidden states [B, T, D] after the final norm, from the trunk alone: no logits are made.

        What stands on padding means nothing; where that is quicker it is not computed (``models/ragged.py``).

        Raises:
            ModelError: longer than the model's positions, or packed rows on a model that lets samples see each other.
        """
        if batch.packed and not self._packing_checked:
            self._check_packing()
            self._packing_checked = True
        return self._hidden(batch)

    def hidden_after(self, ids_NT: Tensor) -> Tensor:
        """Last hidden states [N, D] after the last token of unpadded sequences."""
        positions_NT = torch.arange(ids_NT.shape[1], device=ids_NT.device).expand_as(ids_NT)
        return self._trunk(ids_NT, torch.ones_like(ids_NT), positions_NT)[:, -1]

    def _hidden(self, batch: TokenBatch) -> Tensor:
        return self._trunk(batch.inputs_BT, batch.attention_mask_BT, batch.position_ids_BT, packed=batch.packed)

    def _trunk(
        self,
        ids_BT: Tensor,
        attention_mask_BT: Tensor,
        position_ids_BT: Tensor,
        *,
        packed: bool = False,
        prompts_BT: Tensor | None = None,
    ) -> Tensor:
        num_tokens = ids_BT.shape[1]
        limit = getattr(self.base.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and num_tokens > limit and not packed:
            raise ModelError(
                f"a sequence of {num_tokens} tokens is longer than the {limit} positions of this model; "
                f"lower max_tokens, max_prompt_tokens or max_new_tokens"
            )
        takes_pieces = self._takes_pieces(attention_mask_BT, packed=packed, with_prompts=prompts_BT is not None)
        with autocast(self.device, self.dtype), self.acting():
            if takes_pieces:
                return last_hidden_states(
                    self.base.base_model, ids_BT, attention_mask_BT, position_ids_BT, self.dtype, prompts_BT=prompts_BT
                )
            fill = partial(widened, self.base.config.get_text_config())
            marks_BT, prompts_BT = fill(attention_mask_BT), None if prompts_BT is None else fill(prompts_BT)
            mask = self._packed_mask(marks_BT, prompts_BT) if packed else marks_BT
            out = self.base.base_model(
                input_ids=fill(ids_BT), attention_mask=mask, position_ids=fill(position_ids_BT), use_cache=False
            )
        hidden_BTD: Tensor = out.last_hidden_state[:, :num_tokens]
        return hidden_BTD.contiguous()

    def _takes_pieces(self, marks_BT: Tensor, *, packed: bool, with_prompts: bool) -> bool:
        """Whether this batch is computed in pieces, without padding and without attention between them."""
        is_better = is_worth_it(self.base.base_model, marks_BT, packed=packed)
        return is_better and self.can_be_ragged(with_prompts=with_prompts)

    def can_be_ragged(self, *, with_prompts: bool) -> bool:
        """Whether pieces come out as they do with padding: tried once."""
        config = self.base.config.get_text_config()
        if self.device.type != "cpu" or not is_possible(config):
            return False
        if with_prompts not in self._can_be_ragged:
            # in a context of its own: autocast would keep the casts of this trial, which have no gradients
            with autocast(self.device, self.dtype), self.acting():
                self._can_be_ragged[with_prompts] = can_be_ragged(
                    self.base.base_model, self.dtype, vocabulary=config.vocab_size, tolerance=self.rounding,
                    with_prompts=with_prompts,
                )  # fmt: skip
        return self._can_be_ragged[with_prompts]

    def _packed_mask(self, numbers_BT: Tensor, prompts_BT: Tensor | None = None) -> Tensor | None:
        from heedful.data.collate import block_attention_mask

        config = self.base.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        if window is not None and numbers_BT.shape[1] > window:
            raise ModelError(f"packed rows must not be longer than this model's attention window of {window} tokens")
        kernel = config._attn_implementation
        if kernel.startswith("flash"):
            return None  # that kernel finds the borders itself, where positions start again at 0
        dtype = self.dtype if kernel == "eager" else torch.bool
        return block_attention_mask(numbers_BT, dtype, prompts_BT=prompts_BT)

    @torch.no_grad()
    def _check_packing(self) -> None:
        """The second sample of a packed row must come out as it does alone (recurrent models fail here)."""
        ids_16 = torch.arange(6, device=self.device)[None] % self.base.config.get_text_config().vocab_size
        marks_16 = torch.tensor([[1, 1, 1, 2, 2, 2]], device=self.device)
        positions_16 = torch.tensor([[0, 1, 2, 0, 1, 2]], device=self.device)
        packed = TokenBatch(ids_16, ids_16, marks_16 > 0, marks_16, positions_16, packed=True)
        alone = TokenBatch(ids_16[:, 3:], ids_16[:, 3:], marks_16[:, 3:] > 0, marks_16[:, :3], positions_16[:, 3:])
        expected = self._hidden(alone).float()
        gap = (self._hidden(packed)[:, 3:].float() - expected).abs().max() / expected.abs().max()
        if gap > self.rounding:
            raise ModelError(f"{type(self.base).__name__} lets packed samples see each other; set packing to false")


@final
class LanguageModel(Part):
    """A policy or reference: log-probabilities of given tokens, without ever making [B, T, V] logits."""

    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype, *, adapters: Adapters | None = None
    ) -> None:
        """Raises ModelError when our reading of the output layer does not give the model's own logits."""
        super().__init__(model, tokenizer, device, dtype, adapters)
        with self.acting():
            self._verify_head()

    @property
    def head(self) -> Head:
        """The output layer as it is now."""
        return read_head(self.base)

    def logprobs(
        self, batch: TokenBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log π(target) and, when asked, the entropy, both float32 [B, T] in nats, 0 where ``loss_mask`` is False."""
        return self.logprobs_of(self.hidden(batch), batch, temperature=temperature, with_entropy=with_entropy)

    def logprobs_of(
        self, hidden_BTD: Tensor, batch: TokenBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`logprobs`, from the batch's own :meth:`hidden` states."""
        return self._logprobs(hidden_BTD, batch.targets_BT, batch.loss_mask_BT, temperature, with_entropy)

    def exact_kl_of(
        self,
        hidden_BTD: Tensor,
        batch: TokenBatch,
        reference_hidden_BTD: Tensor,
        reference_head: Head,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """KL(π ‖ π_ref) of the whole next-token distributions, float32 [B, T] in nats, 0 where ``loss_mask`` is False.

        Differentiable in the policy; the reference gets no gradient. Both hidden states are of this batch, and both
        models are of one architecture.
        """
        head = self.head
        with autocast(self.device, self.dtype):
            return exact_kl(
                hidden_BTD,
                head.weight_VD,
                reference_hidden_BTD,
                reference_head.weight_VD,
                batch.loss_mask_BT,
                bias_V=head.bias_V,
                reference_bias_V=reference_head.bias_V,
                temperature=temperature,
                logit_scale=head.logit_scale,
                softcap=head.softcap,
            )

    def _logprobs(
        self, hidden_BTD: Tensor, targets_BT: Tensor, mask_BT: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        head = self.head
        with autocast(self.device, self.dtype):
            return token_logprobs(
                hidden_BTD,
                head.weight_VD,
                targets_BT,
                mask_BT,
                bias_V=head.bias_V,
                temperature=temperature,
                logit_scale=head.logit_scale,
                softcap=head.softcap,
                with_entropy=with_entropy,
            )

    @torch.no_grad()
    def _verify_head(self) -> None:
        vocabulary = self.head.weight_VD.shape[0]
        generator = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(vocabulary, (1, 8), generator=generator).to(self.device)
        ones_BT, positions_BT = torch.ones_like(ids_BT), torch.arange(8, device=self.device)[None]
        with autocast(self.device, self.dtype):
            logits_BTV = self.base(input_ids=ids_BT, attention_mask=ones_BT, position_ids=positions_BT).logits.float()
        expected_BTV = logits_BTV.log_softmax(-1)
        hidden_BTD = self._trunk(ids_BT, ones_BT, positions_BT)
        spread = float(logits_BTV.abs().max())
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.02 + spread / 64  # bfloat16 has 8 bits
        for targets_BT in (expected_BTV.argmax(-1), expected_BTV.argmin(-1), ids_BT):
            own_BT, _ = self._logprobs(hidden_BTD, targets_BT, ones_BT.bool(), 1.0, False)
            gap = float((own_BT - expected_BTV.gather(-1, targets_BT[..., None])[..., 0]).abs().max())
            if not gap <= tolerance:
                raise ModelError(
                    f"{type(self.base).__name__} makes its logits in a way heedful does not know (log-probs differ by "
                    f"{gap:.3g} nats); this architecture is not supported"
                )


@final
class ScalarModel(Part):
    """A reward or value model: one float32 number per sequence or per token."""

    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype, *, any_outputs: bool = False,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        """The head is kept and computed in float32: scores are compared with each other, small differences count.

        Args:
            any_outputs: take a head with several outputs too; only :meth:`output_texts` gives the later ones.

        Raises:
            ModelError: no score head with one output.
        """
        super().__init__(model, tokenizer, device, dtype, adapters)
        self._head = scalar_head(self.base, any_outputs=any_outputs)
        self._head.float()
        self.heads: Heads | None = None
        """What the score is made of, where it is made of several heads; :meth:`outputs` tells them after it"""

    @torch.no_grad()
    def set_head(self, weight_D: Tensor) -> None:
        """Let the head be this row without a bias; a row of 0 makes every score and value 0 until it is trained."""
        for parameter in self._head.parameters():
            parameter.copy_(weight_D if parameter.ndim == 2 else torch.zeros_like(parameter))

    @torch.no_grad()
    def turn_head(self, delta_D: Tensor) -> None:
        """Add this row to the head's, for each of its outputs; a bias stays."""
        for parameter in self._head.parameters():
            if parameter.ndim == 2:
                parameter += delta_D.to(parameter)

    def _read_head(self, hidden: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            outputs: Tensor = self._head(hidden.float())
        return outputs

    def scalars(self, hidden: Tensor) -> Tensor:
        """The scalar at each last hidden state [..., D], in float32."""
        return self._read_head(hidden)[..., 0]

    def freeze_trunk(self) -> None:
        """Leave the head alone to train."""
        self.model.requires_grad_(False)
        self._head.requires_grad_(True)

    def freeze_head(self) -> None:
        """Leave the head as it is."""
        self._head.requires_grad_(False)

    def values(self, batch: TokenBatch) -> Tensor:
        """[B, T]: the scalar after each input token; entry t is the value of the state that predicts target t."""
        return self.scalars(self.hidden(batch))

    def ranking_scores(self, batch: RankingBatch) -> Tensor:
        """[P, K]: the scalar at the last token of every answer; meaningless where ``mask_PK`` is False."""
        return self.scalars(self.answer_states(batch))

    def answer_states(self, batch: RankingBatch) -> Tensor:
        """[P, K, D]: the last hidden state of every answer, which the head reads."""
        return self.ranking_states(batch)[batch.rows_PK, batch.columns_PK]

    def ranking_states(self, batch: RankingBatch) -> Tensor:
        """[R, T, D]: the last hidden states of the batch's rows."""
        return self._trunk(
            batch.ids_RT, batch.attention_mask_RT, batch.position_ids_RT,
            packed=batch.prompts_RT is not None, prompts_BT=batch.prompts_RT,
        )  # fmt: skip

    def values_after(self, ids_NT: Tensor) -> Tensor:
        """[N]: the value after the last token of unpadded sequences (what is still to come of a cut answer)."""
        return self.scalars(self.hidden_after(ids_NT))

    def scores(self, ids_NT: Tensor, attention_mask_NT: Tensor) -> Tensor:
        """[N]: the scalar at the last attended token, whatever side the padding is on and whatever the pad id is.

        Raises:
            ModelError: a row without any token.
        """
        return self.outputs(ids_NT, attention_mask_NT)[..., 0]

    def outputs(self, ids_NT: Tensor, attention_mask_NT: Tensor) -> Tensor:
        """[N, number of outputs]: as :meth:`scores`, every output of the head, then every one of :attr:`heads`."""
        num_tokens_N = attention_mask_NT.sum(-1)
        if not bool((num_tokens_N > 0).all()):
            raise ModelError(f"row {int((num_tokens_N == 0).nonzero()[0])} of the batch to score has no tokens")
        position_ids_NT = (attention_mask_NT.cumsum(-1) - 1).clamp(min=0)
        hidden_NTD = self._trunk(ids_NT, attention_mask_NT, position_ids_NT)
        last_N = (attention_mask_NT * torch.arange(ids_NT.shape[1], device=ids_NT.device)).argmax(-1)
        rows_N = torch.arange(len(ids_NT), device=ids_NT.device)
        last_ND = hidden_NTD[rows_N, last_N]
        own = self._read_head(last_ND)
        return own if self.heads is None else torch.cat([own, self.heads.scalars(last_ND)], dim=-1)

    def score_texts(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str], *, micro_batch_tokens: int
    ) -> list[float]:
        """One score per (prompt, answer), in the order given (see :meth:`output_texts`)."""
        return [row[0] for row in self.output_texts(prompts, answers, micro_batch_tokens=micro_batch_tokens)]

    @torch.no_grad()
    def output_texts(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str], *, micro_batch_tokens: int
    ) -> list[list[float]]:
        """Every output of the head per (prompt, answer), encoded by this model's own tokenizer and template (see
        :func:`~heedful.data.chat.scored_ids`).

        Args:
            micro_batch_tokens: padded tokens per forward; sequences of like length share one.
        """
        from heedful.data.chat import scored_ids

        if len(prompts) != len(answers):
            raise ModelError(f"{len(prompts)} prompts but {len(answers)} answers to score")
        sequences = [scored_ids(self.tokenizer, *asked) for asked in zip(prompts, answers, strict=True)]
        return self.output_ids(sequences, micro_batch_tokens=micro_batch_tokens)

    @torch.no_grad()
    def output_ids(self, sequences: Sequence[Sequence[int]], *, micro_batch_tokens: int) -> list[list[float]]:
        """Every output of the head per sequence of token ids, in the order given."""
        outputs: list[list[float]] = [[]] * len(sequences)
        for rows in token_budget_batches([len(s) for s in sequences], micro_batch_tokens):
            width = len(sequences[rows[0]])
            ids_NT = torch.full((len(rows), width), self.pad_id)
            mask_NT = torch.zeros(len(rows), width, dtype=torch.int64)
            for n, row in enumerate(rows):
                ids_NT[n, : len(sequences[row])] = torch.tensor(sequences[row])
                mask_NT[n, : len(sequences[row])] = 1
            found = self.outputs(ids_NT.to(self.device), mask_NT.to(self.device)).tolist()
            for row, output in zip(rows, found, strict=True):
                outputs[row] = output
        return outputs
