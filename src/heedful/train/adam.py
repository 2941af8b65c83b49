"""AdamW that keeps moments only for the rows of a matrix that ever had a gradient.

A row whose gradient has always been zero has zero moments and does not move but for its decay, so leaving it out
changes nothing: the weights are those of ``torch.optim.AdamW``. In an input embedding that is no output layer (every
scalar model's, an untied language model's) those are the tokens that no sequence has held yet, often nine of ten: 8
bytes per parameter that need not exist.

Shapes: V rows of a matrix, N of them seen, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

MIN_ROWS = 4096
"""In matrices with fewer rows nobody looks."""
DENSE_FROM = 0.5
"""Share of a matrix's rows from which on it has moments for all: every step copies the rows that were seen."""


@dataclass
class _Seen:
    """The rows of one matrix that had a gradient so far, in the order of their first, with their moments."""

    ids_N: Tensor
    exp_avg_ND: Tensor
    exp_avg_sq_ND: Tensor
    step: Tensor

    @classmethod
    def none(cls, matrix: nn.Parameter) -> _Seen:
        moments_ND = torch.zeros((0, matrix.shape[1]), dtype=matrix.dtype, device=matrix.device)
        ids_N = torch.zeros(0, dtype=torch.int64, device=matrix.device)
        return cls(ids_N, moments_ND, moments_ND.clone(), torch.zeros((), device=matrix.device))

    def add(self, ids_N: Tensor) -> None:
        """Rows that are seen for the first time."""
        if len(ids_N):
            zeros_ND = self.exp_avg_ND.new_zeros(len(ids_N), self.exp_avg_ND.shape[1])
            self.ids_N = torch.cat([self.ids_N, ids_N])
            self.exp_avg_ND = torch.cat([self.exp_avg_ND, zeros_ND])
            self.exp_avg_sq_ND = torch.cat([self.exp_avg_sq_ND, zeros_ND])

    def dense(self, matrix: nn.Parameter) -> dict[str, Tensor]:
        """What torch's optimizer keeps of a matrix."""
        moments = {}
        for name, some_ND in (("exp_avg", self.exp_avg_ND), ("exp_avg_sq", self.exp_avg_sq_ND)):
            moments[name] = torch.zeros_like(matrix).index_copy_(0, self.ids_N, some_ND)
        return {"step": self.step, **moments}


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True)``, decoupled decay (Loshchilov and Hutter 2019), moments of seen rows only.

    ``state_dict`` holds the matrices with all moments; ``seen_state`` the others.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._seen: dict[nn.Parameter, _Seen] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        by_rows = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if self._is_by_rows(parameter) and not self._becomes_dense(parameter):
                    self._move_rows(parameter, group)
                    by_rows[parameter], parameter.grad = parameter.grad, None
        super().step()
        for parameter, gradient in by_rows.items():
            parameter.grad = gradient

    def seen_state(self, names: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
        """The rows seen and their moments, by the names of the matrices."""
        return {name: dict(vars(self._seen[p])) for name, p in names.items() if p in self._seen}

    def load_seen_state(self, names: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what ``seen_state`` gave."""
        self._seen = {
            names[name]: _Seen(**{k: v.to(names[name].device, copy=True) for k, v in seen.items()})
            for name, seen in state.items()
        }

    def _is_by_rows(self, parameter: nn.Parameter) -> bool:
        large = parameter.dim() == 2 and parameter.shape[0] >= MIN_ROWS
        return large and parameter.grad is not None and not self.state.get(parameter)

    def _becomes_dense(self, matrix: nn.Parameter) -> bool:
        """Note the rows with a gradient; whether there are too many for leaving out the others."""
        assert matrix.grad is not None
        # a fifth of the time of torch.any on a CPU
        has_gradient_V = (torch.amax(matrix.grad, dim=1) != 0) | (torch.amin(matrix.grad, dim=1) != 0)
        seen = self._seen.setdefault(matrix, _Seen.none(matrix))
        has_gradient_V[seen.ids_N] = False
        num_new = int(has_gradient_V.sum())
        if len(seen.ids_N) + num_new > DENSE_FROM * len(matrix):
            del self._seen[matrix]
            if len(seen.ids_N):
                self.state[matrix] = seen.dense(matrix)
            return True
        seen.add(has_gradient_V.nonzero().squeeze(1))
        return False

    def _move_rows(self, matrix: nn.Parameter, group: dict[str, Any]) -> None:
        assert matrix.grad is not None
        seen = self._seen[matrix]
        if group["weight_decay"]:
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
        rows_ND = matrix.index_select(0, seen.ids_N)
        beta1, beta2 = group["betas"]
        adamw(
            [rows_ND], [matrix.grad.index_select(0, seen.ids_N)], [seen.exp_avg_ND], [seen.exp_avg_sq_ND], [],
            [seen.step], fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=0.0,
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        matrix.index_copy_(0, seen.ids_N, rows_ND)
