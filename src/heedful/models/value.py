"""What an answer is worth so far: a scalar model of its own, or a head on the policy's trunk.

Dimension letters: B sequences, N sequences of one length, T tokens, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from heedful.batches import TokenBatch
from heedful.models.parts import LanguageModel, ScalarModel


@final
class TrunkHead:
    """A linear head on the policy's last hidden states, in float32; no part of the policy that is saved.

    It starts at zero: the first values are 0, the mean of a standardised score, and no gradient of theirs disturbs the
    trunk before the head has learnt a direction.
    """

    def __init__(self, policy: LanguageModel, *, frozen: bool) -> None:
        """``frozen``: the head learns from the trunk's features but does not shape them."""
        self.policy, self.frozen = policy, frozen
        width = policy.head.weight_VD.shape[1]
        self.model: nn.Linear = nn.utils.skip_init(nn.Linear, width, 1, device=policy.device)  # draws no random number
        with torch.no_grad():
            self.model.weight.zero_()
            self.model.bias.zero_()

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Weight and bias of the head; the trunk is the policy's."""
        return {f"value_head.{name}": p for name, p in self.model.named_parameters()}

    def values(self, batch: TokenBatch, policy_hidden_BTD: Tensor | None = None) -> Tensor:
        """[B, T]: as :meth:`ScalarModel.values`; ``policy_hidden_BTD`` saves a forward of the policy."""
        if policy_hidden_BTD is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                policy_hidden_BTD = self.policy.hidden(batch)
        return self._scalars(policy_hidden_BTD)

    def values_after(self, ids_NT: Tensor) -> Tensor:
        """[N]: as :meth:`ScalarModel.values_after`."""
        return self._scalars(self.policy.hidden_after(ids_NT))

    def _scalars(self, hidden: Tensor) -> Tensor:
        if self.frozen:
            hidden = hidden.detach()
        with torch.autocast(self.device.type, enabled=False):
            scalars: Tensor = self.model(hidden.float()).squeeze(-1)
        return scalars


@final
@dataclass(frozen=True)
class Value:
    """The value model, in the units of the standardised score: (scalar − shift) / scale.

    One that starts as the reward model has raw values of any mean and deviation; with the reward card's own mean and
    deviation its first values are the scores that PPO sees, not a constant away from them.
    """

    part: ScalarModel | TrunkHead
    shift: float = 0.0
    scale: float = 1.0

    @property
    def is_shared(self) -> bool:
        """Whether values come from the policy's own hidden states."""
        return isinstance(self.part, TrunkHead)

    @property
    def device(self) -> torch.device:
        return self.part.device

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """What the value's optimizer may move, by name; of a shared trunk the head alone."""
        return self.part.trainable_parameters()

    def values(self, batch: TokenBatch, policy_hidden_BTD: Tensor | None = None) -> Tensor:
        """[B, T]: what is still to come in the state that predicts target t.

        Args:
            policy_hidden_BTD: the policy's hidden states of this batch, where they are at hand; a value that is shared
                computes them otherwise, one that is not has no use for them.
        """
        if isinstance(self.part, TrunkHead):
            return (self.part.values(batch, policy_hidden_BTD) - self.shift) / self.scale
        return (self.part.values(batch) - self.shift) / self.scale

    def values_after(self, ids_NT: Tensor) -> Tensor:
        """[N]: the value after the last token of unpadded sequences (what is still to come of a cut answer)."""
        return (self.part.values_after(ids_NT) - self.shift) / self.scale
