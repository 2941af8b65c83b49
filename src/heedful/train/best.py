"""The best weights of a run so far, by a score measured on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from heedful.errors import GuardError
from heedful.train.weights import replaced


class Best:
    """A copy, in the computer's own memory, of the weights with the highest score; the first of equals stays."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.step: int | None = None
        """Of the best weights; None before the first offer"""
        self.score: float | None = None
        self.weights: dict[str, Tensor] = {}

    def offer(self, step: int, score: float, weights: Mapping[str, Tensor]) -> bool:
        """Keep ``weights`` if their score is above every earlier one; says whether it is.

        Args:
            weights: under the names of the parameters: these themselves, or an average of them.

        Raises:
            GuardError: a score that is not finite.
        """
        if not math.isfinite(score):
            raise GuardError(f"step {step}: the score that the best weights are chosen by is {score}")
        if self.score is not None and score <= self.score:
            return False
        self.step, self.score = step, score
        self.weights = {name: x.detach().to("cpu", copy=True) for name, x in weights.items()}
        return True

    def applied(self) -> AbstractContextManager[None]:
        """Inside, the model has the best weights; afterwards its own, to the bit.

        Raises:
            ValueError: nothing was offered yet, or under other names.
        """
        return replaced(self.parameters, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Step, score and weights of the best so far."""
        return {"step": self.step, "score": self.score, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self.step, self.score = state["step"], state["score"]
        self.weights = dict(state["weights"])
