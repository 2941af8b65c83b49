"""Does the reward model still learn what holds for other prompts, or its own rankings by heart?"""

from __future__ import annotations

from typing import Any

RISE_NATS = 0.02
"""A held-out loss this far above its lowest has turned round; smaller moves are noise on a few hundred prompts."""


class OverfittingWatch:
    """Follows the accuracy in training and the loss on held-out rankings from look to look."""

    def __init__(self) -> None:
        self._accuracies: list[float] = []
        self.looks: list[tuple[int, float, float]] = []
        """(steps done, mean accuracy in training since the look before, held-out loss in nats)"""

    def trained(self, accuracy: float) -> None:
        """Note the accuracy of one optimizer step, measured before the step."""
        self._accuracies.append(accuracy)

    def looked(self, num_steps: int, heldout_loss_nats: float) -> None:
        """Note a look at the held-out rankings."""
        if self._accuracies:
            mean = sum(self._accuracies) / len(self._accuracies)
            self.looks.append((num_steps, mean, heldout_loss_nats))
        self._accuracies = []

    @property
    def train_accuracy(self) -> float | None:
        """In training, before the last look; None before the first."""
        return self.looks[-1][1] if self.looks else None

    def verdict(self) -> str | None:
        """One sentence where held-out loss rose from its lowest to the end while training accuracy rose too."""
        if not self.looks:
            return None
        best, last = min(self.looks, key=lambda look: look[2]), self.looks[-1]
        if last[2] <= best[2] + RISE_NATS or last[1] <= best[1]:
            return None
        return (
            f"overfitting: after step {best[0]} the held-out loss rose from {best[2]:.3f} to {last[2]:.3f} nats while "
            f"the accuracy in training rose from {best[1]:.1%} to {last[1]:.1%}; train for fewer epochs, at a lower "
            "rate, or take reward.keep: best"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that was noted."""
        return {"accuracies": self._accuracies, "looks": self.looks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self._accuracies = list(state["accuracies"])
        self.looks = [(int(n), float(a), float(b)) for n, a, b in state["looks"]]
