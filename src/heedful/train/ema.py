"""An exponential moving average of the trained weights: a steadier policy than that of any single step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from heedful.train.weights import replaced


class EMA:
    """average ← decay · average + (1 − decay) · weights, in float32; it starts as the weights do.

    After n updates the start still has the weight decay^n, and the average lags about 1 / (1 − decay) updates behind.
    Of adapters the two factors are averaged, not their product.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """Raises ValueError when ``decay`` is not between 0 and 1."""
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}; must be between 0 and 1")
        self.parameters, self.decay = parameters, decay
        self.average: dict[str, Tensor] = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now; once per PPO step."""
        for name, average in self.average.items():
            average.lerp_(self.parameters[name].to(average.dtype), 1 - self.decay)

    def applied(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights; afterwards its own, to the bit."""
        return replaced(self.parameters, self.average)

    def state_dict(self) -> dict[str, Any]:
        """The average; the decay is the recipe's."""
        return {"average": {name: x.cpu() for name, x in self.average.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        for name, average in self.average.items():
            average.copy_(state["average"][name])
