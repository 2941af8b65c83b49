"""The pretraining mix of PPO-ptx: demonstrations in the policy's loss, so that it does not forget (InstructGPT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heedful.batches import LossOut, TokenBatch, to_device
from heedful.config.ppo import PPOConfig, PTXConfig
from heedful.data.collate import token_batch
from heedful.data.packing import token_budget_batches
from heedful.data.stream import EpochStream, fingerprint
from heedful.models.parts import LanguageModel
from heedful.objectives import likelihood
from heedful.records import TokenSample


class PTX:
    """Draws demonstrations for every optimizer step of the policy; where it stands is part of the checkpoint."""

    def __init__(
        self, samples: Sequence[TokenSample], config: PTXConfig, *, micro_batch_tokens: int, pad_id: int, seed: int
    ) -> None:
        self._samples, self._coefficient = samples, config.coefficient
        self._micro_batch_tokens, self._pad_id = micro_batch_tokens, pad_id
        of_data = fingerprint(s.ids for s in samples)
        self._stream = EpochStream(len(samples), config.prompts_per_step, seed, fingerprint=of_data)

    @classmethod
    def of(cls, samples: Sequence[TokenSample], config: PPOConfig, *, pad_id: int, seed: int) -> PTX | None:
        """The mix that a recipe asks for; None without ``ppo.ptx``."""
        if config.ptx is None:
            return None
        return cls(samples, config.ptx, micro_batch_tokens=config.micro_batch_tokens, pad_id=pad_id, seed=seed)

    def draw(self) -> tuple[list[TokenBatch], int]:
        """The micro-batches of the next step and the number of tokens that count in all of them."""
        chosen = [self._samples[i] for i in next(self._stream)]
        groups = token_budget_batches([len(s.ids) for s in chosen], self._micro_batch_tokens)
        batches = [token_batch([chosen[i] for i in group], self._pad_id) for group in groups]
        return batches, sum(b.num_counted_tokens for b in batches)

    def loss(self, policy: LanguageModel, batch: TokenBatch, denominator: int) -> LossOut:
        """coefficient · mean −log π per token, at temperature 1 as in SFT; metric ``ptx_loss_nats``."""
        batch = to_device(batch, policy.device)
        logprobs_BT, _ = policy.logprobs(batch)
        out = likelihood.token_nll(logprobs_BT, batch.loss_mask_BT, denominator=denominator)
        return LossOut(self._coefficient * out.loss, {"ptx_loss_nats": out.loss.detach()})

    def state_dict(self) -> dict[str, Any]:
        """Where the stream of demonstrations stands."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError when the demonstrations are other ones."""
        self._stream.load_state_dict(state)
